"""Planted faults in the transfer of device memory: each one makes the checks of this file fail."""

from itertools import product

import gpu_probe
import numpy as np
import pytest
from mpi4py import MPI
from support.doc_examples import EXAMPLES
from support.fakes import cupy

from collectives import Communicator
from collectives.buffers.device_memory import DeviceMemory
from collectives.transport.gpu.device_copies import DeviceCopies, PinnedMailboxes
from collectives.transport.gpu.device_messages import DeviceNodeTransport, DeviceSend
from collectives.transport.node.mailbox import KIND, MASK, WORDS


def right(comm, name, n):
    """True if a persistent collective gives the right values three times, each on a stream of its own."""
    rank, size = comm.Get_rank(), comm.Get_size()
    examples = [EXAMPLES[name](rank, size, n, "i4", 0, False) for _ in range(3)]
    send, recv = (None if x is None else cupy.empty(x.shape, x.dtype) for x in (examples[0].send, examples[0].recv))
    request, good = getattr(comm, examples[0].method + "_init")(*examples[0].arguments(send, recv)), True
    for turn, example in enumerate(examples):
        with cupy.cuda.Stream(non_blocking=True):
            if send is not None:
                send[...] = cupy.asarray(example.send + turn if name != "allreduce" else example.send)
            request.Start()
            request.Wait()
            if example.expected is not None:
                shift = turn if name != "allreduce" else 0
                good &= bool((np.asarray(recv.get()) == example.expected + shift).all())
            if recv is not None:
                recv[...] = cupy.full(recv.shape, -1, "i4")
    return good


def passes(world):
    """True if on all ranks the communicator pins its mailboxes, and moves short and long vectors right."""
    comm = Communicator(world, cuda_aware=False)
    good = comm.device_transfer.startswith("pinned" if world.size > 1 else "none")
    for name, n in product(("allgather", "allreduce", "alltoall"), (3, 100_000)):
        try:
            good = good and right(comm, name, n)
        except (RuntimeError, TimeoutError, MPI.Exception):
            good = False
        good = world.allreduce(good, MPI.LAND)
        if not good:
            break
    comm.close()
    return good


def ends_at_once(name):
    """The event of a copy is reached before the copy."""
    copy = getattr(DeviceCopies, name)

    def early(self, *arguments):
        copy(self, *arguments)
        return cupy.cuda.Event(disable_timing=True)

    return DeviceCopies, name, early


def records_on_the_other_stream(self, stream):
    event = self._new_event(disable_timing=True)
    event.record(self._up if stream is self._down else self._down)
    return event


FOLLOW, BEGIN, COPIES, EDGE = (
    DeviceMemory.follow,
    DeviceSend.begin,
    PinnedMailboxes.copies,
    DeviceNodeTransport._edge,
)


def follows_once(self, *arrays):
    if not hasattr(self, "_stream"):
        FOLLOW(self, *arrays)


def slot_of_the_next(self, ahead):
    slots = self._slots
    self._slots = [*slots[1:], slots[0]]
    try:
        return BEGIN(self, ahead)
    finally:
        self._slots = slots


def pins_nothing(self, node, module):
    self._cupy, self._runtime, self._pinned, self._copies = module, module.cuda.runtime, [], {}


def unpins_when_used(self, number):
    if self._copies:
        while self._pinned:
            self._runtime.hostUnregister(self._pinned.pop())
    return COPIES(self, number)


def sets_the_next_flag(self, number):
    at = self._edge.outbox + ((number + 1) & MASK) * WORDS
    self._edge.mine[at] = (number + 1) * KIND + self._label


def swaps_the_other_ranks(self, peer):
    others = [rank for rank in self._memory.places if rank != MPI.COMM_WORLD.rank]
    return EDGE(self, others[::-1][others.index(peer)])


FAULTS = {
    "send: no wait for the copy": lambda: ends_at_once("to_host"),
    "receive: no wait for the copy": lambda: ends_at_once("to_device"),
    "event on the wrong stream": lambda: (DeviceCopies, "_recorded", records_on_the_other_stream),
    "no wait for the user's stream": lambda: (DeviceMemory, "mark", lambda self: None),
    "stream of an earlier call": lambda: (DeviceMemory, "follow", follows_once),
    "slot of another message": lambda: (DeviceSend, "begin", slot_of_the_next),
    "mailboxes not pinned": lambda: (PinnedMailboxes, "__init__", pins_nothing),
    "mailboxes unpinned too early": lambda: (PinnedMailboxes, "copies", unpins_when_used),
    "flag of another message": lambda: (DeviceSend, "end", sets_the_next_flag),
    "copies in the wrong direction": lambda: (cupy.cuda.runtime, "memcpyDeviceToHost", 1),
    "wrong order of ranks": lambda: (DeviceNodeTransport, "_edge", swaps_the_other_ranks),
}


def test_without_a_fault(gpu, impatient, world):
    assert passes(world)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(gpu, impatient, world, monkeypatch, fault):
    if world.size < 3 and (world.size == 1 or fault == "wrong order of ranks"):
        pytest.skip("no messages, or only one other rank")
    monkeypatch.setattr(*FAULTS[fault]())
    assert not passes(world)


# ------------------------------------------------------------------------------------------ memory of other processes


def on_pool(nbytes):
    """Memory of the pool, whose handle would be that of the pool's whole block."""
    return cupy.zeros(nbytes, "u1").data.mem


def in_the_middle(nbytes):
    """Memory that does not begin where its allocation begins, so that its handle is not enough."""
    memory = cupy.cuda.Memory(nbytes + 512)
    memory.ptr += 512
    return memory


OPEN = cupy.cuda.runtime.ipcOpenMemHandle
EXPORTS = {
    "memory of the pool": lambda: (cupy.cuda, "Memory", on_pool),
    "handle without the offset": lambda: (cupy.cuda, "Memory", in_the_middle),
    "one's own handle": lambda: (gpu_probe.Bench, "handles", lambda self, handle: [handle()] * 9),
    "opened as another kind": lambda: (cupy.cuda.runtime, "ipcOpenMemHandle", lambda handle: OPEN(handle[::-1])),
}


@pytest.mark.parametrize("fault", [None, *EXPORTS])
def test_exported_memory(gpu, world, monkeypatch, fault):
    if world.size == 1:
        pytest.skip("needs two processes")
    if fault is not None:
        monkeypatch.setattr(*EXPORTS[fault]())
    bench = gpu_probe.Bench(world, cupy, 1 << 16, [])
    result = gpu_probe.probe(bench, "exported", gpu_probe.BETWEEN_PROCESSES["copy from the neighbour's device memory"])
    assert ("error" in result) == (fault is not None), result
