"""Memory location of every chunk during a task, and the way in which each round receives what it reduces."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from collectives.engine.instructions import SCRATCH
from collectives.runtime.execution.program_memory import Task
from collectives.schedule.chunks import MemorySpan, even, joined
from collectives.schedule.steps import Chunks, Copy, Recv, RecvReduce, Reduce, Send, Step, numbers
from collectives.transport.wire import Wire

LANDING_SLOTS = 3
"""Receive buffers per reduced message: one segment arrives while another is reduced."""

MESSAGE_WINDOW = 2
"""Segments of one message in flight over a network. More would fill its queues and delay TCP acknowledgements."""


class RoundShape(NamedTuple):
    """Receive strategy for the messages that a round reduces: from the sender's memory, or through a temporary buffer.

    `in_place`: reduce from the sender's memory; otherwise receive into `landing` elements of landing memory first, in
    `slots` per message, from `start` on. `changing`: destinations of the results.
    """

    in_place: bool
    slots: list[int]
    landing: int
    changing: list[MemorySpan]
    start: int = 0

    @property
    def stop(self) -> int:
        """End of its landing memory."""
        return self.start + self.landing


class ChunkLocations:
    """Memory location of every chunk as a task's steps are bound in order: its source, then target or scratch memory.

    `lands`: no message is reduced from the sender's memory. `shapes`: treatment of each round; `scratch_length` and
    `landing_length`: elements of the two memories.
    """

    def __init__(self, task: Task, wire: Wire, lands: bool) -> None:
        self._task, self._wire, self._lands = task, wire, lands
        self._location: dict[int, MemorySpan] = dict(task.source)
        self._written = {c for step in chain.from_iterable(task.schedule) for c in numbers(written(step))}
        self._unchanged = [c for c in sorted(task.target) if c in task.source and c not in self._written]
        self._destination = dict(task.target)
        self.scratch_length = 0
        self.scratch_chunks = sorted(self._written.difference(task.target))
        """Chunks in scratch memory, in the order of their places."""

        for chunk in self.scratch_chunks:
            start = self.scratch_length
            self.scratch_length += self._length(chunk)
            self._destination[chunk] = MemorySpan(SCRATCH, start, self.scratch_length)
        self.landing_chunks: list[int] = []
        """In programs for any length, chunks in landing memory in the order of their places: no two share one."""

        self.shapes: list[RoundShape] = []
        for steps in task.schedule:
            self.shapes.append(self._shape(steps))
            for step in steps:
                self.write(written(step))
            if steps:
                self.copy_unchanged()
        self._location = dict(task.source)  # anew: steps are bound from here on
        self.landing_length = max((shape.stop for shape in self.shapes), default=0)

    def unchanged(self) -> list[list[MemorySpan]]:
        """Source and target of the chunks that no step writes: they are copied while the first round is under way."""
        sides = (self._task.source, self._task.target) if self._unchanged else ()
        return [self._placed(side[chunk] for chunk in self._unchanged) for side in sides]

    def copy_unchanged(self) -> None:
        """Record that the unchanged chunks are in the target: beside others there, they are sent in one piece."""
        self._location.update((chunk, self._task.target[chunk]) for chunk in self._unchanged)

    def _length(self, chunk: int) -> int:
        return self._task.lengths[chunk % len(self._task.lengths)]

    def locations(self, chunks: Chunks) -> list[MemorySpan]:
        return self._placed(self._location[chunk] for chunk in numbers(chunks))

    def destinations(self, chunks: Chunks) -> list[MemorySpan]:
        return self._placed(self._destination[chunk] for chunk in numbers(chunks))

    def _placed(self, spans: Iterable[MemorySpan]) -> list[MemorySpan]:
        """Spans in memory. Those of a memory that has rows are of packed data."""
        rows = self._task.rows
        if not rows:
            return list(spans)
        places = []
        for span in spans:
            if span.memory not in rows:
                places.append(span)
            else:
                places += (MemorySpan(span.memory, *part) for part in rows[span.memory].parts(span.start, span.stop))
        return places

    def write(self, chunks: Chunks) -> list[MemorySpan]:
        """Record that a step writes these chunks: move them to their destinations, and return the destinations."""
        self._location.update((chunk, self._destination[chunk]) for chunk in numbers(chunks))
        return self.destinations(chunks)

    def nbytes(self, chunks: Chunks) -> int:
        return sum(map(self._length, numbers(chunks))) * self._task.itemsize

    def segment_counts(self, step: Send | Recv | RecvReduce) -> Sequence[int]:
        """Elements per segment of a step's message: () for chunks without elements (no message), (0,) for no chunks."""
        elements = sum(map(self._length, numbers(step.chunks)))
        if not elements:
            return () if step.chunks else (0,)
        nbytes = elements * self._task.itemsize
        limit = self._wire.split_size(step.peer, nbytes)
        if limit is None:
            limit = self._wire.segment_size(nbytes, self._task.segment)
        part = max(1, limit // self._task.itemsize) if limit else elements
        return even(elements, -(-elements // part))

    def _shape(self, steps: Sequence[Step]) -> RoundShape:
        """Receive strategy for a round's reductions, given the chunk locations before it.

        Segments of the first message share a few landing slots, unless its sender sends another message in the round,
        which would overtake them. Messages of further peers get a slot per segment: they must not wait for the first
        peer, whose sends may depend on theirs.
        """
        arrivals = [step for step in steps if isinstance(step, RecvReduce)]
        changing: list[MemorySpan] = []
        for step in arrivals:
            changing += self.destinations(step.chunks)
        changing = joined(changing)
        if self._reduces_in_place(steps, arrivals, changing):
            return RoundShape(True, [0] * len(arrivals), 0, changing)
        cuts = [self.segment_counts(step) for step in arrivals]
        slots = [len(parts) for parts in cuts]
        senders = [step.peer for step in steps if isinstance(step, (Recv, RecvReduce))]
        if slots and senders.count(arrivals[0].peer) == 1 and self.is_segmented(arrivals[0]):
            slots[0] = min(slots[0], LANDING_SLOTS)
        # chunks without elements have no segments: the default
        room = sum(count * max(parts, default=0) for count, parts in zip(slots, cuts, strict=True))
        start = len(self.landing_chunks)
        if self._wire.lengths_vary:
            self.landing_chunks += (chunk for step in arrivals for chunk in numbers(step.chunks))
        return RoundShape(False, slots, room, changing, start)

    def is_segmented(self, step: Step) -> bool:
        """True if the step reduces a network message segment by segment while later segments are in flight."""
        if not isinstance(step, RecvReduce) or len(self.segment_counts(step)) < 2:
            return False
        return self._wire.split_size(step.peer, self.nbytes(step.chunks)) is None

    def _reduces_in_place(
        self, steps: Sequence[Step], arrivals: Sequence[RecvReduce], changing: list[MemorySpan]
    ) -> bool:
        """True if a round can reduce all its messages directly from the senders' shared memory.

        Not if another step must take effect first, nor if the results overwrite memory that may still be sent.
        """
        first = next((index for index, step in enumerate(steps) if isinstance(step, (Reduce, Copy))), len(steps))
        if self._lands or any(isinstance(step, RecvReduce) for step in steps[first:]):
            return False
        if any(self._wire.split_size(step.peer, self.nbytes(step.chunks)) is None for step in arrivals):
            return False
        if len(arrivals) > 1 and any(len(self.segment_counts(step)) > 1 for step in arrivals):
            return False  # segments of several messages would have to alternate
        sent: list[int] = []
        for step in steps:
            if isinstance(step, Send):
                leaves = self._wire.completes_locally(step.peer, self.nbytes(step.chunks), sent.count(step.peer))
                if not leaves and overlap(self.locations(step.chunks), changing):
                    return False
                sent.append(step.peer)
        return True

    def is_windowed(self, steps: Sequence[Step]) -> bool:
        """True if a round has only network messages, at most one each way per peer, and some have many segments.

        Many: more than `MESSAGE_WINDOW`. Reduced chunks must be distinct, and none of them be sent.
        """
        messages = [step for step in steps if isinstance(step, (Send, Recv, RecvReduce))]
        if len(messages) < len(steps) or all(len(self.segment_counts(step)) <= MESSAGE_WINDOW for step in messages):
            return False
        if any(self._wire.split_size(step.peer, self.nbytes(step.chunks)) is not None for step in messages):
            return False
        streams_used = {(step.peer, isinstance(step, Send)) for step in messages}
        changing = [chunk for step in messages if isinstance(step, RecvReduce) for chunk in numbers(step.chunks)]
        leaving = {chunk for step in messages if isinstance(step, Send) for chunk in numbers(step.chunks)}
        # a segment is reduced while later ones of other messages are still to be sent
        apart = len(set(changing)) == len(changing) and leaving.isdisjoint(changing)
        return apart and len(streams_used) == len(messages)


def written(step: Step) -> Chunks:
    if isinstance(step, Send):
        return ()
    return step.chunks if isinstance(step, (Recv, RecvReduce)) else step.target


def overlap(one: Iterable[MemorySpan], other: Iterable[MemorySpan]) -> bool:
    return any(a.memory == b.memory and a.start < b.stop and b.start < a.stop for a in one for b in other)
