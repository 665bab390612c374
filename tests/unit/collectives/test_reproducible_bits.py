"""Bits of reductions depend on the values alone: not on memory, alignment, length or position."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.placed import placed

from collectives.errors import InvalidType
from collectives.runtime.arguments.ops import combine

LENGTHS = (*range(1, 71), 127, 1000)

DTYPES = [*"efdgFDGbHiQ?", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn, "MAXLOC", "MINLOC"]

OPS = "SUM", "PROD", "MAX", "MIN", "LAND", "BXOR"

PAIR = np.dtype({"names": ["val", "loc"], "formats": ["f8", "i4"], "offsets": [0, 8], "itemsize": 16})


def values(dtype, count, rng):
    """Ordinary numbers, and zeros, infinities and NaN of both signs and of several payloads."""
    if dtype.names:
        pairs = np.zeros(count, dtype)
        pairs["val"], pairs["loc"] = values(dtype["val"], count, rng), rng.integers(0, 4, count)
        return pairs
    if dtype.kind in "iub":
        return rng.integers(0, 256, count, np.uint8).astype(dtype)
    if dtype.kind == "c":
        numbers = np.empty(count, dtype)
        numbers.real, numbers.imag = (values(numbers.real.dtype, count, rng) for _ in range(2))
        return numbers
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.5])
    numbers = np.where(rng.random(count) < 0.4, rng.choice(special, count), rng.standard_normal(count)).astype(dtype)
    if dtype.char == "d":
        bits = numbers.view(np.uint64)
        bits[np.isnan(numbers)] |= rng.integers(1, 99, np.isnan(numbers).sum(), np.uint64)
    return numbers


def bits(array):
    """Bytes of the numbers, without the padding of pairs and of extended precision."""
    if array.dtype.names:
        return array["val"].tobytes() + array["loc"].tobytes()
    if array.dtype.char not in "gG":
        return array.tobytes()
    parts = array.view(np.longdouble)
    return parts.astype(np.float64).tobytes() + (parts - parts.astype(np.float64)).astype(np.float64).tobytes()


def result(kernel, left, right, shifts, alias):
    left, right = (placed(array, shift) for array, shift in zip((left, right), shifts))
    out = {"left": left, "right": right, "neither": placed(np.zeros_like(left), shifts[2])}[alias]
    kernel(left, right, out)
    return bits(out)


def reference(kernel, left, right):
    """One element at a time, in memory of its own."""
    pairs = zip(np.split(left, len(left)), np.split(right, len(right)))
    return bits(np.concatenate([np.frombuffer(single(kernel, *pair), left.dtype) for pair in pairs]))


def single(kernel, left, right):
    out = np.zeros_like(left)
    kernel(left, right, out)
    return out.tobytes()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_in_any_memory(dtype, op):
    if dtype in ("MAXLOC", "MINLOC"):
        op, dtype = dtype, PAIR
    dtype, rng = np.dtype(dtype), np.random.default_rng(1)
    try:
        kernel = combine(getattr(MPI, op), dtype, None)
    except InvalidType:
        return
    with np.errstate(all="ignore"):
        for length in LENGTHS:
            left, right = values(dtype, length, rng), values(dtype, length, rng)
            expected = reference(kernel, left, right)
            for alias in ("neither", "left", "right"):
                for shifts in ((0, 0, 0), (dtype.itemsize, 0, 32), (1, 0, 0), (0, 3, 1)):
                    found = result(kernel, left, right, shifts, alias)
                    assert found == expected, f"{length} elements, out is {alias}, shifts {shifts}"


@pytest.mark.parametrize("op", ["SUM", "PROD"])
@pytest.mark.parametrize("dtype", [*"efdgFDG", ml_dtypes.bfloat16], ids=str)
def test_the_order_of_two_operands_does_not_matter(dtype, op):
    dtype, rng = np.dtype(dtype), np.random.default_rng(2)
    kernel = combine(getattr(MPI, op), dtype, None)
    with np.errstate(all="ignore"):
        for length in LENGTHS:
            left, right = values(dtype, length, rng), values(dtype, length, rng)
            one, other = (result(kernel, *pair, (0, 0, 0), "neither") for pair in ((left, right), (right, left)))
            assert one == other
