"""Elementwise activations: ReLU, GELU, SiLU."""

from __future__ import annotations

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from quant.types import Array


class Activation(Operator):
    """Elementwise function."""

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        """`forward` of z + bias in one pass that overwrites z: (y, saved)."""
        raise NotImplementedError


class ReLU(Activation):
    """y = max(x, 0)."""

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        y = kernels.biased_relu(z, bias)
        return y, y

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        y = kernels.relu(x)
        return y, y

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return kernels.relu_backward(dy, saved)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        y = ArraySpec(x.shape, x.dtype)
        return OperatorOutline(y, y, 0, _temporaries(x, 2))


class GELU(Activation):
    """y = x Phi(x) (Hendrycks and Gimpel, 2016); with `tanh`, the approximation of GPT-2."""

    def __init__(self, tanh: bool = False):
        self.tanh = tanh

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        return (kernels.biased_gelu_tanh if self.tanh else kernels.biased_gelu)(z, bias), z

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return (kernels.gelu_tanh if self.tanh else kernels.gelu)(x), x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return (kernels.gelu_tanh_backward if self.tanh else kernels.gelu_backward)(dy, saved)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        return OperatorOutline(ArraySpec(x.shape, x.dtype), x, 0, _temporaries(x, 8))


class SiLU(Activation):
    """y = x / (1 + exp(-x)), also called swish (Elfwing, Uchibe and Doya, 2017)."""

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        return kernels.biased_silu(z, bias), z

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return kernels.silu(x), x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return kernels.silu_backward(dy, saved)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        return OperatorOutline(ArraySpec(x.shape, x.dtype), x, 0, _temporaries(x, 4))


def _temporaries(x: ArraySpec, count: int) -> int:
    """Bytes of `count` wide temporaries of one run, with the copies of half types."""
    count += 3 * (x.dtype.itemsize == 2)
    return count * min(elements(x), kernels.RUN) * kernels.wide(x.dtype).itemsize
