"""Reductions of the engine have the bits of those in Python, for every operation and dtype that the engine has."""

import ml_dtypes
import numpy as np
import pytest

from collectives.engine.extension import available, engine, reduction_number
from collectives.runtime.ops import ReproducibleFunction

pytestmark = pytest.mark.skipif(not available(), reason="this installation has no compiled engine")

UFUNCS = (
    np.add, np.multiply, np.maximum, np.minimum, np.logical_and, np.logical_or, np.logical_xor,
    np.bitwise_and, np.bitwise_or, np.bitwise_xor,
)  # fmt: skip
DTYPES = "?bBhHiIlLqQefdgFDG"


def number(ufunc, dtype):
    return reduction_number(ufunc, ufunc, np.dtype(dtype))


def call(ufunc, left, right, out):
    addresses = (array.ctypes.data for array in (left, right, out))
    engine.reduce(number(ufunc, out.dtype), *addresses, out.nbytes)


def samples(dtype):
    """Zeros of both signs, infinities, NaN and the ends of the range; parts of complex numbers too."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.array([0, 1, 2, 255], np.uint8).view(bool)
    if dtype.kind in "iu":
        ends = np.iinfo(dtype)
        return np.array([0, 1, 2, 3, ends.max, ends.min, ends.max - 1, ends.max // 2 + 1], dtype)
    ends = np.finfo(dtype)
    values = [0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, -np.nan, ends.max, ends.min, ends.tiny]
    if dtype.kind == "c":
        return np.array([complex(a, b) for a in values[:8] for b in values[:8]], dtype)
    return np.array(values, dtype)


def cases():
    return [
        pytest.param(ufunc, dtype, id=f"{ufunc.__name__}-{dtype}")
        for ufunc in UFUNCS
        for dtype in DTYPES
        if available() and number(ufunc, dtype) >= 0
    ]


@pytest.mark.parametrize(("ufunc", "dtype"), cases())
def test_the_same_bits(ufunc, dtype):
    few = samples(dtype)
    left, right = np.repeat(few, len(few)), np.tile(few, len(few))
    out = np.zeros_like(left)
    expected = np.zeros_like(left)
    with np.errstate(all="ignore"):
        (ReproducibleFunction.of(ufunc, left.dtype) or ufunc)(left, right, out=expected)
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
    for dtype in ("e", "g", "G", ">f4"):
        assert number(np.add, dtype) < 0
    assert number(np.maximum, "F") < 0
    for name in ("float8_e5m2", "float8_e4m3fn", "bfloat16"):
        assert number(np.add, getattr(ml_dtypes, name)) < 0


def test_every_alignment_and_length():
    for dtype in "bhildfF":
        values = np.arange(1, 300).astype(dtype)
        for length in (*range(70), 255):
            for start in range(3):
                left, right = values[start:][:length], values[::-1].copy()[start + 1 :][:length]
                out = np.zeros(length + 2, dtype)[1:-1]
                call(np.add, left, right, out)
                assert (out == left + right).all()
