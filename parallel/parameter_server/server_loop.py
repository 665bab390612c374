"""A server at work: letters come in, in any order; what the rule allows is answered, the rest waits.

It knows a post, but no MPI: tests put another in its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from parallel.parameter_server.worker_clocks import Clocks, Rule
from parallel.parameter_server.messages import Kind, Letter, Message
from parallel.server.order import Order
from parallel.parameter_server.shard_store import Apart, Pushed, Together
from parallel.parameter_server.work_assignment import Outcome, Part, Work


class Mail(Protocol):
    """What a server and a worker need of `parallel.parameter_server.message_bus.Post`."""

    accept: Callable[[int, Message], Sequence[Any]]

    def send(self, peer: int, message: Message, *vectors: Any) -> Any: ...
    def poll(self) -> Letter | None: ...
    def idle(self) -> None: ...
    def abandon(self, *kinds: Kind) -> None: ...


class Failed(RuntimeError):
    """All have given up. The text says why, where it was this rank that did so first."""


class Server:
    """Answers letters.

    Parameters
    ----------
    post : Mail
    store : Apart or Together
    rule : Rule
    workers, servers : sequence of int
        Their ranks. A worker's number is its place among them, and so is a server's.
    here : int
        Which of the servers this is.
    order : Order
    watch : callable (worker, clock), optional
        Told of every tick.

    Attributes
    ----------
    clocks : Clocks
        As far as this server has heard.
    work : Work
        Of use on the first server only.
    gaps : Counter
        How often a worker was let read with which gap between its clock and the slowest worker's.
    applied : Counter
        Pushes that were taken, by key.
    rests : int
        How often all workers have rested.
    norms : dict
        By step, of the gradient; if steps are one update.
    problem : str or None
        Why this rank has given up; nothing if others have.
    """

    def __init__(
        self,
        post: Mail,
        store: Apart | Together,
        rule: Rule,
        workers: Sequence[int],
        servers: Sequence[int],
        here: int,
        order: Order,
        watch: Callable[[int, int], None] = lambda worker, clock: None,
    ):
        self._post, self.store, self._rule = post, store, rule
        self._workers, self._servers, self._here = list(workers), list(servers), here
        self._number = {rank: number for number, rank in enumerate(workers)}
        self.order, self._watch = order, watch
        self.begin(0)
        self.gaps: Counter[int] = Counter()
        self.applied: Counter[int] = Counter()
        self.norms: dict[int, float | None] = {}
        self.wish = False
        self._gone: set[int] = set()
        self._latest: dict[int, int] = {}
        self._drawn: dict[int, Message] = {}
        self._resting: dict[int, Message] = {}
        self.rests = self._awaited = 0
        self._over: set[int] = set()
        self.problem: str | None = None
        post.accept = self._room

    def begin(self, steps: int) -> None:
        """All workers have made so many steps."""
        self.clocks, self.work = Clocks(len(self._workers), steps), Work(len(self._workers), steps)
        self.store.applied = steps
        self._parts: dict[int, int] = {}
        self._last: dict[int, bool] = {}
        self._squares: dict[int, dict[int, Any]] = {}
        self._asked = steps

    # ------------------------------------------------------------------------------------------ serving

    def until_made(self, steps: int) -> bool:
        """Serve until all workers have made so many steps; whether that shall be the end.

        Raises
        ------
        Failed
            When all ranks have given up.
        """
        self._serve(lambda: self.clocks.least >= steps and self.store.applied >= steps)
        if len(self._gone) == len(self._workers):
            raise Failed("all workers are dead")
        return self._last.get(steps, False)

    def until_rest(self) -> None:
        """Serve until all workers rest; then nothing is under way. Raises `Failed`."""
        self._awaited += 1
        self._serve(lambda: self.rests >= self._awaited)

    def catch_up(self) -> None:
        """Act on all that has come and may be acted on: a replica, which leads nobody."""
        while True:
            if (letter := self.order.take(self._allowed)) is not None:
                HANDLERS[letter.message.kind](self, letter)
            elif (letter := self._post.poll()) is not None:
                self._arrived(letter)
            else:
                return

    def give_up(self, problem: str) -> None:
        """Say the last word to all workers and servers, and wait for theirs."""
        self._tell(problem)
        self._serve(lambda: False)

    def _serve(self, enough: Callable[[], bool]) -> None:
        try:
            while not enough():
                if self.problem is None and (letter := self.order.take(self._allowed)) is not None:
                    HANDLERS[letter.message.kind](self, letter)
                elif (letter := self._post.poll()) is not None:
                    self._arrived(letter)
                elif len(self._over) == len(self._workers) + len(self._servers) - 1:
                    raise Failed(self.problem or "")
                elif self.problem is None and self._over.issuperset(self._workers):
                    raise Failed("all workers are dead")
                else:
                    self._post.idle()
        except Failed:
            raise
        except Exception as error:
            if self.problem is not None:
                raise
            self._tell(f"{type(error).__name__}: {error}")
            self._serve(lambda: False)

    def _arrived(self, letter: Letter) -> None:
        if letter.message.kind is Kind.LOST:
            self._over.add(letter.source)
        elif letter.message.kind is Kind.PROBLEM:
            self._over.add(letter.source)
            self._tell("")
        elif self.problem is None:
            self.order.put(letter)

    def _tell(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem
            self.order.clear()
            for peer in [*self._workers, *self._servers]:
                if peer != self._servers[self._here]:
                    self._post.send(peer, Message(Kind.PROBLEM))

    # ------------------------------------------------------------------------------------------ letters

    def _room(self, source: int, message: Message) -> list[Any]:
        """Where the vectors of a message shall land."""
        rows = [np.empty(message.rows, np.int64)] if message.rows > 0 else []
        if message.kind is Kind.SQUARES:
            return [np.empty(message.elements, np.float64)]
        if message.kind is Kind.PUSH and message.rows < 0:
            return [self.store.room(message.key)[: message.elements]]
        if message.elements:
            like = self.store.cells[message.key].piece.weights
            return [*rows, np.empty(message.elements, like.dtype)]
        return rows

    def _allowed(self, letter: Letter) -> bool:
        """Whether a pull may be answered; all else may."""
        message = letter.message
        if message.kind is not Kind.PULL:
            return True
        return self._rule.allows(message.clock, self._reach)

    @property
    def _reach(self) -> int:
        """How many steps of every worker are in the weights."""
        return min(self.store.applied, self.clocks.least)

    def _draw(self, letter: Letter) -> None:
        message, worker = letter.message, self._number[letter.source]
        if self._is_stale(letter):
            return
        if worker in self._drawn and message.ticket and self._drawn[worker].ticket == message.ticket:
            self._post.send(letter.source, self._drawn[worker])
            return
        self._resting.pop(letter.source, None)
        if message.number >= 0:
            outcome = Outcome(message.loss, message.targets, message.factor, worker)
            self.work.done(worker, Part(message.before, message.number), outcome)
        if message.stop or self.wish:
            self.work.end()
        part = self.work.draw(worker, message.clock, message.parts, self.order.forced())
        clock, number = part or Part(message.clock, -1)
        self.order.note(letter, number)
        answer = Message(Kind.WORK, clock=clock, number=number, last=self.work.last, ticket=message.ticket)
        self._drawn[worker] = answer
        self._post.send(letter.source, answer)

    def _is_stale(self, letter: Letter) -> bool:
        """Whether a worker that draws or rests has drawn or rested since."""
        latest = max(letter.message.ticket, self._latest.get(letter.source, 0))
        self._latest[letter.source] = latest
        return letter.message.ticket < latest

    def _pull(self, letter: Letter) -> None:
        gap = letter.message.clock - self.clocks.least
        assert gap <= self._rule.staleness, f"a gap of {gap} clocks at a read, with {self._rule.name}"
        self.gaps[gap] += 1
        self.order.note(letter)
        self._show(letter, Kind.WEIGHTS)

    def _read(self, letter: Letter) -> None:
        message, piece = letter.message, self.store.cells[letter.message.key].piece
        if message.number < 0:
            self._show(letter, Kind.COPY)
            return
        kept = [piece.weights, *piece.state.values()][message.number].copy()
        answer = Message(Kind.COPY, message.key, number=message.number, elements=len(kept), ticket=message.ticket)
        self._post.send(letter.source, answer, kept)

    def _show(self, letter: Letter, kind: Kind) -> None:
        """Send a key, or rows of it."""
        message, cell = letter.message, self.store.cells[letter.message.key]
        weights, lent = cell.visible, True
        if message.rows >= 0:
            assert cell.key.table is not None
            rows = letter.vectors[0] if letter.vectors else np.zeros(0, np.int64)
            weights, lent = weights[cell.key.table.places(rows, cell.key.span)], False
        answer = Message(kind, message.key, self._reach, elements=len(weights), stop=self.wish)
        answer = answer._replace(clocks=tuple(self.clocks.vector), ticket=message.ticket)
        sent = self._post.send(letter.source, answer, *([weights] if len(weights) else []))
        if lent:
            cell.lend(sent)

    def _push(self, letter: Letter) -> None:
        message, cell = letter.message, self.store.cells[letter.message.key]
        if message.rows < 0:
            gradient = letter.vectors[0]
        else:
            assert cell.key.table is not None
            gradient = self.store.room(message.key)
            gradient[...] = 0
            if letter.vectors:
                rows, values = letter.vectors
                gradient[cell.key.table.places(rows, cell.key.span)] = values
        pushed = Pushed(message.clock, message.number, message.parts, message.targets, message.factor, gradient)
        self.applied[message.key] += self.store.push(message.key, pushed)
        self.order.note(letter)
        answer = Message(Kind.ACK, message.key, message.clock, number=message.number, ticket=message.ticket)
        self._post.send(letter.source, answer)
        self._advance()

    def _tick(self, letter: Letter) -> None:
        message, worker = letter.message, self._number[letter.source]
        self.clocks.tick(worker, message.clock)
        self._parts[message.clock - 1] = message.parts
        self._last[message.clock] = bool(message.stop)
        self._watch(worker, message.clock)
        self.order.note(letter)
        self._advance()

    def _rest(self, letter: Letter) -> None:
        if self._is_stale(letter):
            return
        if letter.message.number <= self.rests:
            self._rested(letter.source, letter.message)
            return
        self._resting[letter.source] = letter.message
        self.order.note(letter)
        self.remind()
        self._release()

    def _release(self) -> None:
        """Let workers go on, if all that live rest, no part waits to be done, and every step's update is made."""
        if not self._resting or len(self._resting) < len(self._workers) - len(self._gone) or self.work.returned:
            return
        if self.store.applied < self.clocks.least:
            return
        if isinstance(self.store, Apart):
            self.store.settle()
        self.work.forget(self.clocks.least)
        self.rests += 1
        for worker, message in self._resting.items():
            self._rested(worker, message)
        self._resting.clear()

    def _rested(self, worker: int, message: Message) -> None:
        answer = Message(Kind.RESTED, number=self.store.updates, ticket=message.ticket)
        answer = answer._replace(clocks=tuple(self.clocks.vector))
        self._post.send(worker, answer)

    def _bury(self, letter: Letter) -> None:
        """A worker is dead: others do what it had, and wait for it no more."""
        worker = self._number[letter.source]
        self._gone.add(letter.source)
        self._resting.pop(letter.source, None)
        self.work.gone(worker)
        self.clocks.leave(worker)
        self.remind()
        self._release()
        self._advance()

    def remind(self) -> None:
        """Tell workers that a part waits to be done, if one does: who waits for something else is to draw it."""
        for worker in self._workers if self.work.returned else ():
            if worker not in self._gone:
                self._post.send(worker, Message(Kind.AGAIN))

    def _sum(self, letter: Letter) -> None:
        if letter.message.clock >= self.store.applied:
            self._squares.setdefault(letter.message.clock, {})[self._servers.index(letter.source)] = letter.vectors
            self._advance()

    # ------------------------------------------------------------------------------------------ steps as one update

    def _advance(self) -> None:
        """If steps are one update: ask the others for their sums when a step is complete here, and make it."""
        store = self.store
        if not isinstance(store, Together):
            store.applied = self.clocks.least
            self._release()
            return
        clock = store.applied
        if self._asked == clock < self.clocks.least and clock in self._parts and store.whole(self._parts[clock]):
            mine = store.squares()
            self._asked += 1
            self._squares.setdefault(clock, {})[self._here] = (mine,) if len(mine) else ()
            for server, rank in enumerate(self._servers):
                if server != self._here:
                    message = Message(Kind.SQUARES, clock=clock, elements=len(mine))
                    self._post.send(rank, message, *([mine] if len(mine) else []))
        if self._asked == clock + 1 and len(self._squares.get(clock, ())) == len(self._servers):
            sums = self._squares.pop(clock)
            everything = np.concatenate([np.zeros(0), *(vector for at in range(len(sums)) for vector in sums[at])])
            norm = store.finish(everything, store.count)
            self.norms[clock] = norm
            if norm is not None and not math.isfinite(norm):
                raise FloatingPointError(f"the norm of the gradient is not finite in step {clock}")
            self._release()


HANDLERS: dict[Kind, Callable[[Server, Letter], None]] = {
    Kind.DRAW: Server._draw,
    Kind.PULL: Server._pull,
    Kind.READ: Server._read,
    Kind.PUSH: Server._push,
    Kind.TICK: Server._tick,
    Kind.REST: Server._rest,
    Kind.GONE: Server._bury,
    Kind.SQUARES: Server._sum,
}
"""What a server does with each kind of letter."""
