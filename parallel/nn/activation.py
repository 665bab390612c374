"""Element by element: ReLU, GELU, SiLU."""

from __future__ import annotations

from typing import Any

from parallel.nn import kernels
from parallel.nn.checks import elements
from parallel.nn.operator import Array, Operator, Outline, Run, Sink, Spec


class ReLU(Operator):
    """y = max(x, 0)."""

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


class GELU(Operator):
    """y = x Phi(x) (Hendrycks and Gimpel, 2016).

    Parameters
    ----------
    tanh : bool
        Take the approximation of GPT-2, and not the error function.
    """

    def __init__(self, tanh: bool = False):
        self.tanh = tanh

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves x."""
        return (kernels.gelu_tanh if self.tanh else kernels.gelu)(x), x

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dy times the derivative at x."""
        return (kernels.gelu_tanh_backward if self.tanh else kernels.gelu_backward)(dy, saved)

    def outline(self, x: Spec) -> Outline:
        """Temporaries of the error function."""
        return Outline(Spec(x.shape, x.dtype), x, 0, _temporaries(x, 8))


class SiLU(Operator):
    """y = x / (1 + exp(-x)), also called swish (Elfwing, Uchibe and Doya, 2017)."""

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
