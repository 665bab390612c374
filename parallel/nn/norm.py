"""The last axis brought to a common size: LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect_last
from parallel.nn.operator import Array, Operator, Outline, Parameter, Run, Sink, Spec, constant


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _work(x: Spec) -> int:
    """Bytes of the wide temporaries of a backward."""
    return (5 + (x.dtype.itemsize == 2)) * elements(x) * kernels.wide(x.dtype).itemsize


class LayerNorm(Operator):
    """y = (x - mean) / sqrt(variance + eps) gain + bias over the last axis (Ba, Kiros and Hinton, 2016).

    Parameters
    ----------
    width : int
    eps : float

    Attributes
    ----------
    gain, bias : Parameter of shape (width,)
    """

    def __init__(self, width: int, eps: float = 1e-5):
        self.width, self.eps = width, eps
        self.gain = Parameter((width,), constant(1.0), decay=False)
        self.bias = Parameter((width,), constant(0.0), decay=False)

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves x, and the mean and 1 / sqrt(variance + eps) of every row, wide."""
        expect_last(self, x, self.width)
        y, mean, rstd = kernels.layer_norm(_rows(x), self.gain.data, self.bias.data, self.eps)
        return y.reshape(x.shape), (x, mean, rstd)

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """All three gradients in one pass over the rows."""
        x, mean, rstd = saved
        dx, dgain, dbias = kernels.layer_norm_backward(_rows(dy), _rows(x), self.gain.data, mean, rstd)
        grads(self.gain, lambda out: kernels.narrow(dgain, out.dtype, out))
        grads(self.bias, lambda out: kernels.narrow(dbias, out.dtype, out))
        return dx.reshape(x.shape)

    def outline(self, x: Spec) -> Outline:
        """Two numbers a row are saved beside x."""
        expect_last(self, x, self.width)
        mean, rstd = (Spec((elements(x) // max(self.width, 1),), kernels.wide(x.dtype)) for _ in range(2))
        return Outline(Spec(x.shape, x.dtype), (x, mean, rstd), 0, _work(x))


class RMSNorm(Operator):
    """y = x / sqrt(mean of x^2 + eps) gain over the last axis (Zhang and Sennrich, 2019).

    Parameters
    ----------
    width : int
    eps : float

    Attributes
    ----------
    gain : Parameter of shape (width,)
    """

    def __init__(self, width: int, eps: float = 1e-5):
        self.width, self.eps = width, eps
        self.gain = Parameter((width,), constant(1.0), decay=False)

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves x, and 1 / sqrt(mean of x^2 + eps) of every row, wide."""
        expect_last(self, x, self.width)
        y, rstd = kernels.rms_norm(_rows(x), self.gain.data, self.eps)
        return y.reshape(x.shape), (x, rstd)

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """Both gradients in one pass over the rows."""
        x, rstd = saved
        dx, dgain = kernels.rms_norm_backward(_rows(dy), _rows(x), self.gain.data, rstd)
        grads(self.gain, lambda out: kernels.narrow(dgain, out.dtype, out))
        return dx.reshape(x.shape)

    def outline(self, x: Spec) -> Outline:
        """A number a row is saved beside x."""
        expect_last(self, x, self.width)
        rstd = Spec((elements(x) // max(self.width, 1),), kernels.wide(x.dtype))
        return Outline(Spec(x.shape, x.dtype), (x, rstd), 0, _work(x))
