"""Kernels in C: one pass over memory, bitwise equal to the reference.

Largest elements and codes are found in separate loops, which vectorise. `add_rows` and `multiply_rows` decode rows of
bytes and add or multiply them at once, for `quant.RowFormat`. The terms of a product of two rows may be added in any
order.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from quant.formats import MINIFLOATS
from quant.kernels import _codecs as c  # type: ignore[attr-defined]
from quant.kernels import reference_clusters, reference_codecs
from quant.kernels.reference_codecs import LinearCode, ScaleRule
from quant.packing import BLOCK
from quant.spec.quant_spec import ROUNDINGS
from quant.types import Array

PLAIN, AFTER, BEFORE = range(3)
"""Zero point: none, added after rounding, or added before."""

FORMS = ("fp32", "fp16", "bf16")
"""Formats of scales that `quantize_linear` stores."""

KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels of this module by the reference's names."""


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as the compiled version of the reference kernel of its name (decorator)."""
    name = function.__name__
    KERNELS[name] = wraps(getattr(reference_codecs, name, None) or getattr(reference_clusters, name))(function)
    return KERNELS[name]


def _cut(rows: Array, size: int, *per_group: Array) -> Any:
    """Reshape a matrix to one row if no group is short, and arrays with one entry per group to match."""
    cut = rows.reshape(1, -1) if rows.shape[1] % size == 0 else rows
    shape = cut.shape[0], -(-cut.shape[1] // size)
    return cut, *(values.reshape(*shape, *values.shape[2:]) for values in per_group)


def _per_group(rows: Array, size: int, *shape: int) -> Array:
    """Uninitialised float32 array for one value per group: shape (*shape, rows, groups per row)."""
    return np.empty((*shape, rows.shape[0], -(-rows.shape[1] // size)), np.float32)


# ------------------------------------------------------------------------------------------ ranges of groups


@kernel
def absmax(rows: Array, size: int) -> Array:
    c.absmax(_cut(rows, size)[0], size, found := _per_group(rows, size))
    return found


@kernel
def peak(rows: Array, size: int) -> Array:
    c.peak(_cut(rows, size)[0], size, found := _per_group(rows, size))
    return found


@kernel
def minmax(rows: Array, size: int) -> tuple[Array, Array]:
    low, high = _per_group(rows, size, 2)
    c.minmax(_cut(rows, size)[0], size, low, high)
    return low, high


# ------------------------------------------------------------------------------------------ linear codes


def _packs_nibbles(bits: int, size: int, rows: Array) -> bool:
    """True if 4-bit codes can be packed as they are encoded: all groups are whole blocks of 32."""
    return bits == 4 and size % BLOCK == 0 and rows.shape[1] % size == 0


@kernel
def encode_linear(
    rows: Array, size: int, by: Array, multiply: bool, zeros: Array | None, code: LinearCode, out: Array
) -> None:
    shift = PLAIN
    if zeros is not None:
        shift = AFTER if (zeros == np.rint(zeros)).all() else BEFORE
    nibbles = _packs_nibbles(code.bits, size, rows)
    codes = out if nibbles or code.bits == 8 else np.empty(rows.size, np.uint8)
    limits = code.low, code.high, code.bias
    way = bool(multiply), ROUNDINGS.index(code.rounding), shift
    c.encode_linear(_cut(rows, size)[0], size, by, zeros, *way, *limits, *(code.key or (0, 0)), nibbles, codes)
    if codes is not out:
        pack(codes, code.bits, out)


@kernel
def quantize_linear(rows: Array, size: int, rule: ScaleRule, code: LinearCode, scales: Array, out: Array) -> bool:
    nibbles = _packs_nibbles(code.bits, size, rows)
    codes = out if nibbles or code.bits == 8 else np.empty(rows.size, np.uint8)
    cut, items = rows, scales.view(np.float32 if rule.form == "fp32" else np.uint16)
    if out.ndim == 1:
        cut, items = _cut(rows, size, items)
        codes = codes.reshape(len(cut), -1)
    elif items.ndim == 1:
        items = items.reshape(len(cut), -1)
    way = FORMS.index(rule.form), rule.inverse, rule.peak, ROUNDINGS.index(code.rounding)
    limits = code.low, code.high, code.bias
    if not c.quantize_linear(cut, size, rule.steps, *way, *limits, nibbles, items.view(np.uint8), codes):
        return False
    if code.bits < 8 and not nibbles:
        pack(codes.reshape(-1), code.bits, out)
    return True


@kernel
def decode_linear(
    packed: Array, size: int, scales: Array, zeros: Array | None, code: LinearCode, out: Array, add: bool
) -> None:
    codes, target = packed, out
    if _packs_nibbles(code.bits, size, out):
        c.decode_nibbles(packed, size, scales, zeros, code.bias, bool(add), out)
        return
    if packed.ndim == 1:
        target, scales = _cut(out, size, scales)
    if code.bits < 8:
        codes = np.empty(out.size, np.uint8)
        unpack(packed, code.bits, codes)
    signed = bool(code.signed and not code.bias)
    c.decode_bytes(codes.reshape(target.shape), size, scales, zeros, signed, code.bias, bool(add), target)


# ------------------------------------------------------------------------------------------ small floats and tables


@kernel
def encode_float(
    rows: Array, size: int, by: Array, multiply: bool, code: str, key: tuple[int, int] | None, out: Array
) -> None:
    kind = MINIFLOATS[code]
    shape = 127 + kind.lowest, kind.mantissa, kind.bits - 1, kind.largest
    cut = _cut(rows, size)[0]
    c.encode_float(cut, size, by, bool(multiply), *shape, key is not None, *(key or (0, 0)), out)


@kernel
def encode_table(rows: Array, size: int, by: Array, multiply: bool, thresholds: Array, out: Array) -> None:
    limits = np.ascontiguousarray(thresholds)
    c.encode_table(_cut(rows, size)[0], size, by, bool(multiply), limits, limits.ndim > 1, out)


@kernel
def decode_table(codes: Array, size: int, scales: Array, levels: Array, out: Array, add: bool) -> None:
    target, scales = _cut(out, size, scales)
    table = np.ascontiguousarray(levels)
    c.decode_table(codes.reshape(target.shape), size, scales, table, table.ndim > 1, bool(add), target)


# ------------------------------------------------------------------------------------------ packing


@kernel
def pack(codes: Array, bits: int, out: Array) -> None:
    whole = len(codes) // BLOCK
    c.pack(codes, bits, out)
    reference_codecs.pack(codes[whole * BLOCK :], bits, out[whole * 4 * bits :])


@kernel
def unpack(packed: Array, bits: int, out: Array) -> None:
    whole = len(out) // BLOCK
    c.unpack(packed, bits, out)
    reference_codecs.unpack(packed[whole * 4 * bits :], bits, out[whole * BLOCK :])


# ------------------------------------------------------------------------------------------ rows of bytes


@kernel
def add_rows(
    codes: Array, size: int, scales: Array, levels: Array | None, y: Array, places: Array, weights: Array | None
) -> bool:
    if not _suit(codes, y, places, weights):
        return False
    c.add_rows(codes, size, scales, levels, y, places, weights)
    return True


@kernel
def multiply_rows(
    codes: Array, size: int, scales: Array, levels: Array | None, x: Array, places: Array, products: Array
) -> bool:
    if not _suit(codes, x, places, products):
        return False
    c.multiply_rows(codes, size, scales, levels, x, places, products)
    return True


def _suit(codes: Array, matrix: Array, places: Array, others: Array | None) -> bool:
    """True if lengths and places, which the kernels do not check, fit."""
    fit = (
        matrix.shape[1:] == codes.shape[1:]
        and len(places) == len(codes)
        and (others is None or len(others) == len(codes))
    )
    return fit and (not places.size or (places.min() >= 0 and places.max() < len(matrix)))


# ------------------------------------------------------------------------------------------ k-means


@kernel
def optimal_edges(points: Array, k: int) -> Array:
    groups, n = points.shape
    edges = np.empty((groups, k + 1), np.int64)
    height = max(n - 1, 1).bit_length()
    tables = np.empty((2, height + 1, 1 << height))
    c.optimal_edges(points, k, height, tables, np.empty((3, n + 1)), np.empty((k, n + 1), np.int32), edges)
    return edges
