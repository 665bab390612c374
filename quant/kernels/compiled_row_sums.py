"""Kernels compiled by numba that decode rows of bytes and add or multiply them at once, for `quant.RowFormat`.

Sums of rows have the bits of the reference; the terms of a product of two rows may be added in any order.
"""

# mypy: ignore-errors

from functools import cache

import numpy as np

from quant import formats
from quant.formats import GREATEST
from quant.kernels import compiled_codecs
from quant.kernels.compiled_codecs import KERNELS as KERNELS
from quant.kernels.compiled_codecs import ZERO, F, _product, inlined, kernel
from quant.kernels.jit import compiler

exact = compiler(formats, compiled_codecs, nogil=True, error_model="numpy")
reordered = compiler(formats, compiled_codecs, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})

NO_LEVELS = np.zeros(0, np.float32)
ONES = np.ones((1, 1), np.float32)


@inlined
def _element(code, scale, levels, linear):
    """Decoded number of a byte: int8 if `linear`, a constant at compile time; else number of a level."""
    q = F(np.int8(code)) if linear else levels[code]
    return _product(q, scale, linear or abs(q) <= GREATEST)


@cache
def _row_adder(linear, weighted):
    def add(codes, size, scales, levels, y, places, weights):
        for i in range(places.size):
            whole, weight = y[places[i]], weights[i, 0] if weighted else ZERO
            for group in range(scales.shape[1]):
                first, last = group * size, min((group + 1) * size, codes.shape[1])
                part, into, scale = codes[i, first:last], whole[first:last], scales[i, group]
                for j in range(part.size):
                    r = _element(part[j], scale, levels, linear)
                    into[j] = F(into[j] + (F(weight * r) if weighted else r))

    return exact(add)


@kernel
def add_rows(codes, size, scales, levels, y, places, weights):
    if not _suit(codes, y, places, weights):
        return False
    linear, weighted = levels is None, weights is not None
    add = _row_adder(linear, weighted)
    add(codes, size, scales, NO_LEVELS if linear else levels, y, places, weights if weighted else ONES)
    return True


@cache
def _row_multiplier(linear):
    def multiply(codes, size, scales, levels, x, places, products):
        for i in range(places.size):
            whole, total = x[places[i]], ZERO
            for group in range(scales.shape[1]):
                first, last = group * size, min((group + 1) * size, codes.shape[1])
                part, other, scale = codes[i, first:last], whole[first:last], scales[i, group]
                for j in range(part.size):
                    total += other[j] * _element(part[j], scale, levels, linear)
            products[i] = total

    return reordered(multiply)


@kernel
def multiply_rows(codes, size, scales, levels, x, places, products):
    if not _suit(codes, x, places, products):
        return False
    linear = levels is None
    _row_multiplier(linear)(codes, size, scales, NO_LEVELS if linear else levels, x, places, products)
    return True


def _suit(codes, matrix, places, others):
    """True if the kernels are compiled for such arrays, whose lengths and places they do not check."""
    types = matrix.dtype == np.float32 and places.dtype == np.int64 and (others is None or others.dtype == np.float32)
    fit = (
        matrix.shape[1:] == codes.shape[1:]
        and len(places) == len(codes)
        and (others is None or len(others) == len(codes))
    )
    within = fit and (not places.size or (places.min() >= 0 and places.max() < len(matrix)))
    return types and within and matrix.flags.c_contiguous
