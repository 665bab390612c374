"""Reference kernels of convolution and pooling, on images of shape (batch, channels, height, width)."""

import numpy as np

from parallel.nn.kernels.storage import array_namespace, narrow, widen
from quant.types import Array


def _padded(x: Array, padding: int) -> Array:
    """Copy of x with `padding` rows and columns of zeros added around each image. X itself without padding."""
    if not padding:
        return x
    return array_namespace(x).pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))


def _places(window: tuple[int, int], stride: int, over: tuple[int, int]) -> list[tuple[slice, slice]]:
    """Per window element, row-major: (rows, columns) slices of the padded image that it covers over all positions."""
    return [
        (slice(i, i + stride * (over[0] - 1) + 1, stride), slice(j, j + stride * (over[1] - 1) + 1, stride))
        for i in range(window[0])
        for j in range(window[1])
    ]


def positions(shape: tuple[int, ...], window: tuple[int, int], stride: int, padding: int) -> tuple[int, int]:
    """Number of window positions (down, across) for images of shape (..., height, width).

    >>> positions((8, 9), (3, 3), 1, 1)
    (8, 9)
    """
    down, across = (max((n + 2 * padding - size) // stride + 1, 0) for n, size in zip(shape[-2:], window))
    return down, across


def im2col(x: Array, window: tuple[int, int], stride: int, padding: int) -> Array:
    """Unfold: each window position of x as a column. Shape (channels * window elements, batch * positions).

    x has shape (batch, channels, height, width), `window` is (rows, columns). Positions are in row-major order.
    """
    xp = array_namespace(x)
    batch, channels = x.shape[:2]
    over = positions(x.shape, window, stride, padding)
    source = _padded(x, padding).swapaxes(0, 1)
    columns = xp.empty((channels, window[0] * window[1], batch, *over), x.dtype)
    for number, (rows, cols) in enumerate(_places(window, stride, over)):
        columns[:, number] = source[:, :, rows, cols]
    return columns.reshape(channels * window[0] * window[1], batch * over[0] * over[1])


def col2im(columns: Array, shape: tuple[int, ...], window: tuple[int, int], stride: int, padding: int) -> Array:
    """Fold, the adjoint of `im2col`: add columns into images of `shape` (batch, channels, height, width)."""
    xp = array_namespace(columns)
    batch, channels, height, width = shape
    over = positions(shape, window, stride, padding)
    source = widen(columns).reshape(channels, window[0] * window[1], batch, *over)
    image = xp.zeros((batch, channels, height + 2 * padding, width + 2 * padding), source.dtype)
    for number, (rows, cols) in enumerate(_places(window, stride, over)):
        image[:, :, rows, cols] += source[:, number].swapaxes(0, 1)
    inside = image[:, :, padding : padding + height, padding : padding + width]
    return narrow(xp.ascontiguousarray(inside), columns.dtype)


def max_pool(x: Array, window: tuple[int, int], stride: int) -> tuple[Array, Array]:
    """Max pooling: (y, index of each maximum within its window). NaN counts as largest, ties go to the first.

    x has shape (batch, channels, height, width), `window` is (rows, columns); `which` is uint8, or wider for large
    windows.
    """
    xp = array_namespace(x)
    over = positions(x.shape, window, stride, 0)
    places = _places(window, stride, over)
    y = x[:, :, places[0][0], places[0][1]].copy()
    which = xp.zeros(y.shape, np.min_scalar_type(len(places) - 1))
    for number, (rows, cols) in enumerate(places[1:], 1):
        part = x[:, :, rows, cols]
        larger = (part > y) | (part != part)
        y = xp.where(larger, part, y)
        which = xp.where(larger, which.dtype.type(number), which)
    return y, which


def max_pool_backward(dy: Array, which: Array, shape: tuple[int, ...], window: tuple[int, int], stride: int) -> Array:
    """Gradient of max pooling, of x's `shape`, from dy and the indices `which` that `max_pool` returned."""
    upper = widen(dy)
    dx = array_namespace(dy).zeros(shape, upper.dtype)
    for number, (rows, cols) in enumerate(_places(window, stride, dy.shape[2:])):
        dx[:, :, rows, cols] += upper * (which == number)
    return narrow(dx, dy.dtype)


def avg_pool(x: Array, window: tuple[int, int], stride: int) -> Array:
    """Average pooling: mean of each window of x, of shape (batch, channels, height, width)."""
    over = positions(x.shape, window, stride, 0)
    wider = widen(x)
    y = array_namespace(x).zeros((*x.shape[:2], *over), wider.dtype)
    for rows, cols in _places(window, stride, over):
        y += wider[:, :, rows, cols]
    y *= 1 / (window[0] * window[1])
    return narrow(y, x.dtype)


def avg_pool_backward(dy: Array, shape: tuple[int, ...], window: tuple[int, int], stride: int) -> Array:
    """Gradient of average pooling, of x's `shape`: dy divided equally among the elements of each window."""
    upper = widen(dy) * (1 / (window[0] * window[1]))
    dx = array_namespace(dy).zeros(shape, upper.dtype)
    for rows, cols in _places(window, stride, dy.shape[2:]):
        dx[:, :, rows, cols] += upper
    return narrow(dx, dy.dtype)
