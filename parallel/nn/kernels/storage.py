"""Storage dtypes (float64, float32, bfloat16, float16), compute dtypes (float64, float32), and casts.

Values are stored in float64, float32 or a half type (bfloat16, float16) and computed with in float64 or float32. Half
types are widened to float32 and rounded to nearest even when results are stored.
"""

import sys
from types import ModuleType

import ml_dtypes
import numpy as np

from quant.types import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16, FLOAT32, FLOAT64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
BOOL = np.dtype(bool)
HALVES = (BFLOAT16, FLOAT16)


def array_namespace(x: Array) -> ModuleType:
    """Module of an array: NumPy for NumPy arrays and scalars, CuPy for any other. TypeError if that is not imported."""
    if isinstance(x, np.ndarray | np.generic):
        return np
    cupy = sys.modules.get("cupy")
    if cupy is None or not hasattr(x, "dtype"):
        raise TypeError(f"expected an array of NumPy or CuPy, found {type(x).__name__}")
    return cupy


def wide(dtype: np.dtype) -> np.dtype:
    """Compute dtype of values stored as `dtype`: float64 for float64, else float32."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def product_dtype(dtype: np.dtype, xp: ModuleType) -> np.dtype:
    """Dtype in which matrices of `dtype` are multiplied: float32 for half types, but the half type itself on a GPU."""
    return FLOAT32 if dtype in HALVES and xp is np else dtype


def widen(x: Array) -> Array:
    """Cast `x` (half type, integers or bools) to float32. Return `x` itself if it is float32 or float64."""
    if x.dtype == BFLOAT16 and isinstance(x, np.ndarray):
        xp = array_namespace(x)
        bits = x.view(xp.uint16).astype(xp.uint32)
        bits <<= 16
        return bits.view(xp.float32)
    return x.astype(wide(x.dtype), copy=False)


def movable(x: Array) -> Array:
    """View of an array that any MPI can move: half types as 16-bit integers."""
    return x.view("u2") if x.dtype in HALVES else x


def narrow(x: Array, dtype: np.dtype, out: Array | None = None) -> Array:
    """Round float32/float64 `x` (nearest even) to `dtype`, or into `out`, to its dtype. May return `x` itself."""
    dtype = dtype if out is None else out.dtype
    if dtype == BFLOAT16 and x.dtype in (FLOAT32, FLOAT64):
        x = x if x.dtype == FLOAT32 else _to_odd(x)
        if isinstance(x, np.ndarray):  # CuPy rounds by itself, in one kernel
            x = _to_bfloat16(x)
    with np.errstate(over="ignore"):  # what is too large for float16 becomes infinite, as in bfloat16
        if out is None:
            return x.astype(dtype, copy=False)
        if out is not x:
            out[...] = x
        return out


def _to_odd(x: Array) -> Array:
    """Cast float64 to float32, rounding what is inexact to the neighbour with an odd last bit. NaN stays NaN.

    Then rounding to fewer digits gives the same as rounding `x` (Boldo and Melquiond, 2008).
    """
    xp = array_namespace(x)
    with np.errstate(over="ignore"):
        nearest = x.astype(xp.float32)
    bits = nearest.view(xp.uint32) - (abs(nearest) > abs(x))  # the neighbour towards 0
    return (bits | (nearest != x)).view(xp.float32)


def _to_bfloat16(x: Array) -> Array:
    """Cast float32 to bfloat16, rounding to nearest even. NaN stays NaN."""
    xp = array_namespace(x)
    bits = x.view(xp.uint32) if x.flags.c_contiguous else x.copy().view(xp.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = x != x
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded.astype(xp.uint16).view(BFLOAT16)
