"""Products of small integers, exactly, by the matrix product of float32: no sum of a block of K passes 2^24."""

from __future__ import annotations

from typing import Any

import numpy as np

from quant.array import QuantizedArray
from quant.granularity import PerChannel, PerTensor
from quant.kernels import array_namespace

Array = Any

EXACT = 1 << 24
"""Up to here float32 has every integer."""
LARGEST = {np.dtype(np.int8): 128, np.dtype(np.uint8): 255}


def integer_matmul(a: Array, b: Array) -> Array:
    """a @ b of integers, exact.

    Parameters
    ----------
    a : array of int8 or uint8, shape (m, k)
    b : array of int8 or uint8, shape (k, n)

    Returns
    -------
    array, shape (m, n)
        int32; int64 where k is so long that int32 might not do.

    Raises
    ------
    TypeError
        For other types.
    ValueError
        If the shapes do not fit.

    Examples
    --------
    >>> integer_matmul(np.array([[127, -128]], np.int8), np.array([[127], [-128]], np.int8))
    array([[32513]], dtype=int32)
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in LARGEST:
            raise TypeError(f"{name} holds {x.dtype}, not int8 or uint8")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"no product of shapes {a.shape} and {b.shape}")
    xp, k = array_namespace(a), a.shape[1]
    largest = LARGEST[a.dtype] * LARGEST[b.dtype]
    block = EXACT // largest
    total = xp.zeros((a.shape[0], b.shape[1]), np.int32 if k * largest < 2**31 else np.int64)
    for first in range(0, k, block):
        part = xp.matmul(a[:, first : first + block].astype(np.float32), b[first : first + block].astype(np.float32))
        total += part.astype(total.dtype)
    return total


def matmul(x: QuantizedArray, w: QuantizedArray) -> Array:
    """x @ w of two quantised matrices, by their codes: rounded once, when the scales are applied.

    S_x S_w sum (q_x - Z_x)(q_w - Z_w), whose sum of four terms is one of integers.

    Parameters
    ----------
    x : QuantizedArray, shape (m, k)
        Linear; one scale for all, or one for each row: `PerTensor()`, `PerChannel(0)`.
    w : QuantizedArray, shape (k, n)
        Linear; one scale for all, or one for each column: `PerTensor()`, `PerChannel(1)`.

    Returns
    -------
    array of float32, shape (m, n)

    Raises
    ------
    ValueError
        If scales change along k, zero points are not integers, or codes are not linear.
    """
    for name, q, axis in (("x", x, 0), ("w", w, 1)):
        if not q.spec.linear or (not q.spec.symmetric and q.spec.zero != "integer"):
            raise ValueError(f"{name} has codes {q.spec.code} and zeros {q.spec.zero}, not linear ones and integers")
        if len(q.shape) != 2 or q.spec.granularity not in (PerTensor(), PerChannel(axis), PerChannel(axis - 2)):
            raise ValueError(f"{name} of shape {q.shape} has {q.spec.granularity}: scales must not change along k")
    xp = array_namespace(x.buffer)
    a, b = (xp.ascontiguousarray(q.integers()) for q in (x, w))
    total = integer_matmul(a, b)
    if not (x.spec.symmetric and w.spec.symmetric):
        total = total.astype(np.int64)
    zx, zw = (None if zeros is None else zeros.astype(np.int64) for zeros in (x.zeros(), w.zeros()))
    if zx is not None:
        total -= zx.reshape(-1, 1) * b.sum(axis=0, dtype=np.int64)[None]
    if zw is not None:
        total -= a.sum(axis=1, dtype=np.int64)[:, None] * zw.reshape(1, -1)
    if zx is not None and zw is not None:
        total += zx.reshape(-1, 1) * zw.reshape(1, -1) * a.shape[1]
    return total.astype(np.float32) * (x.scales().reshape(-1, 1) * w.scales().reshape(1, -1))
