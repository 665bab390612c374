"""Experts on the ranks of a mesh axis: rows travel to the rank that holds their expert, and results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.schedule.chunks import even
from parallel.nn import kernels
from parallel.nn.expert_group import Assignments, ExpertGroup
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from parallel.runtime.interleaving import give_way, own_time
from parallel.sharding.expert.dispatch import Dispatch, TokenRoute
from parallel.sharding.expert.row_exchange import segments
from quant.types import Array


class ExchangeTraffic:
    """Numbers on the exchanges of an operator in a micro-batch's passes. A ``with`` block adds its seconds.

    Parameters
    ----------
    run : PassMode
        Gets the numbers in `traffic` and `seconds`.
    name : str
        Logical name of the operator.
    """

    def __init__(self, run: PassMode, name: str):
        self._run, self._name = run, name

    def _add(self, word: str, number: int) -> None:
        self._run.traffic[self._name, word] = self._run.traffic.get((self._name, word), 0) + number

    def add_copies(self, sends: Sequence[int], axis: Any) -> None:
        """Count rows that this rank sends to each rank of the axis."""
        nodes = (axis.comm.nodes if axis.size > 1 else None) or (0,) * axis.size
        self._add("copies", sum(sends) - sends[axis.rank])
        self._add("between nodes", sum(count for count, node in zip(sends, nodes) if node != nodes[axis.rank]))

    def __enter__(self) -> None:
        self._began = own_time()

    def __exit__(self, *_: object) -> None:
        seconds = own_time() - self._began
        self._run.seconds[self._name] = self._run.seconds.get(self._name, 0.0) + seconds


class ExpertRanks(ExpertGroup):
    """This rank's experts of a group that is divided over the ranks of an axis (GShard, arXiv:2006.16668, section 2.3).

    Neighbouring experts share a rank. Numbers of experts may differ by one, or be 0. A rank gets the gradients of its
    experts by the tokens of all ranks of the axis.

    Parameters
    ----------
    axis : MeshAxis
    experts : sequence of Operator
        All of them. Only this rank's are kept, under the names that they have in the whole group.
    by_source : bool
        Compute on the rows of every rank apart, so that the shapes of products, and thus bits, equal those on one
        rank.
    dispatch : str
        Text for `Dispatch.parse`. ValueError for one that changes bits, if `by_source`.
    local : MeshAxis, optional
        Ranks of the axis on this rank's node, for the hierarchical route
        (`parallel.sharding.expert.hierarchical_route`).
    first : int
        Number, in the mixture, of the first expert of the group.
    """

    exchanges = True

    def __init__(
        self,
        axis: Any,
        experts: Sequence[Operator],
        by_source: bool = False,
        dispatch: str = "direct",
        local: Any = None,
        first: int = 0,
    ):
        self.axis, self.local, self.by_source, self.dispatch = axis, local, by_source, Dispatch.parse(dispatch)
        if by_source and not self.dispatch.is_exact:
            raise ValueError(f"dispatch: expected direct, for the bits of one rank, found {dispatch}")
        self.owners = even(len(experts), axis.size)
        start = sum(self.owners[: axis.rank])
        super().__init__(experts[start : start + self.owners[axis.rank]], first + start)

    def __len__(self) -> int:
        return sum(self.owners)

    def outline_rows(self, x: ArraySpec) -> OperatorOutline:
        """Outline for as many rows as this rank's experts get if tokens are divided evenly."""
        rows = x.shape[0] * self.axis.size * len(self.experts) // len(self)
        if not self.experts:
            return OperatorOutline(ArraySpec(*x), ())
        return super().outline_rows(ArraySpec((rows, *x.shape[1:]), x.dtype))._replace(y=ArraySpec(*x))

    def send(self, tokens: Array, chosen: Assignments) -> TokenRoute:
        """Start to send tokens (tokens, width) to their experts. Collective along the axis, as all that follows."""
        route = self.dispatch.plan(self.axis, self.owners, chosen, self.local)
        route.send(tokens)
        return route

    def forward_sent(self, sent: TokenRoute, y: Array, run: PassMode) -> Any:
        """Apply this rank's experts to the rows that arrive. Exchange the results, and add them to y, wide.

        Notes in `PassMode.traffic`: "copies" of tokens to other ranks, and copies "between nodes". Notes in
        `PassMode.seconds` the time of waiting for exchanges and of putting rows in place, in both passes.
        """
        traffic = ExchangeTraffic(run, self.name)
        traffic.add_copies(sent.sends, self.axis)
        with traffic:
            give_way()
            arrived = sent.receive()
        saved = []

        def compute(_: int, number: int, rows: Array) -> Array:
            y, values = self.forward_rows(number, rows, run)
            saved.append(values)
            return y

        results = self._computed(arrived, sent.received, range(len(self.experts)), compute)
        with traffic:
            mine = sent.combine(results, y)
        return sent, mine, saved, traffic

    def send_gradients(self, upper: Array, saved: Any, dtype: np.dtype) -> TokenRoute:
        """Start to send gradients of y along the routes of the forward pass."""
        route: TokenRoute = saved[0]
        route.send_gradients(upper, saved[1], dtype)
        return route

    def backward_sent(self, sent: TokenRoute, saved: Any, dx: Array, grads: GradientSink) -> Array:
        """Gradients of this rank's experts by the rows that arrive.

        Exchange the gradients of the rows, and add them to dx.
        """
        _, _, values, traffic = saved
        with traffic:
            give_way()
            arrived = sent.receive()
        count = len(self.experts)

        def compute(batch: int, number: int, dy: Array) -> Array:
            return self.backward_rows(number, dy, values[batch * count + number], grads)

        last_first = range(count)[::-1]  # whose saved values are in the caches
        drows = self._computed(arrived, sent.received, last_first, compute)
        with traffic:
            return sent.combine_gradients(drows, dx)

    def _computed(
        self,
        arrived: Any,
        received: np.ndarray,
        order: Sequence[int],
        compute: Callable[[int, int, Array], Array],
    ) -> Any:
        """Results of rows that arrived, `received` (sources, experts) of them, in the type of `arrived`.

        ``compute(batch, expert, rows)`` maps an expert's rows, of all sources or of source `batch`, to results. It is
        called for each batch and, in it, for the experts in this order.
        """
        results, concatenate = arrived.empty(), kernels.array_namespace(arrived.own).concatenate
        rows, places = (
            [segments(part, counts) for part, counts in zip(every.parts, received.tolist())]
            for every in (arrived, results)
        )
        sources = list(range(len(rows)))
        # By source, products have the rows of one rank alone, and so its bits.
        for batch, some in enumerate([[one] for one in sources] if self.by_source else [sources]):
            for expert in order:
                parts = [rows[one][expert] for one in some]
                found = compute(batch, expert, parts[0] if len(parts) == 1 else concatenate(parts))
                into = [places[one][expert] for one in some]
                for place, part in zip(into, segments(found, list(map(len, into)))):
                    place[...] = part
        return results
