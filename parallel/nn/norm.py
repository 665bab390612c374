"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect_last
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode, constant
from quant.types import Array


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _work(x: ArraySpec) -> int:
    """Bytes of the wide temporaries of a backward pass."""
    return (5 + (x.dtype.itemsize == 2)) * elements(x) * kernels.wide(x.dtype).itemsize


class LayerNorm(Operator):
    """y = (x - mean) / sqrt(variance + eps) gain + bias over the last axis, of size `width` (Ba, Kiros and Hinton,
    2016).
    """

    def __init__(self, width: int, eps: float = 1e-5):
        self.width, self.eps = width, eps
        self.gain = Parameter((width,), constant(1.0), decay=False)
        self.bias = Parameter((width,), constant(0.0), decay=False)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Saves x, and the mean and rstd of every row, wide."""
        expect_last(self, x, self.width)
        y, mean, rstd = kernels.layer_norm(_rows(x), self.gain.data, self.bias.data, self.eps)
        return y.reshape(x.shape), (x, mean, rstd)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        x, mean, rstd = saved
        dx, dgain, dbias = kernels.layer_norm_backward(_rows(dy), _rows(x), self.gain.data, mean, rstd)
        grads(self.gain, lambda out: kernels.narrow(dgain, out.dtype, out))
        grads(self.bias, lambda out: kernels.narrow(dbias, out.dtype, out))
        return dx.reshape(x.shape)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        expect_last(self, x, self.width)
        mean, rstd = (ArraySpec((elements(x) // max(self.width, 1),), kernels.wide(x.dtype)) for _ in range(2))
        return OperatorOutline(ArraySpec(x.shape, x.dtype), (x, mean, rstd), 0, _work(x))


class RMSNorm(Operator):
    """y = x / sqrt(mean of x^2 + eps) gain over the last axis, of size `width` (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int, eps: float = 1e-5):
        self.width, self.eps = width, eps
        self.gain = Parameter((width,), constant(1.0), decay=False)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Saves x, and the rstd of every row, wide."""
        expect_last(self, x, self.width)
        y, rstd = kernels.rms_norm(_rows(x), self.gain.data, self.eps)
        return y.reshape(x.shape), (x, rstd)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        x, rstd = saved
        dx, dgain = kernels.rms_norm_backward(_rows(dy), _rows(x), self.gain.data, rstd)
        grads(self.gain, lambda out: kernels.narrow(dgain, out.dtype, out))
        return dx.reshape(x.shape)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        expect_last(self, x, self.width)
        rstd = ArraySpec((elements(x) // max(self.width, 1),), kernels.wide(x.dtype))
        return OperatorOutline(ArraySpec(x.shape, x.dtype), (x, rstd), 0, _work(x))
