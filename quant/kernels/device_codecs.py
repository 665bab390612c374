"""CuPy kernels that encode and decode linear codes and encode small floats, bitwise equal to the reference.

One pass over memory; the reference packs and unpacks codes below 8 bits, and takes over if groups are short. Every
operation is rounded by itself: `__fmul_rn` and its like are never fused.
"""

from functools import cache, wraps
from types import ModuleType
from typing import Any

import numpy as np

from quant.formats import GREATEST, MINIFLOATS
from quant.kernels import headers, reference_codecs
from quant.kernels.reference_codecs import LinearCode, array_namespace
from quant.types import Array

HEADERS = headers.PORTABLE, headers.RANDOM
KERNELS: dict[str, Any] = {}
"""Kernels of this module by the reference's names."""

ROUND = {
    "nearest_even": "t = rintf(t);",
    "half_away": "{ float a = fabsf(t), d = floorf(a); t = copysignf(__fadd_rn(d, __fsub_rn(a, d) >= 0.5f), t); }",
    "half_up": "t = __fsub_rn(floorf(__fadd_rn(t, bias + 0.5f)), bias);",
    "stochastic": "t = floorf(__fadd_rn(t, uniform(i, key0, key1)));",
}


def kernel(function: Any) -> Any:
    """Register a function as the CuPy version of the reference kernel of its name (decorator)."""
    KERNELS[function.__name__] = wraps(getattr(reference_codecs, function.__name__))(function)
    return KERNELS[function.__name__]


@cache
def _elementwise(xp: ModuleType, name: str, takes: str, gives: str, body: str) -> Any:
    return xp.ElementwiseKernel(takes, gives, body, f"quant_{name}", preamble=headers.text(*HEADERS))


def _unit(multiply: bool) -> str:
    return "float t = __fmul_rn(r, by);" if multiply else "float t = __fdiv_rn(r, by);"


def _keys(key: tuple[int, int] | None) -> tuple[np.uint32, np.uint32]:
    return (np.uint32(0), np.uint32(0)) if key is None else (np.uint32(key[0]), np.uint32(key[1]))


@kernel
def encode_linear(
    rows: Array, size: int, by: Array, multiply: bool, zeros: Array | None, code: LinearCode, out: Array
) -> None:
    if rows.shape[1] % size:
        return reference_codecs.encode_linear(rows, size, by, multiply, zeros, code, out)
    xp = array_namespace(rows)
    integral = zeros is None or bool((zeros == xp.rint(zeros)).all())
    shift = "t = __fadd_rn(t, zero);" if zeros is not None else ""
    body = f"""
        {_unit(multiply)}
        {"" if integral else shift}
        {ROUND[code.rounding]}
        {shift if integral else ""}
        t = t < low ? low : t;
        t = t > high ? high : t;
        code = (unsigned char)(int)(t + bias);
    """
    takes = "float32 r, float32 by, float32 zero, float32 low, float32 high, float32 bias, uint32 key0, uint32 key1"
    codes = out if code.bits == 8 else xp.empty(rows.size, xp.uint8)
    points = by if zeros is None else zeros
    apply = _elementwise(xp, "encode_linear", takes, "uint8 code", body)
    low, high, bias = map(np.float32, (code.low, code.high, code.bias))
    groups = rows.reshape(-1, size)
    apply(
        groups, by.reshape(-1, 1), points.reshape(-1, 1), low, high, bias, *_keys(code.key), codes.reshape(groups.shape)
    )
    if code.bits < 8:
        reference_codecs.pack(codes, code.bits, out)
    return None


@kernel
def encode_float(
    rows: Array, size: int, by: Array, multiply: bool, code: str, key: tuple[int, int] | None, out: Array
) -> None:
    if rows.shape[1] % size:
        return reference_codecs.encode_float(rows, size, by, multiply, code, key, out)
    xp, kind = array_namespace(rows), MINIFLOATS[code]
    lowest = 127 + kind.lowest
    body = f"""
        {_unit(multiply)}
        float a = fminf(fabsf(t), {kind.largest!r}f);
        int exponent = max(__float_as_int(a) >> 23, {lowest});
        float n = __fdiv_rn(a, __int_as_float((exponent - {kind.mantissa}) << 23));
        n = {"rintf(n)" if key is None else "floorf(__fadd_rn(n, uniform(i, key0, key1)))"};
        int bits = ((exponent - {lowest}) << {kind.mantissa}) + (int)n;
        code = (unsigned char)(bits | (((__float_as_int(t) >> 31) & 1) << {kind.bits - 1}));
    """
    takes = "float32 r, float32 by, uint32 key0, uint32 key1"
    groups = rows.reshape(-1, size)
    apply = _elementwise(xp, "encode_float", takes, "uint8 code", body)
    apply(groups, by.reshape(-1, 1), *_keys(key), out.reshape(groups.shape))
    return None


@kernel
def decode_linear(
    packed: Array, size: int, scales: Array, zeros: Array | None, code: LinearCode, out: Array, add: bool
) -> None:
    if out.shape[1] % size:
        return reference_codecs.decode_linear(packed, size, scales, zeros, code, out, add)
    bits, bias = code.bits, code.bias
    xp = array_namespace(packed)
    codes = packed
    if bits < 8:
        codes = xp.empty(out.size, xp.uint8)
        reference_codecs.unpack(packed, bits, codes)
    body = f"""
        float q = {"(float)(signed char)code" if code.signed and not bias else "(float)((int)code - bias)"};
        {"" if zeros is None else "q = __fsub_rn(q, zero);"}
        q = __fmul_rn(q, scale);
        q = q > {GREATEST}f ? {GREATEST}f : q < -{GREATEST}f ? -{GREATEST}f : q;
        r = {"__fadd_rn(r, q)" if add else "q"};
    """
    apply = _elementwise(xp, "decode_linear", "uint8 code, float32 scale, float32 zero, int32 bias", "float32 r", body)
    points = scales if zeros is None else zeros
    groups = out.reshape(-1, size)
    apply(codes.reshape(groups.shape), scales.reshape(-1, 1), points.reshape(-1, 1), np.int32(bias), groups)
    return None
