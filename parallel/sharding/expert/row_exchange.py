"""Exchange of rows between the ranks of an axis, in one message per pair of ranks, with notes behind them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from parallel.nn import kernels
from parallel.sharding.expert.row_codec import RowCodec
from quant.types import Array


class RowsByRank(NamedTuple):
    """Rows for, or from, every rank of an axis. This rank's rows are separate, as they are not sent.

    Attributes
    ----------
    own : array of shape (rows of this rank, ...)
    others : array of shape (all other rows, ...)
        Ordered by rank. May be encoded.
    counts : list of int
        Rows of every rank.
    rank : int
        This rank.
    margins : sequence of int
        Rows of `others` behind the rows of each rank, for notes. Empty: none. With margins `others` has the rows of
        this rank too, and `own` is a view of them.
    """

    own: Array
    others: Array
    counts: list[int]
    rank: int
    margins: Sequence[int] = ()

    @classmethod
    def divided(cls, rows: Array, counts: list[int], rank: int, margins: Sequence[int]) -> RowsByRank:
        """Rows in one array, with margins."""
        whole = cls(rows, rows, counts, rank, margins)
        start = whole.starts[rank]
        return whole._replace(own=rows[start : start + counts[rank]])

    def empty(self, counts: list[int] | None = None) -> RowsByRank:
        """New arrays for rows of the same widths and dtypes. `counts`: rows per rank, by default the same.

        Without margins.
        """
        xp, counts = kernels.array_namespace(self.own), counts or self.counts
        own = counts[self.rank]
        one = xp.empty((own, *self.own.shape[1:]), self.own.dtype)
        some = xp.empty((sum(counts) - own, *self.others.shape[1:]), self.others.dtype)
        return RowsByRank(one, some, counts, self.rank)

    @property
    def parts(self) -> list[Array]:
        """Rows of each rank: views."""
        views = [self.others[start : start + count] for start, count in zip(self.starts, self.counts)]
        views[self.rank] = self.own
        return views

    @property
    def starts(self) -> list[int]:
        """First row of each rank in `others`."""
        if self.margins:
            sizes = [count + margin for count, margin in zip(self.counts, self.margins)]
        else:
            sizes = [count * (rank != self.rank) for rank, count in enumerate(self.counts)]
        return list(accumulate(sizes[:-1], initial=0))

    @property
    def nbytes_of_row(self) -> int:
        """Bytes of a row of `others`."""
        return int(self.others.itemsize * prod(self.others.shape[1:]))

    def encoded(self, codec: RowCodec) -> RowsByRank:
        """Rows of which those for other ranks are encoded."""
        if not codec.name:
            return self
        wire = kernels.array_namespace(self.own).empty((len(self.others), codec.nbytes), np.uint8)
        start = self.starts[self.rank]
        stop = start + (self.counts[self.rank] + self.margins[self.rank] if self.margins else 0)
        for span in (slice(start), slice(stop, None)):
            codec.encode(self.others[span], wire[span])
        return self._replace(others=wire)

    def decoded(self, codec: RowCodec) -> RowsByRank:
        """Rows with the rows of other ranks decoded."""
        return self._replace(others=codec.decode(self.others))


class Notes(NamedTuple):
    """Arrays of numbers that travel behind the rows, with a number of items of each for, and from, every rank."""

    arrays: list[Array]
    sends: list[int]
    receives: list[int]

    @property
    def itemsize(self) -> int:
        """Bytes of one number of every array."""
        return sum(one.itemsize for one in self.arrays)


class RowExchange:
    """Exchange of rows along an axis by one ``Ialltoallv``. The constructor starts it. `finish` returns the rows.

    Construction is collective. Rows have the same dtypes and widths on all ranks. Sent rows must not change before
    `finish`.

    Parameters
    ----------
    axis : MeshAxis
    rows : RowsByRank
    arrived : RowsByRank
        Arrays for the rows that come from each rank. This rank's own are taken from `rows`.
    notes : Notes, optional
        Numbers to exchange with the rows. Margins of both must have room for them.
    """

    def __init__(self, axis: Any, rows: RowsByRank, arrived: RowsByRank, notes: Notes | None = None):
        self._arrived, self._notes, self._request = arrived, notes or Notes([], [], []), None
        if axis.size == 1:
            return
        self._message, self._arriving = (some.others.reshape(-1).view(np.uint8) for some in (rows, arrived))
        self._write_notes(rows)
        ends = self._ends(rows, self._notes.sends), self._ends(arrived, self._notes.receives)
        self._request = axis.comm.Ialltoallv([self._message, *ends[0]], [self._arriving, *ends[1]])

    def _ends(self, rows: RowsByRank, notes: Sequence[int]) -> tuple[list[int], list[int], None]:
        """Counts and displacements of the messages in bytes, for Alltoallv."""
        size, items, each = rows.nbytes_of_row, self._notes.itemsize, notes or [0] * len(rows.counts)
        lengths = [count * size + some * items for count, some in zip(rows.counts, each)]
        lengths[rows.rank] = 0
        return lengths, [start * size for start in rows.starts], None

    def _write_notes(self, rows: RowsByRank) -> None:
        for rank, place in enumerate(self._note_places(rows, self._notes.sends)):
            if rank != rows.rank:
                for one, into in zip(self._notes.arrays, place):
                    first = sum(self._notes.sends[:rank])
                    self._message[into] = one[first : first + self._notes.sends[rank]].reshape(-1).view(np.uint8)

    def _note_places(self, rows: RowsByRank, notes: Sequence[int]) -> list[list[slice]]:
        """Bytes of every array's numbers in the message for, or from, each rank."""
        ends = [(start + count) * rows.nbytes_of_row for start, count in zip(rows.starts, rows.counts)]
        bounds = [
            list(accumulate((count * one.itemsize for one in self._notes.arrays), initial=end))
            for end, count in zip(ends, notes)
        ]
        return [[slice(*pair) for pair in pairwise(some)] for some in bounds]

    def finish(self) -> RowsByRank:
        """Wait, and return the rows, by sending rank."""
        if self._request is not None:
            self._request.Wait()
        return self._arrived

    def notes(self) -> list[Array]:
        """Notes from all ranks, in one array each. Valid after `finish`."""
        rank, sends = self._arrived.rank, self._notes.sends
        places, first = self._note_places(self._arrived, self._notes.receives), sum(sends[:rank])
        found = []
        for number, one in enumerate(self._notes.arrays):
            parts = [self._arriving[of_rank[number]] for of_rank in places] if self._request is not None else [one]
            parts[rank] = one[first : first + sends[rank]].reshape(-1).view(np.uint8)
            joined = kernels.array_namespace(one).concatenate(parts).view(one.dtype)
            found.append(joined.reshape(-1, *one.shape[1:]))
        return found


def segments(rows: Array, counts: Sequence[int]) -> list[Array]:
    """Neighbouring segments with these numbers of rows: views."""
    ends = list(accumulate(counts, initial=0))
    return [rows[start:stop] for start, stop in pairwise(ends)]
