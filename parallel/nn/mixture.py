"""Mixture of experts: every token is given to a few of many operators, which its router chooses.

    y_t = sum over the chosen experts e of  w_te expert_e(x_t)     [+ shared(x_t)]

(Shazeer et al., "Outrageously Large Neural Networks", arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect_last
from parallel.nn.expert_group import Assignments, ExpertGroup
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from parallel.nn.placement import Placement
from parallel.nn.router import Router
from quant.types import Array


class MixtureOfExperts(Operator):
    """Mixture of experts over the last axis of x (batch, ..., width); dropped tokens get 0, or the shared expert's y.

    Terms are added in the order of the experts, after the shared one.

    Parameters
    ----------
    router : Router
    experts : iterable of Operator, or ExpertGroup
        As many as the router chooses from, from rows (rows, width) to rows.
    shared : Operator, optional
        Expert of all tokens, on x.
    """

    mixes = (-1,)

    def __init__(self, router: Router, experts: Iterable[Operator] | ExpertGroup, shared: Operator | None = None):
        self.router, self.shared = router, shared
        self.experts = experts if isinstance(experts, ExpertGroup) else ExpertGroup(experts)
        if (found := len(self.experts)) != router.experts:
            raise ValueError(f"MixtureOfExperts: expected {router.experts} experts, as its router has, found {found}")

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        expect_last(self, x, self.router.width)
        weights, routed = self.router.forward(x, run)
        chosen = Assignments.from_weights(weights.reshape(-1, self.router.experts))
        sent = self.experts.send(x.reshape(-1, self.router.width), chosen)
        y, of_shared = self._start(x, run)
        of_experts = self.experts.forward_sent(sent, y, run)
        return kernels.narrow(y, x.dtype).reshape(x.shape), (routed, chosen, of_experts, of_shared)

    def _start(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Rows to which the experts' results are added, wide: those of the shared expert, or 0."""
        if self.shared is None:
            return kernels.array_namespace(x).zeros(
                (elements(x) // x.shape[-1], x.shape[-1]), kernels.wide(x.dtype)
            ), ()
        y, saved = self.shared.forward(x, run)
        return kernels.widen(y).reshape(-1, x.shape[-1]).copy(), saved

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        routed, chosen, of_experts, of_shared = saved
        upper = kernels.widen(dy.reshape(-1, dy.shape[-1]))
        sent = self.experts.send_gradients(upper, of_experts, dy.dtype)
        dx = self._start_gradient(dy, of_shared, grads)
        dweights = self._weight_gradient(self.experts.backward_sent(sent, of_experts, dx, grads), chosen, len(upper))
        dx += kernels.widen(self.router.backward(dweights, routed, grads)).reshape(dx.shape)
        return kernels.narrow(dx, dy.dtype).reshape(dy.shape)

    def _start_gradient(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Gradient to which those of experts and router are added, wide: that of the shared expert, or 0."""
        rows = dy.reshape(-1, dy.shape[-1])
        if self.shared is None:
            return kernels.array_namespace(dy).zeros(rows.shape, kernels.wide(dy.dtype))
        return kernels.widen(self.shared.backward(dy, saved, grads)).reshape(rows.shape).copy()

    def _weight_gradient(self, values: Array, chosen: Assignments, tokens: int) -> Array:
        """Gradients of the assignments' weights as an array (tokens, experts)."""
        xp = kernels.array_namespace(values)
        gradient = xp.zeros((tokens, self.router.experts), values.dtype)
        gradient[chosen.tokens, xp.asarray(chosen.experts)] = values
        return gradient

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        """As any operator on tokens whose router can take `x`; its shared expert takes the same tokens."""
        for operator in (self.router, self.shared):
            if operator is not None:
                operator.place(axis, x, partial)
        return super().place(axis, x, partial)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline in which no token is dropped, and experts save in proportion to their rows."""
        expect_last(self, x, self.router.width)
        router = self.router.outline(x)
        tokens, width = elements(x) // x.shape[-1], x.shape[-1]
        assigned = tokens * self.router.settings.choices
        rows = ArraySpec((assigned, width), x.dtype)
        experts = self.experts.outline_rows(rows)
        shared = OperatorOutline(x, ()) if self.shared is None else self.shared.outline(x)
        wide = kernels.wide(x.dtype)
        chosen = ArraySpec((assigned,), np.dtype(np.int64)), ArraySpec((assigned, 1), wide)
        saved = router.saved, chosen, (chosen, ArraySpec((assigned, width), x.dtype), experts.saved), shared.saved
        flops = router.flops + experts.flops + shared.flops
        work = max(router.work, experts.work, shared.work) + 3 * assigned * width * wide.itemsize
        return OperatorOutline(ArraySpec(*x), saved, flops, work + 2 * tokens * width * wide.itemsize)
