"""Reduction kernels against MPI's own, on all element types, in all ways of sharing memory."""

import gc

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from collectives.buffers.arguments import vector
from collectives.buffers.datatypes import PAIRS, kind
from collectives.errors import InvalidArgument, InvalidType
from collectives.runtime.arguments.ops import combine, is_commutative

NUMBERS = [*"bhilqBHILQ", *"efdg", *"FDG", "?"]
SMALL = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
OPS = ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"]
ALIASES = ["apart", "left", "right"]
N = 5


def operands(dtype):
    """Two vectors of small integers, exact in every type, with zeros, ties and both orders."""
    return np.array([0, 1, 2, 1, 0]).astype(dtype), np.array([0, 0, 1, 1, 2]).astype(dtype)


def where(alias, left, right):
    return {"apart": np.zeros_like(left), "left": left, "right": right}[alias]


def datatype_of(dtype):
    return vector(np.zeros(1, dtype), "x").datatype


def by_numpy(name, left, right):
    if name.startswith("L"):
        ufunc = {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}[name]
        return ufunc(left, right).astype(left.dtype)
    ufuncs = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}
    ufuncs |= {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
    return ufuncs[name](left, right)


def defined(name, dtype):
    if name in ("SUM", "PROD"):
        return True
    if name in ("MAX", "MIN"):
        return kind(dtype) != "c"
    return kind(dtype) in "iub"


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("char", [*NUMBERS, *SMALL], ids=str)
def test_predefined(name, char, alias):
    dtype = np.dtype(char)
    left, right = operands(dtype)
    if not defined(name, dtype):
        with pytest.raises(InvalidType, match=f"MPI.{name} is not defined for") as caught:
            combine(getattr(MPI, name), dtype, datatype_of(dtype))
        assert caught.value.Get_error_class() == MPI.ERR_OP
        return
    expected = by_numpy(name, left, right)
    out = where(alias, left, right)
    kernel = combine(getattr(MPI, name), dtype, datatype_of(dtype))
    assert kernel.commutative
    kernel(left, right, out)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, expected)


BY_MPI = [
    (name, char)
    for name in OPS
    for char in NUMBERS
    if (name.startswith("L") if char == "?" else defined(name, np.dtype(char)))
]


@pytest.mark.parametrize(("name", "char"), BY_MPI)
def test_predefined_agrees_with_mpi(name, char):
    dtype = np.dtype(char)
    left, right = operands(dtype)
    out, native = np.zeros_like(left), right.copy()
    combine(getattr(MPI, name), dtype, datatype_of(dtype))(left, right, out)
    getattr(MPI, name).Reduce_local(left, native)
    np.testing.assert_array_equal(out, native)


def test_nan_is_the_largest_and_the_smallest():
    left, right = np.array([np.nan, 1.0]), np.array([1.0, np.nan])
    for op in (MPI.MAX, MPI.MIN):
        out = np.zeros(2)
        combine(op, out.dtype, MPI.DOUBLE)(left, right, out)
        assert np.isnan(out).all()


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("name", ["MAXLOC", "MINLOC"])
@pytest.mark.parametrize("pair", PAIRS)
def test_locations(pair, name, alias):
    datatype, op = getattr(MPI, pair), getattr(MPI, name)
    value, location = PAIRS[pair]
    aligned = np.dtype([("val", value), ("loc", location)], align=True)
    left = np.array([(1, 7), (2, 3), (5, 1), (5, 4)], aligned)
    right = np.array([(2, 4), (1, 8), (5, 0), (5, 9)], aligned)
    native = right.copy()
    op.Reduce_local([left, 4, datatype], [native, 4, datatype])

    dtype = vector(left, "x").dtype
    assert dtype is not None and dtype.itemsize == datatype.Get_size()
    left, right = left.astype(dtype), right.astype(dtype)
    out = where(alias, left, right)
    combine(op, dtype, datatype)(left, right, out)
    assert out.tolist() == native.astype(dtype).tolist()


def test_locations_need_pairs():
    for dtype, datatype in ((np.dtype("f8"), MPI.DOUBLE), (None, None)):
        with pytest.raises(InvalidType, match="MAXLOC is not defined"):
            combine(MPI.MAXLOC, dtype, datatype)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize(("op", "which"), [(MPI.REPLACE, 1), (MPI.NO_OP, 0)])
def test_replace_keeps_right_and_no_op_left(op, which, alias):
    left, right = operands("f8")
    expected = (left, right)[which].copy()
    out = where(alias, left, right)
    kernel = combine(op, left.dtype, MPI.DOUBLE)
    kernel(left, right, out)
    assert not kernel.commutative
    np.testing.assert_array_equal(out, expected)
    assert op(3, 4) == (3, 4)[which]  # mpi4py's own meaning


def test_bytes_are_bits_only():
    with pytest.raises(InvalidType, match="is not defined for MPI_BYTE"):
        combine(MPI.SUM, np.dtype("u1"), MPI.BYTE)
    left, right, out = np.uint8([1, 3]), np.uint8([3, 6]), np.zeros(2, np.uint8)
    combine(MPI.BXOR, np.dtype("u1"), MPI.BYTE)(left, right, out)
    assert out.tolist() == [2, 5]


def test_no_operation():
    for wrong, error in ((MPI.OP_NULL, InvalidArgument), (None, InvalidType), (sum, InvalidType)):
        with pytest.raises(error, match="op: ") as caught:
            combine(wrong, np.dtype("f8"), MPI.DOUBLE)
        assert caught.value.Get_error_class() == MPI.ERR_OP


def affine(dtype):
    """Non-commutative: (x, y) -> 2x + y in the given type, on raw memory as MPI hands it over."""

    def function(inbuf, inoutbuf, datatype):
        left, right = np.frombuffer(inbuf, dtype), np.frombuffer(inoutbuf, dtype)
        right[:] = 2 * left + right

    return MPI.Op.Create(function, commute=False)


@pytest.mark.parametrize("alias", [*ALIASES, "all"])
@pytest.mark.parametrize("char", ["i", "d", *SMALL], ids=str)
def test_user_operation_keeps_left_left(char, alias):
    dtype = np.dtype(char)
    op = affine(dtype)
    left, right = operands(dtype)
    if alias == "all":
        right = left
    expected = (2 * left + right).astype(dtype)
    out = left if alias == "all" else where(alias, left, right)
    kernel = combine(op, dtype, datatype_of(dtype))
    run = kernel.bind(left, right, out)
    run()
    assert not kernel.commutative
    np.testing.assert_array_equal(out, expected)
    op.Free()


def test_user_operation_sees_the_gaps_of_a_derived_datatype():
    seen = []

    def function(inbuf, inoutbuf, datatype):
        seen.append(len(inbuf))
        left, right = np.frombuffer(inbuf, "i4")[::3], np.frombuffer(inoutbuf, "i4")[::3]
        right[:] = 2 * left + right

    op = MPI.Op.Create(function, commute=False)
    datatype = MPI.INT.Create_resized(0, 12).Commit()
    kernel = combine(op, None, datatype)
    datatype.Free()  # as MPI allows while a call is under way
    left, right, out = np.int32([1, 2, 3]), np.int32([4, 5, 6]), np.zeros(3, "i4")
    run = kernel.bind(left.view("u1"), right.view("u1"), out.view("u1"))
    del kernel
    gc.collect()
    run()
    assert out.tolist() == [6, 9, 12] and seen == [36]
    op.Free()


def test_user_operation_on_padded_pairs():
    aligned = np.dtype([("val", "f8"), ("loc", "i4")], align=True)

    def function(inbuf, inoutbuf, datatype):
        left, right = np.frombuffer(inbuf, aligned), np.frombuffer(inoutbuf, aligned)
        right["val"] = 2 * left["val"] + right["val"]
        right["loc"] += left["loc"]

    op = MPI.Op.Create(function, commute=False)
    dtype = np.dtype([("val", "f8"), ("loc", "i4")])
    left, right = np.array([(1, 2), (3, 4)], dtype), np.array([(10, 20), (30, 40)], dtype)
    combine(op, dtype, MPI.DOUBLE_INT)(left, right, left)
    assert left.tolist() == [(12.0, 22), (36.0, 44)]
    op.Free()


def test_an_operation_freed_before_the_end_of_its_call_is_named():
    op = affine(np.dtype("d"))
    run = combine(op, np.dtype("d"), MPI.DOUBLE).bind(np.ones(2), np.ones(2), np.zeros(2))
    op.Free()
    with pytest.raises(InvalidArgument, match="op: freed before the end of a call that uses it"):
        run()


@pytest.mark.parametrize("op", [MPI.SUM, MPI.MAXLOC, MPI.REPLACE, "user"])
def test_empty(op):
    user = op == "user"
    op = affine("f8") if user else op
    dtype, datatype = (
        (np.dtype([("val", "f4"), ("loc", "i4")]), MPI.FLOAT_INT) if op == MPI.MAXLOC else (np.dtype("f8"), MPI.DOUBLE)
    )
    nothing = np.empty(0, dtype)
    combine(op, dtype, datatype)(nothing, nothing, nothing)
    if user:
        op.Free()


def test_commutative():
    assert all(is_commutative(getattr(MPI, name)) for name in [*OPS, "MAXLOC", "MINLOC"])
    assert not is_commutative(MPI.REPLACE) and not is_commutative(MPI.NO_OP)
    for commute in (True, False):
        op = MPI.Op.Create(lambda a, b, t: None, commute=commute)
        assert is_commutative(op) is commute
        op.Free()
