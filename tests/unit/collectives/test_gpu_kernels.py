"""Kernels of ranks that share a GPU, compiled for the host: equal to NumPy, bit by bit."""

from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from support.fakes import cupy

from collectives.transport.gpu import gpu_kernels
from collectives.transport.gpu.gpu_kernels import EXCLUSIVE, INCLUSIVE, NOTHING, TOTAL, Copied, GpuKernels, Reduced

UFUNCS = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
DTYPES = ["?", "u1", "i4", "f2", ml_dtypes.bfloat16, "f4", "c8"]
MORE_DTYPES = [
    pytest.param(dtype, marks=pytest.mark.full) for dtype in ("i1", "i2", "u2", "u4", "i8", "u8", "f8", "c16")
]


def vectors(dtype, ranks, count):
    random = np.random.default_rng(ranks)
    values = random.integers(-100, 100, (ranks, count))
    if np.dtype(dtype).kind not in "iub":
        values = values + random.random((ranks, count)) * 3
        if np.dtype(dtype).kind == "c":
            values = values + 1j * random.random((ranks, count))
        values[ranks // 2, 3::7] = np.nan
    return values.astype(dtype)


def on_device(array, shift=0):
    """(array that keeps the memory, address): bytes on the device, `shift` bytes from where memory is aligned."""
    memory = cupy.asarray(np.concatenate([np.zeros(shift, "u1"), array.reshape(-1).view("u1")]))
    return memory, memory.data.ptr + shift


def put(launches):
    for launch in launches:
        launch.put(0)
    cupy.cuda.runtime.deviceSynchronize()


def reduced(op, x, shift=0, way=TOTAL, cuts=None):
    """Results of all ranks by the kernel; `cuts` are the ranks' parts of the vector, by default all of it."""
    ranks, count = x.shape
    kind = gpu_kernels.reduction_type(op, x.dtype)
    inputs = [on_device(row, shift) for row in x]
    cuts = cuts or [(0, count)] * ranks
    outs = [on_device(np.zeros(last - first, x.dtype), shift) for first, last in cuts]
    outputs = [Reduced(at, *cut) if cut[0] < cut[1] else NOTHING for (_, at), cut in zip(outs, cuts)]
    put(GpuKernels(cupy, 0).reduction(kind, [at for _, at in inputs], count, outputs, way))
    return [memory.get()[shift:].view(x.dtype) for memory, _ in outs]


def same(found, expected):
    """Equal bits, or NaN in both."""
    np.testing.assert_array_equal(found.astype("c16"), expected.astype("c16"))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("dtype", [*DTYPES, *MORE_DTYPES], ids=str)
def test_every_operation_and_dtype(gpu, dtype):
    x = vectors(dtype, 3, 45)
    for op, ufunc in UFUNCS.items():
        if gpu_kernels.reduction_type(op, x.dtype) is not None:
            expected = reduce(lambda a, b: ufunc(a, b).astype(dtype), x)
            for found in reduced(op, x):
                same(found, expected)


def test_kinds_without_a_kernel():
    """Bits of floats, logic of floats, products and orders of complex numbers."""
    for op, dtype in (("BAND", "f4"), ("LOR", "f8"), ("PROD", "c8"), ("MAX", "c16"), ("LAND", "f2"), ("MAXLOC", "i4")):
        assert gpu_kernels.reduction_type(op, np.dtype(dtype)) is None
    assert gpu_kernels.reduction_type("SUM", np.dtype(ml_dtypes.float8_e4m3fn)) is None


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("count", [1, 3, 64, 1003])
@pytest.mark.parametrize("shift", [0, 4])
def test_lengths_and_alignments(gpu, ranks, count, shift):
    """Elements beyond the last whole pack, and memory that is not aligned."""
    x = vectors("f4", ranks, count)
    for found in reduced("SUM", x, shift):
        same(found, reduce(np.add, x))


def test_prefixes(gpu):
    x = vectors("f4", 3, 33)
    for rank, found in enumerate(reduced("SUM", x, way=INCLUSIVE)):
        same(found, reduce(np.add, x[: rank + 1]))
    found = reduced("SUM", x, way=EXCLUSIVE, cuts=[(0, 0), (0, 33), (0, 33)])
    for rank in (1, 2):
        same(found[rank], reduce(np.add, x[:rank]))


@pytest.mark.parametrize("cuts", [[(0, 16), (16, 32), (32, 50)], [(0, 3), (3, 3), (3, 50)]])
def test_parts_of_the_result(gpu, cuts):
    """As of a reduce-scatter; nothing is written outside them."""
    x = vectors("i4", 3, 50)
    for found, (first, last) in zip(reduced("SUM", x, cuts=cuts), cuts):
        same(found, reduce(np.add, x)[first:last])


def test_in_place(gpu):
    """A result replaces an input."""
    x = vectors("f8", 2, 100)
    inputs = [on_device(row) for row in x]
    kind = gpu_kernels.reduction_type("SUM", x.dtype)
    outputs = [Reduced(at, 0, 100) for _, at in inputs]
    put(GpuKernels(cupy, 0).reduction(kind, [at for _, at in inputs], 100, outputs))
    for memory, _ in inputs:
        same(memory.get().view("f8"), x[0] + x[1])


@pytest.mark.parametrize("shift", [0, 1, 8])
def test_copies(gpu, shift):
    """Many pieces, more than one launch takes; of any length, and none of what lies between."""
    source, start = on_device(np.arange(40_000, dtype="u2") % 251, shift)
    target = cupy.zeros(80_200, "u1")
    lengths = np.arange(300) % 97
    places = 64 * np.arange(300) * 4
    pieces = [Copied(start + at, target.data.ptr + at, n) for at, n in zip(places.tolist(), lengths.tolist())]
    put(GpuKernels(cupy, 0).copies(pieces))
    expected = np.zeros(80_200, "u1")
    for at, n in zip(places, lengths):
        expected[at : at + n] = source.get()[shift + at : shift + at + n]
    np.testing.assert_array_equal(target.get(), expected)


def test_nothing_to_do(gpu):
    kernels, kind = GpuKernels(cupy, 0), gpu_kernels.reduction_type("SUM", np.dtype("f4"))
    assert kernels.copies([Copied(1, 1, 9), Copied(1, 2, 0)]) == []
    assert kernels.reduction(kind, [0, 0], 0, [NOTHING, NOTHING]) == []


def test_arguments_fit():
    """A kernel's arguments take at most 4 KiB, and their layout is that of C."""
    assert gpu_kernels.PIECES.itemsize == 24 * gpu_kernels.MOST_PIECES < 4096
    assert gpu_kernels.VECTORS.itemsize == 32 * gpu_kernels.MOST_RANKS < 4096
