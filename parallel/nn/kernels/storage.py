"""Numbers are stored in the type of the arrays, and computed with in a type that is wide enough: float32, or float64.

A half type (bfloat16, float16) is storage: it is widened to float32, computed with, and rounded to nearest, ties to
even, when the result is stored.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

Array = Any

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16, FLOAT32, FLOAT64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
BOOL = np.dtype(bool)
HALVES = (BFLOAT16, FLOAT16)


def array_namespace(x: Array) -> ModuleType:
    """The module whose functions work on `x`: NumPy, or CuPy for arrays of its own."""
    return np if isinstance(x, np.ndarray | np.generic) else sys.modules["cupy"]


def wide(dtype: np.dtype) -> np.dtype:
    """The type to compute in, for values stored as `dtype`: float64 for float64, float32 for all else."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def smallest_type(largest: int) -> np.dtype:
    """The smallest unsigned type that holds numbers up to `largest`."""
    return np.min_scalar_type(largest)


def widen(x: Array) -> Array:
    """The values of `x` in the type to compute in: `x` itself where it is wide already."""
    if x.dtype == BFLOAT16:
        xp = array_namespace(x)
        bits = x.view(xp.uint16).astype(xp.uint32)
        bits <<= 16
        return bits.view(xp.float32)
    return x.astype(wide(x.dtype), copy=False)


def narrow(x: Array, dtype: np.dtype, out: Array | None = None) -> Array:
    """Wide values rounded to `dtype`, to nearest, ties to even: `x` itself if it is of that type.

    Parameters
    ----------
    x : array of float32 or float64
    dtype : dtype
        Ignored if there is an `out`, whose type it then is.
    out : array like x, optional
        Where to put them.
    """
    dtype = dtype if out is None else out.dtype
    if dtype == BFLOAT16 and x.dtype == FLOAT32:
        x = _to_bfloat16(x)
    with np.errstate(over="ignore"):  # what is too large for float16 becomes infinite, as in bfloat16
        if out is None:
            return x.astype(dtype, copy=False)
        if out is not x:
            out[...] = x
        return out


def _to_bfloat16(x: Array) -> Array:
    """The upper half of each float32, plus one where the lower half says so; a NaN stays one, whatever its bits."""
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
