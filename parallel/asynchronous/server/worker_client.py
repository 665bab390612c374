"""Worker client: requests micro-batches, pulls weights and pushes gradients, with many requests in flight. No MPI."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

from parallel.asynchronous.server.consistency import ConsistencyRule
from parallel.asynchronous.server.key_assignment import ServerKey
from parallel.asynchronous.server.messages import Envelope, Mail, MessageKind, ServerMessage
from parallel.asynchronous.server.work_assignment import PartResult, WorkPart
from parallel.runtime.consistency_check import TrainingFailed
from quant.types import Array


class Requeued(Exception):
    """A micro-batch that a dead worker left must be redone: draw it."""


class WorkerClient:
    """Client through which one worker requests micro-batches, and pulls and pushes the keys of all servers.

    There are two weight vectors if weights are prefetched while others are in use, else one.
    """

    def __init__(
        self,
        bus: Mail,
        rule: ConsistencyRule,
        keys: Sequence[ServerKey],
        servers: Sequence[int],
        vectors: Sequence[Array],
    ):
        self._bus, self._rule, self._keys, self._servers = bus, rule, keys, list(servers)
        self.vector, *self._others = vectors  # weights in use, and the vector for prefetches, if any
        self.stop_requested = False  # True if this rank knows that some rank has requested to end
        self.last = -1  # step after which the training ends, -1 if it is not set
        self.updates = 0  # of the servers, at the last quiescent point
        self.clocks: tuple[int, ...] = ()  # last known clocks of all workers
        self.gaps: Counter[int] = Counter()  # number of reads by gap between the worker's and the weights' clock
        self._clock = 0
        self._known: dict[int, int] = {}  # clock of the weights by key
        self._pulling: dict[int, Array] = {}
        self._rows: dict[int, Array] = {}
        self._copying: set[tuple[int, int]] = set()
        self._whole: list[Array] = []
        self._unacknowledged: Counter[int] = Counter()  # pushes by key
        self._work: list[ServerMessage] = []
        self._rested = self._rests = 0
        self._requeued = self._failure_sent = False
        self._over: set[int] = set()  # servers that have sent their last message
        bus.accept = self._receive_buffers

    def draw(self, clock: int, parts: int, done: tuple[WorkPart, PartResult] | None, stop: bool) -> WorkPart | None:
        """Request and await a micro-batch of step `clock`, or an earlier one to be redone. None if none is left.

        Reports the micro-batch `done` before, with its result, and sets `last`.
        """
        message = ServerMessage(MessageKind.DRAW, clock=clock, parts=parts, stop=stop or self.stop_requested)
        records: tuple[Array, ...] = ()
        if done is not None:
            part, (loss, targets, norm, _, packed) = done
            message = message._replace(before=part.clock, number=part.number, loss=loss, targets=targets, factor=norm)
            message = message._replace(elements=len(packed))
            records = (np.array(bytearray(packed)),) if packed else ()
        self._requeued = False  # an AGAIN from now on may concern a part that this draw does not get
        self._bus.send(self._servers[0], message, *records)
        self._until(lambda: bool(self._work), MessageKind.WORK, lambda: self._servers[:1])
        answer = self._work.pop()
        self.last = answer.last
        return WorkPart(answer.clock, answer.number) if answer.number >= 0 else None

    def read(self, clock: int, order: Iterable[int], rows: Array | None) -> Array:
        """Start pulling keys too old for step `clock`, tables' `rows` always. Returns the receiving vector."""
        self._clock = clock
        self._others.append(self.vector)
        self.vector = self._others.pop(0)
        for number in order:
            if self._keys[number].table is not None:
                self._known.pop(number, None)
                self._pull(number, self.vector, rows)
            elif number not in self._pulling and not self._fresh(number):
                self._pull(number, self.vector, None)
        return self.vector

    def need(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            while not self._arrives_fresh(number):
                self._pull(number, self.vector, self._rows.get(number))
            self.gaps[self._clock - self._known[number]] += 1

    def push(
        self, number: int, part: WorkPart, parts: int, targets: float, factor: float, gradient: Array, rows: Any
    ) -> None:
        """Start sending a key's gradient, unchanged until `acknowledged`. If asynchronous, prefetch the key's weights.

        Of a table, `rows` are the rows with a non-zero gradient.
        """
        key, vectors = self._keys[number], [gradient]
        fields: dict[str, Any] = {"number": part.number, "parts": parts, "targets": targets, "factor": factor}
        if key.table is not None:
            here = key.table.within(rows, key.span)
            vectors, fields["rows"] = [here, gradient[key.places(here)]], len(here)
        message = ServerMessage(MessageKind.PUSH, number, part.clock, elements=len(vectors[-1]), **fields)
        self._bus.send(self._servers[key.server], message, *vectors)
        self._unacknowledged[number] += 1
        if self._others and key.table is None:
            self._pull(number, self._others[0], None)
        self.poll()

    def acknowledged(self) -> None:
        self._until(lambda: not +self._unacknowledged, MessageKind.ACK, lambda: self._owners(+self._unacknowledged))

    def tick(self, steps: int, parts: int, last: bool) -> None:
        """Report `steps` finished steps to all servers, the last of `parts` micro-batches. `last` ends the training."""
        for server in self._servers:
            self._bus.send(server, ServerMessage(MessageKind.TICK, clock=steps, parts=parts, stop=last))

    def quiesce(self) -> None:
        """Wait until all living workers call this and all updates are made. `Requeued` if a micro-batch must be redone.

        The first server decides. The workers pass its decision on to the others.
        """
        self._until(lambda: not self._pulling or self._requeued, MessageKind.WEIGHTS, self._pulled)
        self._rest_on(self._servers[:1], lambda: self._requeued)
        self._check_requeued()
        self._rest_on(self._servers[1:], lambda: False)
        self._rests += 1

    def _rest_on(self, servers: Sequence[int], or_else: Callable[[], bool]) -> None:
        self._rested = 0
        for server in servers:
            self._bus.send(server, ServerMessage(MessageKind.REST, number=self._rests + 1))
        self._until(lambda: self._rested == len(servers) or or_else(), MessageKind.RESTED, lambda: servers)

    def copy(self) -> Array:
        self._copy([-1])
        return self.vector

    def copies(self, count: int, dtype: Any) -> list[Array]:
        """Read full vectors from the servers for a checkpoint: weights, then `count` optimizer states, in `dtype`."""
        self._whole = [np.zeros(len(self.vector), dtype) for _ in range(1 + count)]
        self._copy(range(1 + count))
        whole, self._whole = self._whole, []
        return whole

    def _copy(self, numbers: Sequence[int]) -> None:
        for key, number in product(self._keys, numbers):
            self._copying.add((key.number, number))
            self._bus.send(self._servers[key.server], ServerMessage(MessageKind.READ, key.number, number=number))
        self._until(lambda: not self._copying, MessageKind.COPY, lambda: self._owners(dict(self._copying)))

    def _check_requeued(self) -> None:
        """Raise `Requeued` and drop open requests if the first server has sent AGAIN (a micro-batch must be redone)."""
        if self._requeued:
            self._requeued = False
            self._pulling.clear()
            self._known.clear()  # after a prefetch, current weights are spread over both vectors: pull all keys again
            self._bus.abandon(MessageKind.PULL, MessageKind.REST)
            raise Requeued

    def forget(self) -> None:
        self._known.clear()

    def give_up(self) -> None:
        if not self._failure_sent:
            self._failure_sent = True
            for server in self._servers:
                self._bus.send(server, ServerMessage(MessageKind.PROBLEM))
        while len(self._over) < len(self._servers):
            envelope = self._bus.poll()
            if envelope is None:
                self._bus.idle(lambda: dict.fromkeys(set(self._servers) - self._over, "PROBLEM"))
            elif envelope.message.kind in (MessageKind.PROBLEM, MessageKind.LOST):
                self._over.add(envelope.source)

    def poll(self) -> bool:
        """Handle one message. Returns False if there is none. Raises `TrainingFailed` if another rank has failed."""
        envelope = self._bus.poll()
        if envelope is None:
            return False
        source, message, _ = envelope
        match message.kind:
            case MessageKind.WEIGHTS:
                self._receive_weights(envelope)
            case MessageKind.COPY:
                self._copying.discard((message.key, message.number))
            case MessageKind.ACK:
                self._unacknowledged[message.key] -= 1
            case MessageKind.WORK:
                self._work.append(message)
            case MessageKind.RESTED:
                self._rested += 1
                self.clocks, self.updates = message.clocks, max(self.updates, message.number)
            case MessageKind.AGAIN:
                self._requeued = True
            case MessageKind.LOST:
                self._over.add(source)
            # the failed rank reports the reason, this one only ends its waits
            case MessageKind.PROBLEM:
                self._over.add(source)
                self.give_up()
                raise TrainingFailed
            case kind:
                raise AssertionError(f"a worker received {kind.name} from rank {source}")
        return True

    def _until(self, enough: Callable[[], bool], kind: MessageKind, servers: Callable[[], Iterable[int]]) -> None:
        """Handle messages until ``enough()``. Messages of `kind` are awaited from ``servers()``."""
        while not enough():
            if not self.poll():
                self._bus.idle(lambda: dict.fromkeys(servers(), f"{kind.name} of step {self._clock}"))

    def _owners(self, keys: Iterable[int]) -> set[int]:
        """Ranks of the servers of keys."""
        return {self._servers[self._keys[number].server] for number in keys}

    def _pulled(self) -> set[int]:
        return self._owners(self._pulling)

    def _arrives_fresh(self, number: int) -> bool:
        """Wait for a key's pull, if any. True if the key is as fresh as the rule requires. May raise `Requeued`."""
        self._until(lambda: number not in self._pulling or self._requeued, MessageKind.WEIGHTS, self._pulled)
        self._check_requeued()
        return self._fresh(number)

    def _fresh(self, number: int) -> bool:
        return number in self._known and self._rule.allows(self._clock, self._known[number])

    def _pull(self, number: int, vector: Array, rows: Array | None) -> None:
        key = self._keys[number]
        self._known.pop(number, None)
        self._pulling[number] = vector[key.span.start : key.span.stop]
        message, vectors = ServerMessage(MessageKind.PULL, number, self._clock), []
        if key.table is not None:
            self._rows[number] = here = key.table.within(rows, key.span)
            message, vectors = message._replace(rows=len(here)), [here]
        self._bus.send(self._servers[key.server], message, *vectors)

    def _receive_buffers(self, source: int, message: ServerMessage) -> list[Array]:
        key = self._keys[message.key]
        if message.number >= 0:
            return [self._whole[message.number][key.span.start : key.span.stop]]
        if message.kind is MessageKind.COPY:
            return [self.vector[key.span.start : key.span.stop]]
        if key.table is not None:
            return [np.empty(message.elements, self.vector.dtype)]
        return [self._pulling[message.key]]

    def _receive_weights(self, envelope: Envelope) -> None:
        message, key = envelope.message, self._keys[envelope.message.key]
        into = self._pulling.pop(message.key)
        if key.table is not None and envelope.vectors:
            into[key.places(self._rows[message.key])] = envelope.vectors[0]
        self._known[message.key] = message.clock
        self.clocks = message.clocks
        self.stop_requested |= bool(message.stop)
