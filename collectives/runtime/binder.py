"""Binder: turns a schedule, buffers and a transport into a program (a flat list of function calls).

Binding walks the schedule once and resolves the location of every chunk at every step: the first access to a chunk
reads the user's send buffer, results go to the receive buffer, and to scratch memory where a chunk is only forwarded.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.instructions import LANDING
from collectives.runtime.chunk_locations import MESSAGE_WINDOW, ChunkLocations, RoundShape, overlap
from collectives.runtime.ops import Combiner, SidedReduction
from collectives.runtime.program import ElementArray, Program, ScratchMemory, Task
from collectives.schedule.chunks import MemorySpan, aligned, joined, split
from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Send, Side, Step
from collectives.transport.exchange import Exchange, Stream
from collectives.transport.shm_messages import Acknowledgement, MailboxSend
from collectives.transport.wire import Iovec, Wire
from collectives.types import Wait

EAGER_BYTES = 4096
"""Bytes up to which any MPI sends eagerly, without waiting for the receiver."""


def bind(
    task: Task,
    source: ElementArray,
    target: ElementArray,
    wire: Wire,
    reduce_kernel: Combiner | None = None,
    place: DeviceMemory | ScratchMemory | None = None,
    first: Iterable[Callable[[], object] | Wait] = (),
    last: Iterable[Callable[[], object] | Wait] = (),
) -> Program:
    """Build the program that runs a task between these arrays over a transport; the program frees the transport.

    `source` and `target` are the same for a call in place. Scratch memory and local work are at `place`: on a device,
    in host memory that programs share, or, by default, in host memory of the program's own. `first` and `last` run
    before the first round and after the last, such as staging.
    """
    stream = None if isinstance(place, ScratchMemory) else place
    chunks = ChunkLocations(task, wire, asynchronous=stream is not None)
    binder = _ProgramBinder(task, chunks, [source, target], wire, reduce_kernel, stream)
    binder.allocate(place)
    if stream is None:
        binder.emit_all(first)
    else:
        binder.steps += first  # on the caller's stream
    copies = binder.copies(*zip(*chunks.unchanged())) if chunks.unchanged() else []
    for index, (steps, shape) in enumerate(zip(task.schedule, chunks.shapes, strict=True)):
        if steps:
            binder.begins.append((index, len(binder.steps)))
            (binder.windowed_round if chunks.is_windowed(steps) else binder.round)(steps, shape, copies)
            copies = []
            chunks.copy_unchanged()
    binder.emit_all([*copies, *last])
    binder.wait_for_stream()
    program = Program(binder.steps, wire, binder.nbytes, binder.memories, stream)
    program.begins = tuple(binder.begins)
    if len(binder.exchanges) == len(binder.steps):
        program.exchanges = tuple(binder.exchanges)
    return program


class _Action(NamedTuple):
    """Local work of a step, run once `message` is complete (None: all of the round); then `following` is started."""

    step: int
    message: Any
    calls: list[Callable[[], object]]
    onto: list[MemorySpan]
    following: Any = None


class _ProgramBinder:
    """Builds one program's list of calls: message starts and waits, local reductions and copies."""

    def __init__(
        self,
        task: Task,
        chunks: ChunkLocations,
        memories: list[ElementArray],
        wire: Wire,
        reduce_kernel: Combiner | None,
        stream: DeviceMemory | None,
    ) -> None:
        self.task, self.chunks, self.wire = task, chunks, wire
        self.reduce_kernel, self.stream = reduce_kernel, stream
        self.working = stream is not None  # earlier work on the stream must end before messages start
        self.steps: list[Callable[[], object] | Wait] = []
        self.exchanges: list[Exchange] = []
        self.begins: list[tuple[int, int]] = []
        self.memories, self.nbytes = memories, 0

    def allocate(self, place: DeviceMemory | ScratchMemory | None) -> None:
        """Add scratch and landing memory to the memories of the program."""
        lengths = self.chunks.scratch_length, self.chunks.landing_length
        dtype = self.memories[0].array.dtype
        if isinstance(place, ScratchMemory):
            more, self.nbytes = place.arrays(lengths, dtype)
        else:
            more = [ElementArray.allocate(count, dtype, place or np) for count in lengths]
            self.nbytes = sum(lengths) * self.task.itemsize
        self.memories = [*self.memories, *more]

    def _array(self, place: MemorySpan) -> Any:
        return self.memories[place.memory].array[place.start : place.stop]

    def _iovec(self, place: MemorySpan) -> Iovec:
        size = self.task.itemsize
        address = self.memories[place.memory].address + place.start * size
        return Iovec(address, (place.stop - place.start) * size)

    # -------------------------------------------------------------------------------- emitting calls

    def emit_local(self, call: Callable[[], object] | Wait) -> None:
        """Append a local copy or reduction to the program, on the device stream if there is one."""
        if self.stream is None or isinstance(call, Wait):
            self.steps.append(call)
        else:
            self.steps.append(self.stream.working(call))
            self.working = True

    def wait_for_stream(self) -> None:
        """Append a wait for earlier local work on the device stream, if there is any."""
        if self.stream is not None and self.working:
            self.steps += self.stream.mark, self.stream.ended
        self.working = False

    def start(self, messages: Sequence[Any]) -> None:
        """Append calls that start the messages, after a wait for earlier local work on the device stream."""
        if messages:
            self.wait_for_stream()
            self.steps += self.wire.start_calls(messages)

    def wait(self, messages: Sequence[Any]) -> None:
        if messages:
            self.steps += self.wire.wait_calls(messages)

    def emit_all(self, calls: Iterable[Callable[[], object] | Wait]) -> None:
        """Append local work before or after the rounds: as an exchange within a node, which can be compiled."""
        local = list(calls)
        if self.wire.node is None or any(isinstance(call, Wait) for call in local):
            for call in local:
                self.emit_local(call)
        elif local:
            stream = Stream()
            for call in local:
                stream.add(call)
            self._emit_exchange([stream])

    def _emit_exchange(self, streams: Iterable[Stream], uses_network: bool = False) -> None:
        exchange = Exchange(self.wire.node, [stream for stream in streams if stream.calls], uses_network)
        self.exchanges.append(exchange)
        self.steps.append(Wait(exchange.wait, exchange.test, [exchange]))

    def round(self, steps: Sequence[Step], shape: RoundShape, meanwhile: Iterable[Callable[[], object]]) -> None:
        """Append a round that starts all messages (as far as there are receive slots), then waits and reduces."""
        sends: list[tuple[Any, list[MemorySpan]]] = []
        receives: list[tuple[int, Any]] = []
        for index, step in enumerate(steps):
            if isinstance(step, Send):
                sends += self._sends(step, shape.changing)
            elif isinstance(step, Recv):
                receives += zip(repeat(index), self._receives(step))
        actions = self._actions(steps, shape)
        arrivals = [(action.step, action.message) for action in actions if action.message is not None]
        arriving = [message for _, message in sorted([*receives, *arrivals], key=itemgetter(0))]  # by step
        departing = [message for message, _ in sends]
        short = sum(self._iovec(place).nbytes for _, places in sends for place in places) <= EAGER_BYTES
        messages = [*departing, *arriving] if short else [*arriving, *departing]  # eager sends complete at once
        if self.wire.node is not None and (not messages or any(map(self.wire.stream_key, messages))):
            self._exchange(sends, arriving, actions, meanwhile)
            return
        following = {id(action.following) for action in actions}
        self.start([message for message in messages if id(message) not in following])
        for call in meanwhile:
            self.emit_local(call)
        pending = {id(message): message for message in messages}
        if not any(self.chunks.is_segmented(step) for step in steps):
            self._wait_pending(pending, messages)  # a single wait is cheapest, and streams need it
        changing = joined(place for action in actions for place in action.onto)
        leaving = [(message, places) for message, places in sends if overlap(places, changing)]
        for action in actions:
            if action.message is None:
                self._wait_pending(pending, messages)
            else:
                overwritten = [message for message, places in leaving if overlap(places, action.onto)]
                self._wait_pending(pending, [action.message, *overwritten])
            for call in action.calls:
                self.emit_local(call)
            if action.following is not None:
                self.start([action.following])
        self._wait_pending(pending, messages)

    def _exchange(
        self,
        sends: Sequence[tuple[Any, list[MemorySpan]]],
        arriving: Sequence[Any],
        actions: Sequence[_Action],
        meanwhile: Iterable[Callable[[], object]],
    ) -> None:
        """Append a round of messages within the node, and perhaps over the network, as an `Exchange`."""
        round_ = _ExchangeBuilder(self.wire, {id(action.following) for action in actions})
        for message, places in sends:
            round_.send(message, places)
        if sends:  # peers read these meanwhile
            round_.copy(meanwhile)
        reduced = {id(action.message): action.onto for action in actions if not action.calls}
        for message in arriving:
            round_.receive(message, reduced.get(id(message), []))
        if not sends:  # peers may write what is to be received meanwhile
            round_.copy(meanwhile)
        for action in actions:
            if action.message is None or action.calls:
                round_.act(action)
        self._emit_exchange(round_.streams.values(), round_.uses_network)

    def windowed_round(
        self, steps: Sequence[Step], shape: RoundShape, meanwhile: Iterable[Callable[[], object]]
    ) -> None:
        """Append a round of segmented messages, each with a few segments in flight: as one completes, the next starts.

        Free of deadlock, as rounds are aligned: no rank is ahead of a peer by more than the window.
        """
        leaving = [step for step in steps if isinstance(step, Send)]
        sends = [[message for message, _ in self._sends(step, shape.changing)] for step in leaving]
        receives = [list(self._receives(step)) for step in steps if isinstance(step, Recv)]
        actions = self._actions(steps, shape)
        reductions = [
            [action.message for action in actions if action.step == index]
            for index, step in enumerate(steps)
            if isinstance(step, RecvReduce)
        ]
        calls = {id(action.message): action.calls for action in actions}
        streams = [*receives, *reductions, *sends]
        windows = [*map(len, receives), *shape.slots, *(MESSAGE_WINDOW for _ in sends)]
        self.start([message for parts, window in zip(streams, windows) for message in parts[:window]])
        for call in meanwhile:
            self.emit_local(call)
        for index in range(max(map(len, streams))):
            for parts, window in zip(streams, windows):
                if index < len(parts):
                    self.wait([parts[index]])
                    for call in calls.get(id(parts[index]), ()):
                        self.emit_local(call)
                    self.start(parts[index + window : index + window + 1])

    def _wait_pending(self, pending: dict[int, Any], messages: Iterable[Any]) -> None:
        self.wait([pending.pop(id(message)) for message in messages if id(message) in pending])

    def _sends(self, step: Send, changing: list[MemorySpan]) -> Iterator[tuple[Any, list[MemorySpan]]]:
        """Bind a step's send, in segments; yield each message with the memory it reads. Reductions write `changing`."""
        for rows in split(aligned(self.chunks.locations(step.chunks)), self.chunks.segment_counts(step)):
            places = [place for (place,) in rows]
            stable = not overlap(places, changing)
            yield self.wire.send(step.peer, list(map(self._iovec, places)), stable), places

    def _receives(self, step: Recv) -> Iterator[Any]:
        for rows in split(aligned(self.chunks.write(step.chunks)), self.chunks.segment_counts(step)):
            yield self.wire.receive(step.peer, [self._iovec(place) for (place,) in rows])

    def _actions(self, steps: Sequence[Step], shape: RoundShape) -> list[_Action]:
        """Local reductions and copies of a round in the order in which they must run, with the receives they need."""
        actions: list[_Action] = []
        landing, room = 0, iter(shape.slots)
        for index, step in enumerate(steps):
            if isinstance(step, RecvReduce):
                cuts, slots = self.chunks.segment_counts(step), next(room)
                if shape.in_place:
                    for arrays, onto in self._operands(step, cuts):
                        message = self.wire.combine(step.peer, arrays, self._combine(step.side))
                        actions.append(_Action(index, message, [], onto))
                    continue
                actions.extend(self._arrivals(index, step, cuts, slots, landing))
                landing += slots * max(cuts, default=0)
            elif isinstance(step, Reduce):
                sources, locations = self.chunks.locations(step.source), self.chunks.locations(step.target)
                destinations = self.chunks.write(step.target)
                rows = aligned(sources, locations, destinations)
                actions.append(_Action(index, None, [self._reduction(row, step.side) for row in rows], destinations))
            elif isinstance(step, Copy):
                sources, destinations = self.chunks.locations(step.source), self.chunks.write(step.target)
                actions.append(_Action(index, None, self.copies(sources, destinations), destinations))
        return actions

    def _arrivals(self, number: int, step: RecvReduce, cuts: Sequence[int], slots: int, landing: int) -> list[_Action]:
        """One action per segment of a message: receive it into a temporary slot, then reduce it from there."""
        locations, destinations = self.chunks.locations(step.chunks), self.chunks.write(step.chunks)
        actions: list[_Action] = []
        for index, rows in enumerate(split(aligned(locations, destinations), cuts)):
            start = landing + index % slots * max(cuts)
            slot = MemorySpan(LANDING, start, start + cuts[index])
            calls = []
            for location, destination in rows:
                landed = MemorySpan(LANDING, start, start + location.stop - location.start)
                calls.append(self._reduction((landed, location, destination), step.side))
                start = landed.stop
            onto = [destination for _, destination in rows]
            message = self.wire.receive(step.peer, [self._iovec(slot)] if cuts[index] else [])
            actions.append(_Action(number, message, calls, onto))
        return [
            action._replace(following=actions[index + slots].message if index + slots < len(actions) else None)
            for index, action in enumerate(actions)
        ]

    def _operands(
        self, step: RecvReduce, cuts: Sequence[int]
    ) -> Iterator[tuple[list[tuple[Any, Any]], list[MemorySpan]]]:
        """For each segment of a message reduced from the sender's memory: pairs (own operand, result), and results."""
        locations, destinations = self.chunks.locations(step.chunks), self.chunks.write(step.chunks)
        for rows in split(aligned(locations, destinations), cuts):
            arrays = [(self._array(location), self._array(destination)) for location, destination in rows]
            yield arrays, [destination for _, destination in rows]

    def _combine(self, side: Side) -> SidedReduction:
        """Reduction of incoming data, the operand on `side`, with own data."""
        if self.reduce_kernel is None:
            raise ValueError("the schedule combines, but no operation was given")
        return SidedReduction(self.reduce_kernel, side == "right")

    def _reduction(self, row: tuple[MemorySpan, ...], side: Side) -> Callable[[], object]:
        return self._combine(side)(*map(self._array, row))

    def copies(self, sources: Iterable[MemorySpan], destinations: Iterable[MemorySpan]) -> list[Callable[[], object]]:
        return [
            partial(copy_array, self._array(destination), self._array(source))
            for source, destination in aligned(sources, destinations)
            if self._iovec(source) != self._iovec(destination)
        ]


class _ExchangeBuilder:
    """Streams of one round, in the order of their first operations.

    There is one for each peer and direction, one for local work, and one for each network message.
    """

    def __init__(self, wire: Wire, later: set[int]) -> None:
        self._wire, self._later = wire, later
        self.streams: defaultdict[Any, Stream] = defaultdict(Stream)
        self.uses_network = False
        self._ends: dict[int, list[Any]] = {}  # by the id of a message: operations that wait for its end
        self._sent: list[tuple[Any, list[MemorySpan]]] = []
        self._reduced: list[tuple[Any, list[MemorySpan]]] = []

    @property
    def local(self) -> Stream:
        return self.streams["local"]

    def _add(self, message: Any, stream: Stream | None = None) -> None:
        """Append a message to its stream; a network message gets one of its own, after its start in `stream`."""
        key = self._wire.stream_key(message)
        if key is not None:
            ended = self.streams[key].add(message)
            self._ends[id(message)] = [ended]
            if isinstance(message, MailboxSend) and message.address_label:
                read = Acknowledgement(message, ended)
                self.streams["read", *key].add(read)
                self._ends[id(message)] = [read]
            return
        self.uses_network = True
        if id(message) in self._later and stream is None:
            return
        starts = stream or self.streams["network"]
        for call in self._wire.start_calls([message]):
            begun = starts.add(call)
        own = self.streams[id(message)]
        own.add(begun)
        for wait in self._wire.wait_calls([message]):
            ended = own.add(wait)
        self._ends[id(message)] = [ended]

    def copy(self, copies: Iterable[Callable[[], object]]) -> None:
        for call in copies:
            self.local.add(call)

    def send(self, message: Any, places: list[MemorySpan]) -> None:
        self._add(message)
        self._sent.append((message, places))

    def receive(self, message: Any, onto: list[MemorySpan]) -> None:
        """Append a receive; if it reduces `onto` memory directly, it waits for what must read or write that before."""
        key = self._wire.stream_key(message)
        for other, places in (*self._sent, *self._reduced) if onto else ():
            if overlap(places, onto) and self._wire.stream_key(other) != key:
                for ended in self._ends[id(other)]:
                    self.streams[key].add(ended)
        self._add(message)
        if onto:
            self._reduced.append((message, onto))

    def act(self, action: _Action) -> None:
        """Append local work, after its message and the sends of what it overwrites, or after all messages."""
        waits = [id(action.message), *(id(send) for send, places in self._sent if overlap(places, action.onto))]
        for ended in [end for wait in (self._ends if action.message is None else waits) for end in self._ends[wait]]:
            self.local.add(ended)
        for call in action.calls:
            self.local.add(call)
        if action.following is not None:
            self._add(action.following, self.local)


def copy_array(destination: Any, source: Any) -> None:
    destination[...] = source
