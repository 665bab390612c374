"""Kernels as loops compiled by numba: one pass over memory where NumPy takes several. Names as in `reference_kernels`.

For C-contiguous host arrays of float32. Each is compiled at its first call and cached on disk. Results depend on values
and shapes only. Sums may be reordered (for vector instructions), but NaN and infinity come out as NumPy's would.
"""

# mypy: ignore-errors
# numba infers other types than Python annotations could express.

import math
from functools import wraps

import numpy as np

from parallel.nn.kernels import reference_kernels
from parallel.nn.kernels.compiled_elementwise import *  # noqa: F403
from parallel.nn.kernels.compiled_elementwise import loop
from parallel.nn.kernels.compiled_rows import *  # noqa: F403
from parallel.nn.kernels.scalar import ONE, ZERO, F, exp_down
from quant.kernels.jit import njit

ROWS = 64
"""Rows per partial sum: limits the growth of rounding errors with the length of a sum."""

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
    """LayerNorm of the rows of x into y, mean and rstd; RMSNorm if bias and mean are None (compiled separately)."""
    rows, width = x.shape
    for i in range(rows):
        row, into = x[i], y[i]
        middle = ZERO
        if mean is not None:
            for j in range(width):
                middle += row[j]
            middle /= F(width)
            mean[i] = middle
        squares = ZERO
        for j in range(width):
            away = row[j] - middle
            squares += away * away
        inverse = ONE / np.sqrt(squares / F(width) + eps)
        rstd[i] = inverse
        for j in range(width):
            unit = (row[j] - middle) * inverse * gain[j]
            into[j] = unit if bias is None else unit + bias[j]


@wraps(reference_kernels.layer_norm)
def layer_norm(x, gain, bias, eps):
    y, rstd = np.empty_like(x), np.empty(len(x), np.float32)
    mean = None if bias is None else np.empty_like(rstd)
    _layer_norm(x, gain, bias, F(eps), y, mean, rstd)
    return y, mean, rstd


@loop
def _layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias):
    """Gradients of LayerNorm into dx, dgain, dbias; of RMSNorm if mean and dbias are None (compiled separately)."""
    rows, width = x.shape
    gains, biases = np.empty(width, np.float32), np.empty(width, np.float32)
    dgain[:] = ZERO
    if dbias is not None:
        dbias[:] = ZERO
    for first in range(0, rows, ROWS):
        gains[:] = ZERO
        biases[:] = ZERO
        for i in range(first, min(first + ROWS, rows)):
            upper, row, into = dy[i], x[i], dx[i]
            middle, inverse = ZERO if mean is None else mean[i], rstd[i]
            total, along = ZERO, ZERO
            for j in range(width):
                unit = (row[j] - middle) * inverse
                inner = upper[j] * gain[j]
                if mean is not None:
                    total += inner
                along += inner * unit
            total /= F(width)
            along /= F(width)
            for j in range(width):
                unit = (row[j] - middle) * inverse
                into[j] = (upper[j] * gain[j] - total - unit * along) * inverse
                gains[j] += upper[j] * unit
                if dbias is not None:
                    biases[j] += upper[j]
        for j in range(width):
            dgain[j] += gains[j]
            if dbias is not None:
                dbias[j] += biases[j]


@wraps(reference_kernels.layer_norm_backward)
def layer_norm_backward(dy, x, gain, mean, rstd):
    dx, dgain, dbias = np.empty_like(dy), np.empty_like(gain), None if mean is None else np.empty_like(gain)
    _layer_norm_backward(dy, x, gain, mean, rstd, dx, dgain, dbias)
    return dx, dgain, dbias


# ------------------------------------------------------------------------------------------ probabilities


_UNSIGNED = np.int32(0x7FFFFFFF)
_ALL = np.int32(31)


@njit(forceinline=True)
def _ordered(value):
    """Map a float32 to an int32 of the same ordering: maxima of integers vectorise, those of floats do not."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ ((bits >> _ALL) & _UNSIGNED))


@njit(forceinline=True)
def _number(ordered):
    """Float32 that `_ordered` maps to this integer."""
    return np.int32(ordered ^ ((ordered >> _ALL) & _UNSIGNED)).view(np.float32)


@loop
def _largest(row, count, scale):
    """Maximum of `scale` times the first `count` elements of a row; arbitrary if any is NaN."""
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
def _visible_softmax(scores, scale, low, high, log_sum):
    keys = scores.shape[1]
    for i in range(scores.shape[0]):
        row, first, last = scores[i], low[i % low.size], high[i % low.size]
        for j in range(first):
            row[j] = ZERO
        for j in range(last, keys):
            row[j] = ZERO
        if first >= last:
            log_sum[i] = -np.inf
            continue
        seen = row[first:last]
        top = _largest(seen, last - first, scale)
        total = ZERO
        for j in range(last - first):
            e = exp_down(seen[j] * scale - top)
            seen[j] = e
            total += e
        inverse = ONE / total
        for j in range(last - first):
            seen[j] *= inverse
        log_sum[i] = F(math.log(total)) + top


@wraps(reference_kernels.visible_softmax)
def visible_softmax(scores, scale, low, high):
    log_sum = np.empty(scores.shape[:-1], F)
    if scores.size:
        _visible_softmax(scores.reshape(-1, scores.shape[-1]), F(scale), low, high, log_sum.reshape(-1))
    return log_sum


@loop
def _visible_probabilities(scores, scale, low, high, log_sum):
    keys = scores.shape[1]
    for i in range(scores.shape[0]):
        row, first, last, away = scores[i], low[i % low.size], high[i % low.size], log_sum[i]
        for j in range(first):
            row[j] = ZERO
        for j in range(first, last):
            row[j] = exp_down(row[j] * scale - away)
        for j in range(last, keys):
            row[j] = ZERO


@wraps(reference_kernels.visible_probabilities)
def visible_probabilities(scores, scale, low, high, log_sum):
    if scores.size:
        _visible_probabilities(scores.reshape(-1, scores.shape[-1]), F(scale), low, high, log_sum.reshape(-1))
    return scores


@loop
def _attention_gradient(dp, p, scale, row_sum):
    for i in range(dp.shape[0]):
        row, weights, along = dp[i], p[i], row_sum[i]
        for j in range(dp.shape[1]):
            row[j] = (row[j] - along) * weights[j] * scale


@wraps(reference_kernels.attention_gradient)
def attention_gradient(dp, p, scale, row_sum):
    if dp.size:
        keys = dp.shape[-1]
        _attention_gradient(dp.reshape(-1, keys), p.reshape(-1, keys), F(scale), row_sum.reshape(-1))
    return dp


@loop
def _merge_attention(out, log_sum, part, part_log_sum):
    for i in range(out.shape[0]):
        one, other = log_sum[i], part_log_sum[i]
        if other == -np.inf:
            continue
        top, away = max(one, other), -abs(one - other)
        e = F(math.exp(away))
        log_sum[i] = top + F(math.log1p(e))
        share = (ONE if other >= one else e) / (ONE + e)
        row, more = out[i], part[i]
        for j in range(row.size):
            row[j] += share * (more[j] - row[j])


@wraps(reference_kernels.merge_attention)
def merge_attention(out, log_sum, part, part_log_sum):
    if out.size:
        width = out.shape[-1]
        _merge_attention(out.reshape(-1, width), log_sum.reshape(-1), part.reshape(-1, width), part_log_sum.reshape(-1))


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
