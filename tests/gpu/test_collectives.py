"""Collectives on CuPy arrays give what NumPy says, in every form, wherever the arrays' work goes on."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.doc_examples import EXAMPLES, FORMS, call, check
from support.fakes import Foreign, NoInterface

from collectives import wait_all

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
BUSY = 300  # additions that keep a stream at work while the host goes on


def on_device(cupy, array):
    return None if array is None else cupy.asarray(array)


def run(cupy, comm, name, lengths, dtype, form="blocking", in_place=(False, True)):
    """Call with arrays of all lengths, and then compare: a GPU takes long to go from one process to another."""
    rank, size = comm.Get_rank(), comm.Get_size()
    examples = [EXAMPLES[name](rank, size, n, dtype, size - 1, where) for n in lengths for where in in_place]
    arrays = [(on_device(cupy, example.send), on_device(cupy, example.recv)) for example in examples]
    for example, (send, recv) in zip(examples, arrays):
        call(comm, example.method, form, example.arguments(send, recv))
    for example, (_, recv) in zip(examples, arrays):
        if recv is not None:
            check(recv.get(), example.expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_collective_and_dtype(cupy, comm, name, dtype):
    run(cupy, comm, name, (0, 1, 5, 10_000), dtype)


@pytest.mark.parametrize("form", ["nonblocking", "persistent"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_form(cupy, comm, name, form):
    run(cupy, comm, name, (0, 5, 10_000), "f4", form)


@pytest.mark.parametrize("name", ["allreduce", "bcast", "allgather"])
def test_large(cupy, comm, name):
    """Many segments: 16 MB a rank."""
    run(cupy, comm, name, [4_000_000], "f4", in_place=[False])


@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", ["i4", "u1", "?"])
def test_every_operation(cupy, comm, op, dtype):
    """On the device as on the host."""
    if dtype == "?" and op in ("BAND", "BOR", "BXOR"):
        pytest.skip("not defined for bool")
    rank = comm.Get_rank()
    x = ((np.arange(100) * (rank + 3)) % 4).astype(dtype)
    y = np.zeros(100, dtype)
    comm.Allreduce(x, y, getattr(MPI, op))
    send, recv = cupy.asarray(x), cupy.zeros(100, dtype)
    comm.Allreduce(send, recv, getattr(MPI, op))
    np.testing.assert_array_equal(recv.get(), y)


def test_nan_is_the_largest_and_the_smallest(cupy, comm):
    rank = comm.Get_rank()
    x = np.array([np.nan if rank == 0 else 1.0, rank])
    for op, last in ((MPI.MAX, comm.Get_size() - 1), (MPI.MIN, 0)):
        recv = cupy.zeros(2)
        comm.Allreduce(cupy.asarray(x), recv, op)
        np.testing.assert_array_equal(recv.get(), [np.nan, last])


# ------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_stream_of_the_users(cupy, comm, form, in_place):
    """Work that was queued before the call is in the result, and the result is there for what is queued after it."""
    rank, size = comm.Get_rank(), comm.Get_size()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y = cupy.full(1_000_000, rank, "f4"), cupy.zeros(1_000_000, "f4")
        for _ in range(BUSY):
            x += 1
        arguments = (MPI.IN_PLACE, x) if in_place else (x, y)
        call(comm, "Allreduce", form, arguments)
        result = x if in_place else y
        result *= 2
        found = result.get()
    assert (found == 2 * (size * BUSY + size * (size - 1) // 2)).all()


def test_streams_that_cuda_synchronises(cupy, comm):
    """Work on a blocking stream is in what the default stream sends, and the other way round."""
    if hasattr(cupy, "GPU"):
        pytest.skip("streams of the stand-in wait for no others by themselves")
    rank, size = comm.Get_rank(), comm.Get_size()
    stream, x, y = cupy.cuda.Stream(), cupy.full(1_000_000, rank, "f4"), cupy.zeros(1_000_000, "f4")
    for turn, (first, second) in enumerate(((stream, cupy.cuda.Stream.null), (cupy.cuda.Stream.null, stream)), 1):
        with first:
            for _ in range(BUSY):
                x += 1
        with second:
            comm.Allreduce(x, y)
            found = y.get()
        assert (found == size * BUSY * turn + size * (size - 1) // 2).all()


def test_many_in_flight_on_their_own_streams(cupy, comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(10)]
    arrays, requests = [], []
    for turn, stream in enumerate(streams):
        with stream:
            x, y = cupy.full(100_000, rank, "i4"), cupy.zeros(100_000, "i4")
            for _ in range(turn):
                x += 1
            arrays.append((x, y))
            requests.append(comm.Iallreduce(x, y))
    wait_all(requests[::-1])
    for turn, (stream, (_, y)) in enumerate(zip(streams, arrays, strict=True)):
        with stream:
            assert (y.get() == size * turn + size * (size - 1) // 2).all()


def test_a_stream_that_the_array_names(cupy, comm):
    """Another library's array, whose stream is not CuPy's current one."""
    rank, size = comm.Get_rank(), comm.Get_size()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.full(1_000_000, rank, "f4")
        for _ in range(BUSY):
            x += 1
    comm.Allreduce(MPI.IN_PLACE, Foreign(x, stream=stream))
    with stream:
        assert (x.get() == size * BUSY + size * (size - 1) // 2).all()


def test_persistent_again_and_again(cupy, comm):
    """Each start follows the stream that is current then."""
    size = comm.Get_size()
    x, y = cupy.zeros(1000, "i4"), cupy.zeros(1000, "i4")
    cupy.cuda.get_current_stream().synchronize()
    request = comm.Allreduce_init(x, y)
    for turn in range(5):
        with cupy.cuda.Stream(non_blocking=True):
            x += 1
            request.Start()
            request.Wait()
            assert (y.get() == size * (turn + 1)).all()
    request.Free()


def test_the_same_call_again_and_again(cupy, comm):
    size = comm.Get_size()
    x, y = cupy.zeros(1000, "i4"), cupy.zeros(1000, "i4")
    for turn in range(50):
        x += 1
        comm.Allreduce(x, y)
        assert (y.get() == size * (turn + 1)).all()


# ------------------------------------------------------------------------------------------ arguments


def test_host_and_device_in_one_call(cupy, comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    x = np.arange(5000.0) + rank
    expected = size * np.arange(5000.0) + size * (size - 1) / 2
    for send, recv in ((x, cupy.zeros(5000)), (cupy.asarray(x), np.zeros(5000))):
        comm.Allreduce(send, recv)
        np.testing.assert_array_equal(cupy.asnumpy(recv), expected)


def test_ranks_with_host_and_ranks_with_device_arrays(cupy, comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    x = np.arange(5000, dtype="i4") + rank
    mine = cupy.asarray(x) if rank % 2 else x
    total = np.zeros(5000, "i4") if rank % 2 else cupy.zeros(5000, "i4")
    comm.Allreduce(mine, total)
    np.testing.assert_array_equal(cupy.asnumpy(total), size * np.arange(5000) + size * (size - 1) // 2)


def test_an_array_with_gaps_is_refused_before_anything_is_sent(cupy, comm):
    with pytest.raises(ValueError, match="not contiguous"):
        comm.Allreduce(MPI.IN_PLACE, cupy.zeros(10)[::2])
    comm.Barrier()


def test_a_column_by_a_derived_datatype(cupy, comm):
    rank = comm.Get_rank()
    table = np.arange(12, dtype="i4").reshape(3, 4)
    array = cupy.asarray(table if rank == 0 else np.zeros_like(table))
    column = MPI.INT.Create_vector(3, 1, 4).Commit()
    comm.Bcast([array, 1, column])
    column.Free()
    found = array.get()
    np.testing.assert_array_equal(found[:, 0], table[:, 0])
    np.testing.assert_array_equal(found[:, 1:], table[:, 1:] if rank == 0 else 0)


def test_dlpack(cupy, comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    x, y = cupy.full(1000, rank, "f4"), cupy.zeros(1000, "f4")
    comm.Allreduce(NoInterface(x), NoInterface(y))
    assert (y.get() == size * (size - 1) / 2).all()


def test_bfloat16(cupy, comm):
    """Which CuPy may not know: its bytes, in an array that says what they are."""
    rank, size = comm.Get_rank(), comm.Get_size()
    values = np.full(1000, rank + 1).astype(ml_dtypes.bfloat16)
    memory = cupy.asarray(values.view("u1"))
    comm.Allreduce(MPI.IN_PLACE, Foreign(memory, dtype=ml_dtypes.bfloat16))
    assert (memory.get().view(ml_dtypes.bfloat16) == size * (size + 1) // 2).all()


def test_an_operation_of_the_users(cupy, comm):
    """Rank by rank in order; only MPI can do it, so the host does."""
    rank, size = comm.Get_rank(), comm.Get_size()

    def last(left, right, datatype):
        np.frombuffer(right, "i4")[:] += 0 * np.frombuffer(left, "i4")

    op = MPI.Op.Create(last, commute=False)
    x = cupy.full(100, rank, "i4")
    comm.Allreduce(MPI.IN_PLACE, x, op)
    assert (x.get() == size - 1).all()
    op.Free()


def test_every_rank_on_a_gpu_of_its_own(cupy, comm):
    """As far as there are some; the last ranks share, as all do where there is one."""
    rank, size = comm.Get_rank(), comm.Get_size()
    with cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()):
        x, y = cupy.full(1000, rank, "f4"), cupy.zeros(1000, "f4")
        cupy.cuda.get_current_stream().synchronize()
    comm.Allreduce(x, y)  # whatever device is current here
    with y.device:
        assert (y.get() == size * (size - 1) / 2).all()
