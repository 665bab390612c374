"""Windows that slide over images: convolution and pooling. Images are (batch, channels, height, width)."""

from __future__ import annotations

import math
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, stored, widened
from parallel.nn.linear import Init
from parallel.nn.operator import Array, Operator, Outline, Parameter, Run, Sink, Spec, constant, normal


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _positions(x: Any, window: tuple[int, int], stride: int, padding: int) -> tuple[int, int]:
    """Positions of a window down and across the images x."""
    down, across = (kernels.positions(length, size, stride, padding) for length, size in zip(x.shape[2:], window))
    return down, across


class Conv2d(Operator):
    """y = the sums over a window of x times a kernel, for each kernel, plus a bias (a cross-correlation).

    Parameters
    ----------
    inputs, outputs : int
        Channels.
    window : int or (rows, columns)
    stride : int
    padding : int
        Zeros around each image.
    bias : bool
    init : callable, optional
        First values of the kernels, by default normal with variance 1 / elements of a kernel. Those of the bias are 0.
    first : bool
        Nothing that learns stands before it: backward gives None in place of dx.

    Attributes
    ----------
    weight : Parameter of shape (outputs, inputs, rows, columns)
    bias : Parameter of shape (outputs,), or None
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
        self.inputs, self.outputs, self.first = inputs, outputs, first
        self.window, self.stride, self.padding = _pair(window), stride, padding
        fan = inputs * math.prod(self.window)
        self.weight = Parameter((outputs, inputs, *self.window), init or normal(1 / math.sqrt(max(fan, 1))))
        self.bias = Parameter((outputs,), constant(0.0), decay=False) if bias else None

    def _over(self, x: Any) -> tuple[int, int]:
        """Positions of the window, of an array that is as it should be."""
        fits = len(x.shape) == 4 and x.shape[1] == self.inputs
        expect(fits, self, f"an array of shape (batch, {self.inputs}, height, width)", x)
        over = _positions(x, self.window, self.stride, self.padding)
        expect(min(over) > 0, self, f"images that hold a window of {self.window}", x)
        return over

    def _columns(self, x: Array) -> Array:
        return kernels.im2col(x, self.window, self.stride, self.padding)

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """One matrix product. Saves x, from which backward cuts the windows again."""
        over, xp = self._over(x), kernels.array_namespace(x)
        y = kernels.matmul(self.weight.data.reshape(self.outputs, -1), self._columns(x))
        if self.bias is not None:
            y += self.bias.data[:, None]
        return xp.ascontiguousarray(y.reshape(self.outputs, len(x), *over).swapaxes(0, 1)), x

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """Two matrix products, and the columns added back to where they came from."""
        xp = kernels.array_namespace(dy)
        upper = xp.ascontiguousarray(dy.swapaxes(0, 1)).reshape(self.outputs, dy.size // self.outputs)
        dx = None
        if not self.first:
            weight = self.weight.data.reshape(self.outputs, -1)
            dx = kernels.col2im(kernels.matmul(weight.T, upper), saved.shape, self.window, self.stride, self.padding)
        grads(
            self.weight,
            lambda out: kernels.matmul(upper, self._columns(saved).T, out=out.reshape(self.outputs, -1)),
        )
        if self.bias is not None:
            grads(self.bias, lambda out: upper.sum(axis=1, dtype=out.dtype, out=out))
        return dx

    def outline(self, x: Spec) -> Outline:
        """2 flops for each element of each kernel at each position; the columns are a temporary."""
        over = self._over(x)
        fan, places = self.inputs * math.prod(self.window), x.shape[0] * math.prod(over)
        y, columns = Spec((x.shape[0], self.outputs, *over), x.dtype), Spec((fan, places), x.dtype)
        padded = Spec((*x.shape[:2], *(length + 2 * self.padding for length in x.shape[2:])), x.dtype)
        work = columns.nbytes + 2 * y.nbytes + padded.nbytes + stored(columns, y) + widened(padded)
        return Outline(y, x, 2 * fan * places * self.outputs, work)


class _Pool2d(Operator):
    """What both kinds of pooling share.

    Parameters
    ----------
    window : int or (rows, columns)
    stride : int, optional
        By default the window's rows, so that windows meet without overlap.
    """

    def __init__(self, window: int | tuple[int, int], stride: int | None = None):
        self.window = _pair(window)
        self.stride = self.window[0] if stride is None else stride

    def _over(self, x: Any) -> tuple[int, int]:
        expect(len(x.shape) == 4, self, "an array of shape (batch, channels, height, width)", x)
        over = _positions(x, self.window, self.stride, 0)
        expect(min(over) > 0, self, f"images that hold a window of {self.window}", x)
        return over


class MaxPool2d(_Pool2d):
    """y = the largest element of each window; what does not fill a window at the right and lower edge is left out.

    Parameters
    ----------
    window : int or (rows, columns)
    stride : int, optional
        By default the window's rows.
    """

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves which element of each window it was, a byte each, and the shape."""
        self._over(x)
        y, which = kernels.max_pool(x, self.window, self.stride)
        return y, (which, x.shape)

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dy goes where the largest elements were."""
        which, shape = saved
        return kernels.max_pool_backward(dy, which, shape, self.window, self.stride)

    def outline(self, x: Spec) -> Outline:
        """A few temporaries as large as the result."""
        y = Spec((*x.shape[:2], *self._over(x)), x.dtype)
        which = Spec(y.shape, kernels.smallest_type(math.prod(self.window) - 1))
        work = 2 * (y.nbytes + which.nbytes) + 6 * elements(y) + stored(x) + widened(y)
        return Outline(y, (which, x.shape), 0, work)


class AvgPool2d(_Pool2d):
    """y = the mean of each window; what does not fill a window at the right and lower edge is left out.

    Parameters
    ----------
    window : int or (rows, columns)
    stride : int, optional
        By default the window's rows.
    """

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """Saves the shape."""
        self._over(x)
        return kernels.avg_pool(x, self.window, self.stride), x.shape

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """dy is shared out among the elements of its window."""
        return kernels.avg_pool_backward(dy, saved, self.window, self.stride)

    def outline(self, x: Spec) -> Outline:
        """A temporary as large as the result."""
        y = Spec((*x.shape[:2], *self._over(x)), x.dtype)
        return Outline(y, (), 0, y.nbytes + stored(x) + widened(y))
