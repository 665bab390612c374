"""Kernels as loops that numba compiles: one pass over memory where NumPy takes several. Same names as in `reference`.

For C-contiguous host arrays of float32. Each function is compiled when it is first called, and kept on disk for the
next process where there is a place to keep it. Results depend on values and shapes only. Sums may be taken in another
order than written (that is what makes them vectors), but a NaN or an infinity is never assumed away: it comes out as
NumPy's would.
"""

# mypy: ignore-errors
# numba infers other types than Python annotations could express.

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps

import numpy as np
from numba import njit

from parallel.nn.kernels import philox, reference_kernels, scalar
from parallel.nn.kernels.scalar import ONE, ZERO, F, exp_down, logistic, normal
from quant.kernels.jit import compiler

ROWS = 64
"""Rows per partial sum: limits the growth of rounding errors with the length of a sum."""


loop = compiler(scalar, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
"""Decorator of a loop in which sums may be reordered and products and sums fused."""


# ------------------------------------------------------------------------------------------ element by element


def mapped(function: Callable[..., None]) -> Callable[..., np.ndarray]:
    """Elementwise kernel of arrays of one shape, with `out`."""
    compiled, plain = loop(function), getattr(reference_kernels, function.__name__)

    @wraps(plain)
    def kernel(*arrays, out=None):
        first = arrays[0]
        result = np.empty_like(first) if out is None else out
        if any(array.shape != first.shape or array.dtype != first.dtype for array in (*arrays[1:], result)):
            return plain(*arrays, out=out)
        compiled(*(array.reshape(-1) for array in arrays), result.reshape(-1))
        return result

    return kernel


@mapped
def relu_backward(dy, y, dx):
    for i in range(dy.size):
        dx[i] = dy[i] * (ONE if y[i] > ZERO else ZERO)


@mapped
def gelu(x, y):
    for i in range(x.size):
        y[i] = x[i] * normal(x[i])[0]


@mapped
def gelu_backward(dy, x, dx):
    for i in range(x.size):
        distribution, density = normal(x[i])
        dx[i] = dy[i] * (distribution + x[i] * density)


CUBIC, TWICE_SLOPE = F(0.044715), F(2 * math.sqrt(2 / math.pi))
CUBIC_3, FAR = F(3 * 0.044715), F(12)


@mapped
def gelu_tanh(x, y):  # (1 + tanh(u)) / 2 = logistic(2 u)
    for i in range(x.size):
        y[i] = x[i] * logistic(TWICE_SLOPE * x[i] * (ONE + CUBIC * x[i] * x[i]))


@mapped
def gelu_tanh_backward(dy, x, dx):
    for i in range(x.size):
        near = FAR if x[i] > FAR else (-FAR if x[i] < -FAR else x[i])  # farther out, the slope is 0 or 1
        square = near * near
        s = logistic(TWICE_SLOPE * near * (ONE + CUBIC * square))
        dx[i] = dy[i] * (s + near * s * (ONE - s) * TWICE_SLOPE * (ONE + CUBIC_3 * square))


@mapped
def silu(x, y):
    for i in range(x.size):
        y[i] = x[i] * logistic(x[i])


@mapped
def silu_backward(dy, x, dx):
    for i in range(x.size):
        s = logistic(x[i])
        dx[i] = dy[i] * s * (ONE + x[i] * (ONE - s))


@loop
def _biased_relu(z, bias):
    for i in range(z.shape[0]):
        row = z[i]
        for j in range(bias.size):
            x = row[j] + bias[j]
            row[j] = ZERO if x < ZERO else x  # a NaN stays one


@wraps(reference_kernels.biased_relu)
def biased_relu(z, bias):
    if not _adds(z, bias):
        return reference_kernels.biased_relu(z, bias)
    _biased_relu(z.reshape(-1, bias.size), bias)
    return z


def biased(function: Callable[..., None]) -> Callable[..., np.ndarray]:
    """Kernel of z and a bias that is added to it in place."""
    compiled, plain = loop(function), getattr(reference_kernels, function.__name__)

    @wraps(plain)
    def kernel(z, bias):
        if not _adds(z, bias):
            return plain(z, bias)
        y = np.empty_like(z)
        compiled(z.reshape(-1, bias.size), bias, y.reshape(-1, bias.size))
        return y

    return kernel


def _adds(z, bias):
    """True if the arrays can be added row by row."""
    return z.size and z.dtype == bias.dtype == F and bias.shape == z.shape[-1:]


@biased
def biased_gelu(z, bias, y):
    for i in range(z.shape[0]):
        row, into = z[i], y[i]
        for j in range(bias.size):
            x = row[j] + bias[j]
            row[j] = x
            into[j] = x * normal(x)[0]


@biased
def biased_gelu_tanh(z, bias, y):
    for i in range(z.shape[0]):
        row, into = z[i], y[i]
        for j in range(bias.size):
            x = row[j] + bias[j]
            row[j] = x
            into[j] = x * logistic(TWICE_SLOPE * x * (ONE + CUBIC * x * x))


@biased
def biased_silu(z, bias, y):
    for i in range(z.shape[0]):
        row, into = z[i], y[i]
        for j in range(bias.size):
            x = row[j] + bias[j]
            row[j] = x
            into[j] = x * logistic(x)


@loop
def _masked(x, keep, scale, y):
    for i in range(x.size):
        y[i] = x[i] * F(keep[i]) * scale


@wraps(reference_kernels.masked)
def masked(x, keep, scale, out=None):
    y = np.empty_like(x) if out is None else out
    if keep.shape != x.shape or keep.dtype != bool or y.shape != x.shape or y.dtype != x.dtype:
        return reference_kernels.masked(x, keep, scale, out=out)
    _masked(x.reshape(-1), keep.reshape(-1).view(np.uint8), F(scale), y.reshape(-1))
    return y


_M0, _M1 = map(np.uint64, (0xD2511F53, 0xCD9E8D57))
_W0, _W1 = map(np.uint64, (0x9E3779B9, 0xBB67AE85))
_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)


@loop
def _keep(samples, limit, key0, key1, kept):
    for row in range(samples.size):
        low, high = samples[row] & _LOW, samples[row] >> _WORD
        flags = kept[row]
        for block in range(kept.shape[1] // 4):
            c0, c1, c2, c3 = np.uint64(block), np.uint64(0), low, high
            k0, k1 = key0, key1
            for _ in range(10):
                left, right = c0 * _M0, c2 * _M1
                c0, c1, c2, c3 = (right >> _WORD) ^ c1 ^ k0, right & _LOW, (left >> _WORD) ^ c3 ^ k1, left & _LOW
                k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
            flags[4 * block] = c0 >= limit
            flags[4 * block + 1] = c1 >= limit
            flags[4 * block + 2] = c2 >= limit
            flags[4 * block + 3] = c3 >= limit


@wraps(philox.keep)
def keep(samples, elements, rate, key):
    """Same as `philox.keep`, bit for bit."""
    if samples.dtype != np.int64 or samples.ndim != 1:
        return philox.keep(samples, elements, rate, key)
    kept = np.empty((len(samples), -(-elements // 4) * 4), bool)
    _keep(samples.view(np.uint64), np.uint64(round(rate * 2**32)), np.uint64(key[0]), np.uint64(key[1]), kept)
    return kept[:, :elements].copy() if elements % 4 else kept


# ------------------------------------------------------------------------------------------ sums over rows


@loop
def _sum_rows(x, out):
    columns = x.shape[1]
    block = np.empty(columns, np.float32)
    out[:] = ZERO
    for first in range(0, x.shape[0], ROWS):
        block[:] = ZERO
        for i in range(first, min(first + ROWS, x.shape[0])):
            row = x[i]
            for j in range(columns):
                block[j] += row[j]
        for j in range(columns):
            out[j] += block[j]


@wraps(reference_kernels.sum_rows)
def sum_rows(x, out=None):
    result = np.empty(x.shape[1:], np.float32) if out is None else out
    if x.ndim < 1 or x.dtype != np.float32 or result.shape != x.shape[1:] or result.dtype != np.float32:
        return reference_kernels.sum_rows(x, out=out)
    _sum_rows(x.reshape(len(x), result.size), result.reshape(-1))
    return result


# ------------------------------------------------------------------------------------------ norms


@loop
def _layer_norm(x, gain, bias, eps, y, mean, rstd):
    rows, width = x.shape
    for i in range(rows):
        row, into = x[i], y[i]
        total = ZERO
        for j in range(width):
            total += row[j]
        middle = total / F(width)
        squares = ZERO
        for j in range(width):
            away = row[j] - middle
            squares += away * away
        inverse = ONE / np.sqrt(squares / F(width) + eps)
        for j in range(width):
            into[j] = (row[j] - middle) * inverse * gain[j] + bias[j]
        mean[i], rstd[i] = middle, inverse


@wraps(reference_kernels.layer_norm)
def layer_norm(x, gain, bias, eps):
    y, mean, rstd = np.empty_like(x), np.empty(len(x), np.float32), np.empty(len(x), np.float32)
    _layer_norm(x, gain, bias, F(eps), y, mean, rstd)
    return y, mean, rstd


@loop
def _layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias):
    rows, width = x.shape
    gains, biases = np.empty(width, np.float32), np.empty(width, np.float32)
    dgain[:] = ZERO
    dbias[:] = ZERO
    for first in range(0, rows, ROWS):
        gains[:] = ZERO
        biases[:] = ZERO
        for i in range(first, min(first + ROWS, rows)):
            upper, row, into = dy[i], x[i], dx[i]
            middle, inverse = mean[i], rstd[i]
            total, along = ZERO, ZERO
            for j in range(width):
                unit = (row[j] - middle) * inverse
                inner = upper[j] * gain[j]
                total += inner
                along += inner * unit
            total /= F(width)
            along /= F(width)
            for j in range(width):
                unit = (row[j] - middle) * inverse
                into[j] = (upper[j] * gain[j] - total - unit * along) * inverse
                gains[j] += upper[j] * unit
                biases[j] += upper[j]
        for j in range(width):
            dgain[j] += gains[j]
            dbias[j] += biases[j]


@wraps(reference_kernels.layer_norm_backward)
def layer_norm_backward(dy, x, gain, mean, rstd):
    dx, dgain, dbias = np.empty_like(dy), np.empty_like(gain), np.empty_like(gain)
    _layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias)
    return dx, dgain, dbias


@loop
def _rms_norm(x, gain, eps, y, rstd):
    rows, width = x.shape
    for i in range(rows):
        row, into = x[i], y[i]
        squares = ZERO
        for j in range(width):
            squares += row[j] * row[j]
        inverse = ONE / np.sqrt(squares / F(width) + eps)
        for j in range(width):
            into[j] = row[j] * inverse * gain[j]
        rstd[i] = inverse


@wraps(reference_kernels.rms_norm)
def rms_norm(x, gain, eps):
    y, rstd = np.empty_like(x), np.empty(len(x), np.float32)
    _rms_norm(x, gain, F(eps), y, rstd)
    return y, rstd


@loop
def _rms_norm_backward(dy, x, gain, rstd, dx, dgain):
    rows, width = x.shape
    gains = np.empty(width, np.float32)
    dgain[:] = ZERO
    for first in range(0, rows, ROWS):
        gains[:] = ZERO
        for i in range(first, min(first + ROWS, rows)):
            upper, row, into = dy[i], x[i], dx[i]
            inverse, along = rstd[i], ZERO
            for j in range(width):
                along += upper[j] * gain[j] * (row[j] * inverse)
            along /= F(width)
            for j in range(width):
                unit = row[j] * inverse
                into[j] = (upper[j] * gain[j] - unit * along) * inverse
                gains[j] += upper[j] * unit
        for j in range(width):
            dgain[j] += gains[j]


@wraps(reference_kernels.rms_norm_backward)
def rms_norm_backward(dy, x, gain, rstd):
    dx, dgain = np.empty_like(dy), np.empty_like(gain)
    _rms_norm_backward(dy, x, gain, rstd, dx, dgain)
    return dx, dgain


# ------------------------------------------------------------------------------------------ probabilities


_UNSIGNED = np.int32(0x7FFFFFFF)
_ALL = np.int32(31)


@njit(forceinline=True)
def _ordered(value):
    """Integer in the order of float32; unlike maxima of floats, those of integers vectorise."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> _ALL) & _UNSIGNED))


@njit(forceinline=True)
def _number(ordered):
    """Inverse of `_ordered`."""
    return np.int32(ordered ^ ((ordered >> _ALL) & _UNSIGNED)).view(np.float32)


@loop
def _largest(row, count, scale):
    """Largest of the first elements of a row times scale; arbitrary if some are NaN."""
    top = np.int32(-0x7FFFFFFF)
    for j in range(count):
        top = max(top, _ordered(row[j] * scale))
    return _number(top)


@loop
def _causal_softmax(scores, queries, scale, first):
    keys = scores.shape[1]
    for i in range(scores.shape[0]):
        row, seen = scores[i], min(first + i % queries + 1, keys)
        top = _largest(row, seen, scale)
        total = ZERO
        for j in range(seen):
            e = exp_down(row[j] * scale - top)
            row[j] = e
            total += e
        inverse = ONE / total
        for j in range(seen):
            row[j] *= inverse
        for j in range(seen, keys):
            row[j] = ZERO


@wraps(reference_kernels.causal_softmax)
def causal_softmax(scores, scale, first):
    queries, keys = scores.shape[-2:]
    _causal_softmax(scores.reshape(-1, keys) if scores.size else np.empty((0, 1), F), queries, F(scale), first)
    return scores


@loop
def _softmax_backward(dp, p, scale):
    rows, keys = dp.shape
    for i in range(rows):
        row, weights = dp[i], p[i]
        along = ZERO
        for j in range(keys):
            along += row[j] * weights[j]
        for j in range(keys):
            row[j] = (row[j] - along) * weights[j] * scale


@wraps(reference_kernels.softmax_backward)
def softmax_backward(dp, p, scale):
    if dp.size:
        _softmax_backward(dp.reshape(-1, dp.shape[-1]), p.reshape(-1, dp.shape[-1]), F(scale))
    return dp


@loop
def _softmax_cross_entropy(scores, targets, log_sum):
    rows, classes = scores.shape
    loss = 0.0
    for i in range(rows):
        row = scores[i]
        top = _largest(row, classes, ONE)
        total = ZERO
        for j in range(classes):
            total += exp_down(row[j] - top)
        log_sum[i] = F(math.log(total)) + top
        if targets[i] >= 0:
            loss += F(log_sum[i] - row[targets[i]])
    return loss


@wraps(reference_kernels.softmax_cross_entropy)
def softmax_cross_entropy(scores, targets):
    if not scores.size or targets.max() >= scores.shape[1]:
        return reference_kernels.softmax_cross_entropy(scores, targets)
    log_sum = np.empty(len(scores), F)
    return _softmax_cross_entropy(scores, targets, log_sum), log_sum


@loop
def _softmax_cross_entropy_backward(scale, scores, targets, log_sum, dscores):
    rows, classes = scores.shape
    for i in range(rows):
        row, into, target = scores[i], dscores[i], targets[i]
        factor = ZERO if target < 0 else scale
        for j in range(classes):
            into[j] = exp_down(row[j] - log_sum[i]) * factor
        if target >= 0:
            into[target] -= factor


@wraps(reference_kernels.softmax_cross_entropy_backward)
def softmax_cross_entropy_backward(scale, scores, targets, log_sum):
    if not scores.size or targets.max() >= scores.shape[1]:
        return reference_kernels.softmax_cross_entropy_backward(scale, scores, targets, log_sum)
    dscores = np.empty_like(scores)
    _softmax_cross_entropy_backward(F(scale), scores, targets, log_sum, dscores)
    return dscores


# ------------------------------------------------------------------------------------------ embedding


@loop
def _embedding_gradient(dy, tokens, out):
    out[:] = ZERO
    for i in range(tokens.size):
        row, into = dy[i], out[tokens[i]]
        for j in range(row.size):
            into[j] += row[j]


@wraps(reference_kernels.embedding_gradient)
def embedding_gradient(dy, tokens, out):
    if not tokens.size or tokens.min() < 0 or tokens.max() >= len(out) or out.dtype != F:
        return reference_kernels.embedding_gradient(dy, tokens, out)
    _embedding_gradient(dy, tokens, out)
    return out
