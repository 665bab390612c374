"""Experts on the ranks of a mesh axis: rows travel to the rank that holds their expert, and results back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from collectives.schedule.chunks import even
from parallel.expert.dispatch import Dispatch
from parallel.nn import kernels
from parallel.nn.expert_group import ExpertGroup
from parallel.nn.operator import GradientSink, Operator, Parameter, PassMode
from quant.types import Array


class RowBatch(NamedTuple):
    """Rows on which experts compute together: their positions, ordered by expert, and the number for each expert."""

    positions: slice | Array
    counts: list[int]


class ExpertRanks(ExpertGroup):
    """This rank's experts of a group that is divided over the ranks of an axis (GShard, arXiv:2006.16668, section 2.3).

    Neighbouring experts share a rank; numbers of experts may differ by one, or be 0. A rank gets the gradients of its
    experts by the tokens of all ranks of the axis.

    Parameters
    ----------
    axis : MeshAxis
    experts : sequence of Operator
        All of them; only this rank's are kept, under the names that they have in the whole group.
    by_source : bool
        Compute on the rows of every rank apart, so that the shapes of products, and thus bits, are those of one rank.
    """

    def __init__(self, axis: Any, experts: Sequence[Operator], by_source: bool = False):
        self.axis, self.by_source = axis, by_source
        self.owners = even(len(experts), axis.size)
        self.first = sum(self.owners[: axis.rank])
        super().__init__(experts[self.first : self.first + self.owners[axis.rank]])

    def __len__(self) -> int:
        return sum(self.owners)

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        yield from ((str(self.first + number), expert) for number, expert in enumerate(self.experts))

    def forward_segments(self, rows: Array, counts: Sequence[int], run: PassMode) -> tuple[Array, Any]:
        """Exchange rows, apply this rank's experts, exchange the results. Collective along the axis."""
        xp, dispatch = kernels.array_namespace(rows), Dispatch(self.axis, self.owners, counts)
        arrived, batches, saved = dispatch.to_experts(rows), self._batches(dispatch.received, xp), []
        results = xp.empty(arrived.shape, arrived.dtype)
        for positions, of_experts in batches:
            results[positions], values = super().forward_segments(arrived[positions], of_experts, run)
            saved.append(values)
        return dispatch.to_sources(results), (dispatch, batches, saved)

    def backward_segments(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Exchange gradients of results and of rows along the routes of the forward pass. Collective along the axis."""
        dispatch, batches, values = saved
        arrived = dispatch.to_experts(dy)
        drows = kernels.array_namespace(dy).empty(arrived.shape, arrived.dtype)
        for (positions, _), own in zip(batches, values):
            drows[positions] = super().backward_segments(arrived[positions], own, grads)
        return dispatch.to_sources(drows)

    def _batches(self, received: np.ndarray, xp: Any) -> list[RowBatch]:
        """Batches of the rows that arrived, ordered by source and expert, from their numbers (sources, experts)."""
        bounds = [0, *accumulate(received.reshape(-1).tolist())]
        if self.by_source:
            every = range(0, len(bounds), max(len(self.experts), 1))
            return [
                RowBatch(slice(bounds[start], bounds[stop]), counts.tolist())
                for (start, stop), counts in zip(pairwise(every), received)
            ]
        ranges = np.array([slice(*pair) for pair in pairwise(bounds)], object).reshape(received.shape)
        numbers = np.arange(bounds[-1])
        positions = np.concatenate([numbers[:0], *(numbers[one] for one in ranges.T.flat)])
        return [RowBatch(xp.asarray(positions), received.sum(axis=0).tolist())]
