"""Routers of divided sequences: choices and loss terms as for whole sequences. A rank has some tokens of each.

A token's scores depend on itself only. For decisions about a whole sequence ranks exchange the scores of all choices
(for a limit of capacity) and the number of choices of every expert (for the balance loss).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parallel.nn import kernels
from parallel.nn.expert_choice import within_capacity
from parallel.nn.rewrite import inherit
from parallel.nn.router import Router
from parallel.sharding.context.messages import allgather, allgather_positions
from parallel.sharding.context.sequence_division import SequenceDivision
from quant.types import Array


class DividedRouter(Router):
    """Router of this rank's tokens of every sequence. Shares the parameters and biases of `whole`.

    Collective along the axis, in forward passes. Loss terms cover this rank's tokens: they are terms of a sum over the
    axis.

    Parameters
    ----------
    whole : Router
    axis : MeshAxis
    division : SequenceDivision
    """

    mixes = (-1,)
    fixed = (*Router.fixed, "settings")  # which decide what ranks exchange

    def __init__(self, whole: Router, axis: Any, division: SequenceDivision):
        inherit(self, whole)
        self.axis, self.division = axis, division
        self.exchanges = bool(whole.settings.balance_loss or whole.settings.capacity is not None)

    def _within(self, capacity: int, chosen: Array, scores: Array) -> Array:
        xp = kernels.array_namespace(scores)
        wanted = xp.where(chosen, scores, -math.inf)
        whole = allgather_positions(self.axis, self.division, wanted)
        kept = within_capacity(whole != -math.inf, whole, capacity, self.settings.priority)
        return kept[:, self._positions(xp)]

    def _counts(self, chosen: Array) -> Array:
        xp = kernels.array_namespace(chosen)
        counts = xp.ascontiguousarray(super()._counts(chosen).astype(np.int64))
        return xp.stack(allgather(self.axis, counts, [counts.shape] * self.axis.size)).sum(axis=0)

    def _length(self, tokens: Array) -> int:
        return self.division.length

    def _tokens(self, x: Array) -> int:
        return self.division.length

    def _of_tokens(self, numbers: Array, x: Array, each: int) -> Array:
        xp = kernels.array_namespace(x)
        whole = numbers.reshape(len(x), self.division.length, each)
        return whole[:, self._positions(xp)].astype(kernels.wide(x.dtype))

    def _positions(self, xp: Any) -> Array:
        return xp.asarray(self.division.positions(self.axis.rank))
