"""Products of half-precision matrices on a GPU: in tensor cores, with sums in float32.

CuPy's own products round wide results to the half type, and multiply stacks of matrices in float32 or not at all.
"""

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from parallel.nn.kernels.storage import BFLOAT16, FLOAT16, FLOAT32, HALVES, array_namespace
from quant.types import Array

TYPES = {FLOAT32: "CUDA_R_32F", FLOAT16: "CUDA_R_16F", BFLOAT16: "CUDA_R_16BF"}
"""CUDA's names of dtypes."""

FACTORS = np.array([1, 0], np.float32)
ONE, ZERO = FACTORS.ctypes.data, FACTORS.ctypes.data + FACTORS.itemsize
"""Addresses of the factors of the product and of the earlier result, which cuBLAS reads on the host."""


def suits(a: Array, b: Array) -> bool:
    """True for stacks of equally many matrices of one half type on a GPU."""
    halves = not isinstance(a, np.ndarray) and a.dtype in HALVES and b.dtype == a.dtype
    return halves and a.ndim >= 2 and a.shape[:-2] == b.shape[:-2]


def multiply(a: Array, b: Array, out: Array | None = None) -> Array:
    """Product of shape (..., n, m) of `a` (..., n, k) and `b` (..., k, m), rounded once, to the dtype of `out` or `a`.

    `out` is of the half type of `a` and `b`, or float32.
    """
    xp = array_namespace(a)
    n, k = a.shape[-2:]
    m = b.shape[-1]
    if k != b.shape[-2]:
        raise ValueError(f"product of shapes {a.shape} and {b.shape}: expected {k} rows, found {b.shape[-2]}")
    shape = (*a.shape[:-2], n, m)
    y = xp.empty(shape, a.dtype) if out is None else out
    if not y.size or not k:
        y[...] = 0
        return y
    place = _by_rows(y)
    result = _operand(xp, xp.empty(shape, y.dtype)) if place is None else place
    _launch(xp, _operand(xp, a), _operand(xp, b), result)
    if place is None:
        y[...] = result.array
    return y


class Operand(NamedTuple):
    """Stack of matrices for cuBLAS: elements from a row (or column) to the next, and from a matrix to the next."""

    array: Array
    by_columns: bool
    leading: int
    stride: int


def _operand(xp: Any, x: Array) -> Operand:
    """View of `x` by rows or by columns, of which a copy is made if its elements lie otherwise."""
    by_rows = _by_rows(x)
    if by_rows is not None:
        return by_rows
    by_columns = _by_rows(x.swapaxes(-1, -2))
    if by_columns is not None:
        return by_columns._replace(array=x, by_columns=True)
    rows, columns = x.shape[-2:]
    return Operand(xp.ascontiguousarray(x), False, columns, rows * columns)


def _by_rows(x: Array) -> Operand | None:
    """View of matrices by rows, whose elements are neighbours, at equal distances. None if they lie otherwise."""
    rows, columns = x.shape[-2:]
    if x.flags.c_contiguous:
        return Operand(x, False, columns, rows * columns)
    *outer, down, right = (stride // x.itemsize for stride in x.strides)
    stride = _stride(x.shape[:-2], outer)
    # The stride of an axis with one element is arbitrary.
    if stride is None or not (right == 1 or columns == 1) or not (down >= columns or rows == 1):
        return None
    return Operand(x, False, columns if rows == 1 else down, stride)


def _stride(shape: tuple[int, ...], strides: list[int]) -> int | None:
    """Stride of axes taken as one. None if there is none.

    >>> _stride((3, 2), [20, 10]), _stride((3, 2), [30, 10]), _stride((1, 2), [7, 10]), _stride((), [])
    (10, None, 10, 0)
    """
    steps = [(length, step) for length, step in zip(shape, strides) if length > 1]
    if any(step != length * inner for (_, step), (length, inner) in pairwise(steps)):
        return None
    return steps[-1][1] if steps else 0


@cache
def _types(xp: Any) -> dict[np.dtype, int]:
    """CUDA's numbers of dtypes."""
    return {dtype: getattr(xp.cuda.runtime, name) for dtype, name in TYPES.items()}


def _launch(xp: Any, a: Operand, b: Operand, out: Operand) -> None:
    """Start cuBLAS, which takes matrices by columns: a matrix by rows is its transpose, and out^T = b^T a^T."""
    cublas, types = xp.cuda.cublas, _types(xp)
    n, k = a.array.shape[-2:]
    m = out.array.shape[-1]
    matrices = out.array.size // (n * m)
    kind, result = types[a.array.dtype], types[out.array.dtype]
    operations = [cublas.CUBLAS_OP_T if one.by_columns else cublas.CUBLAS_OP_N for one in (b, a)]
    begin = (xp.cuda.Device().cublas_handle, *operations, m, n, k, ONE)
    ends = (cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT)
    first, second, target = (one.array.data.ptr for one in (b, a, out))
    if matrices == 1:
        operands = (first, kind, b.leading, second, kind, a.leading)
        cublas.gemmEx(*begin, *operands, ZERO, target, result, out.leading, *ends)
    else:
        stacks = (first, kind, b.leading, b.stride, second, kind, a.leading, a.stride)
        targets = (target, result, out.leading, out.stride, matrices)
        cublas.gemmStridedBatchedEx(*begin, *stacks, ZERO, *targets, *ends)
