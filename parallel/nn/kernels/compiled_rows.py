"""Kernels of rows of tokens compiled by numba: one pass over the rows, where arrays take several."""

# mypy: ignore-errors

from functools import wraps

import numpy as np

from parallel.nn.kernels import reference_kernels
from parallel.nn.kernels.compiled_elementwise import loop
from parallel.nn.kernels.scalar import ZERO, exp_down


@loop
def _add_rows(y, tokens, rows):
    for i in range(tokens.size):
        into, row = y[tokens[i]], rows[i]
        for j in range(row.size):
            into[j] += row[j]


@loop
def _add_weighted_rows(y, tokens, rows, weights):
    for i in range(tokens.size):
        into, row, weight = y[tokens[i]], rows[i], weights[i]
        for j in range(row.size):
            into[j] += weight * row[j]


@wraps(reference_kernels.add_rows)
def add_rows(y, tokens, rows, weights=None):
    if not (_fits(y, rows) and _fits(y, rows if weights is None else weights) and tokens.dtype == np.int64):
        reference_kernels.add_rows(y, tokens, rows, weights)
    elif weights is None:
        _add_rows(y, tokens, rows)
    else:
        _add_weighted_rows(y, tokens, rows, weights.reshape(-1))


@loop
def _weighted_rows(upper, tokens, weights, results, rows, products):
    for i in range(tokens.size):
        source, result, row, weight, total = upper[tokens[i]], results[i], rows[i], weights[i], ZERO
        for j in range(row.size):
            row[j] = weight * source[j]
            total += source[j] * result[j]
        products[i] = total


@wraps(reference_kernels.weighted_rows)
def weighted_rows(upper, tokens, weights, results, out):
    if not (_fits(upper, results) and _fits(weights, out) and tokens.dtype == np.int64):
        return reference_kernels.weighted_rows(upper, tokens, weights, results, out)
    products = np.empty(len(results), np.float32)
    _weighted_rows(upper, tokens, weights.reshape(-1), results, out, products)
    return products


SHORT = 64
"""Longest row in which `top_k` compares all pairs."""


@loop
def _softmax(x, y):
    for i in range(x.shape[0]):
        row, into = x[i], y[i]
        top = row[0]
        for j in range(1, row.size):
            top = row[j] if row[j] > top else top
        for j in range(row.size):
            into[j] = row[j] - top
    whole = y.reshape(-1)  # short rows would leave most of a vector empty
    for j in range(whole.size):
        whole[j] = exp_down(whole[j])
    for i in range(x.shape[0]):
        into, total = y[i], ZERO
        for j in range(into.size):
            total += into[j]
        for j in range(into.size):
            into[j] /= total


@wraps(reference_kernels.softmax)
def softmax(x):
    if x.dtype != np.float32 or not x.size:
        return reference_kernels.softmax(x)
    y = np.empty_like(x)
    _softmax(x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1]))
    return y


@loop
def _top_k(scores, count, mask):
    for i in range(scores.shape[0]):
        row = scores[i]
        for j in range(row.size):
            score, before = row[j], 0
            for k in range(row.size):
                earlier = k < j
                before += row[k] > score or (earlier and row[k] == score)
                before += score != score and (earlier or row[k] == row[k])  # NaN
            mask[i, j] = before < count


@wraps(reference_kernels.top_k)
def top_k(scores, count):
    if scores.dtype != np.float32 or not 0 < scores.shape[-1] <= SHORT:
        return reference_kernels.top_k(scores, count)
    mask = np.empty(scores.shape, bool)
    _top_k(scores.reshape(-1, scores.shape[-1]), count, mask.reshape(-1, scores.shape[-1]))
    return mask


@loop
def _row_products(x, places, rows, products):
    for i in range(places.size):
        source, row, total = x[places[i]], rows[i], ZERO
        for j in range(row.size):
            total += source[j] * row[j]
        products[i] = total


@wraps(reference_kernels.row_products)
def row_products(x, places, rows):
    if not _fits(x, rows):
        return reference_kernels.row_products(x, places, rows)
    products = np.empty(len(rows), np.float32)
    _row_products(x, places, rows, products)
    return products


def _fits(x, y):
    return x.dtype == y.dtype == np.float32 and x.ndim == y.ndim == 2
