"""The arithmetic of operators and losses, as functions of arrays: what compiled kernels are measured by.

One code for NumPy and CuPy. Arrays have any strides and any size, none included; results are new arrays, C-contiguous,
unless there is an `out`. Nothing writes into its arguments but where it says so.

Storage is float64, float32, bfloat16 or float16 (`storage`); results are stored in the type of the first array.
Statistics, probabilities and parameters' gradients are *wide*: float64 if the arrays are, else float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from parallel.nn.kernels.special import erf
from parallel.nn.kernels.storage import FLOAT16, HALVES, Array, array_namespace, narrow, smallest_type, wide, widen

# ------------------------------------------------------------------------------------------ matrix products


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """The matrix product of the last two axes, over all others; half types widened to float32, but float16 on a GPU.

    Parameters
    ----------
    a : array, shape (..., n, k)
    b : array, shape (..., k, m)
    out : array, shape (..., n, m), optional
        Of the type of `a`, or wide: then it gets the sums before they are rounded.

    Returns
    -------
    array, shape (..., n, m), in the type of `a`
    """
    xp = array_namespace(a)
    if a.dtype not in HALVES or (a.dtype == FLOAT16 and xp is not np):
        return xp.matmul(a, b) if out is None else xp.matmul(a, b, out=out)
    a, b, dtype = widen(a), widen(b), a.dtype
    if out is not None and out.dtype == wide(dtype):
        return xp.matmul(a, b, out=out)
    return narrow(xp.matmul(a, b), dtype, out)


def affine(x: Array, weight: Array, bias: Array) -> Array:
    """x weight + bias.

    Parameters
    ----------
    x : array, shape (n, k)
    weight : array, shape (k, m)
    bias : array, shape (m,)

    Returns
    -------
    array, shape (n, m)
    """
    y = matmul(x, weight)
    y += bias
    return y


def sum_rows(x: Array, out: Array | None = None) -> Array:
    """The sum over the first axis, wide: the gradient of a bias.

    Parameters
    ----------
    x : array, shape (n, m)
    out : array, shape (m,), optional
    """
    return x.sum(axis=0, dtype=wide(x.dtype), out=out)


# ------------------------------------------------------------------------------------------ element by element


RUN = 1 << 14
"""Elements that a host goes through at a time, so that temporaries stay in the cache."""


def _elementwise(compute: Callable[..., Array]) -> Callable[..., Array]:
    """From a function of wide arrays, then numbers, one of arrays in any storage; its `out` may be an argument."""

    @wraps(compute)
    def kernel(*arguments: Any, out: Array | None = None) -> Array:
        numbers = tuple(value for value in arguments if isinstance(value, float))
        arrays = arguments[: len(arguments) - len(numbers)]
        xp = array_namespace(arrays[0])
        if out is None:
            out = xp.empty(arrays[0].shape, arrays[0].dtype)
        every = (out, *arrays)
        if xp is np and all(array.flags.c_contiguous for array in every):
            every = tuple(array.reshape(-1) for array in every)
            runs = [tuple(array[first : first + RUN] for array in every) for first in range(0, out.size, RUN)]
        else:
            runs = [every]
        for target, *parts in runs:
            narrow(compute(*(widen(part) for part in parts), *numbers), target.dtype, target)
        return out

    return kernel


@_elementwise
def relu(x: Array) -> Array:
    """max(x, 0); NaN stays NaN."""
    return array_namespace(x).maximum(x, 0)


@_elementwise
def relu_backward(dy: Array, y: Array) -> Array:
    """dy where the *result* y of `relu` was above 0, elsewhere 0."""
    return dy * (y > 0)


@_elementwise
def gelu(x: Array) -> Array:
    """x Phi(x), with the normal distribution Phi(x) = (1 + erf(x / sqrt 2)) / 2 (Hendrycks and Gimpel, 2016)."""
    y = erf(x * math.sqrt(0.5))
    y += 1
    y *= 0.5  # before x, which may be as large as numbers are
    y *= x
    return y


@_elementwise
def gelu_backward(dy: Array, x: Array) -> Array:
    """dy (Phi(x) + x phi(x)), with the normal density phi."""
    xp = array_namespace(x)
    density = xp.exp(x * x * -0.5)
    density *= x
    density *= 1 / math.sqrt(2 * math.pi)
    dx = erf(x * math.sqrt(0.5))
    dx += 1
    dx *= 0.5
    dx += density
    dx *= dy
    return dx


def _logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)), from the exponential of -|x|: it cannot overflow, and small results keep their digits."""
    xp = array_namespace(x)
    e = xp.exp(-xp.absolute(x))
    y = xp.where(x < 0, e, x.dtype.type(1))
    e += 1
    y /= e
    return y


_CUBIC, _TWICE_SLOPE, _FAR = 0.044715, 2 * math.sqrt(2 / math.pi), 16.0


@_elementwise
def gelu_tanh(x: Array) -> Array:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2: the approximation of GPT-2.

    As x logistic(2 u), which (1 + tanh(u)) / 2 is.
    """
    return x * _logistic(_TWICE_SLOPE * x * (1 + _CUBIC * x * x))


@_elementwise
def gelu_tanh_backward(dy: Array, x: Array) -> Array:
    """dy times the derivative of `gelu_tanh` at x."""
    near = array_namespace(x).clip(x, -_FAR, _FAR)  # farther out, it is 0 or 1
    square = near * near
    s = _logistic(_TWICE_SLOPE * near * (1 + _CUBIC * square))
    return dy * (s + near * s * (1 - s) * _TWICE_SLOPE * (1 + 3 * _CUBIC * square))


@_elementwise
def silu(x: Array) -> Array:
    """x / (1 + exp(-x)), also called swish."""
    return x * _logistic(x)


@_elementwise
def silu_backward(dy: Array, x: Array) -> Array:
    """dy times the derivative of `silu` at x."""
    s = _logistic(x)
    return dy * s * (1 + x * (1 - s))


def biased_relu(z: Array, bias: Array) -> Array:
    """`relu` of z + bias, in the memory of z.

    Parameters
    ----------
    z : array, shape (..., m)
        Written into.
    bias : array, shape (m,)
    """
    z += bias
    return relu(z, out=z)


def biased_gelu(z: Array, bias: Array) -> Array:
    """`gelu` of z + bias, which is left in z."""
    z += bias
    return gelu(z)


def biased_gelu_tanh(z: Array, bias: Array) -> Array:
    """`gelu_tanh` of z + bias, which is left in z."""
    z += bias
    return gelu_tanh(z)


def biased_silu(z: Array, bias: Array) -> Array:
    """`silu` of z + bias, which is left in z."""
    z += bias
    return silu(z)


@_elementwise
def masked(x: Array, keep: Array, scale: float) -> Array:
    """x times `scale` where `keep`, an array of bool, elsewhere 0: dropout, forward and backward."""
    return x * keep * scale


# ------------------------------------------------------------------------------------------ norms, over the last axis


def layer_norm(x: Array, gain: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """y = (x - mean) rstd gain + bias, with rstd = 1 / sqrt(variance + eps) (Ba, Kiros and Hinton, 2016).

    Parameters
    ----------
    x : array, shape (n, d)
    gain, bias : array, shape (d,)
    eps : float

    Returns
    -------
    y : array, shape (n, d)
    mean, rstd : wide array, shape (n,)
    """
    xp = array_namespace(x)
    wider = widen(x)
    mean = wider.mean(axis=-1)
    y = wider - mean[:, None]
    rstd = 1 / xp.sqrt((y * y).mean(axis=-1) + eps)
    y *= rstd[:, None]
    y *= widen(gain)
    y += widen(bias)
    return narrow(y, x.dtype), mean, rstd


def layer_norm_backward(dy: Array, x: Array, gain: Array, mean: Array, rstd: Array) -> tuple[Array, Array, Array]:
    """dx, and the gradients of gain and bias.

    Parameters
    ----------
    dy, x : array, shape (n, d)
    gain : array, shape (d,)
    mean, rstd : wide array, shape (n,)
        As `layer_norm` gave them.

    Returns
    -------
    dx : array, shape (n, d)
    dgain, dbias : wide array, shape (d,)
    """
    upper, unit = widen(dy), (widen(x) - mean[:, None]) * rstd[:, None]
    inner = upper * widen(gain)
    dx = inner - inner.mean(axis=-1)[:, None] - unit * (inner * unit).mean(axis=-1)[:, None]
    dx *= rstd[:, None]
    return narrow(dx, dy.dtype), (upper * unit).sum(axis=0), upper.sum(axis=0)


def rms_norm(x: Array, gain: Array, eps: float) -> tuple[Array, Array]:
    """y = x rstd gain, with rstd = 1 / sqrt(mean of x^2 + eps) (Zhang and Sennrich, 2019).

    Parameters
    ----------
    x : array, shape (n, d)
    gain : array, shape (d,)
    eps : float

    Returns
    -------
    y : array, shape (n, d)
    rstd : wide array, shape (n,)
    """
    wider = widen(x)
    rstd = 1 / array_namespace(x).sqrt((wider * wider).mean(axis=-1) + eps)
    return narrow(wider * rstd[:, None] * widen(gain), x.dtype), rstd


def rms_norm_backward(dy: Array, x: Array, gain: Array, rstd: Array) -> tuple[Array, Array]:
    """dx, and the gradient of gain.

    Parameters
    ----------
    dy, x : array, shape (n, d)
    gain : array, shape (d,)
    rstd : wide array, shape (n,)
        As `rms_norm` gave it.

    Returns
    -------
    dx : array, shape (n, d)
    dgain : wide array, shape (d,)
    """
    upper, unit = widen(dy), widen(x) * rstd[:, None]
    inner = upper * widen(gain)
    dx = (inner - unit * (inner * unit).mean(axis=-1)[:, None]) * rstd[:, None]
    return narrow(dx, dy.dtype), (upper * unit).sum(axis=0)


# ------------------------------------------------------------------------------------------ attention


def causal_softmax(scores: Array, scale: float, first: int) -> Array:
    """Scores turned to probabilities, in place: query `first` + i sees the keys up to its own, the others get 0.

    Parameters
    ----------
    scores : wide array, shape (..., queries, keys), C-contiguous
        Written into. At least ``first + queries`` keys.
    scale : float
        What the scores are multiplied with first.
    first : int
        The number of the first query of the block.

    Returns
    -------
    scores, each row of which now sums to 1
    """
    xp = array_namespace(scores)
    queries, keys = scores.shape[-2:]
    hidden = xp.arange(keys)[None, first:] > xp.arange(first, first + queries)[:, None]
    scores *= scale
    scores[..., first:] += xp.where(hidden, scores.dtype.type(-math.inf), scores.dtype.type(0))
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def softmax_backward(dp: Array, p: Array, scale: float) -> Array:
    """p (dp - sum of dp p) scale, in place of dp: from the gradient by probabilities to that by scores.

    Parameters
    ----------
    dp : wide array, shape (..., queries, keys), C-contiguous
        Written into.
    p : wide array of the same shape
        The probabilities.
    scale : float

    Returns
    -------
    dp
    """
    dp -= (dp * p).sum(axis=-1, keepdims=True)
    dp *= p
    dp *= scale
    return dp


# ------------------------------------------------------------------------------------------ losses


def softmax_cross_entropy(scores: Array, targets: Array) -> tuple[float, Array]:
    """The sum over all rows of -log softmax(scores)[target]; rows with a target below 0 do not count.

    Parameters
    ----------
    scores : array, shape (n, classes)
    targets : array of int64, shape (n,)

    Returns
    -------
    loss : float
        Summed in float64.
    log_sum : wide array, shape (n,)
        Of each row, the logarithm of the sum of the exponentials of the scores.
    """
    xp = array_namespace(scores)
    wider, rows = widen(scores), xp.arange(len(targets))
    top = wider.max(axis=-1)
    log_sum = xp.log(xp.exp(wider - top[:, None]).sum(axis=-1)) + top
    losses = xp.where(targets < 0, 0, log_sum - wider[rows, xp.maximum(targets, 0)])
    return float(losses.sum(dtype=np.float64)), log_sum


def softmax_cross_entropy_backward(scale: float, scores: Array, targets: Array, log_sum: Array) -> Array:
    """scale (softmax(scores) - 1 at the target), and 0 in rows that do not count.

    Parameters
    ----------
    scale : float
    scores : array, shape (n, classes)
    targets : array of int64, shape (n,)
    log_sum : wide array, shape (n,)
        As `softmax_cross_entropy` gave it.

    Returns
    -------
    array, shape (n, classes)
    """
    xp = array_namespace(scores)
    dscores, rows = xp.exp(widen(scores) - log_sum[:, None]), xp.arange(len(targets))
    dscores[rows, xp.maximum(targets, 0)] -= 1
    dscores *= xp.where(targets < 0, 0, scale).astype(dscores.dtype)[:, None]
    return narrow(dscores, scores.dtype)


def squared_error(y: Array, targets: Array) -> float:
    """The sum of (y - targets)^2, in float64.

    Parameters
    ----------
    y, targets : arrays of one shape
    """
    difference = widen(y) - widen(targets)
    return float((difference * difference).sum(dtype=np.float64))


def squared_error_backward(scale: float, y: Array, targets: Array) -> Array:
    """2 scale (y - targets)."""
    difference = widen(y) - widen(targets)
    difference *= 2 * scale
    return narrow(difference, y.dtype)


# ------------------------------------------------------------------------------------------ embedding


def embedding_gradient(dy: Array, tokens: Array, out: Array) -> Array:
    """Row t of `out` becomes the sum of the rows of dy whose token is t, in their order.

    Parameters
    ----------
    dy : array, shape (n, d)
    tokens : array of int64, shape (n,)
        From 0 to below `vocabulary`.
    out : wide array, shape (vocabulary, d)
        Overwritten.

    Returns
    -------
    out
    """
    xp = array_namespace(dy)
    out[...] = 0
    if not tokens.size:
        return out
    order = xp.argsort(tokens, kind="stable")
    tokens, rows = tokens[order], widen(dy)[order]
    starts = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), tokens[1:] != tokens[:-1]]))
    if hasattr(xp.add, "reduceat"):
        out[tokens[starts]] = xp.add.reduceat(rows, starts, axis=0)
    else:  # as a product with a matrix that says which rows belong to which token: the same digits every time
        member = tokens[starts][:, None] == tokens[None]
        out[tokens[starts]] = member.astype(rows.dtype) @ rows
    return out


# ------------------------------------------------------------------------------------------ images


def _padded(x: Array, padding: int, fill: Any = 0) -> Array:
    """x with `padding` rows and columns of `fill` around each image."""
    if not padding:
        return x
    return array_namespace(x).pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=fill)


def _places(window: tuple[int, int], stride: int, over: tuple[int, int]) -> list[tuple[slice, slice]]:
    """For each element of a window, by rows: which rows and columns of the image it meets in all its positions."""
    return [
        (slice(i, i + stride * (over[0] - 1) + 1, stride), slice(j, j + stride * (over[1] - 1) + 1, stride))
        for i in range(window[0])
        for j in range(window[1])
    ]


def positions(length: int, window: int, stride: int, padding: int) -> int:
    """How many positions a window has along an axis.

    >>> positions(8, 3, 1, 1)
    8
    """
    return max((length + 2 * padding - window) // stride + 1, 0)


def im2col(x: Array, window: tuple[int, int], stride: int, padding: int) -> Array:
    """Every position of a window as a column, so that a convolution is a matrix product.

    Parameters
    ----------
    x : array, shape (batch, channels, height, width)
    window : (rows, columns)
    stride, padding : int

    Returns
    -------
    array, shape (channels * rows * columns, batch * positions)
        Positions by rows.
    """
    xp = array_namespace(x)
    batch, channels, height, width = x.shape
    over = positions(height, window[0], stride, padding), positions(width, window[1], stride, padding)
    source = _padded(x, padding).swapaxes(0, 1)
    columns = xp.empty((channels, window[0] * window[1], batch, *over), x.dtype)
    for number, (rows, cols) in enumerate(_places(window, stride, over)):
        columns[:, number] = source[:, :, rows, cols]
    return columns.reshape(channels * window[0] * window[1], batch * over[0] * over[1])


def col2im(columns: Array, shape: tuple[int, ...], window: tuple[int, int], stride: int, padding: int) -> Array:
    """The adjoint of `im2col`: what lies on one element of the image in several positions is added.

    Parameters
    ----------
    columns : array, shape (channels * rows * columns, batch * positions)
    shape : (batch, channels, height, width)
    window, stride, padding
        As for `im2col`.

    Returns
    -------
    array of that shape
    """
    xp = array_namespace(columns)
    batch, channels, height, width = shape
    over = positions(height, window[0], stride, padding), positions(width, window[1], stride, padding)
    source = widen(columns).reshape(channels, window[0] * window[1], batch, *over)
    image = xp.zeros((batch, channels, height + 2 * padding, width + 2 * padding), source.dtype)
    for number, (rows, cols) in enumerate(_places(window, stride, over)):
        image[:, :, rows, cols] += source[:, number].swapaxes(0, 1)
    inside = image[:, :, padding : padding + height, padding : padding + width]
    return narrow(xp.ascontiguousarray(inside), columns.dtype)


def max_pool(x: Array, window: tuple[int, int], stride: int) -> tuple[Array, Array]:
    """The largest element in each position of a window, and which it was; of equal ones the first.

    Parameters
    ----------
    x : array, shape (batch, channels, height, width)
    window : (rows, columns)
    stride : int

    Returns
    -------
    y : array, shape (batch, channels, positions down, positions across)
    which : array of uint8 (or wider, for windows of more than 256 elements), of that shape
        Numbers within the window, by rows.
    """
    xp = array_namespace(x)
    over = positions(x.shape[2], window[0], stride, 0), positions(x.shape[3], window[1], stride, 0)
    places = _places(window, stride, over)
    y = x[:, :, places[0][0], places[0][1]].copy()
    which = xp.zeros(y.shape, smallest_type(len(places) - 1))
    for number, (rows, cols) in enumerate(places[1:], 1):
        part = x[:, :, rows, cols]
        larger = (part > y) | (part != part)
        y = xp.where(larger, part, y)
        which = xp.where(larger, which.dtype.type(number), which)
    return y, which


def max_pool_backward(dy: Array, which: Array, shape: tuple[int, ...], window: tuple[int, int], stride: int) -> Array:
    """dy handed to the elements that were the largest.

    Parameters
    ----------
    dy, which : array, shape (batch, channels, positions down, positions across)
    shape : (batch, channels, height, width)
    window, stride
        As for `max_pool`.

    Returns
    -------
    array of that shape
    """
    upper = widen(dy)
    dx = array_namespace(dy).zeros(shape, upper.dtype)
    for number, (rows, cols) in enumerate(_places(window, stride, dy.shape[2:])):
        dx[:, :, rows, cols] += upper * (which == number)
    return narrow(dx, dy.dtype)


def avg_pool(x: Array, window: tuple[int, int], stride: int) -> Array:
    """The mean of the elements in each position of a window.

    Parameters
    ----------
    x : array, shape (batch, channels, height, width)
    window : (rows, columns)
    stride : int

    Returns
    -------
    array, shape (batch, channels, positions down, positions across)
    """
    over = positions(x.shape[2], window[0], stride, 0), positions(x.shape[3], window[1], stride, 0)
    wider = widen(x)
    y = array_namespace(x).zeros((*x.shape[:2], *over), wider.dtype)
    for rows, cols in _places(window, stride, over):
        y += wider[:, :, rows, cols]
    y *= 1 / (window[0] * window[1])
    return narrow(y, x.dtype)


def avg_pool_backward(dy: Array, shape: tuple[int, ...], window: tuple[int, int], stride: int) -> Array:
    """dy shared out among the elements of each position.

    Parameters
    ----------
    dy : array, shape (batch, channels, positions down, positions across)
    shape : (batch, channels, height, width)
    window, stride
        As for `avg_pool`.

    Returns
    -------
    array of that shape
    """
    upper = widen(dy) * (1 / (window[0] * window[1]))
    dx = array_namespace(dy).zeros(shape, upper.dtype)
    for rows, cols in _places(window, stride, dy.shape[2:]):
        dx[:, :, rows, cols] += upper
    return narrow(dx, dy.dtype)
