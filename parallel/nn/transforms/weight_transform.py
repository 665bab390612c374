"""Operators that compute with a function of their weight, such as its rounded or pruned values.

The gradient by the function's result is taken for that by the weight (straight-through estimator: Bengio, Leonard,
Courville, "Estimating or propagating gradients through stochastic neurons", 2013). The function is computed from the
present weight in every pass and has no state, so layouts and checkpoints contain the weight alone.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from parallel.nn import kernels
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from parallel.nn.transforms.quantizable_layers import from_matrix, to_matrix
from parallel.nn.transforms.wrapper import WrappedOperator
from quant import QuantSpec, quantize
from quant.types import Array

WeightFunction = Callable[[Array, int], Array]
"""Function of a weight matrix (float32, shape (outputs, inputs)) and the training step: values to compute with."""


class ComputedWeight:
    """Values with the interface of the parameter that they replace in a pass."""

    def __init__(self, parameter: Parameter, values: Array):
        self.parameter, self.data = parameter, values
        self.shape, self.dtype, self.name = parameter.shape, parameter.dtype, parameter.name


class TransformedWeight(WrappedOperator):
    """Operator that computes with functions of its `weight`, applied in order; gradients are those of the weight.

    `transposed` is True if the parameter is the transpose of the weight matrix.
    """

    def __init__(self, inner: Any, functions: Sequence[WeightFunction], transposed: bool):
        super().__init__(inner)
        self.weight, self._functions, self._transposed = inner.weight, tuple(functions), transposed

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        y, saved = self._computed(run.step).forward(x, run)
        return y, (saved, run.step)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        inner_saved, step = saved

        def to_parameter(parameter: Any, compute: Callable[[Array], object]) -> None:
            grads(parameter.parameter if isinstance(parameter, ComputedWeight) else parameter, compute)

        return self._computed(step).backward(dy, inner_saved, to_parameter)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of the inner operator; the values of the weight, and what they are computed from, are temporaries."""
        inner = self.inner.outline(x)
        return inner._replace(saved=(inner.saved, 0), work=inner.work + 17 * self.weight.size)

    def values(self, step: int) -> Array:
        """Values that a pass in this step computes with, of the weight's shape and dtype."""
        matrix = kernels.widen(to_matrix(self.weight.data, self._transposed))
        for function in self._functions:
            matrix = function(matrix, step)
        return kernels.narrow(from_matrix(matrix, self.weight.shape, self._transposed), self.weight.data.dtype)

    def _computed(self, step: int) -> Operator:
        operator = copy(self.inner)
        operator.name = self.name
        operator.weight = ComputedWeight(self.weight, self.values(step))  # type: ignore[attr-defined]
        return operator


def rounding_to(spec: QuantSpec, name: str) -> WeightFunction:
    """Weight function that rounds a matrix to the codes of a spec: fake quantisation of weights.

    Weights with NaN or infinity become NaN. The seed of stochastic rounding depends on the step and on `name`, that of
    the weight.
    """

    def values(matrix: Array, step: int) -> Array:
        poison = "raise" if spec.code == "kmeans" or spec.scales.format.startswith("uint") else "poison"
        return quantize(matrix, spec, seed=kernels.key_of(0, step, name)[0], nonfinite=poison).dequantize()

    return values
