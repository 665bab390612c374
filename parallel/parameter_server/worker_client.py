"""Worker client: draws parts, pulls weights and pushes gradients with many requests in flight. No MPI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from parallel.parameter_server.key_assignment import ServerKey
from parallel.parameter_server.messages import Envelope, MessageKind, ServerMessage
from parallel.parameter_server.server_loop import ServerFailed, ServerMail
from parallel.parameter_server.work_assignment import PartResult, WorkPart
from parallel.parameter_server.worker_clocks import ConsistencyRule
from quant.types import Array


class Requeued(Exception):
    """A part of an earlier step must be redone: draw it."""


class WorkerClient:
    """Client of one worker.

    Parameters
    ----------
    bus : ServerMail
    rule : ConsistencyRule
    keys : sequence of ServerKey
        Keys of all servers.
    servers : sequence of int
        Ranks of the servers.
    vectors : sequence of arrays
        Weight vectors: two if weights are prefetched while others are in use, else one.

    Attributes
    ----------
    vector : array
        Weights in use.
    stop_requested : bool
        True if some rank has requested to end, as known here.
    last : int
        Step after which the training ends; -1 if it is not set.
    gaps : Counter
        Number of reads by clocks behind the slowest worker.
    clocks : tuple of int
        Last known clocks of all workers.
    updates : int
        Updates made by the servers, as of the last quiescent point.
    """

    def __init__(
        self,
        bus: ServerMail,
        rule: ConsistencyRule,
        keys: Sequence[ServerKey],
        servers: Sequence[int],
        vectors: Sequence[Array],
    ):
        self._bus, self._rule, self._keys, self._servers = bus, rule, keys, list(servers)
        self._vectors = list(vectors)
        self.vector = self._vectors[0]
        self.stop_requested, self.last, self.updates = False, -1, 0
        self.gaps: Counter[int] = Counter()
        self._clock = 0
        self._known: dict[int, int] = {}
        self._pulling: dict[int, Array] = {}
        self._rows: dict[int, Array] = {}
        self._copying: set[tuple[int, int]] = set()
        self._whole: list[Array] = []
        self.clocks: tuple[int, ...] = ()
        self._unacknowledged: Counter[int] = Counter()
        self._work: list[ServerMessage] = []
        self._rested = self._rests = 0
        self._requeued = False
        self._over: set[int] = set()
        self._failure_sent = False
        bus.accept = self._receive_buffers

    # ------------------------------------------------------------------------------------------ what it does

    @property
    def ahead(self) -> bool:
        """True if weights are prefetched."""
        return len(self._vectors) > 1

    def draw(self, clock: int, parts: int, done: tuple[WorkPart, PartResult] | None, stop: bool) -> WorkPart | None:
        """Request the next part; None if none is left in the step. `done` is the part finished before."""
        message = ServerMessage(MessageKind.DRAW, clock=clock, parts=parts, stop=stop or self.stop_requested)
        if done is not None:
            part, outcome = done
            message = message._replace(before=part.clock, number=part.number, loss=outcome.loss)
            message = message._replace(targets=outcome.targets, factor=outcome.norm)
        self._requeued = False  # what comes from now on may be about what this one is not given
        self._bus.send(self._servers[0], message)
        self._until(lambda: bool(self._work))
        answer = self._work.pop()
        self.last = answer.last
        return WorkPart(answer.clock, answer.number) if answer.number >= 0 else None

    def read(self, clock: int, order: Iterable[int], rows: Array | None) -> Array:
        """Start pulling keys that are missing or too old for this step; returns the vector that receives them.

        Parameters
        ----------
        order : iterable of int
            Keys in the order of their use.
        rows : array of int64, or None
            Rows of the table to pull.
        """
        self._clock = clock
        if self.ahead:
            self.vector = self._other()
        for number in order:
            if self._keys[number].table is not None:
                self._known.pop(number, None)
                self._pull(number, self.vector, rows)
            elif number not in self._pulling and not self._fresh(number):
                self._pull(number, self.vector, None)
        return self.vector

    def need(self, numbers: Iterable[int]) -> None:
        """Wait until these keys are as fresh as the rule requires."""
        for number in numbers:
            while True:
                self._until(lambda number=number: number not in self._pulling or self._requeued)
                self._check_requeued()
                if self._fresh(number):
                    break
                self._pull(number, self.vector, self._rows.get(number))
            gap = self._clock - self._known[number]
            assert gap <= self._rule.staleness, f"a gap of {gap} clocks at a read, with {self._rule.name}"
            self.gaps[gap] += 1

    def push(
        self, number: int, part: WorkPart, parts: int, targets: int, factor: float, gradient: Array, rows: Any
    ) -> None:
        """Send the gradient of a key, which must not change until `acknowledged`, and prefetch the key if asynchronous.

        Parameters
        ----------
        rows : array of int64, or None
            Of a table: rows with a non-zero gradient.
        """
        key = self._keys[number]
        message = ServerMessage(
            MessageKind.PUSH,
            number,
            part.clock,
            number=part.number,
            parts=parts,
            elements=len(gradient),
            targets=targets,
        )._replace(factor=factor)
        vectors = [gradient]
        if key.table is not None:
            here = key.table.within(rows, key.span)
            values = gradient[key.table.places(here, key.span)]
            message = message._replace(rows=len(here), elements=len(values))
            vectors = [here, values] if len(here) else []
        self._bus.send(self._servers[key.server], message, *vectors)
        self._unacknowledged[number] += 1
        if self.ahead and key.table is None:
            self._pull(number, self._other(), None)
        self.poll()

    def acknowledged(self) -> None:
        """Wait until the servers have acknowledged all pushes."""
        self._until(lambda: not self._unacknowledged)

    def tick(self, steps: int, parts: int, last: bool) -> None:
        """Report `steps` finished steps, the last one of `parts` parts; `last` ends the training."""
        for server in self._servers:
            self._bus.send(server, ServerMessage(MessageKind.TICK, clock=steps, parts=parts, stop=last))

    def quiesce(self) -> None:
        """Wait until all workers call this; then nothing is in flight.

        The first server decides; the workers pass its decision on to the others.

        Raises
        ------
        Requeued
            If a part must be redone.
        """
        self._until(lambda: not self._pulling or self._requeued)
        self._rest_on(self._servers[:1], lambda: self._requeued)
        self._check_requeued()
        self._rest_on(self._servers[1:], lambda: False)
        self._rests += 1

    def _rest_on(self, servers: Sequence[int], or_else: Callable[[], bool]) -> None:
        self._rested = 0
        for server in servers:
            self._bus.send(server, ServerMessage(MessageKind.REST, number=self._rests + 1))
        self._until(lambda: self._rested == len(servers) or or_else())

    def copy(self) -> Array:
        """Read all weights; returns the vector that contains them."""
        for key in self._keys:
            self._copy(key, -1)
        self._until(lambda: not self._copying)
        return self.vector

    def copies(self, count: int, dtype: Any) -> list[Array]:
        """Read all state that a checkpoint keeps, as full vectors: weights, then `count` optimizer states."""
        self._whole = [np.zeros(len(self.vector), dtype) for _ in range(1 + count)]
        for key in self._keys:
            for number in range(len(self._whole)):
                self._copy(key, number)
        self._until(lambda: not self._copying)
        whole, self._whole = self._whole, []
        return whole

    def _copy(self, key: ServerKey, number: int) -> None:
        self._copying.add((key.number, number))
        self._bus.send(self._servers[key.server], ServerMessage(MessageKind.READ, key.number, number=number))

    def _check_requeued(self) -> None:
        """Raise `Requeued` and drop open requests if the first server has sent AGAIN."""
        if self._requeued:
            self._requeued = False
            self._pulling.clear()
            self._known.clear()  # some keys are in one vector, some in the other
            self._bus.abandon(MessageKind.PULL, MessageKind.REST)
            raise Requeued

    def forget(self) -> None:
        """Invalidate all pulled keys."""
        self._known.clear()

    def give_up(self) -> None:
        """Send PROBLEM to all servers and wait for theirs."""
        if not self._failure_sent:
            self._failure_sent = True
            for server in self._servers:
                self._bus.send(server, ServerMessage(MessageKind.PROBLEM))
        while len(self._over) < len(self._servers):
            envelope = self._bus.poll()
            if envelope is None:
                self._bus.idle()
            elif envelope.message.kind in (MessageKind.PROBLEM, MessageKind.LOST):
                self._over.add(envelope.source)

    def poll(self) -> bool:
        """Handle one message; returns False if there is none.

        Raises
        ------
        ServerFailed
            If another rank has failed; nothing is in flight then.
        """
        envelope = self._bus.poll()
        if envelope is None:
            return False
        if envelope.message.kind is MessageKind.PROBLEM:
            self._over.add(envelope.source)
            self.give_up()
            raise ServerFailed
        HANDLERS[envelope.message.kind](self, envelope)
        return True

    # ------------------------------------------------------------------------------------------ how

    def _until(self, enough: Any) -> None:
        while not enough():
            if not self.poll():
                self._bus.idle()

    def _other(self) -> Array:
        return next(vector for vector in self._vectors if vector is not self.vector)

    def _fresh(self, number: int) -> bool:
        return number in self._known and self._rule.allows(self._clock, self._known[number])

    def _pull(self, number: int, vector: Array, rows: Array | None) -> None:
        key = self._keys[number]
        self._known.pop(number, None)
        self._pulling[number] = vector[key.span.start : key.span.stop]
        message, vectors = ServerMessage(MessageKind.PULL, number, self._clock), []
        if key.table is not None:
            self._rows[number] = here = key.table.within(rows, key.span)
            message, vectors = message._replace(rows=len(here)), [here] if len(here) else []
        self._bus.send(self._servers[key.server], message, *vectors)

    def _receive_buffers(self, source: int, message: ServerMessage) -> list[Array]:
        """Buffers for the vectors of a message."""
        key = self._keys[message.key]
        if message.number >= 0:
            return [self._whole[message.number][key.span.start : key.span.stop]]
        if message.kind is MessageKind.COPY:
            return [self.vector[key.span.start : key.span.stop]]
        if key.table is not None:
            return [np.empty(message.elements, self.vector.dtype)]
        return [self._pulling[message.key]]

    def _weights(self, envelope: Envelope) -> None:
        message, key = envelope.message, self._keys[envelope.message.key]
        into = self._pulling.pop(message.key)
        if key.table is not None and envelope.vectors:
            into[key.table.places(self._rows[message.key], key.span)] = envelope.vectors[0]
        self._known[message.key] = message.clock
        self.clocks = message.clocks
        self.stop_requested |= bool(message.stop)

    def _copied(self, envelope: Envelope) -> None:
        self._copying.discard((envelope.message.key, envelope.message.number))

    def _acknowledge(self, envelope: Envelope) -> None:
        self._unacknowledged[envelope.message.key] -= 1
        self._unacknowledged += Counter()  # without those that are 0

    def _drawn(self, envelope: Envelope) -> None:
        self._work.append(envelope.message)

    def _requeue(self, envelope: Envelope) -> None:
        self._requeued = True

    def _peer_lost(self, envelope: Envelope) -> None:
        self._over.add(envelope.source)

    def _rested_one(self, envelope: Envelope) -> None:
        self._rested += 1
        self.clocks = envelope.message.clocks
        self.updates = max(self.updates, envelope.message.number)


HANDLERS = {
    MessageKind.WEIGHTS: WorkerClient._weights,
    MessageKind.COPY: WorkerClient._copied,
    MessageKind.ACK: WorkerClient._acknowledge,
    MessageKind.WORK: WorkerClient._drawn,
    MessageKind.RESTED: WorkerClient._rested_one,
    MessageKind.AGAIN: WorkerClient._requeue,
    MessageKind.LOST: WorkerClient._peer_lost,
}
"""Handler of each kind of message."""
