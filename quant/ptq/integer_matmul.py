"""Exact products of int8 matrices in float32: cut along k, so that no partial sum exceeds 2^24."""

import numpy as np

from quant.array import QuantizedArray
from quant.kernels import array_namespace
from quant.spec.granularity import PerChannel, PerGroup, PerTensor
from quant.spec.quant_spec import QuantSpec
from quant.types import Array

EXACT = 1 << 24
"""Largest value up to which float32 represents every integer."""
LARGEST = {np.dtype(np.int8): 128, np.dtype(np.uint8): 255}


def integer_matmul(a: Array, b: Array) -> Array:
    """a @ b of int8 or uint8 matrices, exact: int32, or int64 if k is too long for int32.

    >>> integer_matmul(np.array([[127, -128]], np.int8), np.array([[127], [-128]], np.int8))
    array([[32513]], dtype=int32)
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in LARGEST:
            raise TypeError(f"{name}: expected int8 or uint8, found {x.dtype}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"no product of shapes {a.shape} and {b.shape}")
    xp, k = array_namespace(a), a.shape[1]
    largest = LARGEST[a.dtype] * LARGEST[b.dtype]
    block = EXACT // largest
    total = xp.zeros((a.shape[0], b.shape[1]), np.int32 if k * largest < 2**31 else np.int64)
    # sums of a block are exact in float32, whose products are far faster than NumPy's integer ones
    for first in range(0, k, block):
        part = xp.matmul(a[:, first : first + block].astype(np.float32), b[first : first + block].astype(np.float32))
        total += part.astype(total.dtype)
    return total


def product(x: QuantizedArray, w: QuantizedArray) -> Array:
    """x @ w^T of quantised matrices, computed from their integer codes: float32, shape (m, n).

    The sum of a group is exact: its terms are integers. Groups are scaled and added in float32, in their order.

    Parameters
    ----------
    x : QuantizedArray, shape (m, k)
        Linear, with integer zero points. `PerTensor()` or `PerChannel(0)`. Other granularities raise ValueError.
    w : QuantizedArray, shape (n, k)
        Like x. Also `PerGroup(size)`, and scales of any number of levels.

    >>> from quant import grouped, quantize
    >>> x = quantize(np.array([[127.0, 1.0]], np.float32), QuantSpec(8))
    >>> product(x, quantize(np.array([[7.0, 14.0]], np.float32), grouped(4, 1)))
    array([[903.]], dtype=float32)
    """
    for name, q, more in (("x", x, False), ("w", w, True)):
        if not _integers(q.spec):
            raise ValueError(f"{name}: expected linear codes with integer zeros, found {q.spec.code} and {q.spec.zero}")
        if len(q.shape) != 2 or not (_by_rows(q.spec) or (more and _along_rows(q.spec))):
            raise ValueError(
                f"{name}: expected a matrix with scales per tensor or row, found shape {q.shape}, {q.spec.granularity}"
            )
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"no product of shapes {x.shape} and the transpose of {w.shape}")
    xp, k = array_namespace(x.buffer), x.shape[1]
    size = w.spec.granularity.size if isinstance(w.spec.granularity, PerGroup) else max(k, 1)
    a, b, zx, scales, zeros = x.integers(), w.integers().T, x.zeros(), w.scales(), w.zeros()
    total = xp.zeros((len(a), b.shape[1]), np.float32)
    if not k or not total.size:
        return total
    # one float32 addition per group: the order is fixed, so results do not depend on blocking
    for group, first in enumerate(range(0, k, size)):
        here = slice(first, first + size)
        z = None if zeros is None else zeros[:, group]
        total += _sums(a[:, here], b[here], zx, z).astype(np.float32) * scales[:, group]
    return total * x.scales()


def exact(x: QuantSpec, w: QuantSpec) -> bool:
    """True if `product` can multiply arrays quantised with these specs."""
    return _integers(x) and _integers(w) and _by_rows(x) and (_by_rows(w) or _along_rows(w))


def _by_rows(spec: QuantSpec) -> bool:
    """True if all elements in a row of a matrix share a scale."""
    return spec.granularity in (PerTensor(), PerChannel(0), PerChannel(-2))


def _along_rows(spec: QuantSpec) -> bool:
    return isinstance(spec.granularity, PerGroup) and spec.granularity.axis in (-1, 1)


def _integers(spec: QuantSpec) -> bool:
    return spec.linear and (spec.symmetric or spec.zero == "integer")


def _sums(a: Array, b: Array, za: Array | None, zb: Array | None) -> Array:
    """Exact sums over k of (a - za)(b - zb): shape (m, n). Za is a column, zb a row."""
    total = integer_matmul(a, b)
    if za is None and zb is None:
        return total
    za, zb = (0 if z is None else z.astype(np.int64) for z in (za, zb))
    return (
        total - za * b.sum(axis=0, dtype=np.int64) - a.sum(axis=1, dtype=np.int64)[:, None] * zb + za * zb * a.shape[1]
    )
