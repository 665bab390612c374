"""Runs of bytes of which the elements of a buffer consist, decoded from its datatype: where packed data lies in memory.

>>> from mpi4py import MPI
>>> columns = MPI.INT.Create_subarray([3, 4], [2, 2], [1, 1])
>>> offsets, lengths = runs_of(columns)
>>> offsets.tolist(), lengths.tolist()
([20, 36], [8, 8])
>>> columns.Free()
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives.buffers.arguments import Buffer

MOST_ROWS = 1 << 15
"""Most runs of a buffer that are accessed one by one; the MPI packs data of others."""

Runs: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Offsets and lengths in bytes, in the order of packed data."""


class BufferRows(NamedTuple):
    """Runs of bytes of a buffer. `starts`: of each in the packed data, and its end; `offsets`: from its address."""

    starts: list[int]
    offsets: list[int]

    @property
    def mean_bytes(self) -> float:
        return self.starts[-1] / max(1, len(self.offsets))

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of the memory, from the address on, that hold a range of the packed data."""
        row = bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[row + 1])
            offset = self.offsets[row] + start - self.starts[row]
            yield offset, offset + end - start
            start, row = end, row + 1


class TooMany(Exception):
    """More runs than `MOST_ROWS`, or a datatype of unknown layout."""


def rows_of(buffer: Buffer) -> BufferRows | None:
    """Rows of a buffer's elements; None if they are too many, or unknown."""
    if buffer.datatype is None:
        return None
    counts, displs = ((buffer.count,), (0,)) if buffer.counts is None else (buffer.counts, buffer.displs or ())
    try:
        places = np.array(displs, np.int64) * buffer.extent
        offsets, lengths = _blocks(runs_of(buffer.datatype), buffer.extent, np.array(counts, np.int64), places)
    except TooMany:
        return None
    return BufferRows([*accumulate(lengths.tolist(), initial=0)], offsets.tolist())


def runs_of(datatype: MPI.Datatype) -> Runs:
    """Runs of one element of a datatype; raises `TooMany`."""
    base, combiner, found = MPI.Datatype(datatype).decode()
    if combiner == "NAMED":
        size, (low, extent) = datatype.Get_size(), datatype.Get_extent()
        if low or size != extent:  # pairs with padding
            raise TooMany
        return np.zeros(1, np.int64), np.array([size])
    bases = found["datatypes"] if combiner == "STRUCT" else [base]
    try:
        if combiner == "STRUCT":
            parts = zip(bases, found["blocklengths"], found["displacements"], strict=True)
            each = [_blocks(runs_of(one), one.Get_extent()[1], *map(np.array, ([n], [at]))) for one, n, at in parts]
            return _merged(*(np.concatenate([np.zeros(0, np.int64), *side]) for side in zip(*each))) if each else _EMPTY
        extent = base.Get_extent()[1]
        counts, places = _placement(combiner, found, extent)
        return _blocks(runs_of(base), extent, counts, places)
    finally:
        for one in bases:
            one.free()  # no-op for predefined ones


_EMPTY: Runs = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def _placement(combiner: str, found: dict[str, Any], extent: int) -> tuple[np.ndarray, np.ndarray]:
    """Number of elements in each block of a datatype, and the blocks' offsets in bytes; `extent` is of an element."""
    if combiner in ("DUP", "RESIZED"):
        return np.ones(1, np.int64), np.zeros(1, np.int64)
    if combiner == "CONTIGUOUS":
        return np.array([found["count"]]), np.zeros(1, np.int64)
    if combiner in ("VECTOR", "HVECTOR"):
        step = found["stride"] * (extent if combiner == "VECTOR" else 1)
        return np.full(found["count"], found["blocklength"]), np.arange(found["count"]) * step
    if combiner == "SUBARRAY":
        return _subarray(found, extent)
    if combiner in ("INDEXED", "HINDEXED", "INDEXED_BLOCK", "HINDEXED_BLOCK"):
        # MPI has displacements in bytes in the H forms, else in extents
        places = np.array(found["displacements"], np.int64) * (1 if combiner.startswith("H") else extent)
        lengths = found["blocklength"] if combiner.endswith("BLOCK") else found["blocklengths"]
        return np.broadcast_to(np.array(lengths, np.int64), places.shape), places
    raise TooMany


def _subarray(found: dict[str, Any], extent: int) -> tuple[np.ndarray, np.ndarray]:
    sides = [found[name] for name in ("sizes", "subsizes", "starts")]
    sizes, lengths, starts = sides if found["order"] == MPI.ORDER_C else [side[::-1] for side in sides]
    places, step = np.array([starts[-1] * extent]), sizes[-1] * extent
    for size, length, start in zip(sizes[-2::-1], lengths[-2::-1], starts[-2::-1]):
        places = ((start + np.arange(length))[:, None] * step + places).ravel()
        step *= size
    return np.full(len(places), lengths[-1]), places


def _blocks(runs: Runs, extent: int, counts: np.ndarray, places: np.ndarray) -> Runs:
    """Runs of blocks of elements, which have `runs` each, at these places."""
    offsets, lengths = runs
    if len(offsets) == 1 and lengths[0] == extent:  # elements without gaps
        if len(counts) > MOST_ROWS:
            raise TooMany
        return _merged(places + offsets[0], counts * extent)
    if counts.sum() * len(offsets) > MOST_ROWS:
        raise TooMany
    starts = np.repeat(places, counts) + extent * (
        np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    )
    return _merged((starts[:, None] + offsets).ravel(), np.tile(lengths, len(starts)))


def _merged(offsets: np.ndarray, lengths: np.ndarray) -> Runs:
    """Runs without empty ones, and with those that follow one another joined."""
    kept = lengths > 0
    offsets, lengths = offsets[kept], lengths[kept]
    if len(offsets) < 2:
        return offsets, lengths
    first = np.flatnonzero(np.concatenate([[True], offsets[1:] != offsets[:-1] + lengths[:-1]]))
    return offsets[first], np.add.reduceat(lengths, first)
