"""Chunk layout: lengths and offsets of chunks, and memory spans of chunk numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from collectives.schedule.steps import Chunks


def even(elements: int, parts: int, grain: int = 1) -> tuple[int, ...]:
    """Lengths of `parts` nearly equal pieces of `elements` elements, all but the last in multiples of `grain`.

    Longer pieces come first. The last takes the remainder of the grain as well. So large pieces start on cache lines.
    With fewer than `parts * grain` elements the grain is ignored.

    >>> even(10, 4), even(2, 4)
    ((3, 3, 2, 2), (1, 1, 0, 0))
    """
    if grain > 1 and elements >= parts * grain:
        whole, rest = divmod(elements, grain)
        lengths = [length * grain for length in even(whole, parts)]
        lengths[-1] += rest
        return tuple(lengths)
    quotient, remainder = divmod(elements, parts)
    return (quotient + 1,) * remainder + (quotient,) * (parts - remainder)


class ChunkLayout(NamedTuple):
    """Lengths and offsets of chunks 0 .. C-1 in a buffer, in elements."""

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> ChunkLayout:
        """Layout of chunks of these lengths, stored contiguously."""
        return cls(tuple(lengths), tuple(accumulate(lengths[:-1], initial=0)) if lengths else ())

    def length(self, chunks: Chunks) -> int:
        """Number of elements in `chunks`. Scratch chunks count too."""
        count = len(self.lengths)
        return sum(self.lengths[chunk % count] for part in chunks for chunk in part)


class MemorySpan(NamedTuple):
    """Range of elements, `start` .. `stop` - 1, in one of the numbered buffers of a program."""

    memory: int
    start: int
    stop: int


def joined(places: Iterable[MemorySpan]) -> list[MemorySpan]:
    """Merge consecutive spans that are contiguous in memory. Drop empty ones."""
    runs: list[MemorySpan] = []
    for place in places:
        if place.start == place.stop:
            continue
        if runs and runs[-1].memory == place.memory and runs[-1].stop == place.start:
            runs[-1] = MemorySpan(place.memory, runs[-1].start, place.stop)
        else:
            runs.append(place)
    return runs


def aligned(*columns: Iterable[MemorySpan]) -> list[tuple[MemorySpan, ...]]:
    """Cut lists of spans of equal total length at the same places: rows of equally long pieces, one per list."""
    stacks = [joined(column)[::-1] for column in columns]
    rows: list[tuple[MemorySpan, ...]] = []
    while stacks[0]:
        length = min(stack[-1].stop - stack[-1].start for stack in stacks)
        row = []
        for stack in stacks:
            memory, start, stop = stack.pop()
            row.append(MemorySpan(memory, start, start + length))
            if start + length < stop:
                stack.append(MemorySpan(memory, start + length, stop))
        rows.append(tuple(row))
    return rows


def split(rows: Sequence[tuple[MemorySpan, ...]], lengths: Iterable[int]) -> Iterator[list[tuple[MemorySpan, ...]]]:
    """Cut rows of equally long spans into consecutive groups of the given total lengths in elements."""
    queue = [*rows[::-1]]
    for length in lengths:
        portion = []
        while length:
            row = queue.pop()
            taken = min(length, row[0].stop - row[0].start)
            portion.append(tuple(MemorySpan(memory, start, start + taken) for memory, start, _ in row))
            if row[0].start + taken < row[0].stop:
                queue.append(tuple(MemorySpan(memory, start + taken, stop) for memory, start, stop in row))
            length -= taken
        yield portion
