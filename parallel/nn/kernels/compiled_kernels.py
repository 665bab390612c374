"""Kernels in C: one pass over memory where NumPy takes several. Names as in `reference_kernels`.

For C-contiguous host arrays of float32 (indices and flags: int64, uint8, bool). Results depend on values and shapes
only. Sums may be reordered (for vector instructions), but NaN and infinity come out as NumPy's would.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from parallel.nn.kernels import _operators as c  # type: ignore[attr-defined]
from parallel.nn.kernels import reference_kernels
from quant.types import Array

F = np.float32

KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels of this module by the reference's names."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a kernel by its name (decorator)."""
    KERNELS[function.__name__] = wraps(getattr(reference_kernels, function.__name__))(function)
    return KERNELS[function.__name__]


# ------------------------------------------------------------------------------------------ elementwise


def _mapped(name: str) -> Callable[..., Any]:
    """Elementwise kernel; unequal shapes or dtypes go to the reference."""
    run, reference = getattr(c, name), getattr(reference_kernels, name)

    def apply(*arrays: Array, out: Array | None = None) -> Array:
        first = arrays[0]
        if any(array.shape != first.shape or array.dtype != F for array in (*arrays, first if out is None else out)):
            return reference(*arrays, out=out)
        result = np.empty_like(first) if out is None else out
        run(*arrays, result)
        return result

    return wraps(reference)(apply)


def _biased(name: str) -> Callable[..., Any]:
    """Kernel that adds the bias to z in place and returns f(z + bias); the reference for other types and shapes."""
    run, reference = getattr(c, name), getattr(reference_kernels, name)

    def apply(z: Array, bias: Array) -> Array:
        if not (z.size and z.dtype == bias.dtype == F and bias.shape == z.shape[-1:]):
            return reference(z, bias)
        if name == "biased_relu":
            run(z, bias)
            return z
        y = np.empty_like(z)
        run(z, bias, y)
        return y

    return wraps(reference)(apply)


UNARY = ("gelu", "gelu_tanh", "silu")
BINARY = ("relu_backward", "gelu_backward", "gelu_tanh_backward", "silu_backward")
KERNELS |= {name: _mapped(name) for name in (*UNARY, *BINARY)}
KERNELS |= {name: _biased(name) for name in ("biased_relu", *(f"biased_{name}" for name in UNARY))}


@kernel
def masked(x: Array, keep: Array, scale: float, out: Array | None = None) -> Array:
    target = x if out is None else out
    if keep.shape != x.shape or keep.dtype != bool or target.shape != x.shape or not x.dtype == target.dtype == F:
        return reference_kernels.masked(x, keep, scale, out=out)
    y = np.empty_like(x) if out is None else out
    c.masked(x, keep, scale, y)
    return y


@kernel
def keep(samples: Array, elements: int, rate: float, key: tuple[int, int], first: int = 0) -> Array:
    if samples.dtype != np.int64 or samples.ndim != 1:
        return reference_kernels.keep(samples, elements, rate, key, first)
    start, at = divmod(first, 4)
    kept = np.empty((len(samples), -(-(at + elements) // 4) * 4), bool)
    c.keep(samples, round(rate * 2**32), *key, start, kept)
    return kept if at == 0 and elements % 4 == 0 else kept[:, at : at + elements].copy()


# ------------------------------------------------------------------------------------------ sums over rows, norms


@kernel
def sum_rows(x: Array, out: Array | None = None) -> Array:
    result = np.empty(x.shape[1:], F) if out is None else out
    if x.ndim < 1 or x.dtype != F or result.shape != x.shape[1:] or result.dtype != F:
        return reference_kernels.sum_rows(x, out=out)
    c.sum_rows(x, result)
    return result


@kernel
def layer_norm(x: Array, gain: Array, bias: Array | None, eps: float) -> tuple[Array, Array | None, Array]:
    y, rstd = np.empty_like(x), np.empty(len(x), F)
    mean = None if bias is None else np.empty_like(rstd)
    c.layer_norm(x, gain, bias, eps, y, mean, rstd)
    return y, mean, rstd


@kernel
def layer_norm_backward(
    dy: Array, x: Array, gain: Array, mean: Array | None, rstd: Array
) -> tuple[Array, Array, Array | None]:
    dx, dgain, dbias = np.empty_like(dy), np.empty_like(gain), None if mean is None else np.empty_like(gain)
    c.layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias, np.empty((2, gain.size), F))
    return dx, dgain, dbias


# ------------------------------------------------------------------------------------------ probabilities


@kernel
def causal_softmax(scores: Array, scale: float, first: int) -> Array:
    if scores.size:
        c.causal_softmax(scores, scores.shape[-2], scale, first)
    return scores


@kernel
def softmax_backward(dp: Array, p: Array, scale: float) -> Array:
    if dp.size:
        c.softmax_backward(dp, p, scale)
    return dp


@kernel
def visible_softmax(scores: Array, scale: float, low: Array, high: Array) -> Array:
    log_sum = np.empty(scores.shape[:-1], F)
    if scores.size:
        c.visible_softmax(scores, scale, low, high, log_sum)
    return log_sum


@kernel
def visible_probabilities(scores: Array, scale: float, low: Array, high: Array, log_sum: Array) -> Array:
    if scores.size:
        c.visible_probabilities(scores, scale, low, high, log_sum)
    return scores


@kernel
def attention_gradient(dp: Array, p: Array, scale: float, row_sum: Array) -> Array:
    if dp.size:
        c.attention_gradient(dp, p, scale, row_sum)
    return dp


@kernel
def merge_attention(out: Array, log_sum: Array, part: Array, part_log_sum: Array) -> None:
    if out.size:
        c.merge_attention(out, log_sum, part, part_log_sum)


@kernel
def softmax(x: Array) -> Array:
    if x.dtype != F or not x.size:
        return reference_kernels.softmax(x)
    y = np.empty_like(x)
    c.softmax(x, y)
    return y


@kernel
def softmax_cross_entropy(scores: Array, targets: Array) -> tuple[float, Array]:
    if not scores.size or scores.dtype != F or targets.max() >= scores.shape[1]:
        return reference_kernels.softmax_cross_entropy(scores, targets)
    log_sum = np.empty(len(scores), F)
    return c.softmax_cross_entropy(scores, targets, log_sum), log_sum


@kernel
def softmax_cross_entropy_backward(scale: float, scores: Array, targets: Array, log_sum: Array) -> Array:
    if not scores.size or targets.max() >= scores.shape[1]:
        return reference_kernels.softmax_cross_entropy_backward(scale, scores, targets, log_sum)
    dscores = np.empty_like(scores)
    c.softmax_cross_entropy_backward(scale, scores, targets, log_sum, dscores)
    return dscores


# ------------------------------------------------------------------------------------------ rows of tokens

SHORT = 64
"""Longest row in which `top_k` compares all pairs."""


@kernel
def top_k(scores: Array, count: int) -> Array:
    if scores.dtype != F or not 0 < scores.shape[-1] <= SHORT:
        return reference_kernels.top_k(scores, count)
    mask = np.empty(scores.shape, bool)
    c.top_k(scores, count, mask)
    return mask


@kernel
def embedding_gradient(dy: Array, tokens: Array, out: Array) -> Array:
    if not tokens.size or tokens.min() < 0 or tokens.max() >= len(out) or out.dtype != F:
        return reference_kernels.embedding_gradient(dy, tokens, out)
    c.embedding_gradient(dy, tokens, out)
    return out


@kernel
def add_rows(y: Array, tokens: Array, rows: Array, weights: Array | None = None) -> None:
    if _fit(tokens, y, rows, rows if weights is None else weights):
        c.add_rows(y, tokens, rows, weights)
    else:
        reference_kernels.add_rows(y, tokens, rows, weights)


@kernel
def weighted_rows(upper: Array, tokens: Array, weights: Array, results: Array, out: Array) -> Array:
    if not _fit(tokens, upper, results, weights, out):
        return reference_kernels.weighted_rows(upper, tokens, weights, results, out)
    products = np.empty(len(results), F)
    c.weighted_rows(upper, tokens, weights, results, out, products)
    return products


@kernel
def row_products(x: Array, places: Array, rows: Array) -> Array:
    if not _fit(places, x, rows):
        return reference_kernels.row_products(x, places, rows)
    products = np.empty(len(rows), F)
    c.row_products(x, places, rows, products)
    return products


def _fit(places: Array, *matrices: Array) -> bool:
    """True for matrices of float32 and int64 numbers of rows of the first."""
    return places.dtype == np.int64 and all(matrix.dtype == F and matrix.ndim == 2 for matrix in matrices)
