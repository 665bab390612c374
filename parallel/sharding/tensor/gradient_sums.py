"""Sums, over the ranks of a mesh axis, of partial gradients of replicated parameters.

Norms and biases of parts of a sequence, and gains that all heads share, are whole on every rank, but each rank has the
gradient of its own tokens or heads only. `Operator.place` finds these parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import accumulate
from typing import Any

from parallel.nn import kernels
from parallel.nn.compose import Sequential, Wrapper
from parallel.nn.kernels.storage import narrow
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from parallel.nn.placement import Placement, Replicate
from parallel.sharding.tensor.exchange import allreduce
from quant.types import Array

Compute = Callable[[Array], object]


def with_gradient_sums(model: Operator, axis: Any, algorithm: str) -> Operator:
    """The model with a `GradientSums` around every unit that has partial gradients along the axis."""
    units = model.items if isinstance(model, Sequential) else [model]
    x: Placement = Replicate()
    for number, unit in enumerate(units):
        found: set[Parameter] = set()
        x = unit.place(axis.name, x, found)
        if copies := {parameter for parameter in found if parameter.placement == Replicate()}:
            units[number] = GradientSums(unit, axis, copies, algorithm)
    return model if isinstance(model, Sequential) else units[0]


class GradientSums(Wrapper):
    """An operator whose partial gradients are summed over the ranks, by one allreduce for each backward pass.

    Parameters
    ----------
    inner : Operator
    axis : MeshAxis
    partial : collection of Parameter
        Parameters of `inner` with partial gradients. Every rank has them.
    algorithm : str
        Of the sum.
    """

    exchanges = True

    def __init__(self, inner: Operator, axis: Any, partial: Collection[Parameter], algorithm: str):
        super().__init__(inner)
        self.axis, self.algorithm = axis, algorithm
        self._partial = frozenset(id(parameter) for parameter in partial)
        self._elements = sum(parameter.size for parameter in partial)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return self.inner.forward(x, run)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        terms: list[tuple[Parameter, Compute]] = []

        def sink(parameter: Parameter, compute: Compute) -> None:
            if id(parameter) in self._partial:
                terms.append((parameter, compute))
            else:
                grads(parameter, compute)

        dx = self.inner.backward(dy, saved, sink)
        total = _Total(self.axis, self.algorithm, terms)
        for number, (parameter, _) in enumerate(terms):
            grads(parameter, partial(total.write, number))
        return dx

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        found: set[Parameter] = set()
        y = self.inner.place(axis, x, found)
        partial.update(one for one in found if axis != self.axis.name or id(one) not in self._partial)
        return y

    def outline(self, x: ArraySpec) -> OperatorOutline:
        inner = self.inner.outline(x)
        return inner._replace(work=inner.work + 2 * self._elements * kernels.wide(inner.y.dtype).itemsize)


class _Total:
    """Sums of terms of several parameters, computed and exchanged in one array when the first is wanted."""

    def __init__(self, axis: Any, algorithm: str, terms: list[tuple[Parameter, Compute]]):
        self._axis, self._algorithm, self._terms = axis, algorithm, terms
        self._starts = list(accumulate((parameter.size for parameter, _ in terms), initial=0))
        self._sum: Array = None

    def write(self, number: int, out: Array) -> None:
        """Write the sum of one parameter's gradients."""
        if self._sum is None:
            vector = kernels.array_namespace(out).empty(self._starts[-1], kernels.wide(out.dtype))
            for at, (_, compute) in enumerate(self._terms):
                compute(self._part(vector, at))
            self._sum = allreduce(self._axis, vector, self._algorithm)
        narrow(self._part(self._sum, number), out.dtype, out)

    def _part(self, vector: Array, number: int) -> Array:
        return vector[self._starts[number] : self._starts[number + 1]].reshape(self._terms[number][0].shape)
