"""Normalisation layers: LayerNorm and RMSNorm."""

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect_last, whole_number
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode, constant
from quant.types import Array


class LayerNorm(Operator):
    """Layer normalisation over the last axis, of size `width`: (x - mean) / sqrt(variance + eps) gain + bias.

    Ba, Kiros and Hinton, 2016.
    """

    mixes = (-1,)
    bias: Parameter | None

    def __init__(self, width: int, eps: float = 1e-5):
        self.width, self.eps = whole_number("width", width), eps
        self.gain = Parameter((width,), constant(1.0), decay=False)
        self.bias = Parameter((width,), constant(0.0), decay=False)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Normalise x; saves x, and the mean and rstd (1 / standard deviation) of every row in the compute dtype."""
        expect_last(self, x, self.width)
        bias = None if self.bias is None else self.bias.data
        y, mean, rstd = kernels.layer_norm(x.reshape(-1, self.width), self.gain.data, bias, self.eps)
        return y.reshape(x.shape), (x, mean, rstd)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        x, mean, rstd = saved
        rows, upper = x.reshape(-1, self.width), dy.reshape(-1, self.width)
        dx, dgain, dbias = kernels.layer_norm_backward(upper, rows, self.gain.data, mean, rstd)
        grads(self.gain, lambda out: kernels.narrow(dgain, out.dtype, out))
        if self.bias is not None:
            grads(self.bias, lambda out: kernels.narrow(dbias, out.dtype, out))
        return dx.reshape(x.shape)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline; the temporaries are those of the backward pass."""
        expect_last(self, x, self.width)
        wide = kernels.wide(x.dtype)
        mean, rstd = (ArraySpec((elements(x) // max(self.width, 1),), wide) for _ in range(2))
        work = (5 + (x.dtype.itemsize == 2)) * elements(x) * wide.itemsize
        return OperatorOutline(ArraySpec(x.shape, x.dtype), (x, mean if self.bias else None, rstd), 0, work)


class RMSNorm(LayerNorm):
    """RMS normalisation over the last axis (`width`): x / sqrt(mean of x^2 + eps) gain (Zhang, Sennrich, 2019)."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps)
        self.bias = None
