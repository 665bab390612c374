"""Convolution and pooling of images of shape (batch, channels, height, width)."""

import math
from typing import Any

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, expect_floats, stored, whole_number, widened
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
from quant.types import Array


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    rows, columns = size if isinstance(size, tuple) else (size, size)
    return whole_number("window", rows, 1), whole_number("window", columns, 1)


class Conv2d(Operator):
    """Two-dimensional convolution (cross-correlation), with an optional bias.

    Parameters
    ----------
    inputs, outputs : int
        Channels.
    window : int or (rows, columns)
    stride, padding : int
        Step between windows; zeros around each image.
    bias : bool
    init : callable, optional
        Initial kernels, by default normal with variance 1 / elements of a kernel. The bias starts at 0.
    first : bool
        True if no operator before it has parameters: backward returns None in place of dx.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        window: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
        init: Init | None = None,
        first: bool = False,
    ):
        self.inputs, self.outputs = whole_number("inputs", inputs), whole_number("outputs", outputs)
        self.window, self.first = _pair(window), first
        self.stride, self.padding = whole_number("stride", stride, 1), whole_number("padding", padding)
        fan = inputs * math.prod(self.window)
        self.weight = Parameter((outputs, inputs, *self.window), init or normal(1 / math.sqrt(max(fan, 1))))
        self.bias = Parameter((outputs,), constant(0.0), decay=False) if bias else None

    def _over(self, x: Any) -> tuple[int, int]:
        """Check the shape of `x`; return the number of window positions (down, across)."""
        fits = len(x.shape) == 4 and x.shape[1] == self.inputs
        expect(fits, self, f"an array of shape (batch, {self.inputs}, height, width)", x)
        expect_floats(self, x)
        over = kernels.positions(x.shape, self.window, self.stride, self.padding)
        expect(min(over) > 0, self, f"images that hold a window of {self.window}", x)
        return over

    def _columns(self, x: Array) -> Array:
        return kernels.im2col(x, self.window, self.stride, self.padding)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Convolution as im2col and one matrix product; saves x only, so the backward pass repeats im2col."""
        over, xp = self._over(x), kernels.array_namespace(x)
        y = kernels.matmul(self.weight.data.reshape(self.outputs, -1), self._columns(x))
        if self.bias is not None:
            y += self.bias.data[:, None]
        return xp.ascontiguousarray(y.reshape(self.outputs, len(x), *over).swapaxes(0, 1)), x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        xp = kernels.array_namespace(dy)
        upper = xp.ascontiguousarray(dy.swapaxes(0, 1)).reshape(self.outputs, dy.size // self.outputs)
        dx = None
        if not self.first:
            weight = self.weight.data.reshape(self.outputs, -1)
            dx = kernels.col2im(kernels.matmul(weight.T, upper), saved.shape, self.window, self.stride, self.padding)
        grads(self.weight, lambda out: kernels.matmul(upper, self._columns(saved).T, out=out.reshape(self.outputs, -1)))
        if self.bias is not None:
            grads(self.bias, lambda out: upper.sum(axis=1, dtype=out.dtype, out=out))
        return dx

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline; counts 2 flops per kernel element and window position, and im2col's columns as temporaries."""
        over = self._over(x)
        fan, places = self.inputs * math.prod(self.window), x.shape[0] * math.prod(over)
        y, columns = ArraySpec((x.shape[0], self.outputs, *over), x.dtype), ArraySpec((fan, places), x.dtype)
        padded = ArraySpec((*x.shape[:2], *(length + 2 * self.padding for length in x.shape[2:])), x.dtype)
        work = columns.nbytes + 2 * y.nbytes + padded.nbytes + stored(columns, y) + widened(padded)
        flops = 2 * fan * places * self.outputs
        return OperatorOutline(y, x, flops, work, skipped=flops * self.first)


class _Pool2d(Operator):
    """Base class of pooling; `window` is int or (rows, columns), `stride` defaults to the rows of the window."""

    def __init__(self, window: int | tuple[int, int], stride: int | None = None):
        self.window = _pair(window)
        self.stride = self.window[0] if stride is None else whole_number("stride", stride, 1)

    def _over(self, x: Any) -> tuple[int, int]:
        expect(len(x.shape) == 4, self, "an array of shape (batch, channels, height, width)", x)
        over = kernels.positions(x.shape, self.window, self.stride, 0)
        expect(min(over) > 0, self, f"images that hold a window of {self.window}", x)
        return over


class MaxPool2d(_Pool2d):
    """Max pooling: largest element of each window; incomplete windows at the right and lower edge are dropped.

    `window` is int or (rows, columns); `stride` defaults to its rows.
    """

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Max pooling; saves the index of each window's maximum (one byte up to 256 elements) and x's shape."""
        self._over(x)
        y, which = kernels.max_pool(x, self.window, self.stride)
        return y, (which, x.shape)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        which, shape = saved
        return kernels.max_pool_backward(dy, which, shape, self.window, self.stride)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        y = ArraySpec((*x.shape[:2], *self._over(x)), x.dtype)
        which = ArraySpec(y.shape, np.min_scalar_type(math.prod(self.window) - 1))
        work = 2 * (y.nbytes + which.nbytes) + 6 * elements(y) + stored(x) + widened(y)
        return OperatorOutline(y, (which, x.shape), 0, work)


class AvgPool2d(_Pool2d):
    """Average pooling: mean of each window; window and stride as for `MaxPool2d`."""

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        self._over(x)
        return kernels.avg_pool(x, self.window, self.stride), x.shape

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return kernels.avg_pool_backward(dy, saved, self.window, self.stride)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        y = ArraySpec((*x.shape[:2], *self._over(x)), x.dtype)
        return OperatorOutline(y, (), 0, y.nbytes + stored(x) + widened(y))
