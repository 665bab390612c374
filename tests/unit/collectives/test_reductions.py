"""Reductions of the engine have the bits of those in Python, for every operation and dtype that the engine has."""

import ml_dtypes
import numpy as np
import pytest
from support.placed import placed

from collectives.buffers.datatypes import kind
from collectives.engine.extension import available, engine, reduction_number
from collectives.runtime.arguments.ops import ReproducibleFunction

pytestmark = pytest.mark.skipif(not available(), reason="this installation has no compiled engine")

UFUNCS = (
    np.add, np.multiply, np.maximum, np.minimum, np.logical_and, np.logical_or, np.logical_xor,
    np.bitwise_and, np.bitwise_or, np.bitwise_xor,
)  # fmt: skip
DTYPES = [*"?bBhHiIlLqQefdgFDG", ml_dtypes.bfloat16]
LENGTHS = 0, 1, 3, 7, 8, 15, 31, 1000, 4097
SHIFTS = (0, 0, 0), (1, 0, 0), (0, 3, 2), (8, 4, 1)
"""Bytes of operands and result beyond a multiple of 64."""


def number(ufunc, dtype):
    return reduction_number(ufunc, ufunc, np.dtype(dtype))


def call(ufunc, left, right, out):
    addresses = (array.ctypes.data for array in (left, right, out))
    engine.reduce(number(ufunc, out.dtype), *addresses, out.nbytes)


def bits(array):
    """Bytes of the numbers, without the padding of extended precision."""
    if array.dtype.char in "gG" and np.finfo(array.dtype).nmant == 63:
        return array.view(np.uint8).reshape(-1, 16)[:, :10].tobytes()
    return array.tobytes()


def samples(dtype):
    """Zeros of both signs, infinities, NaN and the ends of the range; parts of complex numbers too."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.array([0, 1, 2, 255], np.uint8).view(bool)
    if dtype.kind in "iu":
        ends = np.iinfo(dtype)
        return np.array([0, 1, 2, 3, ends.max, ends.min, ends.max - 1, ends.max // 2 + 1], dtype)
    ends = ml_dtypes.finfo(dtype)
    values = [
        0.0,
        -0.0,
        1.5,
        -2.25,
        np.inf,
        -np.inf,
        np.nan,
        -np.nan,
        ends.max,
        ends.min,
        ends.tiny,
        ends.smallest_subnormal,
    ]
    if dtype.kind == "c":
        pairs = np.array([(a, b) for a in values[:8] for b in values[:8]], np.finfo(dtype).dtype)
        return pairs.view(dtype).ravel()
    return np.array(values, dtype)


def cases():
    return [
        pytest.param(ufunc, dtype, id=f"{ufunc.__name__}-{np.dtype(dtype).name}-{np.dtype(dtype).char}")
        for ufunc in UFUNCS
        for dtype in DTYPES
        if available() and number(ufunc, dtype) >= 0
    ]


@pytest.mark.parametrize(("ufunc", "dtype"), cases())
def test_the_same_bits(ufunc, dtype):
    few = samples(dtype)
    pairs = np.repeat(few, len(few)), np.tile(few, len(few))
    expected = np.zeros_like(pairs[0])
    with np.errstate(all="ignore"):
        (ReproducibleFunction.of(ufunc, few.dtype) or ufunc)(*pairs, out=expected)
    for length in LENGTHS:
        left, right, result = (np.resize(array, length) for array in (*pairs, expected))
        for shifts in SHIFTS:
            for alias in ("apart", "left", "right"):
                one, other, apart = map(placed, (left, right, np.zeros_like(left)), shifts)
                out = {"apart": apart, "left": one, "right": other}[alias]
                call(ufunc, one, other, out)
                assert bits(out) == bits(result), f"{length} elements, shifts {shifts}, out is {alias}"


@pytest.mark.parametrize("dtype", ["e", ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("ufunc", UFUNCS[:4])
def test_every_number_of_16_bits(ufunc, dtype):
    """With one and a half, which does not fit into one place of the result, and in sums with small numbers."""
    left = np.arange(1 << 16).astype(np.uint16).view(dtype)
    for other in (1.5, -0.0, 2.0**-14, 2.0**-24):
        right = np.full(1 << 16, other, dtype)
        out, expected = np.zeros_like(left), np.zeros_like(left)
        with np.errstate(all="ignore"):
            ReproducibleFunction.of(ufunc, left.dtype)(left, right, out=expected)
        call(ufunc, left, right, out)
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("in_place", ["left", "right"])
def test_the_result_may_be_an_operand(in_place):
    left, right = np.arange(1000.0), np.full(1000, 0.5)
    out = left if in_place == "left" else right
    expected = left + right
    call(np.add, left, right, out)
    assert (out == expected).all()


def test_types_that_python_reduces():
    assert number(np.add, ">f4") < 0 and number(np.maximum, "F") < 0
    for name in ("float8_e5m2", "float8_e4m3fn", "int4"):
        assert number(np.add, getattr(ml_dtypes, name)) < 0


def test_every_operation_of_mpi_has_a_reduction():
    for dtype in DTYPES:
        kinds = {"f": 4, "c": 2}
        assert all(number(ufunc, dtype) >= 0 for ufunc in UFUNCS[: kinds.get(kind(np.dtype(dtype)))])
