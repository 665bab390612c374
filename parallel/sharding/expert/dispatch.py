"""Dispatch of tokens by name: the route that they take to their experts, and their format on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from parallel.nn.expert_group import Assignments
from parallel.sharding.expert.direct_route import DirectRoute
from parallel.sharding.expert.piecewise_route import PiecewiseRoute
from parallel.sharding.expert.row_codec import SPECS
from quant.types import Array

ROUTES = ("direct", "hierarchical")


class TokenRoute(Protocol):
    """Interface of routes: `DirectRoute` describes it. Rows have the types that `receive` of the route returns.

    `combine` and `combine_gradients` yield to other tasks once on every route, other methods never: ranks that
    share a communicator must yield equally often (`parallel.runtime.interleaving`), and may have different routes.
    """

    @property
    def sends(self) -> list[int]: ...
    @property
    def received(self) -> np.ndarray: ...
    def send(self, tokens: Array) -> None: ...
    def receive(self) -> Any: ...
    def combine(self, results: Any, y: Array) -> Any: ...
    def send_gradients(self, upper: Array, results: Any, dtype: np.dtype) -> None: ...
    def combine_gradients(self, drows: Any, dx: Array) -> Array: ...


@dataclass(frozen=True)
class Dispatch:
    """Route of tokens to experts on other ranks and of results back, and their format on the way.

    Attributes
    ----------
    route : str
        ``"direct"``: a copy for each expert. ``"hierarchical"``: a copy for each node of `nodes`.
    code : str
        Format of `parallel.sharding.expert.row_codec.SPECS`. "": the rows' own dtype. Direct: of all rows for other
        ranks. Hierarchical: of tokens and their gradients, also for experts of the same rank, and of sums between
        nodes.

    Examples
    --------
    >>> Dispatch.parse("hierarchical:int8")
    Dispatch(route='hierarchical', code='int8')
    """

    route: str = "direct"
    code: str = ""

    @classmethod
    def parse(cls, text: str) -> Dispatch:
        """Parse ROUTE or ROUTE:FORMAT. ValueError for unknown names."""
        route, colon, code = text.partition(":")
        if route not in ROUTES or (colon and code not in SPECS):
            raise ValueError(
                f"dispatch: expected {' or '.join(ROUTES)}, perhaps with :{' or :'.join(SPECS)}; found {text!r}"
            )
        return cls(route, code)

    @property
    def is_exact(self) -> bool:
        """True if results equal, bit for bit, the results of all experts on one rank."""
        return self == Dispatch()

    def plan(self, axis: Any, owners: Sequence[int], chosen: Assignments, local: Any = None) -> TokenRoute:
        """Route of one pass along an axis. `DirectRoute` and `PiecewiseRoute` describe the arguments. Collective.

        If all ranks of the axis share a node, the hierarchical route is the direct one, and encodes nothing.
        """
        if self.route == "direct" or axis.size == 1:
            return DirectRoute(axis, owners, chosen, (self.code, self.code))
        nodes = axis.comm.nodes
        if nodes is None:
            return DirectRoute(axis, owners, chosen)
        return PiecewiseRoute(axis, owners, chosen, self.code, nodes, local)
