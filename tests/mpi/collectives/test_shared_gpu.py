"""Collectives of ranks that share a GPU, by kernels of the leader, on the stand-in that plays several processes."""

import gc
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.device_collectives import Arena
from support.doc_examples import EXAMPLES, FORMS, call
from support.fakes import Foreign, cupy

from collectives import Communicator, wait_all
from collectives.errors import InvalidArgument, InvalidType, Mismatch, OutOfMemory
from collectives.runtime.builders.program_builder import ProgramBuilder
from collectives.runtime.gpu import gpu_program
from collectives.runtime.gpu.gpu_program_builder import GpuProgramBuilder

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def shared(gpu, world, request):
    """A communicator on a GPU that works by itself, in an order of the test's seed; counts what the hosts wait for."""
    if world.size == 1:
        pytest.skip("needs two processes")
    engine = cupy.Engine(gpu, getattr(request, "param", 0) + world.rank)
    comm = Communicator(world, cuda_aware=False)
    assert comm.device_transfer == "kernel"
    gpu.log.clear()
    yield comm
    cupy.cuda.runtime.deviceSynchronize()
    comm.close()
    world.Barrier()
    engine.stop()


def right(comm, example, form, allocate, turns=1):
    """True if a collective gives the right values, each time on a stream of its own."""
    send, recv = (None if x is None else allocate(x.shape, x.dtype) for x in (example.send, example.recv))
    good = True
    for _ in range(turns):
        with cupy.cuda.Stream(non_blocking=True):
            for array, fresh in ((send, example.send), (recv, example.recv)):
                if array is not None:
                    array[...] = cupy.asarray(fresh)
            cupy.GPU.log.clear()
            call(comm, example.method, form, example.arguments(send, recv))
            waits = [one for one in cupy.GPU.log if one[0] in ("wait", "to_host", "to_device")]
            if recv is not None and example.expected is not None:
                good &= bool((recv.get() == example.expected).all())
            assert not waits, "hosts only poll, and not for long"
    return good


@pytest.mark.parametrize("memory", ["pool", "exported"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shared", range(2), indirect=True)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_collective(shared, name, form, memory):
    """From memory of the pool, by copies to a workspace, and from memory that the kernel reads and writes."""
    rank, size = shared.Get_rank(), shared.Get_size()
    allocate = cupy.empty if memory == "pool" else Arena(shared, 1 << 18, start=16, gap=4).empty
    for n in (0, 5, 3001):
        for in_place in (False, True):
            example = EXAMPLES[name](rank, size, n, "f4", size - 1, in_place)
            assert right(shared, example, form, allocate, 2)


@pytest.mark.parametrize(
    "name", ["allreduce", "alltoall", *(pytest.param(one, marks=pytest.mark.full) for one in EXAMPLES)]
)
def test_in_parts(shared, name, monkeypatch):
    """Long vectors of one rank go through its small workspace, those of the others are exported."""
    monkeypatch.setattr(gpu_program, "WORKSPACE", 1 << 12)
    rank, size = shared.Get_rank(), shared.Get_size()
    allocate = Arena(shared, 1 << 18, start=16, gap=4).empty
    for in_place in (False, True):
        example = EXAMPLES[name](rank, size, 3001, "f4", size - 1, in_place)
        assert right(shared, example, "blocking", cupy.empty if rank == size - 1 else allocate)


def test_host_and_device_arrays(shared):
    """Where the arrays of some ranks are on the host, all ranks stage."""
    rank, size = shared.Get_rank(), shared.Get_size()
    for turn in range(6):
        for n in (5, 3000):
            mine, total = np.full(n, rank + turn, "i4"), np.zeros(n, "i4")
            if (rank + turn) % 2:
                mine, total = cupy.asarray(mine), cupy.zeros(n, "i4")
            if turn % 3:
                shared.Iallreduce(mine, total).Wait()
            else:
                shared.Allreduce(mine, total)
            assert (cupy.asnumpy(total) == size * turn + size * (size - 1) // 2).all()
            shared.Bcast(mine, 0)
            assert (cupy.asnumpy(mine) == turn).all()


def test_host_arrays_do_not_meet(shared, world):
    """A rank returns from a call that needs nothing of the others before these make it; frequent calls are compiled."""
    rank, size = shared.Get_rank(), shared.Get_size()
    x, y = np.full(5, rank, "i4"), np.zeros(5, "i4")
    for turn in range(3):
        if rank == 0:
            shared.Bcast(np.full(5, turn, "i4"), 0)
        world.Barrier()
        if rank:
            shared.Bcast(x, 0)
            assert (x == turn).all()
    x = np.full(5, rank, "i4")
    for _ in range(40):
        shared.Allreduce(x, y)
        assert (y == size * (size - 1) // 2).all()
    assert shared._planner.cache.compiled_calls._methods
    on_gpu, total = cupy.asarray(x), cupy.zeros(5, "i4")
    shared.Allreduce(on_gpu, total)
    assert (total.get() == y).all()
    shared.Allreduce(x if rank else on_gpu, y if rank else total)
    shared.Allreduce(on_gpu, total)
    assert (total.get() == y).all()


def test_many_in_flight(shared):
    """On streams of their own, waited for in another order."""
    rank, size = shared.Get_rank(), shared.Get_size()
    arrays, requests = [], []
    for turn in range(12):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x, y = cupy.full(100, rank, "i4"), cupy.zeros(100, "i4")
            x += turn
            arrays.append((stream, y))
            requests.append(shared.Iallreduce(x, y))
    wait_all(requests[::-1])
    for turn, (stream, y) in enumerate(arrays):
        with stream:
            assert (y.get() == size * turn + size * (size - 1) // 2).all()


def test_a_thread_without_a_context_launches(shared, world):
    """The leader waits in a call of MPI: its progress thread, which has not used the GPU, puts the kernel there."""
    x, y = cupy.full(1000, world.rank, "i4"), cupy.zeros(1000, "i4")
    if world.rank:
        world.recv(source=0)
    request = shared.Iallreduce(x, y)
    if world.rank:
        request.Wait()
        world.send(None, 0)
    else:
        for rank in range(1, world.size):
            world.send(None, rank)
        for rank in range(1, world.size):
            world.recv(source=rank)
        request.Wait()
    assert (y.get() == sum(range(world.size))).all()


def test_two_streams(shared):
    """The result is ordered before later work on the streams of both arrays."""
    rank, size = shared.Get_rank(), shared.Get_size()
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x, y = cupy.asarray(np.full(3000, rank, "i4")), cupy.zeros(3000, "i4")
    cupy.cuda.get_current_stream().synchronize()
    shared.Allreduce(Foreign(x, stream=one), Foreign(y, stream=other))
    with other:
        assert (y.get() == size * (size - 1) // 2).all()


@pytest.mark.parametrize("method", ["Gather", "Reduce", "Scatter"])
def test_buffers_that_only_the_root_uses(shared, method):
    """Elsewhere an array on the host is ignored, also in calls that are found in the cache."""
    rank, size = shared.Get_rank(), shared.Get_size()
    mine = cupy.full(5, rank + 1, "i4")
    at_root = (cupy if rank == 0 else np).full(5 if method == "Reduce" else 5 * size, 7, "i4")
    for _ in range(3):
        getattr(shared, method)(*((at_root, mine) if method == "Scatter" else (mine, at_root)), root=0)
    if method == "Scatter":
        assert (mine.get() == 7).all()
    elif rank == 0:
        total = size * (size + 1) // 2
        expected = total if method == "Reduce" else np.repeat(np.arange(1, size + 1), 5)
        assert (at_root.get() == expected).all()


def test_different_calls(shared):
    with pytest.raises(Mismatch, match="expected the same call on all ranks"):
        n = 10 + (shared.Get_rank() == 1)
        shared.Allreduce(cupy.zeros(n, "f4"), cupy.zeros(n, "f4"))


def test_no_room_for_a_workspace(shared, monkeypatch):
    """All ranks stage the call."""
    rank, size = shared.Get_rank(), shared.Get_size()
    with monkeypatch.context() as patched:
        if rank == size - 1:
            patched.setattr(cupy.cuda, "Memory", refuse)
        x, y = cupy.full(3000, rank, "i4"), cupy.zeros(3000, "i4")
        shared.Allreduce(x, y)
        assert (y.get() == size * (size - 1) // 2).all()
    shared.Allreduce(y, x)
    assert (x.get() == size * (size * (size - 1) // 2)).all()


@pytest.mark.parametrize("gpu_transfer", ["pinned", "kernel"])
def test_no_memory_for_a_request(shared, world, monkeypatch, gpu_transfer):
    """A persistent request that one rank cannot bind is made by none; the communicator goes on."""
    with Communicator(world, cuda_aware=False, gpu=gpu_transfer) as comm:
        x, y = cupy.full(3000, world.rank, "i4"), cupy.zeros(3000, "i4")
        with monkeypatch.context() as patched:
            if world.rank == world.size - 1:
                patched.setattr(ProgramBuilder, "bind", out_of_memory)
                patched.setattr(GpuProgramBuilder, "bind", out_of_memory)
            with pytest.raises(OutOfMemory, match=f"no memory for the request .* on rank {world.size - 1}"):
                comm.Allreduce_init(x, y)
        request = comm.Allreduce_init(x, y)
        request.Start()
        request.Wait()
        assert (y.get() == world.size * (world.size - 1) // 2).all()
        request.Free()


def out_of_memory(*_, **__):
    raise cupy.cuda.memory.OutOfMemoryError(1, 2)


def refuse(*_):
    raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")


@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"])
@pytest.mark.parametrize("dtype", ["i4", "u1", "?"])
def test_every_operation(shared, op, dtype):
    """The kernel and NumPy give the same."""
    if dtype == "?" and op[0] == "B":
        pytest.skip("not defined for bool")
    x = ((np.arange(100) * (shared.Get_rank() + 3)) % 4).astype(dtype)
    y, recv = np.zeros(100, dtype), cupy.zeros(100, dtype)
    shared.Allreduce(x, y, getattr(MPI, op))
    shared.Allreduce(cupy.asarray(x), recv, getattr(MPI, op))
    np.testing.assert_array_equal(recv.get(), y)


def test_what_is_staged(shared):
    """Operations without a kernel, and algorithms that the user names."""
    rank, size = shared.Get_rank(), shared.Get_size()
    own = MPI.Op.Create(lambda a, b, _: np.add(np.frombuffer(a, "i4"), np.frombuffer(b, "i4"), np.frombuffer(b, "i4")))
    for options in ({"op": own}, {"algorithm": "ring"}):
        y = cupy.zeros(30, "i4")
        shared.Allreduce(cupy.full(30, rank, "i4"), y, **options)
        assert (y.get() == size * (size - 1) // 2).all()
    own.Free()


# ------------------------------------------------------------------------------------------ exported arrays


def test_short_calls_leave_the_gpu_to_the_leader(shared, gpu, monkeypatch):
    """A GPU takes long to go from one process to the other: idle ranks put nothing on their streams."""
    monkeypatch.setattr(gpu_program, "PATIENCE", 60)
    x, y = shared.empty(1000, "f4", like=cupy), shared.empty(1000, "f4", like=cupy)
    x[...] = cupy.full(1000, shared.Get_rank(), "f4")
    for _ in range(3):
        shared.Allreduce(x, y)
        cupy.cuda.runtime.deviceSynchronize()
        shared.Barrier()
    gpu.log.clear()
    shared.Allreduce(x, y)
    put = {kind for kind, *_ in gpu.log} - {"query"}
    assert put <= ({"kernel", "record"} if shared.Get_rank() == 0 else set())
    assert (y.get() == shared.Get_size() * (shared.Get_size() - 1) / 2).all()


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("late", ["leader", "last"])
def test_long_work_is_left_to_events(shared, gpu, late, seen):
    """Hosts do not wait for it; the streams do. Nor does a host trust a default stream that sees no others."""
    shared._planner.transports.sharing.gpu.default_sees_all &= seen
    rank, size = shared.Get_rank(), shared.Get_size()
    x, y = shared.empty(1000, "f4", like=cupy), shared.empty(1000, "f4", like=cupy)
    for turn in range(2):
        x[...] = cupy.full(1000, -1, "f4")
        y[...] = cupy.full(1000, -1, "f4")
        cupy.cuda.runtime.deviceSynchronize()
        shared.Barrier()
        if rank == (0 if late == "leader" else size - 1):
            end = time.monotonic() + 0.2
            gpu.put(0, lambda: None, [], ("delay", 0, 0), lambda end=end: time.monotonic() > end)
        x[...] = cupy.full(1000, rank + turn, "f4")
        gpu.log.clear()
        shared.Allreduce(x, y)
        assert (late == "leader" or rank != size - 1) or ("record", 0, 0) in gpu.log
        assert (late == "last" or rank == 0) or ("wait_event", 0, 0) in gpu.log
        assert (y.get() == size * turn + size * (size - 1) / 2).all()


def test_repeated_calls_are_found_by_their_arrays(shared):
    """Also on other streams; arrays of the pool and of `comm.empty`, in any order."""
    size, cache = shared.Get_size(), shared._planner.cache
    arrays = [(cupy.full(1000, turn, "f4"), cupy.zeros(1000, "f4")) for turn in range(3)]
    exported = shared.empty(1000, "f4", like=cupy), shared.empty(1000, "f4", like=cupy)
    exported[0][...] = cupy.full(1000, 3, "f4")
    arrays.append(exported)
    for repeat in range(3):
        before = len(cache.calls[0])
        for x, y in arrays:
            with cupy.cuda.Stream(non_blocking=True):
                y[...] = cupy.zeros(1000, "f4")
                shared.Allreduce(x, y)
                assert (y.get() == size * float(x.get()[0])).all()
        assert len(cache.calls[0]) == (before if repeat else before + len(arrays))


def test_new_memory_at_an_old_address(shared, gpu):
    """A program that is found again does not use the handle of memory that was freed."""
    rank, size = shared.Get_rank(), shared.Get_size()
    seen = []
    for turn in range(3):
        x = shared.empty(1 << 19, "f4", like=cupy)
        seen.append(int(x.data.ptr))
        x[...] = cupy.full(1 << 19, rank + turn, "f4")
        shared.Allreduce(MPI.IN_PLACE, x)
        assert (x.get() == size * turn + size * (size - 1) / 2).all()
        del x
        gc.collect()
        cupy.cuda.runtime.deviceSynchronize()
        shared.empty(1, "f4", like=cupy)
        gpu._next = seen[0]  # CUDA gives the same address again
    assert len(set(seen)) == 1


def test_exported_arrays(shared, gpu):
    """They are freed in a later call, after all ranks have closed them."""
    size = shared.Get_size()
    x, y = (shared.empty((3, 1000), "f4", like=cupy) for _ in range(2))
    assert x.shape == (3, 1000) and x.dtype == np.float32 and shared.empty(0, like=x).size == 0
    x[...] = cupy.full((3, 1000), 1, "f4")
    shared.Allreduce(x, y)
    assert (y.get() == size).all()
    block = shared._planner.transports.sharing.gpu.exported.find(x.data.ptr, x.nbytes)
    held = len(gpu.shared)
    part = x[1]
    del x
    gc.collect()
    shared.empty(1, like=cupy)
    assert (part.get() == 1).all(), "a part of the array keeps its memory"
    del part
    gc.collect()
    again = shared.empty(1, like=cupy)
    assert len(gpu.shared) <= held + 1 and again.size == 1 and block is not None
    shared.Allreduce(y, y.copy())


def test_arrays_outlive_the_communicator(shared, gpu, world):
    comm = Communicator(world, cuda_aware=False)
    x = comm.empty(100, "i4", like=cupy)
    x[...] = cupy.full(100, 3, "i4")
    comm.Allreduce(x, x.copy())
    comm.close()
    assert (x.get() == 3).all()
    del comm
    gc.collect()
    world.Barrier()
    assert (x.get() == 3).all()


def test_invalid_arguments(shared, world, monkeypatch):
    last = world.rank == world.size - 1
    with pytest.raises(InvalidType, match="like: expected cupy"):
        shared.empty(3, like=np if last else cupy)
    with pytest.raises(InvalidArgument, match="a GPU on some ranks"):
        shared.empty(3, like=None if last else cupy)
    with pytest.raises(InvalidArgument, match="gpu: expected one of"):
        Communicator(world, gpu="fast" if last else "kernel")
    if last:
        monkeypatch.setattr(cupy.cuda, "Memory", refuse)
    with pytest.raises(OutOfMemory, match=f"rank {world.size - 1} cannot have memory"):
        shared.empty(3, like=cupy)


# ------------------------------------------------------------------------------------------ refusals


def raises(*_, **__):
    raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorNotSupported")


REFUSALS = {
    "no events": (cupy.cuda.runtime, "deviceGetAttribute", lambda *_: 0, "no events between processes"),
    "no export": (cupy.cuda.runtime, "ipcGetMemHandle", raises, "exports no memory"),
    "no opening": (cupy.cuda.runtime, "ipcOpenMemHandle", raises, "opens no memory"),
    "wrong memory": (cupy.cuda.runtime, "ipcOpenMemHandle", lambda _: cupy.cuda.Memory(256).ptr, ""),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusal_on_one_rank(shared, world, monkeypatch, refusal):
    """All ranks use pinned memory, and the communicator names the reason."""
    *patch, reason = REFUSALS[refusal]
    with monkeypatch.context() as patched:
        if world.rank == world.size - 1:
            patched.setattr(*patch)
        comm = Communicator(world, cuda_aware=False)
    assert comm.device_transfer.startswith("pinned: ") and reason in comm.device_transfer
    x, y = cupy.full(3000, world.rank, "i4"), cupy.zeros(3000, "i4")
    comm.Allreduce(x, y)
    assert (y.get() == world.size * (world.size - 1) // 2).all()
    comm.close()
