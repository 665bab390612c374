"""Server of one shard: handles messages as they arrive. Pulls wait until the consistency rule allows them. No MPI."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallel.asynchronous.server.consistency import GONE, ConsistencyRule
from parallel.asynchronous.server.event_order import EventOrder
from parallel.asynchronous.server.messages import Envelope, Mail, MessageHandle, MessageKind, ServerMessage
from parallel.asynchronous.server.shard_store import AsyncStore, SyncStore
from parallel.asynchronous.server.work_assignment import PartResult, WorkAssignment, WorkPart
from parallel.runtime.consistency_check import StepFailed, TrainingFailed


class ServerLoop:
    """Server of shard `here`, or its replica: handles requests on a `store`. Worker i is the rank ``workers[i]``."""

    def __init__(
        self,
        bus: Mail,
        store: AsyncStore | SyncStore,
        rule: ConsistencyRule,
        workers: Sequence[int],
        servers: Sequence[int],
        here: int,
        order: EventOrder,
    ):
        self._bus, self.store, self._rule, self.order = bus, store, rule, order
        self._workers, self._servers, self._here = list(workers), list(servers), here
        self._peers = [rank for rank in (*workers, *servers) if rank != servers[here]]
        self._gone: set[int] = set()  # dead workers
        self.begin(0)
        self.gaps: Counter[int] = Counter()  # reads by gap between the reader's clock and the slowest worker's
        self.applied: Counter[int] = Counter()  # applied pushes by key
        self.parts = 0  # most parts of a step so far
        self.rests = self._awaited_rests = 0  # quiescent points
        self.waits_for_rank = False  # quiescent points wait for `until_quiescent` (replicas do not know of the call)
        self._awaited_steps = 0
        self.stop_requested = False
        self.problem: str | None = None  # reason of this rank's failure, empty if another rank failed
        self._over: set[int] = set()  # ranks that have sent their last message
        self._latest: dict[int, int] = {}  # ticket of the last DRAW or REST by worker
        self._drawn: dict[int, ServerMessage] = {}  # last answer to a DRAW by worker
        self._resting: dict[int, Envelope] = {}  # REST by worker
        bus.accept = self._receive_buffers

    def begin(self, steps: int) -> None:
        """Reset clocks and work assignment as if all workers had made `steps` steps. Weights and statistics stay."""
        self.clocks = [GONE if worker in self._gone else steps for worker in self._workers]
        self.work = WorkAssignment(len(self._workers), steps)  # used on the first server only
        self.norms: dict[int, float | None] = {}  # gradient norm by step, with synchronous updates
        self.store.begin(steps)
        self._last = -1  # number of steps after which the training ends
        self._parts: dict[int, int] = {}  # number of parts of the steps to be applied, with synchronous updates
        self._squares: dict[int, dict[int, Sequence[Any]]] = {}
        self._squared = steps  # steps whose sums of squares this server has sent

    def until_made(self, steps: int) -> bool:
        """Serve until all living workers' first `steps` steps are in the weights.

        True if the training ends at that step. Raises `TrainingFailed` if any rank fails or all workers are dead.
        """
        self._awaited_steps = steps
        self._serve(lambda: self._expect_steps() and self._reach >= steps)
        if len(self._gone) == len(self._workers):
            raise TrainingFailed("all workers are dead")
        return self._last == steps

    def until_quiescent(self) -> None:
        """Serve until all living workers wait in `quiesce` and updates are made. `TrainingFailed` if any rank fails."""
        self._awaited_rests += 1
        self._awaited_steps = 0
        self._release()
        self._serve(lambda: self.rests >= self._awaited_rests)

    def _expect_steps(self) -> bool:
        """Return True. StepFailed if a worker that waits in `quiesce` has made fewer steps than this rank awaits."""
        for worker, clock in zip(self._workers, self.clocks):
            if worker in self._resting and clock < self._awaited_steps:
                here = f"rank {worker} waits for all ranks after {clock} steps"
                raise StepFailed(f"{here}, and a server for step {self._awaited_steps}")
        return True

    def catch_up(self) -> None:
        """Handle all received messages that are allowed, without waiting for more. Called by `ServerReplicas`."""
        while self._handle_next():
            pass

    def _handle_next(self) -> bool:
        """Handle the next message that is allowed, or receive one. Returns False if there is none."""
        if (envelope := self.order.take(self._allowed)) is not None:
            HANDLERS[envelope.message.kind](self, envelope)
        elif (envelope := self._bus.poll()) is not None:
            self._receive(envelope)
        return envelope is not None

    def _serve(self, enough: Callable[[], bool]) -> None:
        """Handle messages until ``enough()``. Raises `TrainingFailed` if any rank fails or all workers are dead."""
        try:
            while not enough():
                if self._handle_next():
                    continue
                if len(self._over) == len(self._peers):
                    raise TrainingFailed(self.problem or "")
                if self.problem is None and self._over.issuperset(self._workers):
                    raise TrainingFailed("all workers are dead")
                self._bus.idle(self._awaits)
        except (TrainingFailed, KeyboardInterrupt, TimeoutError, ConnectionError):
            raise  # an interrupt may have lost a message, and other ranks may not answer
        except BaseException as error:
            if self.problem is not None:
                raise
            self.give_up(error)

    def _awaits(self) -> dict[int, str]:
        """Ranks that this server waits for: workers that wait for none, or servers whose squares are missing."""
        if self.problem is not None:
            return dict.fromkeys(set(self._peers) - self._over, "PROBLEM")
        waiting = {*self._resting, *self._gone, *(envelope.source for envelope in self.order.waiting)}
        clocks = {worker: clock for worker, clock in zip(self._workers, self.clocks) if worker not in waiting}
        if clocks:
            first = min(clocks.values())
            return {worker: f"step {clock}" for worker, clock in clocks.items() if clock == first}
        there, what = self._squares.get(self.store.applied, {}), f"SQUARES of step {self.store.applied}"
        return {rank: what for at, rank in enumerate(self._servers) if at not in there}

    def give_up(self, error: BaseException) -> None:
        """Report this rank's failure. Raises `TrainingFailed` once all other ranks have reported it or are dead."""
        self._announce_failure(f"{type(error).__name__}: {error}")
        try:
            self._serve(lambda: False)
        except TrainingFailed as failed:
            raise failed from error

    def _receive(self, envelope: Envelope) -> None:
        if envelope.message.kind in (MessageKind.LOST, MessageKind.PROBLEM):
            self._over.add(envelope.source)
            if envelope.message.kind is MessageKind.PROBLEM:
                self._announce_failure("")
        elif self.problem is None:
            self.order.put(envelope)

    def _announce_failure(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem
            self.order.clear()
            for peer in self._peers:
                self._bus.send(peer, ServerMessage(MessageKind.PROBLEM))

    def _receive_buffers(self, source: int, message: ServerMessage) -> list[Any]:
        if message.kind is MessageKind.PUSH and message.rows < 0:
            return [self.store.gradient_buffer(message.key)[: message.elements]]
        if message.kind is MessageKind.SQUARES:
            return [np.empty(message.elements, np.float64)]
        if message.kind is MessageKind.DRAW:
            return [np.empty(message.elements, np.uint8)]
        rows = [np.empty(message.rows, np.int64)] if message.rows > 0 else []
        if not message.elements:
            return rows
        return [*rows, np.empty(message.elements, self.store.key_states[message.key].piece.weights.dtype)]

    def _answer(self, request: Envelope, kind: MessageKind, *vectors: Any, **fields: Any) -> MessageHandle:
        """Answer a request with a message of `kind`, with the request's key and ticket."""
        key, ticket = request.message.key, request.message.ticket
        answer = ServerMessage(kind, key, elements=sum(map(len, vectors)), ticket=ticket, **fields)
        return self._bus.send(request.source, answer, *vectors)

    def _allowed(self, envelope: Envelope) -> bool:
        message = envelope.message
        return message.kind is not MessageKind.PULL or self._rule.allows(message.clock, self._reach)

    @property
    def _reach(self) -> int:
        """Number of steps that all living workers have finished and whose gradients are all in the weights."""
        return min(self.store.applied, *self.clocks)

    def _draw(self, envelope: Envelope) -> None:
        message, worker = envelope.message, self._workers.index(envelope.source)
        if self._is_stale(envelope):
            return
        # a repeated request must get the same part
        if worker in self._drawn and message.ticket and self._drawn[worker].ticket == message.ticket:
            self._bus.send(envelope.source, self._drawn[worker])
            return
        self._resting.pop(envelope.source, None)
        if message.number >= 0:
            records = b"".join(bytes(vector) for vector in envelope.vectors)
            outcome = PartResult(message.loss, message.targets, message.factor, worker, records)
            self.work.done(worker, WorkPart(message.before, message.number), outcome)
        if message.stop or self.stop_requested:
            self.work.end()
        part = self.work.draw(worker, message.clock, message.parts)
        clock, number = part or WorkPart(message.clock, -1)
        self.order.expect_drawn(number, message.clock, message.parts)
        self.order.note(envelope, number)
        answer = ServerMessage(MessageKind.WORK, clock=clock, number=number, last=self.work.last, ticket=message.ticket)
        self._drawn[worker] = answer
        self._bus.send(envelope.source, answer)

    def _is_stale(self, envelope: Envelope) -> bool:
        """True if a later request (DRAW or REST) of the same worker has been handled. Records the latest."""
        latest = max(envelope.message.ticket, self._latest.get(envelope.source, 0))
        self._latest[envelope.source] = latest
        return envelope.message.ticket < latest

    def _pull(self, envelope: Envelope) -> None:
        self.gaps[envelope.message.clock - min(self.clocks)] += 1
        self.order.note(envelope)
        self._send_weights(envelope, MessageKind.WEIGHTS)

    def _read(self, envelope: Envelope) -> None:
        message, piece = envelope.message, self.store.key_states[envelope.message.key].piece
        if message.number < 0:
            self._send_weights(envelope, MessageKind.COPY)
        else:
            vector = [piece.weights, *piece.state.values()][message.number].copy()
            self._answer(envelope, MessageKind.COPY, vector, number=message.number)

    def _send_weights(self, envelope: Envelope, kind: MessageKind) -> None:
        message, key_state = envelope.message, self.store.key_states[envelope.message.key]
        weights = key_state.visible
        if message.rows >= 0:
            rows = envelope.vectors[0] if envelope.vectors else np.zeros(0, np.int64)
            weights = weights[key_state.key.places(rows)]  # a copy
        clocks = tuple(self.clocks)
        sent = self._answer(envelope, kind, weights, clock=self._reach, stop=self.stop_requested, clocks=clocks)
        if message.rows < 0:
            key_state.add_reader(sent)

    def _push(self, envelope: Envelope) -> None:
        message = envelope.message
        if message.rows < 0:
            gradient = envelope.vectors[0]
        else:
            gradient = self.store.gradient_buffer(message.key)
            gradient[...] = 0
            if envelope.vectors:
                rows, values = envelope.vectors
                gradient[self.store.key_states[message.key].key.places(rows)] = values
        self.parts = max(self.parts, message.parts)
        self.applied[message.key] += self.store.push(message, gradient)
        self.order.note(envelope)
        self._answer(envelope, MessageKind.ACK, clock=message.clock, number=message.number)
        self._advance()

    def _tick(self, envelope: Envelope) -> None:
        message, worker = envelope.message, self._workers.index(envelope.source)
        self.clocks[worker] = max(self.clocks[worker], message.clock)  # ticks may come late or twice
        self._parts[message.clock - 1] = message.parts
        if message.stop:
            self._last = message.clock
        self.order.note(envelope)
        self._advance()

    def _rest(self, envelope: Envelope) -> None:
        if self._is_stale(envelope):
            return
        if envelope.message.number <= self.rests:
            self._answer_rest(envelope)
            return
        self._resting[envelope.source] = envelope
        self.order.note(envelope)
        self.remind()
        self._expect_steps()
        self._release()

    def _release(self) -> None:
        """End the workers' `quiesce` if all living ones wait in it, nothing is to be redone, all updates are made."""
        living = len(self._workers) - len(self._gone)
        if self.waits_for_rank and self.rests == self._awaited_rests:
            return
        # the weights must contain all steps that the workers have made
        if not self._resting or len(self._resting) < living or self.work.returned or self._reach < min(self.clocks):
            return
        if isinstance(self.store, AsyncStore):
            self.store.quiesce()
        self.work.forget(min(self.clocks))
        self.rests += 1
        for envelope in self._resting.values():
            self._answer_rest(envelope)
        self._resting.clear()

    def _answer_rest(self, envelope: Envelope) -> None:
        self._answer(envelope, MessageKind.RESTED, number=self.store.updates, clocks=tuple(self.clocks))

    def _handle_death(self, envelope: Envelope) -> None:
        """Handle a worker's death: put back its unfinished micro-batch, and no longer wait for its clock."""
        worker = self._workers.index(envelope.source)
        self._gone.add(envelope.source)
        self._resting.pop(envelope.source, None)
        self.work.gone(worker)
        self.clocks[worker] = GONE
        self.remind()
        self._release()
        self._advance()

    def remind(self) -> None:
        """Notify living workers (AGAIN) if the micro-batch of a dead one must be redone."""
        for worker in self._workers if self.work.returned else ():
            if worker not in self._gone:
                self._bus.send(worker, ServerMessage(MessageKind.AGAIN))

    def _store_squares(self, envelope: Envelope) -> None:
        clock = envelope.message.clock
        if clock >= self.store.applied:
            self._squares.setdefault(clock, {})[self._servers.index(envelope.source)] = envelope.vectors
            self._advance()

    def _advance(self) -> None:
        """Count applied steps. If synchronous, send squares of complete steps, and update once all have arrived."""
        store = self.store
        if not isinstance(store, SyncStore):
            store.applied = min(self.clocks)
            self._parts.clear()
            self._release()
            return
        clock = store.applied
        if self._squared == clock < min(self.clocks) and clock in self._parts and store.is_complete(self._parts[clock]):
            mine = store.squares()
            self._squared += 1
            self._squares.setdefault(clock, {})[self._here] = (mine,)
            for server in self._servers:
                if server != self._servers[self._here]:
                    self._bus.send(server, ServerMessage(MessageKind.SQUARES, clock=clock, elements=len(mine)), mine)
        if self._squared == clock + 1 and len(self._squares.get(clock, ())) == len(self._servers):
            sums = self._squares.pop(clock)
            # in the servers' order, so that the norm has the same bits on all of them
            squares = np.concatenate([np.zeros(0), *(vector for at in range(len(sums)) for vector in sums[at])])
            self.norms[clock] = norm = store.finish(squares)
            self._parts = {at: parts for at, parts in self._parts.items() if at > clock}
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
    MessageKind.SQUARES: ServerLoop._store_squares,
}
"""Handler of each kind of message."""
