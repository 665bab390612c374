"""Linear layer and flattening."""

import math
from typing import Any

from parallel.nn import kernels
from parallel.nn.activation import GELU, Activation
from parallel.nn.array_checks import as_matrix, elements, expect, expect_last, stored, whole_number, widened
from parallel.nn.operator import (
    ArraySpec,
    GradientSink,
    Init,
    Operator,
    OperatorOutline,
    Parameter,
    PassMode,
    constant,
    normal,
)
from parallel.nn.placement import Features
from quant.types import Array


class Linear(Operator):
    """Linear layer y = x W + b over the last axis of x.

    Parameters
    ----------
    inputs, outputs : int
    bias : bool
    init : callable, optional
        Initial W, by default normal with variance 1 / inputs. b starts at 0.
    first : bool
        True if no operator before it has parameters: backward returns None in place of dx, which saves a product.

    Attributes
    ----------
    columns, rows : Features
        Units in which `parallel.sharding.tensor` cuts outputs and inputs: by default single features.
    """

    mixes = (-1,)
    fixed = ("inputs", "outputs", "rows", "columns")

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, init: Init | None = None, first: bool = False):
        self.inputs, self.outputs = whole_number("inputs", inputs), whole_number("outputs", outputs)
        self.first = first
        self.rows, self.columns = Features(inputs), Features(outputs)
        self.weight = Parameter((inputs, outputs), init or normal(1 / math.sqrt(max(inputs, 1))))
        self.bias = Parameter((outputs,), constant(0.0), decay=False) if bias else None

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        expect_last(self, x, self.inputs)
        rows = as_matrix(x)
        if self.bias is None:
            y = kernels.matmul(rows, self.weight.data)
        else:
            y = kernels.affine(rows, self.weight.data, self.bias.data)
        return y.reshape(*x.shape[:-1], self.outputs), x

    def onward(self, x: Array, run: PassMode, after: Operator | None) -> tuple[Array, tuple[Any, ...]]:
        """Forward pass, fused with `after` if that is an `Activation` and there is a bias: both in one pass."""
        own = type(self).forward is Linear.forward  # not overridden
        if self.bias is None or not isinstance(after, Activation) or not own:
            return super().onward(x, run, after)
        expect_last(self, x, self.inputs)
        z = kernels.matmul(as_matrix(x), self.weight.data)
        y, saved = after.biased(z.reshape(*x.shape[:-1], self.outputs), self.bias.data)
        return y, (x, saved)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        rows, upper = as_matrix(saved), as_matrix(dy)
        dx = None if self.first else kernels.matmul(upper, self.weight.data.T).reshape(saved.shape)
        grads(self.weight, lambda out: kernels.matmul(rows.T, upper, out=out))
        if self.bias is not None:
            grads(self.bias, lambda out: kernels.sum_rows(upper, out=out))
        return dx

    def outline(self, x: ArraySpec) -> OperatorOutline:
        expect_last(self, x, self.inputs)
        y = ArraySpec((*x.shape[:-1], self.outputs), x.dtype)
        weight = ArraySpec(self.weight.shape, x.dtype)
        work = max(widened(x) + stored(y), widened(y) + stored(x)) + widened(weight)
        flops = 2 * elements(x) * self.outputs
        return OperatorOutline(y, x, flops, work, skipped=flops * self.first)


class Flatten(Operator):
    """Reshape x to (batch, all other axes joined)."""

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        expect(x.ndim >= 1, self, "at least one axis", x)
        return x.reshape(len(x), math.prod(x.shape[1:])), x.shape

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Reshape dy to the shape of x; None if dy is None (no earlier operator has parameters)."""
        return None if dy is None else dy.reshape(saved)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        expect(len(x.shape) >= 1, self, "at least one axis", x)
        return OperatorOutline(ArraySpec((x.shape[0], math.prod(x.shape[1:])), x.dtype), ())


def feed_forward(width: int, hidden: int, init: Init, init_out: Init) -> list[Operator]:
    """Operators from vectors of `width` over `hidden` features to `width`, with these initial weights."""
    return [Linear(width, hidden, init=init), GELU(), Linear(hidden, width, init=init_out)]
