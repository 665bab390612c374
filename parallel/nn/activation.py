"""Element by element: ReLU, GELU, SiLU."""

from __future__ import annotations

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements
from parallel.nn.operator import Array, Operator, Outline, Run, Sink, Spec


class Activation(Operator):
    """A function of each element."""

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        """`forward` of z + bias, in one pass over z, which is written into: the result, and what `forward` saves."""
        raise NotImplementedError


class ReLU(Activation):
    """y = max(x, 0)."""

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        """In the memory of z."""
        y = kernels.biased_relu(z, bias)
        return y, y

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves y, which the next operator keeps anyway."""
        y = kernels.relu(x)
        return y, y

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dy where y is above 0."""
        return kernels.relu_backward(dy, saved)

    def outline(self, x: Spec) -> Outline:
        """One array."""
        y = Spec(x.shape, x.dtype)
        return Outline(y, y, 0, _temporaries(x, 2))


class GELU(Activation):
    """y = x Phi(x) (Hendrycks and Gimpel, 2016).

    Parameters
    ----------
    tanh : bool
        Take the approximation of GPT-2, and not the error function.
    """

    def __init__(self, tanh: bool = False):
        self.tanh = tanh

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        """Saves z + bias."""
        return (kernels.biased_gelu_tanh if self.tanh else kernels.biased_gelu)(z, bias), z

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves x."""
        return (kernels.gelu_tanh if self.tanh else kernels.gelu)(x), x

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dy times the derivative at x."""
        return (kernels.gelu_tanh_backward if self.tanh else kernels.gelu_backward)(dy, saved)

    def outline(self, x: Spec) -> Outline:
        """Temporaries of the error function."""
        return Outline(Spec(x.shape, x.dtype), x, 0, _temporaries(x, 8))


class SiLU(Activation):
    """y = x / (1 + exp(-x)), also called swish (Elfwing, Uchibe and Doya, 2017)."""

    def biased(self, z: Array, bias: Array) -> tuple[Array, Any]:
        """Saves z + bias."""
        return kernels.biased_silu(z, bias), z

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves x."""
        return kernels.silu(x), x

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dy times the derivative at x."""
        return kernels.silu_backward(dy, saved)

    def outline(self, x: Spec) -> Outline:
        """Temporaries of the logistic function."""
        return Outline(Spec(x.shape, x.dtype), x, 0, _temporaries(x, 4))


def _temporaries(x: Spec, count: int) -> int:
    """Bytes of so many wide arrays of as many elements as are gone through at a time, and for halves."""
    count += 3 * (x.dtype.itemsize == 2)
    return count * min(elements(x), kernels.RUN) * kernels.wide(x.dtype).itemsize
