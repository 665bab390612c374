"""Reference kernels of elementwise functions: activations, bias, dropout with counter-based random numbers."""

import math
from collections.abc import Callable
from functools import wraps
from hashlib import blake2b
from typing import Any

import numpy as np

from parallel.nn.kernels.special import erf
from parallel.nn.kernels.storage import array_namespace, narrow, widen
from quant.kernels.headers import constants
from quant.types import Array

FORMULAS = ("parallel.nn.kernels", "scalar.h")
"""Formulas of the kernels in C and CUDA, with their constants."""

_CONSTANTS = constants(FORMULAS)

RUN = 1 << 14
"""Elements per pass on the host, so that temporaries stay in the cache."""


def _elementwise(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Decorate an elementwise float32/float64 function: add other storage dtypes and an `out` (may be an input).

    Arguments that are floats come last."""

    @wraps(compute)
    def kernel(*arguments: Any, out: Array | None = None) -> Array:
        numbers = tuple(value for value in arguments if isinstance(value, float))
        arrays = arguments[: len(arguments) - len(numbers)]
        xp = array_namespace(arrays[0])
        if out is None:
            out = xp.empty(arrays[0].shape, arrays[0].dtype)
        every = (out, *arrays)
        if xp is np and all(array.flags.c_contiguous for array in every):  # else reshape copies, and `out` stays as is
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
    """ReLU: max(x, 0). NaN stays NaN."""
    return array_namespace(x).maximum(x, 0)


@_elementwise
def relu_backward(dy: Array, y: Array) -> Array:
    """Gradient of ReLU: dy where the *result* y of `relu` is positive, else 0."""
    return dy * (y > 0)


@_elementwise
def gelu(x: Array) -> Array:
    """GELU: x Phi(x), with the normal distribution Phi(x) = (1 + erf(x / sqrt 2)) / 2 (Hendrycks and Gimpel, 2016)."""
    y = erf(x * math.sqrt(0.5))
    y += 1
    y *= 0.5  # before x, which may be as large as numbers are
    y *= x
    return y


@_elementwise
def gelu_backward(dy: Array, x: Array) -> Array:
    """Gradient of GELU: dy (Phi(x) + x phi(x)), with the normal distribution Phi and its density phi."""
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


def sigmoid(x: Array) -> Array:
    """Logistic sigmoid 1 / (1 + exp(-x)), computed from exp(-|x|): no overflow, and small results stay accurate."""
    xp = array_namespace(x)
    e = xp.exp(-xp.absolute(x))
    y = xp.where(x < 0, e, x.dtype.type(1))
    e += 1
    y /= e
    return y


_CUBIC, _FAR = _CONSTANTS["CUBIC"], _CONSTANTS["FAR"]
_TWICE_SLOPE = 2 * math.sqrt(2 / math.pi)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), of float32 or float64."""
    xp = array_namespace(x)
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.absolute(x)))


@_elementwise
def gelu_tanh(x: Array) -> Array:
    """GELU by tanh, as in GPT-2: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.

    As x sigmoid(2 u), which (1 + tanh(u)) / 2 is.
    """
    return x * sigmoid(_TWICE_SLOPE * x * (1 + _CUBIC * x * x))


@_elementwise
def gelu_tanh_backward(dy: Array, x: Array) -> Array:
    """Gradient: dy times the derivative of `gelu_tanh` at x."""
    near = array_namespace(x).clip(x, -_FAR, _FAR)  # farther out, it is 0 or 1
    square = near * near
    s = sigmoid(_TWICE_SLOPE * near * (1 + _CUBIC * square))
    return dy * (s + near * s * (1 - s) * _TWICE_SLOPE * (1 + 3 * _CUBIC * square))


@_elementwise
def silu(x: Array) -> Array:
    """SiLU or swish: x / (1 + exp(-x))."""
    return x * sigmoid(x)


@_elementwise
def silu_backward(dy: Array, x: Array) -> Array:
    """Gradient: dy times the derivative of `silu` at x."""
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def add(x: Array, y: Array) -> Array:
    """Sum x + y of arrays of one shape and dtype."""
    return x + y


def biased_relu(z: Array, bias: Array) -> Array:
    """ReLU of z + bias, written to z, which is returned. Shapes (n, m) and (m,)."""
    z += bias
    return relu(z, out=z)


def _biased(activation: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    """Kernel from an activation f: it adds the bias to z in place and returns f(z + bias)."""

    def kernel(z: Array, bias: Array) -> Array:
        z += bias
        return activation(z)

    kernel.__name__ = f"biased_{activation.__name__}"
    return kernel


biased_gelu, biased_gelu_tanh, biased_silu = map(_biased, (gelu, gelu_tanh, silu))


@_elementwise
def masked(x: Array, keep: Array, scale: float) -> Array:
    """Apply a dropout mask (forward or backward): x * `scale` where the bool array `keep` is True, else 0."""
    return x * keep * scale


def key_of(seed: int, step: int, name: str) -> tuple[int, int]:
    """Key of a counter-based random generator: two 32-bit words, a hash of seed, step and name.

    >>> key_of(0, 1, "2.dropout") == key_of(0, 1, "2.dropout")
    True
    """
    digest = blake2b(f"{int(seed)} {int(step)} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Philox4x32-10 random numbers: four arrays of 32-bit words (as uint64) from a counter of four and a key of two.

    Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _CONSTANTS["PHILOX_FIRST"], c2 * _CONSTANTS["PHILOX_SECOND"]
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + _CONSTANTS["WEYL_FIRST"]) & 0xFFFFFFFF, (k1 + _CONSTANTS["WEYL_SECOND"]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep(samples: Array, elements: int, rate: float, key: tuple[int, int], first: int = 0) -> Array:
    """Dropout mask for samples of these numbers: bool, shape (len(samples), elements), False with probability `rate`.

    For the elements from number `first` on.

    Element e < 2^34 of the sample with number s (int64) depends only on s, e, `rate`, rounded to a multiple of 2^-32,
    and `key`.
    """
    xp = array_namespace(samples)
    words = _words(samples, elements, key, first)
    limit = np.uint64(round(rate * 2**32))
    kept = xp.empty((len(samples), words[0].shape[1], 4), bool)
    for lane, word in enumerate(words):
        kept[..., lane] = word >= limit
    kept = kept.reshape(len(samples), 4 * words[0].shape[1])
    at = first % 4
    return kept if at == 0 and elements % 4 == 0 else kept[:, at : at + elements].copy()


def uniform(samples: Array, elements: int, key: tuple[int, int]) -> Array:
    """Random numbers above 0 and below 1, float64 of shape (len(samples), elements), by sample and element as `keep`.

    Uniform multiples of 2^-32, plus 2^-33.
    """
    words = array_namespace(samples).stack(_words(samples, elements, key), axis=-1)
    return (words.reshape(len(samples), words.shape[1] * 4)[:, :elements] + 0.5) / 2**32


def normal_from(uniform: Array) -> Array:
    """Normal random numbers, float64, from twice as many uniform ones along the last axis (Box and Muller, 1958)."""
    xp = array_namespace(uniform)
    half = uniform.shape[-1] // 2
    return xp.sqrt(-2 * xp.log(uniform[..., :half])) * xp.cos(2 * math.pi * uniform[..., half:])


def _words(samples: Array, elements: int, key: tuple[int, int], first: int = 0) -> tuple[Array, Array, Array, Array]:
    """Four words for every four elements from number ``first // 4 * 4`` on. Each of shape (samples, quarters)."""
    xp = array_namespace(samples)
    sample = samples.astype(xp.uint64)[:, None]
    block = xp.arange(first // 4, -(-(first + elements) // 4), dtype=xp.uint64)[None]
    return philox((block, xp.zeros_like(block), sample & 0xFFFFFFFF, sample >> 32), key)
