"""Binder: a schedule bound to memory and a wire becomes a program.

Binding walks the schedule once and resolves the location of every chunk at every step: the first access to a chunk
reads the user's send buffer, results go to the receive buffer, and to scratch memory where a chunk is only forwarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from collectives.runtime.program import LANDING, SCRATCH, ElementArray, Program, ReduceKernel, Stream, Task
from collectives.schedule.chunks import MemorySpan, aligned, even, joined, split
from collectives.schedule.steps import Chunks, Copy, Recv, RecvReduce, Reduce, Schedule, Send, Side, Step, numbers
from collectives.transport.wire import ExchangeSupport, Iovec, Wire
from collectives.types import Wait

LANDING_SLOTS = 3
"""Receive buffers per reduced message: one segment arrives while another is reduced."""

MESSAGE_WINDOW = 2
"""Segments of one message in flight over a network. More would fill its queues and delay TCP acknowledgements."""

EAGER_BYTES = 4096
"""Bytes up to which any MPI sends eagerly, without waiting for the receiver."""

_NO_OPERATION = "the schedule combines, but no operation was given"


def bind(
    task: Task,
    source: ElementArray,
    target: ElementArray,
    wire: Wire,
    reduce_kernel: ReduceKernel | None = None,
    stream: Stream | None = None,
    first: Iterable[Callable[[], object] | Wait] = (),
    last: Iterable[Callable[[], object] | Wait] = (),
) -> Program:
    """Bind a task to the user's memory and a wire, which the program frees.

    `source` and `target` are the same for a call in place. Scratch memory and local work are on `stream`, by default
    NumPy's, synchronous. `first` and `last` run before the first round and after the last, such as staging.
    """
    binder = _ProgramBinder(task, [source, target], wire, reduce_kernel, stream)
    for call in first:
        binder.emit(call)
    binder.rounds()
    for call in last:
        binder.emit_local(call)
    binder.wait_for_stream()
    swap = binder.swap()
    halves = None if swap is None else swap.split(source.array, target.array)
    if halves is not None:
        binder.calls, binder.tests = [], []
        for half in filter(None, halves):
            binder.emit(half)
    program = Program(binder.calls, binder.tests, wire, binder.nbytes, binder.memories, stream)
    program.swap = swap
    program.begins = tuple(binder.begins) if halves is None else tuple(binder.begins[:1])
    return program


class _SendBinding(NamedTuple):
    """One segment to send, and its memory, which must not change before the send completes."""

    message: Any
    places: list[MemorySpan]


class _Action(NamedTuple):
    """Local work of a step: runs after `message` (None: after the whole round); then `following` may start."""

    step: int
    message: Any
    calls: list[Callable[[], object]]
    onto: list[MemorySpan]
    following: Any = None


class _RoundShape(NamedTuple):
    """Treatment of the messages that a round reduces.

    `in_place`: reduce from the sender's memory; otherwise receive into `landing` elements of landing memory first, in
    `slots` per message. `changing`: destinations of the results.
    """

    in_place: bool
    slots: list[int]
    landing: int
    changing: list[MemorySpan]


class _ProgramBinder:
    """Emits the calls of one program, and tracks the current location of every chunk."""

    def __init__(
        self,
        task: Task,
        memories: list[ElementArray],
        wire: Wire,
        reduce_kernel: ReduceKernel | None,
        stream: Stream | None,
    ) -> None:
        self.task, self.wire, self.reduce_kernel, self.stream = task, wire, reduce_kernel, stream
        self.working = stream is not None  # earlier work on the stream must end before messages start
        self.calls: list[Callable[[], object]] = []
        self.tests: list[Callable[[], bool] | None] = []
        self.location: dict[int, MemorySpan] = dict(task.source)
        self.written = _written(task.schedule)
        self.exchanges: list[list[Any]] = []
        self.begins: list[tuple[int, int]] = []
        self.scratch: dict[int, MemorySpan] = {}
        room = 0
        for chunk in sorted(self.written.difference(task.target)):
            self.scratch[chunk] = MemorySpan(SCRATCH, room, room + self._length(chunk))
            room += self._length(chunk)
        self.shapes: list[_RoundShape] = []
        for steps in task.schedule:
            self.shapes.append(self._shape(steps))
            self._move_locations(steps)
        self.location = dict(task.source)
        landing = max((shape.landing for shape in self.shapes), default=0)
        dtype = memories[0].array.dtype
        self.memories = [*memories, *(ElementArray.allocate(count, dtype, stream or np) for count in (room, landing))]
        self.nbytes = (room + landing) * task.itemsize

    # -------------------------------------------------------------------------------- locations

    def _length(self, chunk: int) -> int:
        return self.task.lengths[chunk % len(self.task.lengths)]

    def _locations(self, chunks: Chunks) -> list[MemorySpan]:
        return [self.location[chunk] for chunk in numbers(chunks)]

    def _destinations(self, chunks: Chunks) -> list[MemorySpan]:
        """Locations that the chunks are written to."""
        target = self.task.target
        return [target[chunk] if chunk in target else self.scratch[chunk] for chunk in numbers(chunks)]

    def _write(self, chunks: Chunks) -> list[MemorySpan]:
        """Set the locations of written chunks to their destinations, and return these."""
        destinations = self._destinations(chunks)
        self.location.update(zip(numbers(chunks), destinations, strict=True))
        return destinations

    def _array(self, place: MemorySpan) -> Any:
        return self.memories[place.memory].array[place.start : place.stop]

    def _iovec(self, place: MemorySpan) -> Iovec:
        size = self.task.itemsize
        address = self.memories[place.memory].address + place.start * size
        return Iovec(address, (place.stop - place.start) * size)

    def _segment_counts(self, step: Send | Recv | RecvReduce) -> Sequence[int]:
        """Elements in each segment of a message; none for an empty one."""
        elements = sum(map(self._length, numbers(step.chunks)))
        if not elements:
            return () if step.chunks else (0,)
        split_size = self.wire.split_size(step.peer, elements * self.task.itemsize)
        limit = self.task.segment if split_size is None else split_size
        part = max(1, limit // self.task.itemsize) if limit else elements
        return even(elements, -(-elements // part))

    def _move_locations(self, steps: Sequence[Step]) -> None:
        """Update the locations of the chunks written by a round."""
        for step in steps:
            if not isinstance(step, Send):
                self._write(step.chunks if isinstance(step, (Recv, RecvReduce)) else step.target)

    def _shape(self, steps: Sequence[Step]) -> _RoundShape:
        """Treatment of a round's reductions, with chunks at their locations before it.

        Segments of the first message share a few landing slots, unless its sender sends another message in the round,
        which would overtake them. Messages of further peers get a slot per segment: they must not wait for the first
        peer, whose sends may depend on theirs.
        """
        arrivals = [step for step in steps if isinstance(step, RecvReduce)]
        changing = joined(destination for step in arrivals for destination in self._destinations(step.chunks))
        if self._reduces_in_place(steps, arrivals, changing):
            return _RoundShape(True, [0] * len(arrivals), 0, changing)
        cuts = [self._segment_counts(step) for step in arrivals]
        slots = [len(parts) for parts in cuts]
        senders = [step.peer for step in steps if isinstance(step, (Recv, RecvReduce))]
        if slots and senders.count(arrivals[0].peer) == 1 and self._is_segmented(arrivals[0]):
            slots[0] = min(slots[0], LANDING_SLOTS)
        room = sum(count * max(parts, default=0) for count, parts in zip(slots, cuts, strict=True))
        return _RoundShape(False, slots, room, changing)

    def _is_segmented(self, step: Step) -> bool:
        """True if a network message is reduced in segments while later segments are in flight."""
        if not isinstance(step, RecvReduce) or len(self._segment_counts(step)) < 2:
            return False
        return self.wire.split_size(step.peer, self._bytes(step.chunks)) is None

    def _reduces_in_place(
        self, steps: Sequence[Step], arrivals: Sequence[RecvReduce], changing: list[MemorySpan]
    ) -> bool:
        """True if all messages of a round are reduced directly from the sender's memory while waiting for them.

        Not if another step must take effect first, nor if the results overwrite memory that may still be sent.
        """
        first = next((index for index, step in enumerate(steps) if isinstance(step, (Reduce, Copy))), len(steps))
        if self.stream is not None or any(isinstance(step, RecvReduce) for step in steps[first:]):
            return False
        if any(self.wire.split_size(step.peer, self._bytes(step.chunks)) is None for step in arrivals):
            return False
        if len(arrivals) > 1 and any(len(self._segment_counts(step)) > 1 for step in arrivals):
            return False  # segments of several messages would have to alternate
        sent: list[int] = []
        for step in steps:
            if isinstance(step, Send):
                leaves = self.wire.completes_locally(step.peer, self._bytes(step.chunks), sent.count(step.peer))
                if not leaves and _overlap(self._locations(step.chunks), changing):
                    return False
                sent.append(step.peer)
        return True

    def _bytes(self, chunks: Chunks) -> int:
        return sum(map(self._length, numbers(chunks))) * self.task.itemsize

    # -------------------------------------------------------------------------------- emitting calls

    def emit(self, call: Callable[[], object] | Wait) -> None:
        """Append a call that never blocks, or a wait."""
        self.calls.append(call.wait if isinstance(call, Wait) else call)
        self.tests.append(call.test if isinstance(call, Wait) else None)

    def emit_local(self, call: Callable[[], object] | Wait) -> None:
        """Append a call that changes chunks, on the stream if there is one."""
        if self.stream is None or isinstance(call, Wait):
            self.emit(call)
        else:
            self.emit(self.stream.working(call))
            self.working = True

    def wait_for_stream(self) -> None:
        """Append a wait for the local work on the stream."""
        if self.stream is not None and self.working:
            self.emit(self.stream.mark)
            self.emit(self.stream.ended)
        self.working = False

    def start(self, messages: Sequence[Any]) -> None:
        """Append the start of messages, after all earlier local work."""
        if messages:
            self.wait_for_stream()
            for call in self.wire.start_calls(messages):
                self.emit(call)

    def wait(self, messages: Sequence[Any]) -> None:
        """Append waits for messages."""
        if messages:
            for wait in self.wire.wait_calls(messages):
                self.emit(wait)

    def swap(self) -> ExchangeSupport | None:
        """The program as one fused exchange, if it consists of a single round's messages only."""
        if len(self.exchanges) != 1:
            return None
        messages = self.exchanges[0]
        if len(self.calls) != len(self.wire.start_calls(messages)) + len(self.wire.wait_calls(messages)):
            return None
        return self.wire.swap(messages)

    def rounds(self) -> None:
        """Emit all rounds. Unchanged chunks are copied to their target while the first messages are in flight."""
        kept = [c for c in sorted(self.task.target) if c in self.location and c not in self.written]
        copies = self._copies([self.location[c] for c in kept], [self.task.target[c] for c in kept])
        for index, (steps, shape) in enumerate(zip(self.task.schedule, self.shapes, strict=True)):
            if steps:
                self.begins.append((index, len(self.calls)))
                (self._windowed_round if self._is_windowed(steps) else self._round)(steps, shape, copies)
                copies = []
        for copy in copies:
            self.emit_local(copy)

    def _round(self, steps: Sequence[Step], shape: _RoundShape, meanwhile: Iterable[Callable[[], object]]) -> None:
        """Emit a round whose messages all start at once; segments are reduced in order of arrival."""
        sends = [sent for step in steps if isinstance(step, Send) for sent in self._sends(step, shape.changing)]
        receives = [
            (index, message)
            for index, step in enumerate(steps)
            if isinstance(step, Recv)
            for message in self._receives(step)
        ]
        actions = self._actions(steps, shape)
        arrivals = [(action.step, action.message) for action in actions if action.message is not None]
        arriving = [message for _, message in sorted([*receives, *arrivals], key=itemgetter(0))]  # by step
        departing = [sent.message for sent in sends]
        short = sum(self._iovec(place).nbytes for sent in sends for place in sent.places) <= EAGER_BYTES
        messages = [*departing, *arriving] if short else [*arriving, *departing]  # eager sends complete at once
        self.exchanges.append(messages)
        following = {id(action.following) for action in actions}
        self.start([message for message in messages if id(message) not in following])
        for call in meanwhile:
            self.emit_local(call)
        pending = {id(message): message for message in messages}
        if not any(self._is_segmented(step) for step in steps):
            self._wait_pending(pending, messages)  # a single wait is cheapest, and streams need it
        changing = joined(place for action in actions for place in action.onto)
        leaving = [sent for sent in sends if _overlap(sent.places, changing)]
        for action in actions:
            if action.message is None:
                self._wait_pending(pending, messages)
            else:
                overwritten = [sent.message for sent in leaving if _overlap(sent.places, action.onto)]
                self._wait_pending(pending, [action.message, *overwritten])
            for call in action.calls:
                self.emit_local(call)
            if action.following is not None:
                self.start([action.following])
        self._wait_pending(pending, messages)

    def _is_windowed(self, steps: Sequence[Step]) -> bool:
        """True if a round consists of network messages of distinct chunks, some of them in many segments."""
        messages = [step for step in steps if isinstance(step, (Send, Recv, RecvReduce))]
        if len(messages) < len(steps) or all(len(self._segment_counts(step)) <= MESSAGE_WINDOW for step in messages):
            return False
        if any(self.wire.split_size(step.peer, self._bytes(step.chunks)) is not None for step in messages):
            return False
        streams_used = {(step.peer, isinstance(step, Send)) for step in messages}
        changing = [chunk for step in messages if isinstance(step, RecvReduce) for chunk in numbers(step.chunks)]
        leaving = {chunk for step in messages if isinstance(step, Send) for chunk in numbers(step.chunks)}
        apart = len(set(changing)) == len(changing) and leaving.isdisjoint(changing)
        return apart and len(streams_used) == len(messages)

    def _windowed_round(
        self, steps: Sequence[Step], shape: _RoundShape, meanwhile: Iterable[Callable[[], object]]
    ) -> None:
        """Emit a round whose messages advance segment by segment: each completed receive allows the next send.

        Free of deadlock, as rounds are aligned: no rank is ahead of a peer by more than the window.
        """
        sends = [step for step in steps if isinstance(step, Send)]
        leave = [[(sent.message, []) for sent in self._sends(step, shape.changing)] for step in sends]
        come = [[(message, []) for message in self._receives(step)] for step in steps if isinstance(step, Recv)]
        slots, actions = shape.slots, self._actions(steps, shape)
        land = [
            [(action.message, action.calls) for action in actions if action.step == index]
            for index, step in enumerate(steps)
            if isinstance(step, RecvReduce)
        ]
        ahead = [*map(len, come), *slots, *(MESSAGE_WINDOW for _ in leave)]
        streams = [*come, *land, *leave]
        self.start([message for parts, few in zip(streams, ahead) for message, _ in parts[:few]])
        for call in meanwhile:
            self.emit_local(call)
        for index in range(max(map(len, streams))):
            for parts, few in zip(streams, ahead):
                if index < len(parts):
                    message, calls = parts[index]
                    self.wait([message])
                    for call in calls:
                        self.emit_local(call)
                    self.start([message for message, _ in parts[index + few : index + few + 1]])

    def _wait_pending(self, pending: dict[int, Any], messages: Iterable[Any]) -> None:
        """Append waits for the messages that are still pending."""
        self.wait([pending.pop(id(message)) for message in messages if id(message) in pending])

    def _sends(self, step: Send, changing: list[MemorySpan]) -> Iterator[_SendBinding]:
        for rows in split(aligned(self._locations(step.chunks)), self._segment_counts(step)):
            places = [place for (place,) in rows]
            stable = not _overlap(places, changing)
            yield _SendBinding(self.wire.send(step.peer, list(map(self._iovec, places)), stable), places)

    def _receives(self, step: Recv) -> Iterator[Any]:
        for rows in split(aligned(self._write(step.chunks)), self._segment_counts(step)):
            yield self.wire.receive(step.peer, [self._iovec(place) for (place,) in rows])

    def _actions(self, steps: Sequence[Step], shape: _RoundShape) -> list[_Action]:
        """Local work of a round in the order in which it must take effect."""
        actions: list[_Action] = []
        landing, room = 0, iter(shape.slots)
        for index, step in enumerate(steps):
            if isinstance(step, RecvReduce):
                cuts, slots = self._segment_counts(step), next(room)
                if shape.in_place:
                    actions.extend(_Action(index, part, [], []) for part in self._in_place_reductions(step, cuts))
                    continue
                actions.extend(self._arrivals(index, step, cuts, slots, landing))
                landing += slots * max(cuts, default=0)
            elif isinstance(step, Reduce):
                sources, locations = self._locations(step.source), self._locations(step.target)
                destinations = self._write(step.target)
                rows = aligned(sources, locations, destinations)
                actions.append(_Action(index, None, [self._reduction(*row, step.side) for row in rows], destinations))
            elif isinstance(step, Copy):
                sources, destinations = self._locations(step.source), self._write(step.target)
                actions.append(_Action(index, None, self._copies(sources, destinations), destinations))
        return actions

    def _arrivals(self, number: int, step: RecvReduce, cuts: Sequence[int], slots: int, landing: int) -> list[_Action]:
        """Segments of one message: each is received into a landing slot and reduced from there."""
        locations, destinations = self._locations(step.chunks), self._write(step.chunks)
        actions: list[_Action] = []
        for index, rows in enumerate(split(aligned(locations, destinations), cuts)):
            start = landing + index % slots * max(cuts)
            slot = MemorySpan(LANDING, start, start + cuts[index])
            calls = []
            for location, destination in rows:
                landed = MemorySpan(LANDING, start, start + location.stop - location.start)
                calls.append(self._reduction(landed, location, destination, step.side))
                start = landed.stop
            onto = [destination for _, destination in rows]
            message = self.wire.receive(step.peer, [self._iovec(slot)] if cuts[index] else [])
            actions.append(_Action(number, message, calls, onto))
        return [
            action._replace(following=actions[index + slots].message if index + slots < len(actions) else None)
            for index, action in enumerate(actions)
        ]

    def _in_place_reductions(self, step: RecvReduce, cuts: Sequence[int]) -> Iterator[Any]:
        """Segments of a message that are reduced from the sender's memory."""
        if self.reduce_kernel is None:
            raise ValueError(_NO_OPERATION)
        locations, destinations = self._locations(step.chunks), self._write(step.chunks)
        bind, left = self.reduce_kernel.bind, step.side == "left"

        def combine(incoming: Any, mine: Any, out: Any) -> Callable[[], object]:
            return bind(incoming, mine, out) if left else bind(mine, incoming, out)

        for rows in split(aligned(locations, destinations), cuts):
            arrays = [(self._array(location), self._array(destination)) for location, destination in rows]
            yield self.wire.combine(step.peer, arrays, combine)

    def _reduction(
        self, incoming: MemorySpan, mine: MemorySpan, destination: MemorySpan, side: Side
    ) -> Callable[[], object]:
        if self.reduce_kernel is None:
            raise ValueError(_NO_OPERATION)
        left, right = (incoming, mine) if side == "left" else (mine, incoming)
        return self.reduce_kernel.bind(self._array(left), self._array(right), self._array(destination))

    def _copies(self, sources: Iterable[MemorySpan], destinations: Iterable[MemorySpan]) -> list[Callable[[], object]]:
        return [
            partial(_copy, self._array(destination), self._array(source))
            for source, destination in aligned(sources, destinations)
            if self._iovec(source) != self._iovec(destination)
        ]


def _copy(destination: Any, source: Any) -> None:
    destination[...] = source


def _written(schedule: Schedule) -> set[int]:
    """Chunks that any step writes."""
    chunks: set[int] = set()
    for step in chain.from_iterable(schedule):
        if isinstance(step, (Recv, RecvReduce)):
            chunks.update(numbers(step.chunks))
        elif isinstance(step, (Reduce, Copy)):
            chunks.update(numbers(step.target))
    return chunks


def _overlap(one: Iterable[MemorySpan], other: Iterable[MemorySpan]) -> bool:
    return any(a.memory == b.memory and a.start < b.stop and b.start < a.stop for a in one for b in other)
