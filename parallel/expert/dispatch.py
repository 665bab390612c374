"""Dispatch: exchange of token rows between the ranks that choose experts and the ranks that hold them.

    rank 0 has rows for experts  0 0 1 2 3      experts 0, 1 on rank 0 get   from rank 0: 0 0 1    from rank 1: 1 1
    rank 1 has rows for experts  1 1 3 3        experts 2, 3 on rank 1 get   from rank 0: 2 3      from rank 1: 3 3

Rows are ordered by expert, so those for a rank lie together and nothing is packed. Per direction every rank sends
(e-1)/e of its k T rows of the width h, if the load is balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from parallel.nn import kernels
from parallel.nn.kernels.storage import movable
from quant.types import Array


class Dispatch:
    """Exchange of one batch of rows along an axis, there and back, forward and backward.

    Parameters
    ----------
    axis : MeshAxis
    owners : sequence of int
        Number of experts of each rank; experts are numbered by rank.
    counts : sequence of int
        Rows of this rank for every expert. Construction is collective.

    Attributes
    ----------
    received : array of int64, of shape (ranks, experts of this rank)
        Rows from each rank for each expert.
    """

    def __init__(self, axis: Any, owners: Sequence[int], counts: Sequence[int]):
        self._axis = axis
        every = np.empty((axis.size, len(counts)), np.int64)
        every[axis.rank] = counts
        if axis.size > 1:
            axis.comm.Allgather(every[axis.rank].copy(), every)
        bounds = [0, *accumulate(owners)]
        per_rank = np.stack([every[:, start:stop].sum(axis=1) for start, stop in pairwise(bounds)], axis=1)
        self.received = every[:, bounds[axis.rank] : bounds[axis.rank + 1]]
        self._sends = per_rank[axis.rank].tolist()
        self._receives = per_rank[:, axis.rank].tolist()

    def to_experts(self, rows: Array) -> Array:
        """Rows for this rank's experts, ordered by source and then by expert, from those of this rank by expert."""
        return self._exchange(rows, self._sends, self._receives)

    def to_sources(self, rows: Array) -> Array:
        """The inverse of `to_experts`."""
        return self._exchange(rows, self._receives, self._sends)

    def _exchange(self, rows: Array, sends: list[int], receives: list[int]) -> Array:
        if self._axis.size == 1:
            return rows
        width, xp = rows.shape[1], kernels.array_namespace(rows)
        arriving = xp.empty((sum(receives), width), rows.dtype)
        self._axis.comm.Alltoallv(
            [movable(xp.ascontiguousarray(rows)), [count * width for count in sends]],
            [movable(arriving), [count * width for count in receives]],
        )
        return arriving
