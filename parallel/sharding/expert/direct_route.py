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

from parallel.nn import kernels
from parallel.nn.expert_group import Assignments
from parallel.runtime.interleaving import give_way
from parallel.sharding.expert.row_codec import RowCodec
from parallel.sharding.expert.row_exchange import RowExchange, RowsByRank, segments
from quant.types import Array


def counts_of_all(axis: Any, counts: Sequence[int]) -> np.ndarray:
    """Numbers of every rank, a row each. Collective."""
    every = np.empty((axis.size, len(counts)), np.int64)
    every[axis.rank] = counts
    if axis.size > 1:
        axis.comm.Allgather(every[axis.rank].copy(), every)
    return every


class DirectRoute:
    """Route of the tokens of one forward pass and its backward pass. Numbers and order are the same in both.

    Every method that sends starts an exchange. The next method ends it, so that a rank computes meanwhile. All are
    collective along the axis.

    Parameters
    ----------
    axis : MeshAxis
    owners : sequence of int
        Number of experts of each rank. Experts are numbered by rank.
    chosen : Assignments
    codes : tuple of str
        `RowCodec` formats of rows for experts on other ranks, and of rows back.
    counts : array of int64, of shape (ranks, experts), optional
        Assignments of every rank. By default exchanged by the constructor.

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
        codes: tuple[str, str] = ("", ""),
        counts: np.ndarray | None = None,
    ):
        self._axis, self._chosen, self._codes = axis, chosen, codes
        every = counts_of_all(axis, chosen.counts) if counts is None else counts
        self._bounds = bounds = [0, *accumulate(owners)]
        per_rank = np.stack([every[:, start:stop].sum(axis=1) for start, stop in pairwise(bounds)], axis=1)
        self.received = every[:, bounds[axis.rank] : bounds[axis.rank + 1]]
        self._here = range(bounds[axis.rank], bounds[axis.rank + 1])  # experts of this rank
        self.sends: list[int] = per_rank[axis.rank].tolist()
        self._receives: list[int] = per_rank[:, axis.rank].tolist()

    def _exchanged(self, own: Array, others: Array, sends: list[int], receives: list[int]) -> None:
        """Start to exchange this rank's rows for itself and those for others, as they travel."""
        rows = RowsByRank(own, others, sends, self._axis.rank)
        self._exchange = RowExchange(self._axis, rows, rows.empty(receives)._replace(own=own))

    def _set_format(self, width: int, dtype: np.dtype) -> None:
        self._there, self._back, self._own = (RowCodec(code, width, dtype) for code in (*self._codes, ""))

    def _divided(self, array: Array) -> tuple[Array, Array]:
        """Items of the assignments to experts of this rank, and items of all other assignments."""
        start = sum(self.sends[: self._axis.rank])
        stop = start + self.sends[self._axis.rank]
        return array[start:stop], kernels.array_namespace(array).concatenate([array[:start], array[stop:]])

    def _by_expert(self, rows: RowsByRank) -> list[Array]:
        """Rows of this rank's assignments to each expert: views."""
        counts = [self._chosen.counts[start:stop] for start, stop in pairwise(self._bounds)]
        return [some for part, of_rank in zip(rows.parts, counts) for some in segments(part, of_rank)]

    def send(self, tokens: Array) -> None:
        """Start to send tokens (tokens, width) to their experts."""
        self._set_format(tokens.shape[1], tokens.dtype)
        own, others = self._divided(self._chosen.tokens)
        self._exchanged(tokens[own], self._there.encode(tokens)[others], self.sends, self._receives)

    def send_encoded(self, tokens: Array, width: int, dtype: np.dtype) -> None:
        """As `send`, of tokens that are encoded already."""
        self._set_format(width, dtype)
        own, others = self._divided(self._chosen.tokens)
        self._exchanged(self._there.decode(tokens[own]), tokens[others], self.sends, self._receives)

    def receive(self) -> RowsByRank:
        """Rows that were sent to this rank's experts, by `send` or `send_gradients`: of a source, by expert."""
        return self._exchange.finish().decoded(self._there)

    def combine(self, results: RowsByRank, y: Array) -> list[Array]:
        """Send results of the received rows back. Add them, weighted, to y, expert by expert.

        Returns the results of this rank's own assignments, of each expert.
        """
        self.to_sources(results)
        give_way()
        return self.add_results(y)

    def to_sources(self, rows: RowsByRank) -> None:
        """Start to send results, or gradients, of the received rows back."""
        self._exchanged(rows.own, self._back.encode(rows.others), self._receives, self.sends)

    def add_results(self, y: Array) -> list[Array]:
        """Second half of `combine`, after `to_sources`. Rows of other ranks are still encoded."""
        mine = self._by_expert(self._exchange.finish())
        self._add(mine, y, self._chosen.weights)
        return mine

    def _add(self, rows: Sequence[Array], y: Array, weights: Array | None = None) -> None:
        """Add rows of each expert (still encoded) to the rows of their tokens in y."""
        for expert, (place, some) in enumerate(zip(self._chosen.places, rows)):
            codec, of_rows = self._codec_of(expert), None if weights is None else weights[place]
            codec.add(y, self._chosen.tokens[place], some, of_rows)

    def _codec_of(self, expert: int) -> RowCodec:
        """Format in which results of an expert come."""
        return self._own if expert in self._here else self._back

    def send_gradients(
        self, upper: Array, results: Sequence[Array], dtype: np.dtype, encoded: Array | None = None
    ) -> None:
        """Start to send gradients of y, wide, to the experts, in their dtype. `results` are from `combine`.

        With a format, a token's gradient is encoded once (`encoded`: is already), and its scales multiplied by
        weights.
        """
        self._set_format(upper.shape[1], dtype)
        empty, count = kernels.array_namespace(upper).empty, self.sends[self._axis.rank]
        own = empty((count, upper.shape[1]), dtype)
        if self._there.name:
            others = self._encoded_gradients(upper, results, own, encoded)
        else:
            others = empty((sum(self.sends) - count, upper.shape[1]), dtype)
            rows = self._by_expert(RowsByRank(own, others, self.sends, self._axis.rank))
            self._dweights = self._chosen.gradients(upper, results, rows)
        self._exchanged(own, others, self.sends, self._receives)

    def _encoded_gradients(self, upper: Array, results: Sequence[Array], own: Array, encoded: Array | None) -> Array:
        """Gradients for experts of other ranks, encoded.

        Writes gradients for this rank's experts to `own`, and of the weights.
        """
        (_, tokens), (_, weights) = self._divided(self._chosen.tokens), self._divided(self._chosen.weights)
        others = (self._there.encode(upper) if encoded is None else encoded)[tokens]
        self._there.scale(others, weights)
        first, last = self._here.start, self._here.stop
        mine, about = self._chosen.of_experts(first, last), list(zip(self._chosen.places, results))
        dweights = [
            [self._back.products(upper, self._chosen.tokens[place], some) for place, some in about[:first]],
            [mine.gradients(upper, results[first:last], segments(own, mine.counts))],
            [self._back.products(upper, self._chosen.tokens[place], some) for place, some in about[last:]],
        ]
        self._dweights = kernels.array_namespace(upper).concatenate([one for some in dweights for one in some])
        return others

    def combine_gradients(self, drows: RowsByRank, dx: Array) -> Array:
        """Send gradients of the received rows back, add them to dx.

        Returns the gradients of the assignments' weights.
        """
        self.to_sources(drows)
        give_way()
        return self.add_gradients(dx)

    def add_gradients(self, dx: Array) -> Array:
        """Second half of `combine_gradients`, after `to_sources`."""
        self._add(self._by_expert(self._exchange.finish()), dx)
        return self._dweights
