"""Where chunks lie: n elements in uneven parts, and chunk numbers turned to places in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from collectives.schedule.steps import Chunks


def even(elements: int, parts: int, grain: int = 1) -> tuple[int, ...]:
    """Lengths of `parts` consecutive pieces of `elements`, as equal as can be, the longer ones first.

    Pieces are whole multiples of `grain` elements except for the last that is not empty, so that large pieces
    start on cache lines. A grain too coarse to give every part something is not used.

    >>> even(10, 4)
    (3, 3, 2, 2)
    >>> even(2, 4)
    (1, 1, 0, 0)
    """
    if grain > 1 and elements >= parts * grain:
        whole, rest = divmod(elements, grain)
        lengths = [length * grain for length in even(whole, parts)]
        lengths[-1] += rest
        return tuple(lengths)
    quotient, remainder = divmod(elements, parts)
    return (quotient + 1,) * remainder + (quotient,) * (parts - remainder)


class Layout(NamedTuple):
    """Lengths and places of chunks 0 .. C-1 in a buffer, both in elements."""

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> Layout:
        """Chunks one after another."""
        return cls(tuple(lengths), tuple(accumulate(lengths[:-1], initial=0)) if lengths else ())

    @property
    def elements(self) -> int:
        """Elements in all chunks together."""
        return sum(self.lengths)

    def length(self, chunks: Chunks) -> int:
        """Elements in `chunks`, scratch ones included."""
        count = len(self.lengths)
        return sum(self.lengths[chunk % count] for part in chunks for chunk in part)

    def cut(self, segments: int) -> Layout:
        """Every chunk cut in `segments` pieces: chunk ``c`` becomes chunks ``c * segments ...``."""
        lengths: list[int] = []
        offsets: list[int] = []
        for length, offset in zip(self.lengths, self.offsets, strict=True):
            for piece in even(length, segments):
                lengths.append(piece)
                offsets.append(offset)
                offset += piece
        return Layout(tuple(lengths), tuple(offsets))


class Place(NamedTuple):
    """A run of elements in one of the memories that a program knows."""

    memory: int
    start: int
    stop: int


def joined(places: Iterable[Place]) -> list[Place]:
    """Neighbouring places made one, empty ones left out, order kept."""
    runs: list[Place] = []
    for place in places:
        if place.start == place.stop:
            continue
        if runs and runs[-1].memory == place.memory and runs[-1].stop == place.start:
            runs[-1] = Place(place.memory, runs[-1].start, place.stop)
        else:
            runs.append(place)
    return runs


def aligned(*columns: Iterable[Place]) -> Iterator[tuple[Place, ...]]:
    """Rows of runs of the same length, one from each column; the columns are equally long all in all."""
    stacks = [joined(column)[::-1] for column in columns]
    while stacks[0]:
        length = min(stack[-1].stop - stack[-1].start for stack in stacks)
        row = []
        for stack in stacks:
            memory, start, stop = stack.pop()
            row.append(Place(memory, start, start + length))
            if start + length < stop:
                stack.append(Place(memory, start + length, stop))
        yield tuple(row)


def split(rows: Iterable[tuple[Place, ...]], lengths: Iterable[int]) -> Iterator[list[tuple[Place, ...]]]:
    """The rows in portions of the given lengths."""
    queue = list(rows)[::-1]
    for length in lengths:
        portion = []
        while length:
            row = queue.pop()
            taken = min(length, row[0].stop - row[0].start)
            portion.append(tuple(Place(memory, start, start + taken) for memory, start, _ in row))
            if row[0].start + taken < row[0].stop:
                queue.append(tuple(Place(memory, start + taken, stop) for memory, start, stop in row))
            length -= taken
        yield portion
