"""A worker's dealings with the servers: it draws parts, pulls weights and pushes gradients, many of them at once.

It knows a post, but no MPI: tests put another in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from parallel.nn.operator import Array
from parallel.parameter_server.worker_clocks import Rule
from parallel.parameter_server.key_assignment import Key
from parallel.parameter_server.messages import Kind, Letter, Message
from parallel.parameter_server.server_loop import Failed, Mail
from parallel.parameter_server.work_assignment import Outcome, Part


class Again(Exception):
    """A part of an earlier step waits to be done again: draw it."""


class Worker:
    """One worker's.

    Parameters
    ----------
    post : Mail
    rule : Rule
    keys : sequence of Key
        All.
    servers : sequence of int
        Their ranks.
    vectors : sequence of arrays
        As long as the vector of parameters: two if weights are fetched ahead while others are in use, else one.

    Attributes
    ----------
    vector : array
        The weights in use.
    wish : bool
        Whether somebody wishes to end, as far as this worker knows.
    last : int
        The step after which all will end; -1 if nobody wishes to.
    gaps : Counter
        How often a key was used that lacked so many clocks of the slowest worker.
    clocks : tuple of int
        Of all workers, as last heard.
    updates : int
        Made by the servers, as of the last rest.
    """

    def __init__(self, post: Mail, rule: Rule, keys: Sequence[Key], servers: Sequence[int], vectors: Sequence[Array]):
        self._post, self._rule, self._keys, self._servers = post, rule, keys, list(servers)
        self._vectors = list(vectors)
        self.vector = self._vectors[0]
        self.wish, self.last, self.updates = False, -1, 0
        self.gaps: Counter[int] = Counter()
        self._clock = 0
        self._known: dict[int, int] = {}
        self._flying: dict[int, Array] = {}
        self._rows: dict[int, Array] = {}
        self._copying: set[tuple[int, int]] = set()
        self._whole: list[Array] = []
        self.clocks: tuple[int, ...] = ()
        self._unacknowledged: Counter[int] = Counter()
        self._work: list[Message] = []
        self._rested = self._rests = 0
        self._again = False
        self._over: set[int] = set()
        self._told = False
        post.accept = self._room

    # ------------------------------------------------------------------------------------------ what it does

    @property
    def ahead(self) -> bool:
        """Whether weights are fetched while others are in use."""
        return len(self._vectors) > 1

    def draw(self, clock: int, parts: int, done: tuple[Part, Outcome] | None, stop: bool) -> Part | None:
        """The next part to do; None if nothing is left of the step. `done` is what was done before."""
        message = Message(Kind.DRAW, clock=clock, parts=parts, stop=stop or self.wish)
        if done is not None:
            part, outcome = done
            message = message._replace(before=part.clock, number=part.number, loss=outcome.loss)
            message = message._replace(targets=outcome.targets, factor=outcome.norm)
        self._again = False  # what comes from now on may be about what this one is not given
        self._post.send(self._servers[0], message)
        self._until(lambda: bool(self._work))
        answer = self._work.pop()
        self.last = answer.last
        return Part(answer.clock, answer.number) if answer.number >= 0 else None

    def read(self, clock: int, order: Iterable[int], rows: Array | None) -> Array:
        """Fetch what is not at hand, or too old for this step; gives the vector in which it is, or will be.

        Parameters
        ----------
        order : iterable of int
            Keys as they are going to be used.
        rows : array of int64, or None
            Of the table that is fetched by rows.
        """
        self._clock = clock
        if self.ahead:
            self.vector = self._other()
        for number in order:
            if self._keys[number].table is not None:
                self._known.pop(number, None)
                self._pull(number, self.vector, rows)
            elif number not in self._flying and not self._fresh(number):
                self._pull(number, self.vector, None)
        return self.vector

    def need(self, numbers: Iterable[int]) -> None:
        """Wait until these keys are here, as fresh as the rule wants them."""
        for number in numbers:
            while True:
                self._until(lambda number=number: number not in self._flying or self._again)
                self._heed()
                if self._fresh(number):
                    break
                self._pull(number, self.vector, self._rows.get(number))
            gap = self._clock - self._known[number]
            assert gap <= self._rule.staleness, f"a gap of {gap} clocks at a read, with {self._rule.name}"
            self.gaps[gap] += 1

    def push(
        self, number: int, part: Part, parts: int, targets: int, factor: float, gradient: Array, rows: Any
    ) -> None:
        """Send the gradient by a key, which must not change until `acknowledged`; fetch the key anew, if that is wise.

        Parameters
        ----------
        rows : array of int64, or None
            Of a table: those whose gradient is not zero.
        """
        key = self._keys[number]
        message = Message(
            Kind.PUSH, number, part.clock, number=part.number, parts=parts, elements=len(gradient), targets=targets
        )._replace(factor=factor)
        vectors = [gradient]
        if key.table is not None:
            here = key.table.within(rows, key.span)
            values = gradient[key.table.places(here, key.span)]
            message = message._replace(rows=len(here), elements=len(values))
            vectors = [here, values] if len(here) else []
        self._post.send(self._servers[key.server], message, *vectors)
        self._unacknowledged[number] += 1
        if self.ahead and key.table is None:
            self._pull(number, self._other(), None)
        self.poll()

    def acknowledged(self) -> None:
        """Wait until the servers have all that was pushed."""
        self._until(lambda: not self._unacknowledged)

    def tick(self, steps: int, parts: int, last: bool) -> None:
        """So many steps were made, the last one of so many parts; perhaps it was the very last."""
        for server in self._servers:
            self._post.send(server, Message(Kind.TICK, clock=steps, parts=parts, stop=last))

    def rest(self) -> None:
        """Wait until all workers have come here; then nothing is under way.

        The first server knows when; the others hear it from the workers.

        Raises
        ------
        Again
            If a part waits to be done.
        """
        self._until(lambda: not self._flying or self._again)
        self._rest_at(self._servers[:1], lambda: self._again)
        self._heed()
        self._rest_at(self._servers[1:], lambda: False)
        self._rests += 1

    def _rest_at(self, servers: Sequence[int], or_else: Callable[[], bool]) -> None:
        self._rested = 0
        for server in servers:
            self._post.send(server, Message(Kind.REST, number=self._rests + 1))
        self._until(lambda: self._rested == len(servers) or or_else())

    def copy(self) -> Array:
        """All weights as they are; gives the vector in which they are."""
        for key in self._keys:
            self._copy(key, -1)
        self._until(lambda: not self._copying)
        return self.vector

    def copies(self, count: int, dtype: Any) -> list[Array]:
        """All that a checkpoint keeps, in vectors as long as the vector of parameters: weights, then `count` states."""
        self._whole = [np.zeros(len(self.vector), dtype) for _ in range(1 + count)]
        for key in self._keys:
            for number in range(len(self._whole)):
                self._copy(key, number)
        self._until(lambda: not self._copying)
        whole, self._whole = self._whole, []
        return whole

    def _copy(self, key: Key, number: int) -> None:
        self._copying.add((key.number, number))
        self._post.send(self._servers[key.server], Message(Kind.READ, key.number, number=number))

    def _heed(self) -> None:
        """Leave what is waited for, if the first server says so."""
        if self._again:
            self._again = False
            self._flying.clear()
            self._known.clear()  # some keys are in one vector, some in the other
            self._post.abandon(Kind.PULL, Kind.REST)
            raise Again

    def forget(self) -> None:
        """The weights have changed otherwise."""
        self._known.clear()

    def give_up(self) -> None:
        """Say the last word to all servers, and hear theirs."""
        if not self._told:
            self._told = True
            for server in self._servers:
                self._post.send(server, Message(Kind.PROBLEM))
        while len(self._over) < len(self._servers):
            letter = self._post.poll()
            if letter is None:
                self._post.idle()
            elif letter.message.kind in (Kind.PROBLEM, Kind.LOST):
                self._over.add(letter.source)

    def poll(self) -> bool:
        """Act on what has come; whether anything has.

        Raises
        ------
        Failed
            If somebody has given up; nothing is under way then.
        """
        letter = self._post.poll()
        if letter is None:
            return False
        if letter.message.kind is Kind.PROBLEM:
            self._over.add(letter.source)
            self.give_up()
            raise Failed
        HANDLERS[letter.message.kind](self, letter)
        return True

    # ------------------------------------------------------------------------------------------ how

    def _until(self, enough: Any) -> None:
        while not enough():
            if not self.poll():
                self._post.idle()

    def _other(self) -> Array:
        return next(vector for vector in self._vectors if vector is not self.vector)

    def _fresh(self, number: int) -> bool:
        return number in self._known and self._rule.allows(self._clock, self._known[number])

    def _pull(self, number: int, vector: Array, rows: Array | None) -> None:
        key = self._keys[number]
        self._known.pop(number, None)
        self._flying[number] = vector[key.span.start : key.span.stop]
        message, vectors = Message(Kind.PULL, number, self._clock), []
        if key.table is not None:
            self._rows[number] = here = key.table.within(rows, key.span)
            message, vectors = message._replace(rows=len(here)), [here] if len(here) else []
        self._post.send(self._servers[key.server], message, *vectors)

    def _room(self, source: int, message: Message) -> list[Array]:
        """Where the vectors of a message shall land."""
        key = self._keys[message.key]
        if message.number >= 0:
            return [self._whole[message.number][key.span.start : key.span.stop]]
        if message.kind is Kind.COPY:
            return [self.vector[key.span.start : key.span.stop]]
        if key.table is not None:
            return [np.empty(message.elements, self.vector.dtype)]
        return [self._flying[message.key]]

    def _weights(self, letter: Letter) -> None:
        message, key = letter.message, self._keys[letter.message.key]
        into = self._flying.pop(message.key)
        if key.table is not None and letter.vectors:
            into[key.table.places(self._rows[message.key], key.span)] = letter.vectors[0]
        self._known[message.key] = message.clock
        self.clocks = message.clocks
        self.wish |= bool(message.stop)

    def _copied(self, letter: Letter) -> None:
        self._copying.discard((letter.message.key, letter.message.number))

    def _acknowledge(self, letter: Letter) -> None:
        self._unacknowledged[letter.message.key] -= 1
        self._unacknowledged += Counter()  # without those that are 0

    def _drawn(self, letter: Letter) -> None:
        self._work.append(letter.message)

    def _recalled(self, letter: Letter) -> None:
        self._again = True

    def _bereaved(self, letter: Letter) -> None:
        self._over.add(letter.source)

    def _rested_one(self, letter: Letter) -> None:
        self._rested += 1
        self.clocks = letter.message.clocks
        self.updates = max(self.updates, letter.message.number)


HANDLERS = {
    Kind.WEIGHTS: Worker._weights,
    Kind.COPY: Worker._copied,
    Kind.ACK: Worker._acknowledge,
    Kind.WORK: Worker._drawn,
    Kind.RESTED: Worker._rested_one,
    Kind.AGAIN: Worker._recalled,
    Kind.LOST: Worker._bereaved,
}
"""What a worker does with each kind of letter."""
