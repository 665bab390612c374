"""Reference kernels of operators and losses in NumPy or CuPy: run where no other kernel applies.

One code for NumPy and CuPy. Arrays have any strides and any size; results are new C-contiguous arrays unless there is
an `out`. Arguments are modified only where documented. Results have the storage dtype of the first array; statistics,
probabilities and parameters' gradients are *wide*: float64 for float64 arrays, else float32.
"""

import math

import numpy as np

from parallel.nn.kernels import device_products
from parallel.nn.kernels.deferred import number
from parallel.nn.kernels.reference_conv import *  # noqa: F403
from parallel.nn.kernels.reference_elementwise import *  # noqa: F403
from parallel.nn.kernels.storage import array_namespace, narrow, wide, widen
from quant.types import Array

# ------------------------------------------------------------------------------------------ matrix products


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Matrix product over the last two axes, rounded to the dtype of `a`. Half types are multiplied in float32.

    `a` has shape (..., n, k), `b` (..., k, m), `out` (..., n, m): of the dtype of `a`, or wide for unrounded sums.
    On a GPU half types are not widened; sums are in float32 there too.
    """
    xp = array_namespace(a)
    if device_products.suits(a, b):
        return device_products.multiply(a, b, out)
    if wide(a.dtype) == a.dtype:
        return xp.matmul(a, b) if out is None else xp.matmul(a, b, out=out)
    a, b, dtype = widen(a), widen(b), a.dtype
    if out is not None and out.dtype == wide(dtype):
        return xp.matmul(a, b, out=out)
    return narrow(xp.matmul(a, b), dtype, out)


def affine(x: Array, weight: Array, bias: Array) -> Array:
    """Affine map x @ weight + bias. Shapes (n, k), (k, m), (m,)."""
    y = matmul(x, weight)
    y += bias
    return y


def sum_rows(x: Array, out: Array | None = None) -> Array:
    """Sum over the first axis (the gradient of a bias), in float32, or float64 for float64."""
    return x.sum(axis=0, dtype=wide(x.dtype), out=out)


# ------------------------------------------------------------------------------------------ norms, over the last axis


def layer_norm(x: Array, gain: Array, bias: Array | None, eps: float) -> tuple[Array, Array | None, Array]:
    """LayerNorm of rows: (y, mean, rstd), y = (x - mean) rstd gain + bias, rstd = 1 / sqrt(variance + eps).

    Ba, Kiros, Hinton 2016. If bias is None, RMSNorm: y = x rstd gain, rstd = 1 / sqrt(mean of x^2 + eps), mean None
    (Zhang and Sennrich, 2019). Shapes: x (n, m), gain and bias (m,); mean and rstd (n,), wide.
    """
    centred = widen(x)
    mean = None if bias is None else centred.mean(axis=-1)
    if mean is not None:
        centred = centred - mean[:, None]
    rstd = 1 / array_namespace(x).sqrt((centred * centred).mean(axis=-1) + eps)
    y = centred * rstd[:, None]
    y *= widen(gain)
    if bias is not None:
        y += widen(bias)
    return narrow(y, x.dtype), mean, rstd


def layer_norm_backward(
    dy: Array, x: Array, gain: Array, mean: Array | None, rstd: Array
) -> tuple[Array, Array, Array | None]:
    """Gradients of `layer_norm`: (dx of shape (n, m), dgain and dbias of shape (m,)). Dbias is None if mean is."""
    upper, unit = widen(dy), widen(x)
    unit = (unit if mean is None else unit - mean[:, None]) * rstd[:, None]
    inner = upper * widen(gain)
    dx = inner if mean is None else inner - inner.mean(axis=-1)[:, None]
    dx = dx - unit * (inner * unit).mean(axis=-1)[:, None]
    dx *= rstd[:, None]
    return narrow(dx, dy.dtype), (upper * unit).sum(axis=0), None if mean is None else upper.sum(axis=0)


# ------------------------------------------------------------------------------------------ attention


def causal_softmax(scores: Array, scale: float, first: int) -> Array:
    """Causal softmax of scores * `scale` over the keys, in place: query i attends to keys 0 to `first` + i.

    `scores` has shape (..., queries, keys), wide.
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
    """Gradient of softmax(scores * scale), scale p (dp - sum(dp p)), written to dp. P, dp: (..., queries, keys)."""
    dp -= (dp * p).sum(axis=-1, keepdims=True)
    dp *= p
    dp *= scale
    return dp


def visible_softmax(scores: Array, scale: float, low: Array, high: Array) -> Array:
    """Softmax of scores * `scale` over the visible keys, in place, 0 elsewhere. Return the log of the sum.

    `scores` has shape (..., rows, keys), wide; row i sees keys low[i % queries] up to, but excluding, high[i % queries]
    (int64, of length `queries`). The result, the log of the sum of exponentials, has shape (..., rows): -inf where no
    key is visible.
    """
    xp = array_namespace(scores)
    _hide(scores, scale, low, high)
    top = scores.max(axis=-1, keepdims=True)
    top[top == -math.inf] = 0
    scores -= top
    xp.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= xp.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        log_sum: Array = (xp.log(total) + top)[..., 0]
    return log_sum


def visible_probabilities(scores: Array, scale: float, low: Array, high: Array, log_sum: Array) -> Array:
    """Exponentials of scores * `scale` - `log_sum` at the visible keys, in place, 0 elsewhere.

    Shapes as in `visible_softmax`; `log_sum` is that of all keys of the row, of this and other tiles.
    """
    xp = array_namespace(scores)
    _hide(scores, scale, low, high)
    scores -= xp.where(log_sum == -math.inf, 0, log_sum)[..., None]
    return xp.exp(scores, out=scores)


def _hide(scores: Array, scale: float, low: Array, high: Array) -> None:
    """Multiply by `scale`, and set the scores of invisible keys to -inf."""
    xp, rows = array_namespace(scores), scores.shape[-2]
    scores *= scale
    keys = xp.arange(scores.shape[-1])
    hidden = (keys < xp.asarray(low)[:, None]) | (keys >= xp.asarray(high)[:, None])
    folded = scores.reshape(*scores.shape[:-2], rows // max(len(hidden), 1), *hidden.shape)
    folded[...] = xp.where(hidden, scores.dtype.type(-math.inf), folded)


def attention_gradient(dp: Array, p: Array, scale: float, row_sum: Array) -> Array:
    """Gradient of the unscaled scores, scale p (dp - row_sum), written to dp. P, dp: (..., rows, keys).

    `row_sum`, of shape (..., rows), is the sum of dp p over all keys, of this and other tiles.
    """
    dp -= row_sum[..., None]
    dp *= p
    dp *= scale
    return dp


def merge_attention(out: Array, log_sum: Array, part: Array, part_log_sum: Array) -> None:
    """Add to attention over some keys that over others: update `out` (..., rows, width) and `log_sum` (..., rows).

    All wide. out += s (part - out), where s is the share of the new keys in the sum of exponentials; no exponential
    overflows, and a sum of nothing (-inf) is ordinary. (Dao, "FlashAttention-2", 2023, section 3.1.)
    """
    xp = array_namespace(out)
    with np.errstate(invalid="ignore"):
        more = part_log_sum - log_sum
    ratio = xp.where(part_log_sum == -math.inf, 0, xp.exp(-abs(more)))  # of the smaller sum to the larger
    share = xp.where(more >= 0, 1, ratio) / (1 + ratio)
    log_sum[...] = xp.maximum(log_sum, part_log_sum) + xp.log1p(ratio)
    out += share[..., None] * (part - out)


# ------------------------------------------------------------------------------------------ losses


def log_sum_exp(x: Array) -> Array:
    """Log of the sum of exponentials over the last axis, which stays with length 1. Float32 or float64."""
    xp = array_namespace(x)
    top = x.max(axis=-1, keepdims=True)
    return xp.log(xp.exp(x - top).sum(axis=-1, keepdims=True)) + top


def softmax(x: Array) -> Array:
    """Softmax over the last axis, of float32 or float64."""
    xp = array_namespace(x)
    y = xp.exp(x - x.max(axis=-1, keepdims=True))
    y /= y.sum(axis=-1, keepdims=True)
    return y


def top_k(scores: Array, count: int) -> Array:
    """Mask of the `count` largest scores along the last axis. Among equal ones, of the first. NaN comes last."""
    xp = array_namespace(scores)
    order = xp.argsort(-scores, axis=-1, kind="stable")
    return xp.argsort(order, axis=-1) < count  # ranks


def softmax_cross_entropy(scores: Array, targets: Array) -> tuple[float, Array]:
    """Cross entropy: (sum over rows of -log softmax(scores)[target], log_sum). Rows with negative targets are ignored.

    Shapes: scores (n, classes), targets (n,); log_sum (n,), log of the sum of exponentials, wide.
    """
    xp = array_namespace(scores)
    wider, rows = widen(scores), xp.arange(len(targets))
    top = wider.max(axis=-1)
    log_sum = xp.log(xp.exp(wider - top[:, None]).sum(axis=-1)) + top
    losses = xp.where(targets < 0, 0, log_sum - wider[rows, xp.maximum(targets, 0)])
    return number(losses.sum(dtype=np.float64)), log_sum


def softmax_cross_entropy_backward(scale: float, scores: Array, targets: Array, log_sum: Array) -> Array:
    """Gradient of `scale` * cross entropy by scores: scale (softmax - one-hot target). 0 in rows with targets < 0."""
    xp = array_namespace(scores)
    dscores, rows = xp.exp(widen(scores) - log_sum[:, None]), xp.arange(len(targets))
    dscores[rows, xp.maximum(targets, 0)] -= 1
    dscores *= xp.where(targets < 0, 0, scale).astype(dscores.dtype)[:, None]
    return narrow(dscores, scores.dtype)


# ------------------------------------------------------------------------------------------ embedding


def embedding_gradient(dy: Array, tokens: Array, out: Array) -> Array:
    """Gradient of an embedding table: write to row t of `out` the sum of the rows of dy (n, width) whose token is t."""
    xp = array_namespace(dy)
    out[...] = 0
    if not tokens.size:
        return out
    order = xp.argsort(tokens, kind="stable")
    tokens, rows = tokens[order], widen(dy)[order]
    first = xp.concatenate([xp.ones(1, bool), tokens[1:] != tokens[:-1]])
    if xp is np:
        starts = np.flatnonzero(first)
        out[tokens[starts]] = xp.add.reduceat(rows, starts, axis=0)
        return out
    # Products with matrices of memberships: reproducible, and of lengths that are known without a wait for the device.
    if len(out) <= len(tokens):
        for at in range(0, len(out), MEMBERSHIPS):
            table = xp.arange(at, min(len(out), at + MEMBERSHIPS))
            out[at : at + MEMBERSHIPS] = (table[:, None] == tokens[None]).astype(rows.dtype) @ rows
        return out
    runs, sums = first.cumsum() - 1, xp.empty_like(rows)  # run of equal tokens of each row
    for at in range(0, len(rows), MEMBERSHIPS):
        run = xp.arange(at, min(len(rows), at + MEMBERSHIPS))
        sums[at : at + MEMBERSHIPS] = (run[:, None] == runs[None]).astype(rows.dtype) @ rows
    out[tokens] = sums[runs]  # several rows of a token have the same sum
    return out


MEMBERSHIPS = 1024
"""Rows of a matrix of memberships on a device."""


# ------------------------------------------------------------------------------------------ rows of tokens


def add_rows(y: Array, tokens: Array, rows: Array, weights: Array | None = None) -> None:
    """Add rows, perhaps times weights (n, 1), to the rows `tokens` of y in place.

    `tokens` (n,) are distinct; `rows` has shape (n, width) and the dtype of y, float32 or float64.
    """
    y[tokens] += rows if weights is None else weights * rows


def take_rows(x: Array, places: Array, out: Array) -> None:
    """Copy the rows of x at these places to `out`."""
    if isinstance(x, np.ndarray):
        np.take(x, places, axis=0, out=out, mode="clip")  # other modes copy twice
    else:
        x.take(places, axis=0, out=out)


def row_products(x: Array, places: Array, rows: Array) -> Array:
    """Sums (n,) of the rows of x at `places` (n,) times `rows` (n, width), of the dtype of x."""
    found: Array = (x[places] * rows).sum(axis=-1)
    return found


def weighted_rows(upper: Array, tokens: Array, weights: Array, results: Array, out: Array) -> Array:
    """Write rows `tokens` (n,) of `upper`, times weights (n, 1), to `out`. Return the sums of rows times results: (n,).

    Gradients of results that `add_rows` has added, and of their weights. `results` and `out` have shape (n, width); all
    but `tokens` are of one wide dtype.
    """
    of_tokens = upper[tokens]
    out[...] = weights * of_tokens
    return (of_tokens * results).sum(axis=-1)
