"""Elementwise kernels compiled by numba: activations, bias, dropout."""

# mypy: ignore-errors
# numba infers other types than Python annotations could express.

import math
from collections.abc import Callable
from functools import wraps

import numpy as np

from parallel.nn.kernels import reference_kernels, scalar
from parallel.nn.kernels.scalar import ONE, ZERO, F, logistic, normal
from quant.kernels.jit import compiler

loop = compiler(scalar, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
"""Decorator that compiles a loop at its first call; sums may be reordered, and products and sums fused."""


def mapped(function: Callable[..., None]) -> Callable[..., np.ndarray]:
    """Compile a loop over 1-D arrays to an elementwise kernel; unequal shapes or dtypes go to the reference."""
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
            row[j] = ZERO if x < ZERO else x  # NaN stays NaN


@wraps(reference_kernels.biased_relu)
def biased_relu(z, bias):
    if not _adds(z, bias):
        return reference_kernels.biased_relu(z, bias)
    _biased_relu(z.reshape(-1, bias.size), bias)
    return z


def biased(function: Callable[..., None]) -> Callable[..., np.ndarray]:
    """Decorate a loop over rows: compile it to a kernel that adds the bias to z in place and returns f(z + bias)."""
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
    """True if the compiled kernels apply: float32, not empty, and `bias` has the length of the last axis of `z`."""
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
def _keep(samples, limit, key0, key1, start, kept):
    for row in range(samples.size):
        low, high = samples[row] & _LOW, samples[row] >> _WORD
        flags = kept[row]
        for block in range(kept.shape[1] // 4):
            c0, c1, c2, c3 = start + np.uint64(block), np.uint64(0), low, high
            k0, k1 = key0, key1
            for _ in range(10):
                left, right = c0 * _M0, c2 * _M1
                c0, c1, c2, c3 = (right >> _WORD) ^ c1 ^ k0, right & _LOW, (left >> _WORD) ^ c3 ^ k1, left & _LOW
                k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
            flags[4 * block] = c0 >= limit
            flags[4 * block + 1] = c1 >= limit
            flags[4 * block + 2] = c2 >= limit
            flags[4 * block + 3] = c3 >= limit


@wraps(reference_kernels.keep)
def keep(samples, elements, rate, key, first=0):
    if samples.dtype != np.int64 or samples.ndim != 1:
        return reference_kernels.keep(samples, elements, rate, key, first)
    start, at = divmod(first, 4)
    kept = np.empty((len(samples), -(-(at + elements) // 4) * 4), bool)
    limit, *words = map(np.uint64, (round(rate * 2**32), *key, start))
    _keep(samples.view(np.uint64), limit, *words, kept)
    return kept if at == 0 and elements % 4 == 0 else kept[:, at : at + elements].copy()
