"""Kernels of rows of tokens compiled by numba: one pass over the rows, where arrays take several."""

# mypy: ignore-errors

from functools import wraps

import numpy as np

from parallel.nn.kernels import reference_kernels
from parallel.nn.kernels.compiled_elementwise import loop
from parallel.nn.kernels.scalar import ZERO


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


def _fits(x, y):
    return x.dtype == y.dtype == np.float32 and x.ndim == y.ndim == 2
