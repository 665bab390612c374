"""Exchange of rows between the ranks of an axis, in one message per pair of ranks, with other rows beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from parallel.expert.row_codec import RowCodec
from parallel.nn import kernels
from parallel.nn.kernels.storage import movable
from quant.types import Array


class RowPart(NamedTuple):
    """Rows to exchange, ordered by receiving rank: so many for each rank, and so many from each.

    With a codec, rows for other ranks are encoded on the way.
    """

    rows: Array
    sends: Sequence[int]
    receives: Sequence[int]
    codec: RowCodec | None = None

    def nbytes(self, count: int) -> int:
        """Bytes of `count` rows in a message."""
        width = int(np.prod(self.rows.shape[1:], dtype=int))
        return count * width * self.rows.itemsize if self.codec is None else self.codec.nbytes(count * width)

    def encoded(self, start: int, stop: int) -> Array:
        rows = self.rows[start:stop]
        return _bytes(rows) if self.codec is None else self.codec.encode(rows)

    def decoded(self, wire: Array, count: int) -> Array:
        shape = (count, *self.rows.shape[1:])
        if self.codec is not None:
            return self.codec.decode(wire, shape, self.rows.dtype)
        return wire.view(self.rows.dtype).reshape(shape)


class RowExchange:
    """Exchange of parts along an axis by one ``Ialltoallv``, which the constructor starts; `finish` returns the rows.

    Construction is collective. A rank's rows for itself are not encoded. Parts have the same dtypes, widths and
    codecs on all ranks. Sent rows must not change before `finish`.
    """

    def __init__(self, axis: Any, parts: Sequence[RowPart]):
        self._axis, self._parts, self._request = axis, parts, None
        if axis.size == 1:
            return
        whole = parts[0]
        self._plain = len(parts) == 1 and whole.codec is None
        xp = kernels.array_namespace(whole.rows)
        if self._plain:
            width = int(np.prod(whole.rows.shape[1:], dtype=int))
            self._arriving = xp.empty((sum(whole.receives), *whole.rows.shape[1:]), whole.rows.dtype)
            message, counts = movable(xp.ascontiguousarray(whole.rows)), [count * width for count in whole.sends]
            expected = [count * width for count in whole.receives]
        else:
            message, counts, expected = self._pack(xp)
            self._arriving = xp.empty(sum(expected), np.uint8)
        self._message = message  # alive until the exchange ends
        self._request = axis.comm.Ialltoallv([message, counts], [movable(self._arriving), expected])

    def _pack(self, xp: Any) -> tuple[Array, list[int], list[int]]:
        """Message to all ranks, and its bytes for each rank and from each."""
        others = [rank for rank in range(self._axis.size) if rank != self._axis.rank]
        bounds = [_ends(part.sends) for part in self._parts]
        pieces = [part.encoded(*ends[rank]) for rank in others for part, ends in zip(self._parts, bounds)]
        sends, receives = [0] * self._axis.size, [0] * self._axis.size
        for rank in others:
            sends[rank] = sum(part.nbytes(part.sends[rank]) for part in self._parts)
            receives[rank] = sum(part.nbytes(part.receives[rank]) for part in self._parts)
        return xp.concatenate([xp.empty(0, np.uint8), *pieces]), sends, receives

    def finish(self) -> list[Array]:
        """Wait, and return the rows of every part, ordered by sending rank."""
        if self._request is None:
            return [part.rows for part in self._parts]
        self._request.Wait()
        if self._plain:
            return [self._arriving]
        arrived: list[list[Array]] = [[] for _ in self._parts]
        position = 0
        for rank in range(self._axis.size):
            for part, pieces in zip(self._parts, arrived):
                if rank == self._axis.rank:
                    start, stop = _ends(part.sends)[rank]
                    pieces.append(part.rows[start:stop])
                    continue
                count = part.receives[rank]
                end = position + part.nbytes(count)
                pieces.append(part.decoded(self._arriving[position:end], count))
                position = end
        xp = kernels.array_namespace(self._arriving)
        return [xp.concatenate([part.rows[:0], *pieces]) for part, pieces in zip(self._parts, arrived)]


def _ends(counts: Sequence[int]) -> list[tuple[int, int]]:
    """First row of each rank, and the row after its last."""
    return list(pairwise(accumulate(counts, initial=0)))


def _bytes(rows: Array) -> Array:
    return kernels.array_namespace(rows).ascontiguousarray(rows).reshape(-1).view(np.uint8)
