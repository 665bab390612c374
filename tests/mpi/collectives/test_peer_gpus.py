"""Collectives of ranks with a GPU each and peer access, on the stand-in that plays several processes and devices."""

import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from support.device_collectives import Arena, passes, right_when_late
from support.doc_examples import EXAMPLES, FORMS
from support.fakes import cupy

from collectives import Communicator
from collectives.buffers.device_memory import DeviceMemory
from collectives.errors import Mismatch
from collectives.transport.gpu import device_messages, peer_kernels, peer_messages
from collectives.transport.gpu.device_copies import DeviceCopies
from collectives.transport.gpu.device_messages import DeviceReceive
from collectives.transport.gpu.exported_memory import ExportedMemory
from collectives.transport.gpu.peer_messages import PeerLinks, PeerReceive
from collectives.transport.node.mailbox import MailboxEdge, NodeMemory
from collectives.transport.node.peer_watch import PeerWatch, has_ended
from collectives.transport.wire import Iovec

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def devices(gpu, world):
    """A device for every rank."""
    if world.size == 1:
        pytest.skip("needs two processes")
    gpu.devices, gpu.device = world.size, world.rank
    engine = cupy.Engine(gpu, world.rank)
    yield gpu
    cupy.cuda.runtime.deviceSynchronize()
    world.Barrier()
    if gpu.engine is engine:
        engine.stop()


@pytest.fixture
def peers(devices, world):
    comm = Communicator(world, cuda_aware=False)
    assert comm.device_transfer == "peer" and links_of(comm).flags
    yield comm
    cupy.cuda.runtime.deviceSynchronize()
    comm.close()


def links_of(comm):
    return comm._planner.transports.sharing.gpu.links


@pytest.mark.parametrize("memory", ["pool", "shared"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_collective(peers, name, form, memory):
    """By kernels that set flags, by cells, and from memory of `comm.empty`."""
    allocate = cupy.empty if memory == "pool" else Arena(peers).empty
    for n in (0, 5, 3001):
        assert right_when_late(peers, name, form, n, allocate)


def test_messages_of_many_parts(peers, monkeypatch):
    """Longer than a cell, and in more pieces than a kernel copies."""
    monkeypatch.setattr(peer_messages, "MOST_PIECES", 1)
    links = links_of(peers)
    links.cells[0] = 4096 + 64  # the addresses stay
    arena = Arena(peers)
    for name in ("allgather", "allreduce", "alltoall", "scan"):
        for allocate in (cupy.empty, arena.empty):
            for n in (7, 3120):
                assert right_when_late(peers, name, "blocking", n, allocate)


def test_host_and_device_arrays(peers):
    rank, size = peers.Get_rank(), peers.Get_size()
    for turn in range(6):
        for n in (5, 3000):
            mine, total = np.full(n, rank + turn, "i4"), np.zeros(n, "i4")
            if (rank + turn) % 2:
                mine, total = cupy.asarray(mine), cupy.zeros(n, "i4")
            peers.Iallreduce(mine, total).Wait() if turn % 3 else peers.Allreduce(mine, total)
            assert (cupy.asnumpy(total) == size * turn + size * (size - 1) // 2).all()


def test_different_calls(peers):
    with pytest.raises(Mismatch, match="expected the same call on all ranks"):
        n = 10 + (peers.Get_rank() == 1)
        peers.Allreduce(cupy.zeros(n, "f4"), cupy.zeros(n, "f4"))


def test_no_room_for_a_program(peers, monkeypatch):
    """All ranks stage the call if one cannot bind that between GPUs."""
    rank, size = peers.Get_rank(), peers.Get_size()
    x, y = cupy.full(3000, rank, "i4"), cupy.zeros(3000, "i4")
    with monkeypatch.context() as patched:
        if rank == size - 1:
            patched.setattr(PeerLinks, "cells_of", no_memory)
        peers.Allreduce(x, y)
    assert (y.get() == size * (size - 1) // 2).all()


def no_memory(*_):
    raise MemoryError


def test_freed_memory(peers):
    """Memory is freed after the other ranks have closed it, and they forget it."""
    rank, size = peers.Get_rank(), peers.Get_size()
    for turn in range(3):
        x = peers.empty(5000, "i4", like=cupy)
        x[...] = cupy.full(5000, rank + turn, "i4")
        y = cupy.zeros((size, 5000), "i4")
        peers.Allgather(x, y)
        assert (y.get() == np.arange(size)[:, None] + turn).all()
        del x
    assert all(len(blocks) <= 2 for blocks in links_of(peers).shared)


# ------------------------------------------------------------------------------------------ refusals


def raises(*_, **__):
    raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorNotSupported")


REFUSALS = {
    "no access between two": ("refused", "no peer access from GPU"),
    "no access, and CUDA does not say so": ("hidden", "cannot open"),
    "no export": ((cupy.cuda.runtime, "ipcGetMemHandle", raises), "exports no memory"),
    "no opening": ((cupy.cuda.runtime, "ipcOpenMemHandle", raises), "opens no memory"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusal_of_some(devices, world, monkeypatch, refusal):
    """All ranks use pinned memory if some cannot access the others' GPUs, and the communicator names the reason."""
    patch, reason = REFUSALS[refusal]
    with monkeypatch.context() as patched:
        if isinstance(patch, str):
            devices.refused.add((0, 1))
            reason = reason if patch == "refused" else "opens no memory"
            if patch == "hidden":
                patched.setattr(cupy.cuda.runtime, "deviceGetByPCIBusId", raises)
        elif world.rank == world.size - 1:
            patched.setattr(*patch)
        comm = Communicator(world, cuda_aware=False)
    assert comm.device_transfer.startswith("pinned: ") and reason in comm.device_transfer
    assert len(set(world.allgather(comm.device_transfer))) == 1
    assert right_when_late(comm, "allreduce", "blocking", 3000, cupy.empty)
    comm.close()


def test_flags_that_do_not_arrive(devices, world, monkeypatch):
    """Short messages then go through cells."""
    with monkeypatch.context() as patched:
        if world.rank == 0:
            patched.setattr(cupy.RawKernel, "put", lambda *_: None)
        comm = Communicator(world, cuda_aware=False)
    assert comm.device_transfer == "peer" and not links_of(comm).flags
    assert right_when_late(comm, "allreduce", "blocking", 5, cupy.empty)
    comm.close()


def test_ranks_that_share_devices(devices, world):
    """Kernels of processes that share a GPU do not wait for each other: no flags."""
    if world.size < 3:
        pytest.skip("needs three processes")
    devices.device = world.rank % 2
    comm = Communicator(world, cuda_aware=False)
    assert comm.device_transfer == "peer" and not links_of(comm).flags
    assert right_when_late(comm, "allreduce", "blocking", 5, cupy.empty)
    comm.close()


# ------------------------------------------------------------------------------------------ processes that end


CHILD = """
import sys, time
from support.standin import cupy
cupy.GPU.devices, cupy.GPU.device = 2, 1
memory = cupy.cuda.Memory(1 << 21)
print(cupy.cuda.runtime.ipcGetMemHandle(memory.ptr).hex(), flush=True)
sys.stdin.read()
"""


def test_process_that_ends(gpu):
    """The kernel that waits for its message ends, and the check of the host finds the process."""
    gpu.devices = 2
    tests = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI"))}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**environment, "PYTHONPATH": os.pathsep.join((str(tests), str(tests.parent)))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(child.stdout.readline()))
    mine, seen = cupy.cuda.Memory(1 << 21), np.frombuffer(cupy.cuda.alloc_pinned_memory(8), np.uint64, 1)
    seen[0], target = 7, cupy.zeros(8, "u1")
    kernel = peer_kernels.PeerKernels(cupy, 0).take(
        [Iovec(target.data.ptr, 8)],
        mine.ptr,
        peer_kernels.flag_of(1, 8),
        seen.ctypes.data,
    )
    assert not has_ended(child.pid)
    child.kill()
    kernel.put(0)
    cupy.cuda.get_current_stream().synchronize()
    assert seen[0] not in (7, peer_kernels.flag_of(1, 8)), "the kernel has ended without the message"
    watch = PeerWatch({1: child.pid})
    assert watch.is_due and not watch.is_due
    deadline = time.monotonic() + 60
    while not has_ended(child.pid):
        assert time.monotonic() < deadline
    with pytest.raises(ConnectionResetError, match="rank 1 has ended"):
        watch.check([1])
    child.communicate()


@pytest.mark.parametrize("message", [False, True])
def test_peer_that_ended(peers, world, monkeypatch, message):
    """The others raise an error, in the meeting or as they wait for its message."""
    gone = world.size - 1
    pid = world.bcast(os.getpid(), gone)
    monkeypatch.setattr("collectives.transport.node.peer_watch.has_ended", lambda found: found == pid)
    x = cupy.zeros(5, "f4")
    if world.rank != gone:
        with pytest.raises(ConnectionResetError, match=f"rank {gone} has ended"):
            peers.Bcast(x, gone)
    elif message:  # it meets the others, and sends nothing
        monkeypatch.setattr(device_messages.Lane, "advance", lambda self: None)
        monkeypatch.setattr(NodeMemory, "yielding", gives_up)
        with pytest.raises(TimeoutError):
            peers.Bcast(x, gone)
    world.Barrier()


def gives_up(*_):
    raise TimeoutError


# ------------------------------------------------------------------------------------------ planted faults

BEGIN, UNUSED = DeviceReceive.begin, ExportedMemory.unused


def fence_left_out():
    before, fence, after = peer_kernels.SOURCE.partition("__threadfence_system();")  # the first: of the sender
    assert fence
    return peer_kernels, "SOURCE", before + after


def reached_at_once(name):
    copy = getattr(DeviceCopies, name)

    def early(self, *arguments, **options):
        copy(self, *arguments, **options)
        return cupy.cuda.Event(disable_timing=True)

    return DeviceCopies, name, early


def frees_while_open(self):
    """Free what others have open still."""
    for block in self.blocks:
        cupy.GPU.shared[block.address][0].words[cupy.interprocess.FREED] = 1
    return UNUSED(self)


def acknowledges_first(self, ahead):
    """The sender may use the cell while it is still read."""
    begun = BEGIN(self, ahead)
    if begun is not None:
        self._edge.mine[self._edge.my_ack] = begun.number
    return begun


def in_the_pool(self, address, nbytes):
    return True


FAULTS = {
    "kernel: no fence before the flag": lambda: fence_left_out(),
    "copy: no wait on the sender": lambda: reached_at_once("to_host"),
    "copy: no wait on the receiver": lambda: reached_at_once("to_device"),
    "kernel: the flag that it has seen is not checked": lambda: (PeerReceive, "end", DeviceReceive.end),
    "no wait for the user's stream": lambda: (DeviceMemory, "mark", lambda self: None),
    "slot used too early": lambda: (MailboxEdge, "has_room", lambda self, slots: True),
    "acknowledged too early": lambda: (DeviceReceive, "begin", acknowledges_first),
    "freed while open": lambda: (ExportedMemory, "unused", frees_while_open),
    "address of the pool": lambda: (PeerLinks, "holds", in_the_pool),
    "read without an acknowledgement": lambda: (peer_messages._Read, "done", True),
}

QUICK = ("freed while open", "kernel: the flag that it has seen is not checked")


CASES = [
    (name, shared, n)
    for name, shared, n, _ in product(
        ("allgather", "allreduce", "alltoall"), (False, True), (40, 10_000, 10_400), range(2)
    )
]
"""Lengths of which the last one's parts are more than a kernel copies, in cells of `short_cells`."""


def short_cells(comm):
    links_of(comm).cells[0] = 4096 + 64  # the addresses stay
    cupy.GPU.engine._delay = 5e-3


@pytest.mark.full
@pytest.mark.timeout(300)
def test_without_a_fault(devices, world, monkeypatch):
    monkeypatch.setattr(peer_kernels, "CYCLES", 10**7)
    assert passes(world, "peer", CASES, short_cells)


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.full]) for one in FAULTS]
)
def test_fault_is_found(devices, impatient, world, monkeypatch, fault):
    monkeypatch.setattr(*FAULTS[fault]())
    monkeypatch.setattr(peer_kernels, "CYCLES", 10**7)
    assert not passes(world, "peer", CASES, short_cells)
