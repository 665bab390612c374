"""Kernels in C: one pass over memory, bitwise equal to the reference.

Largest elements and codes are found in separate loops, so that both vectorise. `add_rows` and `multiply_rows` decode
rows of bytes and add or multiply them at once, for `quant.RowFormat`. The terms of a product of two rows may be added
in any order.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import numpy as np

from quant.formats import MINIFLOATS
from quant.kernels import reference_clusters, reference_codecs
from quant.kernels.reference_codecs import Code, LinearCode, ScaleRule
from quant.spec.quant_spec import ROUNDINGS
from quant.types import Array

c: Any = import_module("quant.kernels._codecs")

FORMS = ("fp32", "fp16", "bf16", "e8m0", "e4m3", "whole", "octaves")
"""Formats of scales that `quantize_groups` stores, with their numbers in encode.c."""

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


# ------------------------------------------------------------------------------------------ codes


def _code(code: Code, key: tuple[int, int] | None = None, bits: int = 8) -> tuple[Any, ...]:
    """Arguments that describe a code to a kernel in C: the fields of `Code` in encode.c."""
    if isinstance(code, LinearCode):
        limits = code.low, code.high, code.bias
        return 0, ROUNDINGS.index(code.rounding), code.bits, 0, 0, 0, *limits, *(code.key or (0, 0)), None
    if isinstance(code, str):
        kind, rounding = MINIFLOATS[code], ROUNDINGS.index("stochastic") if key else 0
        about = rounding, bits, kind.bits, kind.mantissa, 127 + kind.lowest
        return 1, *about, 0, kind.largest, 0, *(key or (0, 0)), None
    return 2, 0, bits, 0, 0, 0, 0, 0, 0, 0, 0, np.ascontiguousarray(code)


@kernel
def encode_linear(
    rows: Array, size: int, by: Array, multiply: bool, zeros: Array | None, code: LinearCode, out: Array
) -> None:
    c.encode(_cut(rows, size)[0], size, by, bool(multiply), zeros, *_code(code), out)


@kernel
def encode_float(
    rows: Array, size: int, by: Array, multiply: bool, code: str, key: tuple[int, int] | None, out: Array
) -> None:
    c.encode(_cut(rows, size)[0], size, by, bool(multiply), None, *_code(code, key), out)


@kernel
def encode_table(rows: Array, size: int, by: Array, multiply: bool, thresholds: Array, out: Array) -> None:
    c.encode(_cut(rows, size)[0], size, by, bool(multiply), None, *_code(thresholds), out)


@kernel
def quantize_groups(
    rows: Array, size: int, rule: ScaleRule, code: Code, bits: int, gammas: Array | None, scales: Array, out: Array
) -> bool:
    cut, items = rows, scales
    if out.ndim == 1:
        cut, items = _cut(rows, size, scales)
        out = out.reshape(cut.shape) if bits == 8 else out[None]
    way = FORMS.index(rule.form), rule.inverse, rule.peak, rule.top
    each = rows.size // size // len(gammas) if gammas is not None else 0
    return bool(
        c.quantize(cut, size, rule.steps, *way, gammas, each, *_code(code, bits=bits), items.view(np.uint8), out)
    )


def _decode(
    packed: Array, bits: int, size: int, scales: Array, zeros: Array | None, how: tuple[int, int], levels: Array | None,
    out: Array, add: bool,
) -> None:  # fmt: skip
    target = out
    if packed.ndim == 1:
        target, scales = _cut(out, size, scales)
        packed = packed[None] if bits < 8 else packed.reshape(target.shape)
    c.decode(packed, size, scales, zeros, bits, *how, levels, bool(add), target)


@kernel
def decode_linear(
    packed: Array, size: int, scales: Array, zeros: Array | None, code: LinearCode, out: Array, add: bool
) -> None:
    how = (128, 128) if code.signed and not code.bias else (0, code.bias)
    _decode(packed, code.bits, size, scales, zeros, how, None, out, add)


@kernel
def decode_table(packed: Array, bits: int, size: int, scales: Array, levels: Array, out: Array, add: bool) -> None:
    table, codes = np.ascontiguousarray(levels), packed
    if table.ndim > 1 and bits < 8:
        codes, bits = np.empty(out.size, np.uint8), 8
        unpack(packed, table.shape[-1].bit_length() - 1, codes)
    _decode(codes, bits, size, scales, None, (0, 0), table, out, add)


@kernel
def pack(codes: Array, bits: int, out: Array) -> None:
    c.pack(codes, bits, out)


@kernel
def unpack(packed: Array, bits: int, out: Array) -> None:
    c.unpack(packed, bits, out)


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
    """True if lengths and places fit. The kernels do not check them."""
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
