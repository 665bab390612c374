"""Long messages through chunks of pinned memory, on the stand-in that plays several processes."""

import os
from contextlib import suppress
from functools import cache

import numpy as np
import pytest
from mpi4py import MPI
from support.device_collectives import reached_at_once
from support.doc_examples import EXAMPLES
from support.fakes import cupy

from collectives import Communicator, wait_all
from collectives.errors import Mismatch, RanksDisagree
from collectives.transport.gpu.device_copies import DeviceCopies
from collectives.transport.gpu.device_messages import ChunkSend, DeviceReceive
from collectives.transport.memory.shared_node import SharedNode
from collectives.transport.node import placement, staging_chunks
from collectives.transport.node.mailbox import CELL, NodeMemory
from collectives.transport.node.staging_chunks import CHUNK, SHORTEST, StagingChunks

pytestmark = [pytest.mark.ranks(1, 2), pytest.mark.timeout(60)]

MANY = 16 * CHUNK
"""Bytes of a message that is cut to whole chunks."""

LENGTHS = (0, 1, CELL, CELL + 1, SHORTEST - 1, SHORTEST, SHORTEST + 1, CHUNK - 1, CHUNK, CHUNK + 1, MANY, MANY + 1)

PLACES = {
    "devices": lambda rank: True,
    "a device sends to hosts": lambda rank: rank == 0,
    "a host sends to devices": lambda rank: rank != 0,
    "mixed": lambda rank: rank % 2 == 0,
}


def open_pinned(world):
    comm = Communicator(world, cuda_aware=False, gpu="pinned")
    assert comm.device_transfer.startswith("pinned")
    return comm


def chunks_of(comm):
    return comm._planner.transports.chunks


@pytest.fixture(params=[None, 1, pytest.param(2, marks=pytest.mark.full)], ids=["polled", "seed 1", "seed 2"])
def pinned(request, gpu, world):
    """A communicator of several ranks; the GPU works when it is polled, or by itself with random delays."""
    if world.size == 1:
        pytest.skip("needs two processes")
    engine = None if request.param is None else cupy.Engine(gpu, 97 * request.param + world.rank)
    comm = open_pinned(world)
    assert chunks_of(comm) is not None
    yield comm
    cupy.cuda.runtime.deviceSynchronize()
    comm.close()
    if engine is not None:
        engine.stop()
    assert not gpu.registered


@cache
def random_bytes():
    return (np.arange(MANY + 1, dtype="u4") * np.uint32(2654435761) >> np.uint32(13)).astype("u1")


def values(n, turn):
    """Bytes that differ between parts, and turns."""
    return random_bytes()[:n] + np.uint8(turn % 256)


def array_of(on_device, content):
    return cupy.asarray(content) if on_device else content.copy()


def broadcast_is_right(comm, n, turn, on_device, root=0, call="Bcast"):
    expected = values(n, turn)
    array = array_of(on_device, expected if comm.Get_rank() == root else np.zeros(n, "u1"))
    request = getattr(comm, call)(array, root)
    if request is not None:
        request.Wait()
    return bool((cupy.asnumpy(array) == expected).all())


@pytest.mark.parametrize("places", PLACES)
def test_every_length(pinned, places):
    on_device = PLACES[places](pinned.Get_rank())
    for turn, n in enumerate(LENGTHS):
        for call in ("Bcast", "Ibcast") if n < MANY else ("Bcast",):
            assert broadcast_is_right(pinned, n, turn, on_device, call=call), (n, call)


@pytest.mark.parametrize("places", PLACES)
def test_compiled_programs_of_host_arrays(pinned, monkeypatch, places):
    on_device, root = PLACES[places](pinned.Get_rank()), pinned.Get_size() - 1
    for n in (CELL + 1, 3 * SHORTEST + 5):
        array = array_of(on_device, np.zeros(n, "u1"))
        for turn in range(8):
            if pinned.Get_rank() == root:
                array[...] = array_of(on_device, values(n, turn))
            pinned.Bcast(array, root)
            assert (cupy.asnumpy(array) == values(n, turn)).all(), (n, turn)


@pytest.mark.parametrize("name", ["allgather", "allreduce", "alltoall", "gather", "scan"])
def test_collectives_of_host_and_device_arrays(pinned, name):
    rank, size = pinned.Get_rank(), pinned.Get_size()
    for turn, n in enumerate((70_001, 600_000)):
        example = EXAMPLES[name](rank, size, n, "i4", 0, False)
        on_device = [True, rank == 0][turn]
        send, recv = (None if x is None else array_of(on_device, np.asarray(x)) for x in (example.send, example.recv))
        getattr(pinned, example.method)(*example.arguments(send, recv))
        if example.expected is not None and recv is not None:
            np.testing.assert_array_equal(cupy.asnumpy(recv), example.expected)


def test_messages_whose_receiver_waits_for_later_ones(pinned):
    """More calls than there are chunks for: those of the last one are not kept back."""
    rank, n = pinned.Get_rank(), 8 * SHORTEST
    arrays = [cupy.asarray(values(n, turn) if rank == 0 else np.zeros(n, "u1")) for turn in range(7)]
    requests = [pinned.Bcast_init(array, 0, algorithm="linear") for array in arrays]
    if rank == 0:
        for request in requests:
            request.Start()
        wait_all(requests)
        assert chunks_of(pinned)._own
    else:
        for request in requests[::-1]:
            request.Start()
            request.Wait()
    for turn, array in enumerate(arrays):
        assert (array.get() == values(n, turn)).all()
    for request in requests:
        request.Free()


def test_calls_at_once_share_the_chunks(pinned):
    rank, size, n = pinned.Get_rank(), pinned.Get_size(), 500_000
    inputs = [cupy.full(n, rank + turn, "i4") for turn in range(6)]
    outputs = [cupy.zeros(n, "i4") for _ in inputs]
    wait_all([pinned.Iallreduce(x, y) for x, y in zip(inputs, outputs, strict=True)][::-1])
    for turn, y in enumerate(outputs):
        assert (y.get() == size * turn + size * (size - 1) // 2).all()


def test_memory_that_is_pinned(pinned, gpu):
    """Chunks are used again: those of one call at a time are four for each receiver."""
    assert CHUNK not in gpu.registered.values()
    for turn in range(2):
        assert broadcast_is_right(pinned, MANY, turn, True)
    count = list(gpu.registered.values()).count(CHUNK)
    assert 1 <= count <= 4 * (pinned.Get_size() - 1)  # a receiver may see all chunks of the root


# ------------------------------------------------------------------------------------------ refusals


def test_chunks_that_cuda_does_not_pin(gpu, world, monkeypatch):
    """Copies are slower then; the other ranks need not know."""
    if world.size == 1:
        pytest.skip("needs two processes")
    register = cupy.cuda.runtime.hostRegister

    def refuse(address, nbytes, flags):
        if nbytes == CHUNK:
            raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        register(address, nbytes, flags)

    if world.rank == world.size - 1:
        monkeypatch.setattr(cupy.cuda.runtime, "hostRegister", refuse)
        gpu.pageable = True
    comm = open_pinned(world)
    for root in range(world.size):
        assert broadcast_is_right(comm, CHUNK + 5, root, True, root)
    comm.close()
    assert not gpu.registered


MAP, READS = staging_chunks.map_all, SharedNode._reads_and_writes


def maps_nothing(comm, ranks, nbytes):
    MAP(comm, ranks, 1 << 21)
    return []


@pytest.mark.parametrize("places", PLACES)
def test_nodes_without_chunks(gpu, world, monkeypatch, places):
    """Long messages go through cells."""
    if world.size == 1:
        pytest.skip("needs two processes")
    monkeypatch.setattr(staging_chunks, "map_all", maps_nothing)
    comm = open_pinned(world)
    assert chunks_of(comm) is None
    for n in (1, CELL + 1, CHUNK + 1):
        assert broadcast_is_right(comm, n, n, PLACES[places](world.rank))
    comm.close()


class Unreadable:
    """A process whose memory cannot be read."""

    def __init__(self, pid):
        self.pid = pid

    def read(self, *_):
        raise OSError("this memory is private")


def reads_nothing(self, comm):
    READS(self, comm)
    self.readers = [Unreadable(reader.pid) for reader in self.readers]
    return False, False


@pytest.mark.parametrize("places", PLACES)
def test_ranks_that_may_not_read_each_others_memory(gpu, world, monkeypatch, places):
    if world.size == 1:
        pytest.skip("needs two processes")
    monkeypatch.setattr(placement, "open_nodes", {})
    monkeypatch.setattr(SharedNode, "_reads_and_writes", reads_nothing)
    comm = open_pinned(world)
    assert chunks_of(comm) is not None
    for n in (1, CELL + 1, 3 * SHORTEST + 5, MANY):
        assert broadcast_is_right(comm, n, n, PLACES[places](world.rank))
    mine = array_of(PLACES[places](world.rank), np.zeros(700_001, "i4"))
    total = mine.copy()
    for turn in range(5):
        mine[...] = array_of(PLACES[places](world.rank), np.arange(700_001, dtype="i4") + world.rank + turn)
        comm.Allreduce(mine, total)
        expected = world.size * (np.arange(700_001) + turn) + world.size * (world.size - 1) // 2
        np.testing.assert_array_equal(cupy.asnumpy(total), expected)
    comm.close()


# ------------------------------------------------------------------------------------------ ends in the middle


def gives_up(*_):
    raise TimeoutError


@pytest.mark.parametrize("begins", [False, True], ids=["not begun", "in the middle"])
@pytest.mark.parametrize("sends", [False, True], ids=["receiver", "sender"])
def test_peer_that_ended(pinned, world, monkeypatch, sends, begins):
    """The others raise an error as they wait for its data, or for its acknowledgements."""
    gone, root = world.size - 1, world.size - 1 if sends else 0
    pid = world.bcast(os.getpid(), gone)
    monkeypatch.setattr("collectives.transport.node.peer_watch.has_ended", lambda found: found == pid)
    x = cupy.zeros(MANY, "u1")
    if world.rank != gone:
        if sends or world.rank == root:
            with pytest.raises(ConnectionResetError, match=f"rank {gone} has ended"):
                pinned.Bcast(x, root, algorithm="linear")
        else:
            pinned.Bcast(x, root, algorithm="linear")
    elif begins:
        for kind, name in ((StagingChunks, "take"), (DeviceReceive, "begin")):
            monkeypatch.setattr(kind, name, only(3, getattr(kind, name)))
        monkeypatch.setattr(NodeMemory, "yielding", gives_up)
        with pytest.raises(TimeoutError):
            pinned.Bcast(x, root, algorithm="linear")
    world.Barrier()
    with suppress(Mismatch):  # a rank that ended has messages that it has not read
        pinned.close()


def only(most, function):
    """Function that returns None after `most` other results."""
    left = [most]

    def limited(*arguments):
        result = function(*arguments) if left[0] else None
        left[0] -= result is not None
        return result

    return limited


def test_a_call_that_is_broken_off(pinned, impatient, world, monkeypatch):
    """In the middle of a message; later calls are refused, and other communicators work."""
    end, count = ChunkSend.end, [0]

    def interrupted(self, number):
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        end(self, number)

    with monkeypatch.context() as patched:
        patched.setattr(ChunkSend, "end", interrupted)
        with pytest.raises(KeyboardInterrupt if world.rank == 0 else TimeoutError):
            pinned.Bcast(cupy.zeros(MANY, "u1"), 0, algorithm="linear")
    with pytest.raises(RanksDisagree, match="broken off"):
        pinned.Bcast(cupy.zeros(5, "u1"), 0)
    comm = open_pinned(world)
    assert broadcast_is_right(comm, 2 * CHUNK, 1, True)
    comm.close()


# ------------------------------------------------------------------------------------------ planted faults

FIND = StagingChunks.find


def gives_all_back(self, edge, taken):
    self._free += [chunk for _, chunk in taken if chunk < self._shared]
    taken.clear()


def finds_the_first(self, place, address, nbytes, copies):
    return FIND(self, place, self._bases[place], nbytes, copies)


FAULTS = {
    "no wait on the sender": lambda: reached_at_once("to_host"),
    "no wait on the receiver": lambda: reached_at_once("to_device"),
    "chunk used again too early": lambda: (StagingChunks, "_give_back", gives_all_back),
    "another chunk read": lambda: (StagingChunks, "find", finds_the_first),
    "chunks not pinned": lambda: (
        DeviceCopies,
        "pin",
        lambda self, address, _: self._runtime.hostRegister(address, 1, 1),
    ),
}


def passes(world):
    """True if on all ranks device arrays go through chunks, and are right."""
    comm = Communicator(world, cuda_aware=False, gpu="pinned")
    good = chunks_of(comm) is not None
    for turn in range(6):
        try:
            good = good and broadcast_is_right(comm, 12 * SHORTEST, turn, True)
        except (RuntimeError, TimeoutError, MPI.Exception):
            good = False
        good = world.allreduce(good, MPI.LAND)
    comm.close()
    return good


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_fault_is_found(gpu, impatient, world, monkeypatch, fault):
    if world.size == 1:
        pytest.skip("needs two processes")
    if fault is not None:
        monkeypatch.setattr(*FAULTS[fault]())
    engine = cupy.Engine(gpu, world.rank, delay=5e-3)
    assert passes(world) == (fault is None)
    world.Barrier()
    try:
        engine.stop()
    except RuntimeError:
        assert fault is not None
