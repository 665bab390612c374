"""Hierarchical route of tokens in two pieces: while one crosses the network, the other is packed, relayed or added."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parallel.nn import kernels
from parallel.nn.expert_group import Assignments
from parallel.runtime.interleaving import give_way
from parallel.runtime.vector_memory import to_host
from parallel.sharding.expert.direct_route import counts_of_all
from parallel.sharding.expert.hierarchical_route import HierarchicalRoute, TokensByNode, relays
from parallel.sharding.expert.row_exchange import RowsByRank
from quant.types import Array

Result = TypeVar("Result")

LEAST = 512
"""Least average number of assignments of a rank for dividing its tokens. Below it, more messages take longer."""


class RowPieces(NamedTuple):
    """Rows of several pieces of the tokens, as `RowsByRank` of more ranks."""

    pieces: list[RowsByRank]

    @property
    def own(self) -> Array:
        """Rows of the first piece that stay on this rank."""
        return self.pieces[0].own

    @property
    def parts(self) -> list[Array]:
        """Rows of each rank, for each piece: views."""
        return [part for piece in self.pieces for part in piece.parts]

    def empty(self) -> RowPieces:
        """New arrays for the same number of rows."""
        return RowPieces([piece.empty() for piece in self.pieces])


def alternate(steps: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Advance generators in turns until all have returned. Return their results."""
    results: dict[int, Result] = {}
    while len(results) < len(steps):
        for number, one in enumerate(steps):
            if number not in results:
                try:
                    next(one)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(steps))]


def combined(steps: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Like `alternate`, for `combine` and similar methods.

    Yields to other tasks once, while sums of results cross the network.
    """
    for _ in range(2):  # rows within the node, sums
        for one in steps:
            next(one)
    give_way()
    return alternate(steps)


class PiecewiseRoute:
    """Route with the methods of `DirectRoute`, and the parameters of `HierarchicalRoute`. Collective.

    The assignments of the first tokens are one piece, the others another. If ranks have few, or rows are encoded, all
    are one piece: the network has little to send, and more messages would take longer.
    """

    def __init__(
        self,
        axis: Any,
        owners: Sequence[int],
        chosen: Assignments,
        code: str,
        nodes: Sequence[int],
        local: Any = None,
    ):
        tokens = to_host(chosen.tokens)
        self._assigned, of_expert, relay = len(tokens), np.repeat(nodes, owners), relays(nodes)[axis.rank]
        self._places, pieces = [np.arange(len(tokens))], [chosen]
        if not code:
            first = tokens <= tokens.max(initial=0) // 2
            self._places = [np.flatnonzero(first), np.flatnonzero(~first)]
            pieces = [chosen.subset(places) for places in self._places]
        plans = [TokensByNode.of(piece, of_expert, relay) for piece in pieces]
        every = counts_of_all(axis, np.concatenate([plan.numbers for plan in plans]).tolist())
        numbers = np.split(every, len(plans), axis=1)
        # Of all ranks' counts, so that all decide alike.
        if not code and sum(int(some[:, -len(of_expert) :].sum()) for some in numbers) < axis.size * LEAST:
            self._places, pieces, numbers = [np.arange(len(tokens))], [chosen], [numbers[0] + numbers[1]]
            plans = [TokensByNode.of(chosen, of_expert, relay)]
        self._routes = [
            HierarchicalRoute(axis, owners, piece, plan, every, code, nodes, local)
            for piece, plan, every in zip(pieces, plans, numbers)
        ]

    @property
    def sends(self) -> list[int]:
        """Rows that this rank sends to each, itself included: to relays, and as a relay."""
        return [sum(counts) for counts in zip(*(route.sends for route in self._routes))]

    @property
    def received(self) -> np.ndarray:
        """Rows from each rank, for each piece, for each expert of this rank. Only after `receive`."""
        return np.concatenate([route.received for route in self._routes])

    def send(self, tokens: Array) -> None:
        """Start to send tokens (tokens, width) to their experts."""
        for route in self._routes:
            route.send(tokens)

    def receive(self) -> RowPieces:
        """Rows that were sent to this rank's experts, by `send` or `send_gradients`."""
        return RowPieces(alternate([route.receive() for route in self._routes]))

    def combine(self, results: RowPieces, y: Array) -> list[list[Array]]:
        """Send results of the received rows back. Add them, weighted, to y. Returns those that this rank relayed."""
        return combined([route.combine(some, y) for route, some in zip(self._routes, results.pieces)])

    def send_gradients(self, upper: Array, results: Sequence[list[Array]], dtype: np.dtype) -> None:
        """Start to send gradients of y, wide, to the experts, in their dtype. `results` are from `combine`."""
        rows = kernels.narrow(upper, dtype)
        for route, some in zip(self._routes, results):
            route.send_gradients(rows, some)

    def combine_gradients(self, drows: RowPieces, dx: Array) -> Array:
        """Send gradients of the received rows back, add them to dx.

        Returns the gradients of the assignments' weights.
        """
        found = combined([route.combine_gradients(some, dx) for route, some in zip(self._routes, drows.pieces)])
        xp = kernels.array_namespace(dx)
        dweights = xp.empty(self._assigned, found[0].dtype)
        for places, some in zip(self._places, found):
            dweights[xp.asarray(places)] = some
        return dweights
