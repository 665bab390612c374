"""Collectives on device arrays through the real MPI with the stand-in for CuPy."""

import numpy as np
import pytest
from mpi4py import MPI
from support.doc_examples import EXAMPLES, FORMS, call, check
from support.fakes import cupy

from collectives import Communicator, wait_all
from collectives.runtime.execution.progress import mpi_is_thread_safe

OPTIONS = {
    "direct": lambda size: {"cuda_aware": True},
    "pinned": lambda size: {"gpu": "pinned"},
    "pinned, two nodes": lambda size: {"nodes": [rank * 2 // size for rank in range(size)]},
    "pinned, by MPI alone": lambda size: {"shared": False},
    "staged": lambda size: {"gpu": "staged"},
}


@pytest.fixture(params=OPTIONS)
def aware(request, gpu, world):
    """A communicator that hands device memory to MPI, moves it through pinned memory, or stages it."""
    gpu.private = request.param != "direct"
    comm = Communicator(world, **{"cuda_aware": False, **OPTIONS[request.param](world.size)})
    found = comm.device_transfer.partition(":")[0]
    assert found == (request.param.partition(",")[0] if world.size > 1 else "none")
    yield comm
    comm.close()
    assert not gpu.registered


@pytest.mark.mpi(min_size=2)
def test_refusal_on_one_rank(gpu, world, monkeypatch):
    """All ranks stage, and the communicator names the reason."""

    def refuse(*_):
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorNotPermitted")

    last = world.rank == world.size - 1
    for name, what in (("hostRegister", "pins no memory"), ("memcpyAsync", "did not arrive")):
        with monkeypatch.context() as patched:
            if last:
                patched.setattr(cupy.cuda.runtime, name, refuse)
            comm = Communicator(world)
        assert comm.device_transfer.startswith("staged: ") and what in comm.device_transfer
        x, y = cupy.full(3000, world.rank, "i4"), cupy.zeros(3000, "i4")
        comm.Allreduce(x, y)
        assert (y.get() == world.size * (world.size - 1) // 2).all()
        comm.close()
    comm = Communicator(world, gpu="staged" if last else "kernel")
    assert comm.device_transfer == "staged: not wanted, or CuPy not imported, on some rank"
    comm.close()
    assert not gpu.registered


def on_device(array):
    return None if array is None else cupy.asarray(array)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_collective(aware, name, form):
    rank, size = aware.Get_rank(), aware.Get_size()
    for n in (0, 5, 3000, 200_000 if name == "allreduce" else 7):
        for in_place in (False, True):
            example = EXAMPLES[name](rank, size, n, "f4", size - 1, in_place)
            send, recv = on_device(example.send), on_device(example.recv)
            arguments = example.arguments(send, recv)
            request = None
            if form == "persistent":
                request = getattr(aware, example.method + "_init")(*arguments)
            for _ in range(2):
                stream = cupy.cuda.Stream(non_blocking=True)
                with stream:
                    for array, fresh in ((send, example.send), (recv, example.recv)):
                        if array is not None:
                            array[...] = cupy.asarray(fresh)
                    if request is None:
                        call(aware, example.method, form, arguments)
                    else:
                        request.Start()
                        request.Wait()
                    if recv is not None:
                        check(recv.get(), example.expected)
            if request is not None:
                request.Free()


def test_the_helper_thread_works_on_the_callers_stream(aware):
    """mpi4py's Waitall waits for the thread, whose current stream is another one."""
    if not mpi_is_thread_safe():
        pytest.skip("the MPI allows no helper thread")
    data, root = cupy.empty(3000, "f4"), aware.Get_size() - 1
    for turn in range(20):
        with cupy.cuda.Stream(non_blocking=True):
            data[...] = cupy.asarray(np.full(3000, turn if aware.Get_rank() == root else -1, "f4"))
            MPI.Request.Waitall([aware.Ibcast(data, root)])
            assert np.all(data.get() == turn)


@pytest.mark.parametrize("algorithm", ["auto", "native"])
@pytest.mark.parametrize("form", ["nonblocking", "persistent"])
def test_a_wait_where_another_stream_is_current(aware, form, algorithm):
    """What is received goes to the stream that was current at the start."""
    data, root = cupy.empty(3000, "f4"), aware.Get_size() - 1
    request = aware.Bcast_init(data, root, algorithm=algorithm) if form == "persistent" else None
    for turn in range(20):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            data[...] = cupy.asarray(np.full(3000, turn if aware.Get_rank() == root else -1, "f4"))
            if form == "persistent":
                request.Start()
            else:
                request = aware.Ibcast(data, root, algorithm=algorithm)
        request.Wait()
        with stream:
            assert np.all(data.get() == turn)
    if form == "persistent":
        request.Free()


def test_many_in_flight(aware):
    """Each on a stream of its own, some of whose work is still to come."""
    rank, size = aware.Get_rank(), aware.Get_size()
    arrays, requests = [], []
    for turn in range(20):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x, y = cupy.full(100, rank, "i4"), cupy.zeros(100, "i4")
            x += turn
            arrays.append((x, y, stream))
            requests.append(aware.Iallreduce(x, y))
    wait_all(requests[::-1])
    for turn, (_, y, stream) in enumerate(arrays):
        if size == 1:  # a rank that is alone does not wait for its streams
            stream.synchronize()
        assert (y._seen() == size * turn + size * (size - 1) // 2).all()


def test_host_and_device_in_one_call(aware):
    rank, size = aware.Get_rank(), aware.Get_size()
    x = np.arange(50.0) + rank
    expected = size * np.arange(50.0) + size * (size - 1) / 2
    for send, recv in ((x, cupy.zeros(50)), (cupy.asarray(x), np.zeros(50))):
        aware.Allreduce(send, recv)
        np.testing.assert_array_equal(cupy.asnumpy(recv), expected)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_with_host_and_ranks_with_device_arrays(aware, form):
    """Each rank goes its own way, and messages between them must not care."""
    rank, size = aware.Get_rank(), aware.Get_size()
    for n in (5, 3000, 200_000):
        x = np.arange(n, dtype="i4") + rank
        mine, total = (cupy.asarray(x), cupy.zeros(n, "i4")) if rank % 2 else (x, np.zeros(n, "i4"))
        call(aware, "Allreduce", form, (mine, total))
        expected = size * np.arange(n) + size * (size - 1) // 2
        np.testing.assert_array_equal(cupy.asnumpy(total), expected)
