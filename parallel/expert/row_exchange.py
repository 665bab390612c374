"""Exchange of rows between the ranks of an axis, in one message per pair of ranks, with other rows beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallel.expert.row_codec import RowCodec
from parallel.nn import kernels
from parallel.nn.kernels.storage import movable
from parallel.runtime.interleaving import give_way
from quant.types import Array


class RowsByRank(NamedTuple):
    """Rows for, or from, every rank of an axis: those of this rank apart, as they do not travel.

    Attributes
    ----------
    own : array of shape (rows of this rank, ...)
    others : array of shape (all other rows, ...)
        Ordered by rank.
    counts : list of int
        Rows of every rank.
    rank : int
        This rank.
    whole : bool
        True if `others` has the rows of this rank too, and `own` is a view of them.
    """

    own: Array
    others: Array
    counts: list[int]
    rank: int
    whole: bool = False

    @classmethod
    def taken(cls, rows: Array, places: Array, counts: list[int], rank: int) -> RowsByRank:
        """Rows at these places, ordered by rank."""
        start = sum(counts[:rank])
        stop = start + counts[rank]
        others = kernels.array_namespace(places).concatenate([places[:start], places[stop:]])
        return cls(rows[places[start:stop]], rows[others], counts, rank)

    @classmethod
    def divided(cls, rows: Array, counts: list[int], rank: int) -> RowsByRank:
        """Rows in one array, ordered by rank."""
        start = sum(counts[:rank])
        return cls(rows[start : start + counts[rank]], rows, counts, rank, True)

    def empty(self, counts: list[int] | None = None, whole: bool = False) -> RowsByRank:
        """New arrays for rows of the same width and dtype, as many unless `counts` are given."""
        xp, counts = kernels.array_namespace(self.own), counts or self.counts
        if whole:
            return self.divided(xp.empty((sum(counts), *self.own.shape[1:]), self.own.dtype), counts, self.rank)
        own = counts[self.rank]
        one, some = (xp.empty((count, *self.own.shape[1:]), self.own.dtype) for count in (own, sum(counts) - own))
        return RowsByRank(one, some, counts, self.rank)

    @property
    def lengths(self) -> list[int]:
        """Elements of the rows of each rank but this one."""
        return [count * self.width * (rank != self.rank) for rank, count in enumerate(self.counts)]

    @property
    def places(self) -> list[int]:
        """First element of the rows of each rank in `others`."""
        return [start * self.width for start in self.starts]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return prod(self.own.shape[1:])

    @property
    def parts(self) -> list[Array]:
        """Rows of each rank: views."""
        views = [self.others[start : start + count] for start, count in zip(self.starts, self.counts)]
        views[self.rank] = self.own
        return views

    @property
    def starts(self) -> list[int]:
        """First row of each rank in `others`."""
        counts = [count if self.whole or rank != self.rank else 0 for rank, count in enumerate(self.counts)]
        return list(accumulate(counts[:-1], initial=0))

    def joined(self) -> Array:
        """All rows, ordered by rank, in one array."""
        return self.others if self.whole else kernels.array_namespace(self.own).concatenate(self.parts)


class RowPart(NamedTuple):
    """Rows to exchange, and how many come from each rank. With a codec, rows for other ranks are encoded on the way."""

    rows: RowsByRank
    receives: list[int]
    codec: RowCodec | None = None

    def arrived(self, whole: bool) -> RowsByRank:
        """New arrays for the rows that come from each rank; of `own` a copy, if they are one array."""
        arrived = self.rows.empty(self.receives, whole)
        if not whole:
            return arrived._replace(own=self.rows.own)
        arrived.own[...] = self.rows.own
        return arrived

    def nbytes(self, counts: Sequence[int]) -> list[int]:
        """Bytes in messages of so many rows for, or from, every rank; this rank's are 0."""
        width, itemsize = self.rows.width, self.rows.others.itemsize
        code = self.codec.nbytes if self.codec else lambda elements: elements * itemsize
        return [code(count * width) * (rank != self.rows.rank) for rank, count in enumerate(counts)]

    def encode(self, rows: Array, wire: Array) -> None:
        """Write rows to the bytes `wire`."""
        if self.codec is None:
            wire[...] = kernels.array_namespace(rows).ascontiguousarray(rows).reshape(-1).view(np.uint8)
        else:
            self.codec.encode(rows, wire)

    def decode(self, wire: Array, rows: Array) -> None:
        if self.codec is None:
            rows[...] = wire.view(rows.dtype).reshape(rows.shape)
        else:
            self.codec.decode(wire, rows)


class RowExchange:
    """Exchange of parts along an axis by one ``Ialltoallv``, which the constructor starts; `finish` returns the rows.

    Construction is collective. A rank's rows for itself are neither copied nor encoded, unless rows arrive in one array
    (`whole`). Parts have the same dtypes, widths and codecs on all ranks. Sent rows must not change before `finish`.
    """

    def __init__(self, axis: Any, parts: Sequence[RowPart], whole: bool = False):
        self._axis, self._parts, self._request = axis, parts, None
        self._arrived = [part.arrived(whole) for part in parts]
        if axis.size == 1:
            return
        self._plain = len(parts) == 1 and parts[0].codec is None
        ends: list[list[Any]]  # counts, and displacements where rows have gaps, as of Alltoallv
        if self._plain:
            rows = parts[0].rows, self._arrived[0]
            message, arriving = (some.others for some in rows)
            ends = [[some.lengths, some.places, None] for some in rows]
        else:
            counts = [part.rows.counts for part in parts], [part.receives for part in parts]
            sizes = [[part.nbytes(some) for part, some in zip(parts, every)] for every in counts]
            totals = [[sum(of_rank) for of_rank in zip(*every)] for every in sizes]
            message = self._packed(sum(totals[0]))
            arriving = kernels.array_namespace(message).empty(sum(totals[1]), np.uint8)
            ends = [[total] for total in totals]
        self._message, self._arriving = message, arriving  # alive until the exchange ends
        self._request = axis.comm.Ialltoallv([movable(message), *ends[0]], [movable(arriving), *ends[1]])

    def _packed(self, length: int) -> Array:
        """Message to all ranks, in bytes: for each rank, rows of every part."""
        message = kernels.array_namespace(self._parts[0].rows.own).empty(length, np.uint8)
        self._pass_over(message, [part.rows for part in self._parts], RowPart.encode)
        return message

    def _pass_over(self, message: Array, every: Sequence[RowsByRank], code: Any) -> None:
        """Call ``code(part, rows, bytes)`` for the rows of every other rank and part, in the order of a message."""
        position = 0
        about = [(part, rows.parts, part.nbytes(rows.counts)) for part, rows in zip(self._parts, every)]
        for rank in range(self._axis.size):
            for part, of_ranks, sizes in about:
                if size := sizes[rank]:
                    code(part, of_ranks[rank], message[position : position + size])
                    position += size

    def finish(self) -> list[RowsByRank]:
        """Give way, wait, and return the rows of every part, by sending rank."""
        give_way()  # on all ranks, also those without others
        if self._request is None:
            return self._arrived
        self._request.Wait()
        if not self._plain:
            self._pass_over(self._arriving, self._arrived, lambda part, rows, wire: part.decode(wire, rows))
        return self._arrived


def segments(rows: Array, counts: Sequence[int]) -> list[Array]:
    """Neighbouring segments of so many rows: views."""
    ends = list(accumulate(counts, initial=0))
    return [rows[start:stop] for start, stop in pairwise(ends)]
