"""Elementwise activations: ReLU, GELU, SiLU."""

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from quant.types import Array


class Activation(Operator):
    """Base class of elementwise activations, computed by kernels `kernel`, `<kernel>_backward`, `biased_<kernel>`."""

    mixes = ()
    kernel: str
    vectors: int
    """Wide temporary vectors of a pass."""
    saves_result = False

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        """Fused bias and activation: (y, values for `backward`) with y = f(z + bias); z is overwritten."""
        y = getattr(kernels, f"biased_{self.kernel}")(z, bias)
        return y, y if self.saves_result else z

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        y = getattr(kernels, self.kernel)(x)
        return y, y if self.saves_result else x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return getattr(kernels, f"{self.kernel}_backward")(dy, saved)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        vectors = self.vectors + 3 * (x.dtype.itemsize == 2)  # copies of half types
        work = vectors * min(elements(x), kernels.RUN) * kernels.wide(x.dtype).itemsize
        y = ArraySpec(x.shape, x.dtype)
        return OperatorOutline(y, y if self.saves_result else x, 0, work)


class ReLU(Activation):
    """ReLU activation, y = max(x, 0); saves y for the backward pass."""

    kernel, vectors, saves_result = "relu", 2, True


class GELU(Activation):
    """GELU activation, y = x Phi(x) (Hendrycks and Gimpel, 2016); with `tanh`, the approximation used by GPT-2."""

    vectors = 8

    def __init__(self, tanh: bool = False):
        self.tanh = tanh

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return "gelu_tanh" if self.tanh else "gelu"


class SiLU(Activation):
    """SiLU or swish activation, y = x / (1 + exp(-x)) (Elfwing, Uchibe and Doya, 2017)."""

    kernel, vectors = "silu", 4
