"""Staging: strided data and device memory become plain bytes, and come back where they were."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.fakes import Foreign, cupy

from collectives.buffers.arguments import blocks, blocks_v, vector
from collectives.buffers.datatypes import PAIRS
from collectives.buffers.staging import DeviceStaging, PackedStaging, stage
from collectives.errors import InvalidBuffer

pytestmark = pytest.mark.usefixtures("gpu")


def column():
    return MPI.INT.Create_vector(3, 1, 4)  # the first column of a 3 x 4 matrix


def columns():
    vector_type = column()
    resized = vector_type.Create_resized(0, 4)  # n of them: the first n columns
    vector_type.Free()
    return resized


def swapped():
    return MPI.INT.Create_indexed([1, 1], [1, 0])  # no gaps, but not in memory's order


def backwards():
    return MPI.INT.Create_resized(0, -4)


TABLE = np.arange(12, dtype="i4").reshape(3, 4)
CASES = [
    (column, (1, 0), [0, 4, 8]),
    (columns, (2, 1), [1, 5, 9, 2, 6, 10]),
    (swapped, (2, 1), [3, 2, 5, 4]),
]


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(("make", "count", "expected"), CASES)
def test_derived_datatypes_round_trip(make, count, expected, where):
    datatype = make().Commit()
    array = TABLE.copy() if where == "host" else cupy.asarray(TABLE)
    buffer = vector([array, count, datatype], "recvbuf", writable=True)
    assert not buffer.contiguous and buffer.device == (where == "device")
    staged = stage(buffer, load=True, store=True)
    staged.load()
    assert staged.host.nbytes == buffer.nbytes
    assert staged.host.view("i4").tolist() == expected

    staged.host.view("i4")[:] = -np.arange(1, len(expected) + 1)
    staged.store()
    stored = array if where == "host" else array.get()
    changed = TABLE.copy()
    changed.reshape(-1)[expected] = -np.arange(1, len(expected) + 1)
    np.testing.assert_array_equal(stored, changed)
    staged.free()
    staged.free()
    datatype.Free()


def test_negative_extent():
    datatype = backwards().Commit()
    x = np.arange(4, dtype="i4")
    with pytest.raises(InvalidBuffer, match="8 bytes before the buffer"):
        vector([x, 3, datatype], "sendbuf")
    datatype.Free()


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_travel_without_padding(pair):
    datatype, (value, location) = getattr(MPI, pair), PAIRS[pair]
    aligned = np.dtype([("val", value), ("loc", location)], align=True)
    x = np.array([(1, 2), (3, 4), (5, 6)], aligned)
    buffer = vector(x, "x", writable=True)
    assert buffer.datatype == datatype and buffer.dtype.itemsize == buffer.itemsize == datatype.Get_size()
    assert buffer.contiguous == (aligned.itemsize == datatype.Get_size())
    staged = PackedStaging(buffer, load=True, store=True)
    staged.load()
    assert staged.host.view(buffer.dtype).tolist() == x.tolist()
    staged.host.view(buffer.dtype)["loc"] = 7
    staged.store()
    assert x.tolist() == [(1, 7), (3, 7), (5, 7)]


def test_blocks_of_a_derived_datatype_lie_one_after_the_other():
    datatype = columns().Commit()
    buffer = blocks_v([TABLE.copy(), ([1, 0, 2], [3, 9, 0]), datatype], 3, "sendbuf")
    staged = stage(buffer, load=True, store=False)
    staged.load()
    assert staged.host.view("i4").tolist() == [3, 7, 11, 0, 4, 8, 1, 5, 9]
    datatype.Free()


def test_absolute_addresses():
    x, y = np.arange(3, dtype="i4"), np.arange(10, 13, dtype="i4")
    places = [MPI.Get_address(x), MPI.Get_address(y) + 4]
    datatype = MPI.INT.Create_hindexed([2, 1], places).Commit()
    staged = stage(vector([MPI.BOTTOM, 1, datatype], "buf", writable=True), load=True, store=True)
    staged.load()
    assert staged.host.view("i4").tolist() == [0, 1, 11]
    staged.host.view("i4")[:] = 7
    staged.store()
    assert x.tolist() == [7, 7, 2] and y.tolist() == [10, 7, 12]
    datatype.Free()


def test_the_datatype_may_be_freed_while_staged():
    datatype = column().Commit()
    staged = stage(vector([TABLE, 1, datatype], "sendbuf"), load=True, store=False)
    datatype.Free()
    staged.load()
    assert staged.host.view("i4").tolist() == [0, 4, 8]


@pytest.mark.parametrize("dtype", ["f4", "c16", "?", "u1", "f2", ml_dtypes.bfloat16], ids=str)
def test_device_arrays_round_trip(gpu, dtype):
    values = np.arange(6).astype(dtype)
    memory = cupy.asarray(values.view("u1"))
    array = Foreign(memory, dtype=dtype)
    buffer = vector(array, "recvbuf", writable=True)
    assert buffer.device and buffer.contiguous and buffer.dtype == dtype and buffer.count == 6
    assert buffer.owner is array
    staged = stage(buffer, load=True, store=True)
    assert isinstance(staged, DeviceStaging)
    staged.load()
    np.testing.assert_array_equal(staged.host.view(dtype), values)
    staged.host.view(dtype)[:] = values[::-1]
    staged.store()
    np.testing.assert_array_equal(memory._seen().view(dtype), values[::-1])
    n = values.nbytes
    assert gpu.log == [("to_host", 0, n), ("wait", 0, 0), ("to_device", 0, n), ("wait", 0, 0)]


@pytest.mark.parametrize(("load", "store"), [(True, False), (False, True), (False, False)])
def test_only_the_copies_that_are_needed(gpu, load, store):
    staged = stage(vector(cupy.asarray(np.arange(4.0)), "x"), load=load, store=store)
    staged.load()
    staged.store()
    wanted = [("to_host", load), ("to_device", store)]
    assert [kind for kind, *_ in gpu.log if kind != "wait"] == [k for k, yes in wanted if yes]


def test_blocks_keep_their_places_and_adjacent_ones_are_one_copy(gpu):
    array = cupy.asarray(np.arange(8, dtype="i4"))
    buffer = blocks_v([array, [2, 0, 1, 3], [4, 0, 6, 0], MPI.INT], 4, "sendbuf")
    staged = stage(buffer, load=True, store=False)
    staged.load()
    assert staged.host.view("i4")[[0, 1, 2, 4, 5, 6]].tolist() == [0, 1, 2, 4, 5, 6] and staged.host.nbytes == 28
    assert gpu.log == [("to_host", 0, 12), ("to_host", 0, 12), ("wait", 0, 0)]


def test_displacement_on_a_device():
    array = cupy.asarray(np.arange(8, dtype="i4"))
    staged = stage(blocks([array, (2, 3), MPI.INT], 2, "sendbuf"), load=True, store=False)
    staged.load()
    assert staged.host.view("i4").tolist() == [3, 4, 5, 6]


def test_storing_between_gaps_on_a_device_keeps_them(gpu):
    datatype = column().Commit()
    array = cupy.asarray(TABLE)
    staged = stage(vector([array, 1, datatype], "recvbuf", writable=True), load=False, store=True)
    staged.load()
    assert gpu.log == []
    staged.host.view("i4")[:] = [-1, -2, -3]
    staged.store()
    expected = TABLE.copy()
    expected[:, 0] = [-1, -2, -3]
    np.testing.assert_array_equal(array.get(), expected)
    datatype.Free()


@pytest.mark.parametrize("array", ["host", "device"])
def test_nothing(array):
    datatype = column().Commit()
    empty = np.zeros(0, "i4") if array == "host" else cupy.zeros(0, "i4")
    staged = stage(vector([empty, 0, datatype], "x", writable=True), load=True, store=True)
    staged.load()
    staged.store()
    assert staged.host.nbytes == 0
    datatype.Free()


def test_device_arrays_that_cannot_be_used():
    with pytest.raises(InvalidBuffer, match=r"recvbuf: the device array is read-only"):
        vector(Foreign(cupy.zeros(3), readonly=True), "recvbuf", writable=True)
    with pytest.raises(InvalidBuffer, match=r"sendbuf: array of shape \(3,\), strides \(16,\) is not contiguous"):
        vector(cupy.zeros(6)[::2], "sendbuf")


def test_the_stand_in_guards_its_memory():
    array = cupy.zeros(3)
    with pytest.raises(TypeError):
        np.asarray(array)
    with pytest.raises(TypeError):
        memoryview(array)
    copy, down = cupy.cuda.runtime.memcpyAsync, cupy.cuda.runtime.memcpyDeviceToHost
    pinned = cupy.cuda.alloc_pinned_memory(8)
    with pytest.raises(RuntimeError, match="not on this device"):
        copy(pinned.ctypes.data, 8, 8, down, 0)
    with pytest.raises(RuntimeError, match="pinned"):
        copy(np.zeros(8).ctypes.data, vector(array, "x").address, 8, down, 0)
