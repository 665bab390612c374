"""Binder: turns a schedule, buffers and a transport into a program, the rows that an engine runs.

Binding walks the schedule once and resolves the location of every chunk at every step: the first access to a chunk
reads the user's send buffer, results go to the receive buffer, and to scratch memory where a chunk is only forwarded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import itemgetter

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.assembly import Instruction, Rounds
from collectives.engine.instructions import LANDING
from collectives.runtime.arguments.ops import Combiner
from collectives.runtime.binding.chunk_locations import MESSAGE_WINDOW, ChunkLocations, RoundShape, overlap
from collectives.runtime.binding.local_work import LocalWork
from collectives.runtime.binding.round_builder import RoundAction, RoundBuilder
from collectives.runtime.execution.local_steps import Local, stepping
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.program_memory import ElementArray, ScratchMemory, Task
from collectives.schedule.chunks import MemorySpan, joined, split
from collectives.schedule.chunks import aligned as aligned_spans
from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Schedule, Send, Step
from collectives.transport.wire import BoundMessage, Piece, Wire
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
    first: Iterable[Local] = (),
    last: Iterable[Local] = (),
) -> Program:
    """Build the program that runs a task between these arrays over a transport. The program frees the transport.

    `source` and `target` are the same for a call in place. Scratch memory and local work are at `place`: on a device,
    in host memory that programs share, or, by default, in host memory of the program's own. `first` and `last` run
    before the first round and after the last, such as staging.
    """
    stream = None if isinstance(place, ScratchMemory) else place
    work = LocalWork([source, target], task.itemsize, reduce_kernel, stream)
    chunks = ChunkLocations(task, wire, lands=work.lands)
    work.allocate((chunks.scratch_length, chunks.landing_length), place)
    program = build(task.schedule, chunks, wire, work, first, last)
    program.relocatable = stream is None
    return program


def build(
    schedule: Schedule,
    chunks: ChunkLocations,
    wire: Wire,
    work: LocalWork,
    first: Iterable[Local] = (),
    last: Iterable[Local] = (),
) -> Program:
    """Build the program of a schedule, with local work before the first round and after the last."""
    binder = _ProgramBinder(chunks, wire, work)
    if work.stream is None:
        binder.emit_all(first)
    else:
        binder.emit(*map(stepping, first))  # on the caller's
    copies = work.copies(*chunks.unchanged()) if chunks.unchanged() else []
    begins = []
    for index, (steps, shape) in enumerate(zip(schedule, chunks.shapes, strict=True)):
        if steps:
            binder.end_round()
            begins.append((index, len(binder.rounds)))
            (binder.windowed_round if chunks.is_windowed(steps) else binder.round)(steps, shape, copies)
            copies = []
            chunks.copy_unchanged()
    binder.emit_all([*copies, *last])
    binder.wait_for_stream()
    program = Program(binder.rounds, wire, work.nbytes, work.memories, work.stream)
    program.begins = tuple(begins)
    return program


class _ProgramBinder:
    """Builds one program's rounds: message starts and ends, local reductions and copies."""

    def __init__(self, chunks: ChunkLocations, wire: Wire, work: LocalWork) -> None:
        self.chunks, self.wire, self.work = chunks, wire, work
        self.rounds: Rounds = []
        self._sequence: list[Instruction] | None = None  # the stream of a round of one
        self._working = work.stream is not None  # earlier work on the device stream must end before messages start

    # -------------------------------------------------------------------------------- instructions in order

    def emit(self, *instructions: Instruction) -> None:
        """Append instructions that run one after the other."""
        if self._sequence is None:
            self._sequence = []
            self.rounds.append([self._sequence])
        self._sequence += instructions

    def end_round(self) -> None:
        """Let later instructions be another round."""
        self._sequence = None

    def emit_all(self, steps: Iterable[Local]) -> None:
        """Append local work before or after the rounds."""
        self.end_round()
        for step in steps:
            if isinstance(step, Instruction):
                self._emit_local(step)
            elif isinstance(step, Wait) or self.work.stream is None:
                self.emit(stepping(step))
            else:
                self._emit_local(self.work.on_stream(step))

    def _emit_local(self, *work: Instruction) -> None:
        self.emit(*work)
        self._working |= bool(work) and self.work.stream is not None

    def wait_for_stream(self) -> None:
        """Append a wait for earlier local work on the device stream, if there is any."""
        stream = self.work.stream
        if stream is not None and self._working:
            self.emit(stepping(stream.mark), stepping(stream.ended))
        self._working = False

    def _start(self, messages: Sequence[BoundMessage]) -> None:
        """Append starts of the messages, after a wait for earlier local work on the device stream."""
        if messages:
            self.wait_for_stream()
            for message in messages:
                self.emit(*message.starts)

    def _wait(self, messages: Iterable[BoundMessage]) -> None:
        for message in messages:
            self.emit(*message.ends)

    # -------------------------------------------------------------------------------- rounds

    def round(self, steps: Sequence[Step], shape: RoundShape, meanwhile: Sequence[Instruction]) -> None:
        """Append a round that starts all messages (as far as there are receive slots), then waits and reduces."""
        sends: list[tuple[BoundMessage, list[MemorySpan]]] = []
        receives: list[tuple[int, BoundMessage]] = []
        for index, step in enumerate(steps):
            if isinstance(step, Send):
                sends += self._sends(step, shape.changing)
            elif isinstance(step, Recv):
                receives += zip(repeat(index), self._receives(step))
        actions = self._actions(steps, shape)
        arrivals = [(action.step, action.message) for action in actions if action.message is not None]
        arriving = [message for _, message in sorted([*receives, *arrivals], key=itemgetter(0))]  # by step
        departing = [message for message, _ in sends]
        nbytes = sum(self.work.piece(place).nbytes for _, places in sends for place in places)
        short = self.wire.all_short if self.wire.lengths_vary else nbytes <= EAGER_BYTES
        messages = [*departing, *arriving] if short else [*arriving, *departing]  # eager sends complete at once
        if self.wire.node is not None and (not messages or any(message.key for message in messages)):
            self._streams(sends, arriving, actions, meanwhile)
            return
        following = {id(action.following) for action in actions}
        self._start([message for message in messages if id(message) not in following])
        self._emit_local(*meanwhile)
        pending = {id(message): message for message in messages}
        if not any(self.chunks.is_segmented(step) for step in steps):
            self._wait_pending(pending, messages)
        changing = joined(place for action in actions for place in action.onto)
        leaving = [(message, places) for message, places in sends if overlap(places, changing)]
        for action in actions:
            if action.message is None:
                self._wait_pending(pending, messages)
            else:
                overwritten = [message for message, places in leaving if overlap(places, action.onto)]
                self._wait_pending(pending, [action.message, *overwritten])
            self._emit_local(*action.work)
            if action.following is not None:
                self._start([action.following])
        self._wait_pending(pending, messages)

    def _streams(
        self,
        sends: Sequence[tuple[BoundMessage, list[MemorySpan]]],
        arriving: Sequence[BoundMessage],
        actions: Sequence[RoundAction],
        meanwhile: Sequence[Instruction],
    ) -> None:
        """Append a round of messages within the node, and perhaps over the network, as streams."""
        round_ = RoundBuilder({id(action.following) for action in actions})
        for message, places in sends:
            round_.send(message, places)
        if sends:  # peers read these meanwhile
            round_.local.extend(meanwhile)
        reduced = {id(action.message): action.onto for action in actions if not action.work}
        for message in arriving:
            round_.receive(message, reduced.get(id(message), []))
        if not sends:  # peers may write what is to be received meanwhile
            round_.local.extend(meanwhile)
        for action in actions:
            if action.message is None or action.work:
                round_.act(action)
        self.end_round()
        self.rounds.append([stream for stream in round_.streams.values() if stream])

    def windowed_round(self, steps: Sequence[Step], shape: RoundShape, meanwhile: Sequence[Instruction]) -> None:
        """Append a round of segmented messages, each with a few segments in flight: as one completes, the next starts.

        Free of deadlock, as rounds are aligned: no rank is ahead of a peer by more than the window.
        """
        leaving = [step for step in steps if isinstance(step, Send)]
        sends = [[message for message, _ in self._sends(step, shape.changing)] for step in leaving]
        receives = [list(self._receives(step)) for step in steps if isinstance(step, Recv)]
        actions = self._actions(steps, shape)
        reductions = [
            [action.message for action in actions if action.step == index and action.message is not None]
            for index, step in enumerate(steps)
            if isinstance(step, RecvReduce)
        ]
        work = {id(action.message): action.work for action in actions}
        messages = [*receives, *reductions, *sends]
        # a receive needs no slot, so that all are posted at once: the window of the sender limits the traffic
        windows = [*map(len, receives), *shape.slots, *(MESSAGE_WINDOW for _ in sends)]
        self._start([message for parts, window in zip(messages, windows) for message in parts[:window]])
        self._emit_local(*meanwhile)
        for index in range(max(map(len, messages))):
            for parts, window in zip(messages, windows):
                if index < len(parts):
                    self._wait([parts[index]])
                    self._emit_local(*work.get(id(parts[index]), ()))
                    self._start(parts[index + window : index + window + 1])

    def _wait_pending(self, pending: dict[int, BoundMessage], messages: Iterable[BoundMessage]) -> None:
        self._wait([pending.pop(id(message)) for message in messages if id(message) in pending])

    # -------------------------------------------------------------------------------- messages and actions

    def _sends(self, step: Send, changing: list[MemorySpan]) -> Iterator[tuple[BoundMessage, list[MemorySpan]]]:
        """Bind a step's send, in segments. Yield each message with the memory it reads. Reductions write `changing`."""
        for rows in split(aligned_spans(self.chunks.locations(step.chunks)), self.chunks.segment_counts(step)):
            places = [place for (place,) in rows]
            stable = not overlap(places, changing)
            yield self.wire.send(step.peer, list(map(self.work.piece, places)), stable), places

    def _receives(self, step: Recv) -> Iterator[BoundMessage]:
        for rows in split(aligned_spans(self.chunks.write(step.chunks)), self.chunks.segment_counts(step)):
            yield self.wire.receive(step.peer, [self.work.piece(place) for (place,) in rows])

    def _actions(self, steps: Sequence[Step], shape: RoundShape) -> list[RoundAction]:
        """Local reductions and copies of a round in the order in which they must run, with the receives they need."""
        actions: list[RoundAction] = []
        landing, room = shape.start, iter(shape.slots)
        for index, step in enumerate(steps):
            if isinstance(step, RecvReduce):
                cuts, slots = self.chunks.segment_counts(step), next(room)
                if shape.in_place:
                    for pairs, onto in self._operands(step, cuts):
                        message = self.wire.combine(step.peer, pairs, self.work.combining(step.side))
                        actions.append(RoundAction(index, message, [], onto))
                    continue
                actions.extend(self._arrivals(index, step, cuts, slots, landing))
                landing += slots * max(cuts, default=0)
            elif isinstance(step, Reduce):
                sources, locations = self.chunks.locations(step.source), self.chunks.locations(step.target)
                destinations = self.chunks.write(step.target)
                rows = aligned_spans(sources, locations, destinations)
                actions.append(RoundAction(index, None, self.work.reductions(rows, step.side), destinations))
            elif isinstance(step, Copy):
                sources, destinations = self.chunks.locations(step.source), self.chunks.write(step.target)
                actions.append(RoundAction(index, None, self.work.copies(sources, destinations), destinations))
        return actions

    def _arrivals(
        self, number: int, step: RecvReduce, cuts: Sequence[int], slots: int, landing: int
    ) -> list[RoundAction]:
        """One action per segment of a message: receive it into a temporary slot, then reduce it from there."""
        locations, destinations = self.chunks.locations(step.chunks), self.chunks.write(step.chunks)
        actions: list[RoundAction] = []
        for index, rows in enumerate(split(aligned_spans(locations, destinations), cuts)):
            start = landing + index % slots * max(cuts)
            slot = MemorySpan(LANDING, start, start + cuts[index])
            landed = []
            for location, destination in rows:
                landed.append(
                    (MemorySpan(LANDING, start, start + location.stop - location.start), location, destination)
                )
                start = landed[-1][0].stop
            onto = [destination for _, destination in rows]
            message = self.wire.receive(step.peer, [self.work.piece(slot)] if cuts[index] else [])
            actions.append(RoundAction(number, message, self.work.reductions(landed, step.side), onto))
        return [
            action._replace(following=actions[index + slots].message if index + slots < len(actions) else None)
            for index, action in enumerate(actions)
        ]

    def _operands(
        self, step: RecvReduce, cuts: Sequence[int]
    ) -> Iterator[tuple[list[tuple[Piece, Piece]], list[MemorySpan]]]:
        """For each segment of a message reduced from the sender's memory: pairs (own operand, result), and results."""
        locations, destinations = self.chunks.locations(step.chunks), self.chunks.write(step.chunks)
        for rows in split(aligned_spans(locations, destinations), cuts):
            pairs = [(self.work.piece(location), self.work.piece(destination)) for location, destination in rows]
            yield pairs, [destination for _, destination in rows]
