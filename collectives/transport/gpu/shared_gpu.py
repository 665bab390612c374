"""Meetings of the ranks of a node whose GPUs access each other's memory, and transport among ranks that share one.

Where all ranks share one GPU, the leader's kernel reads and writes the memory of all. A call is a meeting of all ranks
on a board in shared host memory: every rank posts the places of its buffers, and waits until all have posted. Then the
leader runs the kernels. No kernel waits for another one: without NVIDIA's MPS the kernels of two processes never run
at the same time, and a GPU takes about 300 microseconds to switch between processes.

So a short call puts work on the GPU in the leader's process only: the hosts of the other ranks wait until their
streams are idle before they post, and then until the leader's kernels have ended. In non-blocking calls, and after
`PATIENCE` seconds, streams wait instead of hosts: a rank records an event on its stream before it posts. The leader's
stream waits for it. Afterwards the rank's stream waits for the leader's event.

Where the ranks use several GPUs, a meeting only finds out if the arrays of all ranks are on GPUs.
`peer_messages` has the messages.

A rank whose arrays are on the host counts the call and continues without waiting. The others see that it has counted
the call without a post.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.errors import OutOfMemory
from collectives.transport.gpu.exported_memory import ExportedMemory
from collectives.transport.gpu.gpu_channel import ENTRY, HEADER, GpuChannel
from collectives.transport.gpu.gpu_kernels import MOST_RANKS, GpuKernels
from collectives.transport.gpu.peer_messages import PeerBlock, PeerLinks, connect, first_error, refused_access
from collectives.transport.memory.shared_heap import map_all
from collectives.transport.mpi.reduced import reduced
from collectives.transport.node.mailbox import NodeMemory
from collectives.transport.node.mailbox_layout import CHANNELS
from collectives.transport.node.peer_watch import PeerWatch

IPC_EVENTS = 125
"""CUDA's cudaDevAttrIpcEventSupport."""

TOKEN = 256
"""Bytes that the probe reads of a neighbour's memory."""

CLOSED = 2
"""Word of a board, before its entries, that is set once its rank has closed all that others own."""

PROBED = 1 << 26
"""Bytes that a probe writes, a few times: some hundred microseconds of work."""

_retired: list[tuple[list[memoryview], list[object]]] = []
"""Memory of closed communicators of this process, by the boards of the ranks that may have it open."""


class SharedGpu:
    """GPU that all ranks of a communicator share, or several with access: exported memory, a board for every channel.

    `links` connect several GPUs. None for one GPU.
    """

    links: PeerLinks | None = None
    default_sees_all = False
    """Whether CUDA's default stream is not idle while others work for which its own work waits."""

    def __init__(self, node: NodeMemory, boards: list[np.ndarray], cupy: ModuleType, device: int) -> None:
        self.node_memory, self.cupy, self.device = node, cupy, device
        self.exported, self.kernels = ExportedMemory(cupy, device), GpuKernels(cupy, device)
        self.rank, self.size = node.place, node.size
        self.words = [board.data.cast("B").cast("q") for board in boards]
        self.entries = [board[HEADER:].view(ENTRY) for board in boards]
        self._channels: dict[int, GpuChannel] = {}
        self.watch = PeerWatch({place: reader.pid for place, reader in enumerate(node.readers)})

    def channel(self, number: int) -> GpuChannel:
        if number not in self._channels:
            self._channels[number] = GpuChannel(self, number)
        return self._channels[number]

    def allocate(self, comm: MPI.Intracomm, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Allocate an array in exported memory. Free the memory of collected arrays. Collective.

        `OutOfMemory` on all ranks if one cannot allocate.
        """
        unused, array, error = self.exported.unused(), None, ""
        handles = [handle for handles in comm.allgather([one.handle for one in unused]) for handle in handles]
        try:
            self.exported.close(handles)
        except RuntimeError as refused:
            error = str(refused)
        refusal = first_error(comm, error)  # also a barrier: all ranks have closed the memory to be freed
        if refusal:
            raise RuntimeError(f"cannot close the memory of other ranks: {refusal}")
        self.exported.release(unused)
        if self.links is not None:
            self.links.forget(handles)
        block = None
        try:
            block = self.exported.allocate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            array = self.exported.array(block, shape, dtype)
        except (RuntimeError, MemoryError) as refused:
            error = str(refused)
        everyone = comm.allgather((error, PeerBlock(0, 0, b"") if block is None else PeerBlock(*block[1:])))
        for rank, (found, _) in enumerate(everyone):
            if found:
                raise OutOfMemory(MPI.ERR_NO_MEM, f"rank {rank} cannot have memory of shape {shape}, {dtype}: {found}")
        if self.links is not None:
            for rank, (_, one) in enumerate(everyone):
                self.links.shared[self.node_memory.places[rank]].append(one)
        return array

    def close(self) -> None:
        """Close the memory of other ranks, and free this rank's once they have closed it. Not collective."""
        with suppress(RuntimeError):  # CUDA is shut down
            if self.links is not None:
                self.links.finish()
            self.exported.close()
            self.exported.close_events()
        self.words[self.rank][CLOSED] = 1
        _retired.append((self.words, [self.exported.blocks, self._channels]))
        self.exported.blocks, self._channels = [], {}
        free_retired()


def free_retired() -> None:
    """Free the memory of closed communicators that all ranks have closed."""
    _retired[:] = [one for one in _retired if not all(words[CLOSED] for words in one[0])]


class SharingResult(NamedTuple):
    """The shared GPU, or GPUs, or None and the reason why there are none. The same kind on all ranks."""

    gpu: SharedGpu | None
    reason: str


def share_gpu(comm: MPI.Intracomm, node: NodeMemory | None, wanted: bool) -> SharingResult:
    """Export memory and an event of every rank, and read the memory of others. Collective over `comm`.

    Where ranks share one GPU, each reads its neighbour's memory. Otherwise each reads the memory of all others, and
    they send each other a message. `node` is the node of all ranks, or None. `wanted` is equal on all ranks. If True,
    they have imported CuPy.
    """
    cupy = sys.modules.get("cupy")
    if not wanted or cupy is None:
        return SharingResult(None, "not wanted, or CuPy not imported, on some rank")
    if node is None or not 2 <= node.size <= MOST_RANKS:
        return SharingResult(None, f"needs 2 to {MOST_RANKS} ranks on one node that share memory")
    bus, error = "", ""
    with suppress(RuntimeError):
        device = cupy.cuda.Device().id
        bus = str(cupy.cuda.runtime.deviceGetPCIBusId(device))
        if not cupy.cuda.runtime.deviceGetAttribute(IPC_EVENTS, device):
            error = "the device has no events between processes"
    # every rank must reach each collective below, so errors are exchanged before a return
    everyone = comm.allgather((bus, error))
    buses = [bus for bus, _ in everyone]
    if not all(buses):
        return SharingResult(None, "some rank uses no GPU")
    several = len(set(buses)) > 1
    refusal = first_error(comm, error or (refused_access(cupy, device, bus, buses) if several else ""))
    if refusal:
        return SharingResult(None, refusal)
    free_retired()
    boards = map_all(comm, list(node.places), HEADER + CHANNELS * ENTRY.itemsize)
    if not reduced(comm, bool(boards), MPI.LAND):
        return SharingResult(None, "the ranks may not map each other's memory")
    gpu = SharedGpu(node, boards, cupy, device)
    if several:
        links = PeerLinks(node, cupy, gpu.exported, flags=len(set(buses)) == len(buses))
        gpu.links, refusal = links, connect(comm, links)
    else:
        refusal = _refusal(comm, gpu)
        gpu.default_sees_all = not refusal and _default_sees_all(cupy)
    if refusal:
        gpu.close()
        return SharingResult(None, refusal)
    return SharingResult(gpu, "")


def _refusal(comm: MPI.Intracomm, gpu: SharedGpu) -> str:
    """Reason why some rank cannot read the token of the previous rank. "" if all can. Collective."""
    block, handle, error = None, b"", ""
    try:
        channel = gpu.channel(0)  # its event lives until all ranks have closed it
        event, handle = channel.event, channel.handle
        block = gpu.exported.allocate(TOKEN)
        gpu.exported.view(block.address, TOKEN)[...] = 1 + gpu.rank
        event.record()
    except (RuntimeError, MemoryError) as refused:
        error = f"CUDA exports no memory: {refused}"
    offers = comm.allgather((b"" if block is None else block.handle, handle))
    refusal = first_error(comm, error)
    if refusal:
        return refusal
    left = (gpu.rank - 1) % gpu.size
    try:
        stream = gpu.cupy.cuda.get_current_stream()
        gpu.cupy.cuda.runtime.streamWaitEvent(stream.ptr, gpu.exported.open_event(offers[left][1]))
        found = gpu.exported.view(gpu.exported.open(offers[left][0]), TOKEN).get()
        if (found != 1 + left).any():
            error = f"expected {1 + left} in the memory of rank {left}, found {found[0]}"
    except RuntimeError as refused:
        error = f"CUDA opens no memory of another process: {refused}"
    with suppress(RuntimeError):  # nothing was opened
        gpu.exported.close([offers[left][0]])
    refusal = first_error(comm, error)  # also a barrier: all have closed
    gpu.exported.release([block] if block is not None else [])
    return refusal


def _default_sees_all(cupy: ModuleType) -> bool:
    """True if the default stream is not idle while another stream works with which it is synchronised."""
    try:
        stream, memory = cupy.cuda.Stream(), cupy.cuda.Memory(PROBED)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        for _ in range(16):
            pointer.memset_async(0, PROBED, stream)
        found = not cupy.cuda.Stream.null.done
        stream.synchronize()
    except (RuntimeError, MemoryError):  # no room
        return False
    return found
