"""Elementwise activations: ReLU, GELU, SiLU."""

from __future__ import annotations

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from quant.types import Array


class Activation(Operator):
    """Elementwise function of the kernels `kernel`, `<kernel>_backward` and `biased_<kernel>`; saves its input."""

    kernel: str
    vectors: int
    """Wide temporary vectors of a pass."""

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        """`forward` of z + bias in one pass that overwrites z: (y, saved)."""
        return getattr(kernels, f"biased_{self.kernel}")(z, bias), z

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return getattr(kernels, self.kernel)(x), x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return getattr(kernels, f"{self.kernel}_backward")(dy, saved)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        vectors = self.vectors + 3 * (x.dtype.itemsize == 2)  # copies of half types
        work = vectors * min(elements(x), kernels.RUN) * kernels.wide(x.dtype).itemsize
        return OperatorOutline(ArraySpec(x.shape, x.dtype), x, 0, work)


class ReLU(Activation):
    """y = max(x, 0); saves its result."""

    kernel, vectors = "relu", 2

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        y, _ = super().biased(z, bias)
        return y, y

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        y, _ = super().forward(x, run)
        return y, y

    def outline(self, x: ArraySpec) -> OperatorOutline:
        outline = super().outline(x)
        return outline._replace(saved=outline.y)


class GELU(Activation):
    """y = x Phi(x) (Hendrycks and Gimpel, 2016); with `tanh`, the approximation of GPT-2."""

    vectors = 8

    def __init__(self, tanh: bool = False):
        self.tanh, self.kernel = tanh, "gelu_tanh" if tanh else "gelu"


class SiLU(Activation):
    """y = x / (1 + exp(-x)), also called swish (Elfwing, Uchibe and Doya, 2017)."""

    kernel, vectors = "silu", 4
