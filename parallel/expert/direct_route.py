"""Direct route of tokens: from the rank that chooses an expert to the rank that holds it, a copy for each expert.

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

from parallel.expert.row_codec import RowCodec
from parallel.expert.row_exchange import RowExchange, RowPart, RowsByRank, segments
from parallel.nn import kernels
from parallel.nn.expert_group import Assignments
from quant.types import Array


def counts_of_all(axis: Any, counts: Sequence[int]) -> np.ndarray:
    """Numbers of every rank, a row each. Collective."""
    every = np.empty((axis.size, len(counts)), np.int64)
    every[axis.rank] = counts
    if axis.size > 1:
        axis.comm.Allgather(every[axis.rank].copy(), every)
    return every


class DirectRoute:
    """Route of the tokens of one forward pass and its backward pass; numbers and order are those of both.

    Every method that sends starts an exchange, which the next one ends, so that a rank computes meanwhile. All are
    collective along the axis.

    Parameters
    ----------
    axis : MeshAxis
    owners : sequence of int
        Number of experts of each rank; experts are numbered by rank.
    chosen : Assignments
    codec : RowCodec, optional
        Encodes rows for other ranks.
    counts : array of int64, of shape (ranks, experts), optional
        Assignments of every rank; by default exchanged here.

    Attributes
    ----------
    sends : list of int
        Rows that this rank sends to each, itself included.
    received : array of int64, of shape (ranks, experts of this rank)
        Rows from each rank for each expert.
    """

    def __init__(
        self,
        axis: Any,
        owners: Sequence[int],
        chosen: Assignments,
        codec: RowCodec | None = None,
        counts: np.ndarray | None = None,
    ):
        self._axis, self._chosen, self._codec = axis, chosen, codec
        every = counts_of_all(axis, chosen.counts) if counts is None else counts
        self._bounds = bounds = [0, *accumulate(owners)]
        per_rank = np.stack([every[:, start:stop].sum(axis=1) for start, stop in pairwise(bounds)], axis=1)
        self.received = every[:, bounds[axis.rank] : bounds[axis.rank + 1]]
        self.sends: list[int] = per_rank[axis.rank].tolist()
        self._receives: list[int] = per_rank[:, axis.rank].tolist()

    def _to_experts(self, rows: RowsByRank) -> None:
        self._exchange = RowExchange(self._axis, [RowPart(rows, self._receives, self._codec)])

    def to_sources(self, rows: RowsByRank) -> None:
        """Start to send results, or gradients, of the received rows back."""
        self._exchange = RowExchange(self._axis, [RowPart(rows, self.sends, self._codec)])

    def _by_expert(self, rows: RowsByRank) -> list[Array]:
        """Rows of this rank's assignments to each expert: views."""
        counts = [self._chosen.counts[start:stop] for start, stop in pairwise(self._bounds)]
        return [some for part, of_rank in zip(rows.parts, counts) for some in segments(part, of_rank)]

    def send(self, tokens: Array) -> None:
        """Start to send tokens (tokens, width) to their experts."""
        self._to_experts(RowsByRank.taken(tokens, self._chosen.tokens, self.sends, self._axis.rank))

    def receive(self) -> RowsByRank:
        """Rows that were sent to this rank's experts, by `send` or `send_gradients`: of a source, by expert."""
        return self._exchange.finish()[0]

    def combine(self, results: RowsByRank, y: Array) -> list[Array]:
        """Send results of the received rows back; add them, weighted, to y, expert by expert.

        Returns the results of this rank's own assignments, of each expert.
        """
        self.to_sources(results)
        return self.add_results(y)

    def add_results(self, y: Array) -> list[Array]:
        """Second half of `combine`, after `to_sources`."""
        mine = self._by_expert(self._exchange.finish()[0])
        self._chosen.add(y, mine)
        return mine

    def send_gradients(self, upper: Array, results: Sequence[Array], dtype: np.dtype) -> None:
        """Start to send gradients of y, wide, to the experts, in their dtype; `results` are those of `combine`."""
        none = kernels.array_namespace(upper).empty((0, upper.shape[1]), dtype)
        rows = RowsByRank(none, none, [], self._axis.rank).empty(self.sends)
        self._dweights = self._chosen.gradients(upper, results, self._by_expert(rows))
        self._to_experts(rows)

    def combine_gradients(self, drows: RowsByRank, dx: Array) -> Array:
        """Send gradients of the received rows back, add them to dx; returns those of the assignments' weights."""
        self.to_sources(drows)
        return self.add_gradients(dx)

    def add_gradients(self, dx: Array) -> Array:
        """Second half of `combine_gradients`, after `to_sources`."""
        self._chosen.add(dx, self._by_expert(self._exchange.finish()[0]), weighted=False)
        return self._dweights
