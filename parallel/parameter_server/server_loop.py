"""Server loop: handles messages in any order; requests that the rule does not allow yet wait. No MPI."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from parallel.parameter_server.event_order import EventOrder
from parallel.parameter_server.messages import Envelope, MessageKind, ServerMessage
from parallel.parameter_server.shard_store import AsyncStore, PushedGradient, SyncStore
from parallel.parameter_server.work_assignment import PartResult, WorkAssignment, WorkPart
from parallel.parameter_server.worker_clocks import ConsistencyRule, WorkerClocks


class ServerMail(Protocol):
    """Interface of a message bus, for servers and workers."""

    accept: Callable[[int, ServerMessage], Sequence[Any]]

    def send(self, peer: int, message: ServerMessage, *vectors: Any) -> Any: ...
    def poll(self) -> Envelope | None: ...
    def idle(self) -> None: ...
    def abandon(self, *kinds: MessageKind) -> None: ...


class ServerFailed(RuntimeError):
    """The training has ended on all ranks; the text is the reason if it is this rank's."""


class ServerLoop:
    """Server of one shard.

    Parameters
    ----------
    bus : ServerMail
    store : AsyncStore or SyncStore
    rule : ConsistencyRule
    workers, servers : sequence of int
        Their ranks; a worker's or server's number is its position there.
    here : int
        Number of this server.
    order : EventOrder

    Attributes
    ----------
    watch : callable (worker, clock)
        Called on every tick.
    clocks : WorkerClocks
    work : WorkAssignment
        Used on the first server only.
    gaps : Counter
        Number of reads by gap between the reader's clock and the slowest worker's.
    applied : Counter
        Applied pushes, by key.
    parts : int
        Most parts of a step so far.
    rests : int
        Number of quiescent points.
    norms : dict
        Gradient norm by step, with synchronous updates.
    problem : str or None
        Reason of this rank's failure; empty if another rank failed.
    """

    def __init__(
        self,
        bus: ServerMail,
        store: AsyncStore | SyncStore,
        rule: ConsistencyRule,
        workers: Sequence[int],
        servers: Sequence[int],
        here: int,
        order: EventOrder,
    ):
        self._bus, self.store, self._rule = bus, store, rule
        self._workers, self._servers, self._here = list(workers), list(servers), here
        self._number = {rank: number for number, rank in enumerate(workers)}
        self.order = order
        self.watch: Callable[[int, int], None] = lambda worker, clock: None
        self.begin(0)
        self.gaps: Counter[int] = Counter()
        self.applied: Counter[int] = Counter()
        self.norms: dict[int, float | None] = {}
        self.stop_requested = False
        self._gone: set[int] = set()
        self._latest: dict[int, int] = {}
        self._drawn: dict[int, ServerMessage] = {}
        self._resting: dict[int, ServerMessage] = {}
        self.rests = self._awaited = self.parts = 0
        self._over: set[int] = set()
        self.problem: str | None = None
        bus.accept = self._receive_buffers

    def begin(self, steps: int) -> None:
        """Reset to a state in which all workers have made `steps` steps."""
        self.clocks, self.work = WorkerClocks(len(self._workers), steps), WorkAssignment(len(self._workers), steps)
        self.store.applied = steps
        self._parts: dict[int, int] = {}
        self._last: dict[int, bool] = {}
        self._squares: dict[int, dict[int, Any]] = {}
        self._asked = steps

    # ------------------------------------------------------------------------------------------ serving

    def until_made(self, steps: int) -> bool:
        """Serve until all workers have made `steps` steps; returns True if the training ends there.

        Raises
        ------
        ServerFailed
            When the training has failed on all ranks.
        """
        self._serve(lambda: self.clocks.least >= steps and self.store.applied >= steps)
        if len(self._gone) == len(self._workers):
            raise ServerFailed("all workers are dead")
        return self._last.get(steps, False)

    def until_quiescent(self) -> None:
        """Serve until all workers rest and nothing is in flight. Raises `ServerFailed`."""
        self._awaited += 1
        self._serve(lambda: self.rests >= self._awaited)

    def catch_up(self) -> None:
        """Handle all received messages that are allowed; used by replicas."""
        while True:
            if (envelope := self.order.take(self._allowed)) is not None:
                HANDLERS[envelope.message.kind](self, envelope)
            elif (envelope := self._bus.poll()) is not None:
                self._arrived(envelope)
            else:
                return

    def give_up(self, problem: str) -> None:
        """Send PROBLEM to all workers and servers, and wait for theirs."""
        self._announce_failure(problem)
        self._serve(lambda: False)

    def _serve(self, enough: Callable[[], bool]) -> None:
        try:
            while not enough():
                if self.problem is None and (envelope := self.order.take(self._allowed)) is not None:
                    HANDLERS[envelope.message.kind](self, envelope)
                elif (envelope := self._bus.poll()) is not None:
                    self._arrived(envelope)
                elif len(self._over) == len(self._workers) + len(self._servers) - 1:
                    raise ServerFailed(self.problem or "")
                elif self.problem is None and self._over.issuperset(self._workers):
                    raise ServerFailed("all workers are dead")
                else:
                    self._bus.idle()
        except ServerFailed:
            raise
        except Exception as error:
            if self.problem is not None:
                raise
            self._announce_failure(f"{type(error).__name__}: {error}")
            self._serve(lambda: False)

    def _arrived(self, envelope: Envelope) -> None:
        if envelope.message.kind is MessageKind.LOST:
            self._over.add(envelope.source)
        elif envelope.message.kind is MessageKind.PROBLEM:
            self._over.add(envelope.source)
            self._announce_failure("")
        elif self.problem is None:
            self.order.put(envelope)

    def _announce_failure(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem
            self.order.clear()
            for peer in [*self._workers, *self._servers]:
                if peer != self._servers[self._here]:
                    self._bus.send(peer, ServerMessage(MessageKind.PROBLEM))

    # ------------------------------------------------------------------------------------------ envelopes

    def _receive_buffers(self, source: int, message: ServerMessage) -> list[Any]:
        """Buffers for the vectors of a message."""
        rows = [np.empty(message.rows, np.int64)] if message.rows > 0 else []
        if message.kind is MessageKind.SQUARES:
            return [np.empty(message.elements, np.float64)]
        if message.kind is MessageKind.PUSH and message.rows < 0:
            return [self.store.gradient_buffer(message.key)[: message.elements]]
        if message.elements:
            like = self.store.key_states[message.key].piece.weights
            return [*rows, np.empty(message.elements, like.dtype)]
        return rows

    def _allowed(self, envelope: Envelope) -> bool:
        """True unless the message is a pull that the rule delays."""
        message = envelope.message
        if message.kind is not MessageKind.PULL:
            return True
        return self._rule.allows(message.clock, self._reach)

    @property
    def _reach(self) -> int:
        """Number of steps of every worker that the weights contain."""
        return min(self.store.applied, self.clocks.least)

    def _draw(self, envelope: Envelope) -> None:
        message, worker = envelope.message, self._number[envelope.source]
        if self._is_stale(envelope):
            return
        if worker in self._drawn and message.ticket and self._drawn[worker].ticket == message.ticket:
            self._bus.send(envelope.source, self._drawn[worker])
            return
        self._resting.pop(envelope.source, None)
        if message.number >= 0:
            outcome = PartResult(message.loss, message.targets, message.factor, worker)
            self.work.done(worker, WorkPart(message.before, message.number), outcome)
        if message.stop or self.stop_requested:
            self.work.end()
        part = self.work.draw(worker, message.clock, message.parts, self.order.forced())
        clock, number = part or WorkPart(message.clock, -1)
        self.order.note(envelope, number)
        answer = ServerMessage(MessageKind.WORK, clock=clock, number=number, last=self.work.last, ticket=message.ticket)
        self._drawn[worker] = answer
        self._bus.send(envelope.source, answer)

    def _is_stale(self, envelope: Envelope) -> bool:
        """True if the worker has sent a later DRAW or REST."""
        latest = max(envelope.message.ticket, self._latest.get(envelope.source, 0))
        self._latest[envelope.source] = latest
        return envelope.message.ticket < latest

    def _pull(self, envelope: Envelope) -> None:
        gap = envelope.message.clock - self.clocks.least
        assert gap <= self._rule.staleness, f"a gap of {gap} clocks at a read, with {self._rule.name}"
        self.gaps[gap] += 1
        self.order.note(envelope)
        self._send_weights(envelope, MessageKind.WEIGHTS)

    def _read(self, envelope: Envelope) -> None:
        message, piece = envelope.message, self.store.key_states[envelope.message.key].piece
        if message.number < 0:
            self._send_weights(envelope, MessageKind.COPY)
            return
        kept = [piece.weights, *piece.state.values()][message.number].copy()
        answer = ServerMessage(
            MessageKind.COPY, message.key, number=message.number, elements=len(kept), ticket=message.ticket
        )
        self._bus.send(envelope.source, answer, kept)

    def _send_weights(self, envelope: Envelope, kind: MessageKind) -> None:
        """Send a key, or rows of it."""
        message, key_state = envelope.message, self.store.key_states[envelope.message.key]
        weights, lent = key_state.visible, True
        if message.rows >= 0:
            assert key_state.key.table is not None
            rows = envelope.vectors[0] if envelope.vectors else np.zeros(0, np.int64)
            weights, lent = weights[key_state.key.table.places(rows, key_state.key.span)], False
        answer = ServerMessage(kind, message.key, self._reach, elements=len(weights), stop=self.stop_requested)
        answer = answer._replace(clocks=tuple(self.clocks.vector), ticket=message.ticket)
        sent = self._bus.send(envelope.source, answer, *([weights] if len(weights) else []))
        if lent:
            key_state.lend(sent)

    def _push(self, envelope: Envelope) -> None:
        message, key_state = envelope.message, self.store.key_states[envelope.message.key]
        if message.rows < 0:
            gradient = envelope.vectors[0]
        else:
            assert key_state.key.table is not None
            gradient = self.store.gradient_buffer(message.key)
            gradient[...] = 0
            if envelope.vectors:
                rows, values = envelope.vectors
                gradient[key_state.key.table.places(rows, key_state.key.span)] = values
        self.parts = max(self.parts, message.parts)
        pushed = PushedGradient(message.clock, message.number, message.parts, message.targets, message.factor, gradient)
        self.applied[message.key] += self.store.push(message.key, pushed)
        self.order.note(envelope)
        answer = ServerMessage(
            MessageKind.ACK, message.key, message.clock, number=message.number, ticket=message.ticket
        )
        self._bus.send(envelope.source, answer)
        self._advance()

    def _tick(self, envelope: Envelope) -> None:
        message, worker = envelope.message, self._number[envelope.source]
        self.clocks.tick(worker, message.clock)
        self._parts[message.clock - 1] = message.parts
        self._last[message.clock] = bool(message.stop)
        self.watch(worker, message.clock)
        self.order.note(envelope)
        self._advance()

    def _rest(self, envelope: Envelope) -> None:
        if self._is_stale(envelope):
            return
        if envelope.message.number <= self.rests:
            self._rested(envelope.source, envelope.message)
            return
        self._resting[envelope.source] = envelope.message
        self.order.note(envelope)
        self.remind()
        self._release()

    def _release(self) -> None:
        """Answer all RESTs once every living worker rests, no part must be redone, and all updates are made."""
        if not self._resting or len(self._resting) < len(self._workers) - len(self._gone) or self.work.returned:
            return
        if self.store.applied < self.clocks.least:
            return
        if isinstance(self.store, AsyncStore):
            self.store.quiesce()
        self.work.forget(self.clocks.least)
        self.rests += 1
        for worker, message in self._resting.items():
            self._rested(worker, message)
        self._resting.clear()

    def _rested(self, worker: int, message: ServerMessage) -> None:
        answer = ServerMessage(MessageKind.RESTED, number=self.store.updates, ticket=message.ticket)
        answer = answer._replace(clocks=tuple(self.clocks.vector))
        self._bus.send(worker, answer)

    def _handle_death(self, envelope: Envelope) -> None:
        """Return a dead worker's part and exclude its clock."""
        worker = self._number[envelope.source]
        self._gone.add(envelope.source)
        self._resting.pop(envelope.source, None)
        self.work.gone(worker)
        self.clocks.leave(worker)
        self.remind()
        self._release()
        self._advance()

    def remind(self) -> None:
        """Send AGAIN to the living workers if a part must be redone."""
        for worker in self._workers if self.work.returned else ():
            if worker not in self._gone:
                self._bus.send(worker, ServerMessage(MessageKind.AGAIN))

    def _sum(self, envelope: Envelope) -> None:
        if envelope.message.clock >= self.store.applied:
            self._squares.setdefault(envelope.message.clock, {})[self._servers.index(envelope.source)] = (
                envelope.vectors
            )
            self._advance()

    # ------------------------------------------------------------------------------------------ steps as one update

    def _advance(self) -> None:
        """With synchronous updates: exchange a complete step's sums of squares; update once all have arrived."""
        store = self.store
        if not isinstance(store, SyncStore):
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
                    message = ServerMessage(MessageKind.SQUARES, clock=clock, elements=len(mine))
                    self._bus.send(rank, message, *([mine] if len(mine) else []))
        if self._asked == clock + 1 and len(self._squares.get(clock, ())) == len(self._servers):
            sums = self._squares.pop(clock)
            everything = np.concatenate([np.zeros(0), *(vector for at in range(len(sums)) for vector in sums[at])])
            norm = store.finish(everything, store.count)
            self.norms[clock] = norm
            if norm is not None and not math.isfinite(norm):
                raise FloatingPointError(f"the norm of the gradient is not finite in step {clock}")
            self._release()


HANDLERS: dict[MessageKind, Callable[[ServerLoop, Envelope], None]] = {
    MessageKind.DRAW: ServerLoop._draw,
    MessageKind.PULL: ServerLoop._pull,
    MessageKind.READ: ServerLoop._read,
    MessageKind.PUSH: ServerLoop._push,
    MessageKind.TICK: ServerLoop._tick,
    MessageKind.REST: ServerLoop._rest,
    MessageKind.GONE: ServerLoop._handle_death,
    MessageKind.SQUARES: ServerLoop._sum,
}
"""Handler of each kind of message."""
