"""Kernels in C: one pass over memory where NumPy takes several. Names as in `reference_kernels`.

For C-contiguous host arrays of float32 (indices and flags: int64, uint8, bool). Results depend on values and shapes
only. Sums may be reordered (for vector instructions), but NaN and infinity come out as NumPy's would. C checks types
and memory layouts, the functions of this module shapes. Other arguments raise `Unsuited` before anything is changed.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import numpy as np

from parallel.nn.kernels import reference_kernels
from quant.kernels.dispatch import Unsuited
from quant.types import Array

c: Any = import_module("parallel.nn.kernels._operators")

F = np.float32

KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels of this module by the reference's names."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a kernel by its name (decorator)."""
    KERNELS[function.__name__] = wraps(getattr(reference_kernels, function.__name__))(function)
    return KERNELS[function.__name__]


def needs(condition: bool) -> None:
    """Raise `Unsuited` unless the condition holds."""
    if not condition:
        raise Unsuited("expected other shapes or numbers of rows")


# ------------------------------------------------------------------------------------------ elementwise


def _mapped(name: str) -> Callable[..., Any]:
    """Elementwise kernel of arrays of one shape."""
    run = getattr(c, name)

    def apply(*arrays: Array, out: Array | None = None) -> Array:
        first = arrays[0]
        result = np.empty_like(first) if out is None else out
        needs({array.shape for array in (*arrays, result)} == {first.shape})
        run(*arrays, result)
        return result

    return wraps(getattr(reference_kernels, name))(apply)


def _biased(name: str) -> Callable[..., Any]:
    """Kernel that adds the bias to z in place and returns f(z + bias)."""
    run = getattr(c, name)

    def apply(z: Array, bias: Array) -> Array:
        needs(bias.shape == z.shape[-1:])
        y = z if name == "biased_relu" else np.empty_like(z)
        run(z, bias, y)
        return y

    return wraps(getattr(reference_kernels, name))(apply)


UNARY = ("gelu", "gelu_tanh", "silu")
BINARY = ("relu_backward", "gelu_backward", "gelu_tanh_backward", "silu_backward")
KERNELS |= {name: _mapped(name) for name in (*UNARY, *BINARY)}
KERNELS |= {name: _biased(name) for name in ("biased_relu", *(f"biased_{name}" for name in UNARY))}


@kernel
def masked(x: Array, keep: Array, scale: float, out: Array | None = None) -> Array:
    y = np.empty_like(x) if out is None else out
    needs(keep.shape == x.shape == y.shape and keep.dtype == bool)
    c.masked(x, keep, scale, y)
    return y


@kernel
def keep(samples: Array, elements: int, rate: float, key: tuple[int, int], first: int = 0) -> Array:
    needs(samples.dtype == np.int64 and samples.ndim == 1)
    start, at = divmod(first, 4)
    kept = np.empty((len(samples), -(-(at + elements) // 4) * 4), bool)
    c.keep(samples, round(rate * 2**32), *key, start, kept)
    return kept if at == 0 and elements % 4 == 0 else kept[:, at : at + elements].copy()


# ------------------------------------------------------------------------------------------ sums over rows, norms


@kernel
def sum_rows(x: Array, out: Array | None = None) -> Array:
    result = np.empty(x.shape[1:], F) if out is None else out
    needs(x.ndim > 0 and result.shape == x.shape[1:])
    c.sum_rows(x, result)
    return result


@kernel
def layer_norm(x: Array, gain: Array, bias: Array | None, eps: float) -> tuple[Array, Array | None, Array]:
    needs(x.ndim == 2 and gain.shape == x.shape[1:] and (bias is None or bias.shape == gain.shape))
    y, rstd = np.empty_like(x), np.empty(len(x), F)
    mean = None if bias is None else np.empty_like(rstd)
    c.layer_norm(x, gain, bias, eps, y, mean, rstd)
    return y, mean, rstd


@kernel
def layer_norm_backward(
    dy: Array, x: Array, gain: Array, mean: Array | None, rstd: Array
) -> tuple[Array, Array, Array | None]:
    needs(dy.ndim == 2 and dy.shape == x.shape and gain.shape == x.shape[1:] and rstd.shape == x.shape[:1])
    needs(mean is None or mean.shape == rstd.shape)
    dx, dgain, dbias = np.empty_like(dy), np.empty_like(gain), None if mean is None else np.empty_like(gain)
    c.layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias, np.empty((2, gain.size), F))
    return dx, dgain, dbias


# ------------------------------------------------------------------------------------------ probabilities


@kernel
def causal_softmax(scores: Array, scale: float, first: int) -> Array:
    needs(first >= 0)
    if scores.size:
        c.causal_softmax(scores, scores.shape[-2], scale, first)
    return scores


@kernel
def softmax_backward(dp: Array, p: Array, scale: float) -> Array:
    needs(dp.shape == p.shape)
    if dp.size:
        c.softmax_backward(dp, p, scale)
    return dp


@kernel
def visible_softmax(scores: Array, scale: float, low: Array, high: Array) -> Array:
    _check_tiles(scores, low, high)
    log_sum = np.empty(scores.shape[:-1], F)
    if scores.size:
        c.visible_softmax(scores, scale, low, high, log_sum)
    return log_sum


@kernel
def visible_probabilities(scores: Array, scale: float, low: Array, high: Array, log_sum: Array) -> Array:
    _check_tiles(scores, low, high)
    needs(log_sum.shape == scores.shape[:-1])
    if scores.size:
        c.visible_probabilities(scores, scale, low, high, log_sum)
    return scores


def _check_tiles(scores: Array, low: Array, high: Array) -> None:
    """Raise `Unsuited` unless each row of scores has keys and one of the ranges."""
    needs(scores.ndim > 1 and scores.shape[-1] > 0 and low.ndim == 1 and low.shape == high.shape)
    needs(scores.shape[-2] % low.size == 0 if low.size else scores.size == 0)


@kernel
def attention_gradient(dp: Array, p: Array, scale: float, row_sum: Array) -> Array:
    needs(dp.shape == p.shape and row_sum.shape == dp.shape[:-1])
    if dp.size:
        c.attention_gradient(dp, p, scale, row_sum)
    return dp


@kernel
def merge_attention(out: Array, log_sum: Array, part: Array, part_log_sum: Array) -> None:
    needs(out.shape == part.shape and log_sum.shape == part_log_sum.shape == out.shape[:-1])
    if out.size:
        c.merge_attention(out, log_sum, part, part_log_sum)


@kernel
def softmax(x: Array) -> Array:
    needs(x.size > 0)
    y = np.empty_like(x)
    c.softmax(x, y)
    return y


@kernel
def softmax_cross_entropy(scores: Array, targets: Array) -> tuple[float, Array]:
    _check_targets(scores, targets)
    log_sum = np.empty(len(scores), F)
    return c.softmax_cross_entropy(scores, targets, log_sum), log_sum


@kernel
def softmax_cross_entropy_backward(scale: float, scores: Array, targets: Array, log_sum: Array) -> Array:
    _check_targets(scores, targets)
    needs(log_sum.shape == targets.shape)
    dscores = np.empty_like(scores)
    c.softmax_cross_entropy_backward(scale, scores, targets, log_sum, dscores)
    return dscores


def _check_targets(scores: Array, targets: Array) -> None:
    """Raise `Unsuited` unless each row of scores has a target, which is a class, or negative."""
    needs(scores.ndim == 2 and targets.shape == scores.shape[:1])
    needs(targets.max(initial=-1) < scores.shape[1])


# ------------------------------------------------------------------------------------------ rows of tokens

FOUND = 0.0
"""Result of kernels in C that found all rows. Nothing was changed if there is another."""

SHORT = 64
"""Longest row in which `top_k` compares all pairs."""


@kernel
def top_k(scores: Array, count: int) -> Array:
    needs(0 < scores.shape[-1] <= SHORT)
    mask = np.empty(scores.shape, bool)
    c.top_k(scores, count, mask)
    return mask


@kernel
def embedding_gradient(dy: Array, tokens: Array, out: Array) -> Array:
    needs(tokens.ndim == 1 and out.ndim == 2 and dy.shape == (*tokens.shape, *out.shape[1:]))
    needs(c.embedding_gradient(dy, tokens, out) == FOUND)
    return out


@kernel
def add_rows(y: Array, tokens: Array, rows: Array, weights: Array | None = None) -> None:
    _check_rows(y, tokens, rows, weights=weights)
    needs(c.add_rows(y, tokens, rows, weights) == FOUND)


@kernel
def weighted_rows(upper: Array, tokens: Array, weights: Array, results: Array, out: Array) -> Array:
    _check_rows(upper, tokens, results, out, weights=weights)
    products = np.empty(len(results), F)
    needs(c.weighted_rows(upper, tokens, weights, results, out, products) == FOUND)
    return products


@kernel
def row_products(x: Array, places: Array, rows: Array) -> Array:
    _check_rows(x, places, rows)
    products = np.empty(len(rows), F)
    needs(c.row_products(x, places, rows, products) == FOUND)
    return products


def _check_rows(table: Array, places: Array, *rows: Array, weights: Array | None = None) -> None:
    """Raise `Unsuited` unless each place in the table has its row, of the table's width, and weight."""
    needs(table.ndim == 2 and places.ndim == 1)
    needs({one.shape for one in rows} == {(*places.shape, table.shape[1])})
    needs(weights is None or weights.shape == (places.size, 1))
