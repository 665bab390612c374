"""Compiled reduction kernels for program tables: ``out = left op right`` on dense memory.

The results have the bits of `ops`: of equal values maximum and minimum take the right one (which differ for signed
zeros); every NaN is the same one; products of complex numbers are not fused; integers wrap around; on bools sum and
maximum are "or", product and minimum "and".
"""

# mypy: ignore-errors
# Types of compiled functions are not those of Python.

from threading import RLock
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from quant.kernels.jit import compiler

_compile = compiler(fastmath=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # called at their address alone


@_compile
def _sum(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = a[i] + b[i]
    return 0


@_compile
def _product(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = a[i] * b[i]
    return 0


@_compile
def _largest(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = a[i] if a[i] > b[i] else b[i]
    return 0


@_compile
def _smallest(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = a[i] if a[i] < b[i] else b[i]
    return 0


@_compile
def _float_sum(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        value = a[i] + b[i]
        c[i] = value if value == value else np.nan
    return 0


@_compile
def _float_product(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        value = a[i] * b[i]
        c[i] = value if value == value else np.nan
    return 0


@_compile
def _float_largest(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        value = a[i] if a[i] > b[i] else b[i]
        c[i] = value if a[i] == a[i] and b[i] == b[i] else np.nan
    return 0


@_compile
def _float_smallest(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        value = a[i] if a[i] < b[i] else b[i]
        c[i] = value if a[i] == a[i] and b[i] == b[i] else np.nan
    return 0


@_compile
def _complex_product(left, right, out, nbytes):
    """Product of pairs (real, imaginary) of floats."""
    p, q, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(0, nbytes // c.itemsize, 2):
        real = p[i] * q[i] - p[i + 1] * q[i + 1]
        imaginary = p[i] * q[i + 1] + p[i + 1] * q[i]
        c[i] = real if real == real else np.nan
        c[i + 1] = imaginary if imaginary == imaginary else np.nan
    return 0


@_compile
def _logical_and(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = (a[i] != 0) & (b[i] != 0)
    return 0


@_compile
def _logical_or(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = (a[i] != 0) | (b[i] != 0)
    return 0


@_compile
def _logical_xor(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = (a[i] != 0) ^ (b[i] != 0)
    return 0


@_compile
def _bitwise_and(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = a[i] & b[i]
    return 0


@_compile
def _bitwise_or(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = a[i] | b[i]
    return 0


@_compile
def _bitwise_xor(left, right, out, nbytes):
    a, b, c = carray(left, (1,)), carray(right, (1,)), carray(out, (1,))
    for i in range(nbytes // c.itemsize):
        c[i] = a[i] ^ b[i]
    return 0


_BITWISE = {np.bitwise_and: _bitwise_and, np.bitwise_or: _bitwise_or, np.bitwise_xor: _bitwise_xor}
_LOGICAL = {np.logical_and: _logical_and, np.logical_or: _logical_or, np.logical_xor: _logical_xor}
_ARITHMETIC = {np.add: _sum, np.multiply: _product, np.maximum: _largest, np.minimum: _smallest}
_ON_FLOATS = {
    np.add: _float_sum,
    np.multiply: _float_product,
    np.maximum: _float_largest,
    np.minimum: _float_smallest,
}
_ON_BOOLS = {
    _logical_or: (np.add, np.maximum, np.logical_or, np.bitwise_or),
    _logical_and: (np.multiply, np.minimum, np.logical_and, np.bitwise_and),
    _logical_xor: (np.logical_xor, np.bitwise_xor),
}
"""As NumPy's: all bytes but 0 are true, and results 0 or 1."""

_KERNELS = {
    "f": _ON_FLOATS,
    "c": {np.add: _float_sum, np.multiply: _complex_product},
    "i": _ARITHMETIC | _LOGICAL | _BITWISE,
    "u": _ARITHMETIC | _LOGICAL | _BITWISE,
    "b": {ufunc: kernel for kernel, ufuncs in _ON_BOOLS.items() for ufunc in ufuncs},
}
"""Kernels by the kind of a dtype and NumPy's ufunc; those of complex numbers work on their parts."""

_UNITS = {"?": np.dtype(np.uint8), "F": np.dtype(np.float32), "D": np.dtype(np.float64)}
"""Numbers that kernels work on, if not the elements."""

_compiling = RLock()
"""Held while kernels are compiled: two threads would write the same files."""


def find_kernel(ufunc: np.ufunc, dtype: np.dtype) -> Any:
    """Kernel of an operation, to be compiled for the dtype; None if there is none."""
    if dtype.isbuiltin != 1 or dtype.char in "egG" or dtype.itemsize > 16:  # of other packages; half, long double
        return None
    return _KERNELS.get(dtype.kind, {}).get(ufunc)


def kernel_address(ufunc: np.ufunc, dtype: np.dtype) -> int:
    """Address of the kernel ``int64 kernel(left, right, out, nbytes)``, compiled or loaded; 0 if there is none."""
    kernel = find_kernel(ufunc, dtype)
    if kernel is None:
        return 0
    pointer = types.CPointer(from_dtype(_UNITS.get(dtype.char, dtype)))
    signature = (pointer, pointer, pointer, types.int64)
    with _compiling:
        kernel.compile(signature)
    result = kernel.overloads[signature]
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))
