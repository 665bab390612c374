"""Exchange of rows between the ranks of an axis, in one message per pair of ranks, with other rows beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
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
    """

    own: Array
    others: Array
    counts: list[int]
    rank: int

    @classmethod
    def taken(cls, rows: Array, places: Array, counts: list[int], rank: int) -> RowsByRank:
        """Rows at these places, ordered by rank."""
        own, others, *_ = cls.divided(places, counts, rank)
        return cls(rows[own], rows[others], counts, rank)

    @classmethod
    def divided(cls, rows: Array, counts: list[int], rank: int) -> RowsByRank:
        """Rows in one array, ordered by rank; those of this rank are a view."""
        start = sum(counts[:rank])
        stop = start + counts[rank]
        others = kernels.array_namespace(rows).concatenate([rows[:start], rows[stop:]])
        return cls(rows[start:stop], others, counts, rank)

    def empty(self, counts: list[int] | None = None) -> RowsByRank:
        """New arrays for rows of the same width and dtype, as many unless `counts` are given."""
        xp, counts = kernels.array_namespace(self.own), counts or self.counts
        own = counts[self.rank]
        one, some = (xp.empty((count, *self.own.shape[1:]), self.own.dtype) for count in (own, sum(counts) - own))
        return RowsByRank(one, some, counts, self.rank)

    @property
    def parts(self) -> list[Array]:
        """Rows of each rank: views."""
        counts = [*self.counts[: self.rank], 0, *self.counts[self.rank + 1 :]]
        views = segments(self.others, counts)
        views[self.rank] = self.own
        return views

    def joined(self) -> Array:
        """All rows, ordered by rank, in one array."""
        return kernels.array_namespace(self.own).concatenate(self.parts)


class RowPart(NamedTuple):
    """Rows to exchange, and how many come from each rank. With a codec, rows for other ranks are encoded on the way."""

    rows: RowsByRank
    receives: list[int]
    codec: RowCodec | None = None

    def nbytes(self, count: int) -> int:
        """Bytes of `count` rows in a message."""
        some = self.rows.others
        width = int(np.prod(some.shape[1:], dtype=int))
        return count * width * some.itemsize if self.codec is None else self.codec.nbytes(count * width)

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

    Construction is collective. A rank's rows for itself are neither copied nor encoded. Parts have the same dtypes,
    widths and codecs on all ranks. Sent rows must not change before `finish`.
    """

    def __init__(self, axis: Any, parts: Sequence[RowPart]):
        self._axis, self._parts, self._request = axis, parts, None
        self._arrived = [part.rows.empty(part.receives)._replace(own=part.rows.own) for part in parts]
        if axis.size == 1:
            return
        self._plain = len(parts) == 1 and parts[0].codec is None
        if self._plain:
            sent, arriving = parts[0].rows, self._arrived[0].others
            width = int(np.prod(arriving.shape[1:], dtype=int))
            message, sends, receives = (
                sent.others,
                *([count * width for count in self._of_others(counts)] for counts in (sent.counts, parts[0].receives)),
            )
        else:
            sends, receives = (
                [sum(part.nbytes(count) for part, count in zip(parts, of_rank)) for of_rank in zip(*counts)]
                for counts in (
                    [self._of_others(part.rows.counts) for part in parts],
                    [self._of_others(part.receives) for part in parts],
                )
            )
            message = self._packed(sum(sends))
            arriving = kernels.array_namespace(message).empty(sum(receives), np.uint8)
        self._message, self._arriving = message, arriving  # alive until the exchange ends
        self._request = axis.comm.Ialltoallv([movable(message), sends], [movable(arriving), receives])

    def _of_others(self, counts: Sequence[int]) -> list[int]:
        return [count * (rank != self._axis.rank) for rank, count in enumerate(counts)]

    def _packed(self, length: int) -> Array:
        """Message to all ranks, in bytes: for each rank, rows of every part."""
        message = kernels.array_namespace(self._parts[0].rows.own).empty(length, np.uint8)
        self._pass_over(message, [part.rows for part in self._parts], RowPart.encode)
        return message

    def _pass_over(self, message: Array, every: Sequence[RowsByRank], code: Any) -> None:
        """Call ``code(part, rows, bytes)`` for the rows of every other rank and part, in the order of a message."""
        position, by_part = 0, [rows.parts for rows in every]
        for rank in range(self._axis.size):
            for part, of_ranks in zip(self._parts, by_part):
                if rank != self._axis.rank:
                    end = position + part.nbytes(len(of_ranks[rank]))
                    code(part, of_ranks[rank], message[position:end])
                    position = end

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
