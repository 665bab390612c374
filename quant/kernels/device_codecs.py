"""CuPy kernels of codes in one pass over memory: the formulas of `formulas.h`, bitwise equal to the reference.

Every operation is rounded by itself. The reference takes over if groups are short.
"""

from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import numpy as np

from quant.formats import MINIFLOATS
from quant.kernels import headers, reference_codecs
from quant.kernels.dispatch import Unsuited
from quant.kernels.reference_codecs import LinearCode, array_namespace
from quant.spec.quant_spec import ROUNDINGS
from quant.types import Array

OPTIONS = ("--fmad=false",)
KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels of this module by the reference's names."""

UNIT = "float32 r, float32 by"
KEY = "uint32 key0, uint32 key1"
DRAWN = "uniform(i, key0, key1)"


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as the CuPy version of the reference kernel of its name (decorator)."""
    KERNELS[function.__name__] = wraps(getattr(reference_codecs, function.__name__))(function)
    return KERNELS[function.__name__]


@cache
def _elementwise(xp: ModuleType, name: str, takes: str, gives: str, body: str) -> Any:
    preamble = headers.text(headers.PORTABLE, headers.FORMULAS)
    return xp.ElementwiseKernel(takes, gives, body, f"quant_{name}", preamble=preamble, options=OPTIONS)


def _in_groups(rows: Array, size: int, *per_group: Array) -> tuple[Array, ...]:
    """Rows as a matrix with a row for each group, and columns of the values per group."""
    if rows.shape[1] % size:
        raise Unsuited("expected whole groups")
    return rows.reshape(-1, size), *(values.reshape(-1, 1) for values in per_group)


def _words(key: tuple[int, int] | None) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key[0] if key else 0), np.uint32(key[1] if key else 0)


@kernel
def encode_linear(
    rows: Array, size: int, by: Array, multiply: bool, zeros: Array | None, code: LinearCode, out: Array
) -> None:
    groups, by, points = _in_groups(rows, size, by, by if zeros is None else zeros)
    xp, t = array_namespace(rows), f"in_units(r, by, {int(multiply)})"
    before = zeros is not None and not bool((zeros == xp.rint(zeros)).all())
    t, after = (f"{t} + zero", "") if before else (t, "" if zeros is None else " + zero")
    near = f"rounded({t}, {ROUNDINGS.index(code.rounding)}, bias, {DRAWN})"
    body = f"code = integer_code({near}{after}, low, high, bias);"
    takes = f"{UNIT}, float32 zero, float32 low, float32 high, float32 bias, {KEY}"
    codes = out if code.bits == 8 else xp.empty(rows.size, xp.uint8)
    numbers = map(np.float32, (code.low, code.high, code.bias))
    apply = _elementwise(xp, "encode_linear", takes, "uint8 code", body)
    apply(groups, by, points, *numbers, *_words(code.key), codes.reshape(groups.shape))
    if code.bits < 8:
        pack(codes, code.bits, out)


@kernel
def encode_float(
    rows: Array, size: int, by: Array, multiply: bool, code: str, key: tuple[int, int] | None, out: Array
) -> None:
    (groups, by), kind = _in_groups(rows, size, by), MINIFLOATS[code]
    about = f"{kind.bits}, {kind.mantissa}, {127 + kind.lowest}, largest"
    rounding = ROUNDINGS.index("stochastic" if key else "nearest_even")
    body = f"code = float_code(in_units(r, by, {int(multiply)}), {about}, {rounding}, {DRAWN});"
    apply = _elementwise(array_namespace(rows), "encode_float", f"{UNIT}, float32 largest, {KEY}", "uint8 code", body)
    apply(groups, by, np.float32(kind.largest), *_words(key), out.reshape(groups.shape))


@kernel
def encode_table(rows: Array, size: int, by: Array, multiply: bool, thresholds: Array, out: Array) -> None:
    groups, by = _in_groups(rows, size, by)
    count, stride = thresholds.shape[-1], thresholds.shape[-1] if thresholds.ndim > 1 else 0
    limits = "&limits[i / size * stride]"
    body = f"code = table_code(in_units(r, by, {int(multiply)}), {limits}, count);"
    takes = f"{UNIT}, raw float32 limits, int64 size, int64 stride, int32 count"
    apply = _elementwise(array_namespace(rows), "encode_table", takes, "uint8 code", body)
    numbers = np.int64(size), np.int64(stride), np.int32(count)
    apply(groups, by, thresholds.reshape(-1), *numbers, out.reshape(groups.shape))


@kernel
def decode_linear(
    packed: Array, size: int, scales: Array, zeros: Array | None, code: LinearCode, out: Array, add: bool
) -> None:
    flip, bias = (128, 128) if code.signed and not code.bias else (0, code.bias)
    groups, scales, points = _in_groups(out, size, scales, scales if zeros is None else zeros)
    number = f"decoded(integer_level(code, {flip}, bias), scale, {'0' if zeros is None else 'zero'})"
    codes, takes = _unpacked(packed, code.bits, groups), "float32 zero, int32 bias"
    apply = _decoding(array_namespace(out), "linear", takes, number, add)
    apply(codes, scales, points, np.int32(bias), groups)


@kernel
def decode_table(packed: Array, bits: int, size: int, scales: Array, levels: Array, out: Array, add: bool) -> None:
    groups, scales = _in_groups(out, size, scales)
    stride, number = levels.shape[-1] if levels.ndim > 1 else 0, "decoded(levels[i / size * stride + code], scale, 0)"
    codes, takes = _unpacked(packed, bits, groups), "raw float32 levels, int64 size, int64 stride"
    apply = _decoding(array_namespace(out), "table", takes, number, add)
    apply(codes, scales, levels.reshape(-1), np.int64(size), np.int64(stride), groups)


def _decoding(xp: ModuleType, name: str, takes: str, number: str, add: bool) -> Any:
    """Kernel of (codes, scales, values that it `takes`, out) that writes a number of each code, or adds it."""
    body = f"r {'+' if add else ''}= {number};"
    return _elementwise(xp, f"decode_{name}", f"uint8 code, float32 scale, {takes}", "float32 r", body)


def _unpacked(packed: Array, bits: int, groups: Array) -> Array:
    """Codes in bytes, in the shape of their groups."""
    codes = packed
    if bits < 8:
        unpack(packed, bits, codes := array_namespace(packed).empty(groups.size, np.uint8))
    return codes.reshape(groups.shape)


@kernel
def pack(codes: Array, bits: int, out: Array) -> None:
    _move("pack", "packed_byte", codes, bits, codes.size, out)


@kernel
def unpack(packed: Array, bits: int, out: Array) -> None:
    _move("unpack", "unpacked_code", packed, bits, out.size, out)


def _move(name: str, formula: str, given: Array, bits: int, count: int, out: Array) -> None:
    """Launch a kernel of a thread for each byte of `out`, packed codes or codes."""
    body = f"byte = {formula}(&given[(int64_t)0], count, {bits}, i);"
    apply = _elementwise(array_namespace(out), name, "raw uint8 given, int64 count", "uint8 byte", body)
    if out.size:
        apply(given, np.int64(count), out)
