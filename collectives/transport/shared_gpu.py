"""Meetings of the ranks of a node whose GPUs access each other's memory, and transport among ranks that share one.

Where all ranks share one GPU, the leader's kernel reads and writes the memory of all. A call is a meeting of all ranks
on a board in shared host memory: every rank posts the places of its buffers, and waits until all have posted. Then the
leader runs the kernels. No kernel waits for another one: without NVIDIA's MPS the kernels of two processes never run at
the same time, and a GPU takes some 300 microseconds to go from one process to the other.

So a short call puts work on the GPU in the leader's process only: the hosts of the other ranks wait until their streams
are idle before they post, and then until the leader's kernels have ended. In non-blocking calls, and after `PATIENCE`
seconds, streams wait instead of hosts: a rank records an event on its stream before it posts, for which the leader's
stream waits, and afterwards its stream waits for the leader's event.

Where the ranks use several GPUs, a meeting only finds out if the arrays of all are there; `peer_messages` has the
messages.

A rank whose arrays are on the host does not meet: it counts the call, and goes on. The others see that it has counted
the call without a post.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.errors import OutOfMemory
from collectives.transport.exported_memory import HANDLE, ExportedBlock, ExportedMemory
from collectives.transport.gpu_kernels import MOST_RANKS, GpuKernels
from collectives.transport.mailbox import CHANNELS, NodeMemory
from collectives.transport.peer_messages import PeerBlock, PeerLinks, connect, first_error, refused_access
from collectives.transport.peer_watch import PeerWatch
from collectives.transport.reduced import reduced
from collectives.transport.shared_heap import map_all

IPC_EVENTS = 125
"""CUDA's cudaDevAttrIpcEventSupport."""

TOKEN = 256
"""Bytes that the probe reads of a neighbour's memory."""

LEADER = 0
"""Rank on the node whose stream runs the kernels."""

PATIENCE = 2e-3
"""Most seconds for which a blocking call waits for its stream, or for the leader's kernels, before it uses an event."""

BLOCK = np.dtype([("block", "i8"), ("start", "i8"), ("count", "i8")])
RECORD = np.dtype(
    [
        ("mark", "i8"),
        ("parts", "i8"),
        ("event", f"V{HANDLE}"),
        ("source", f"V{HANDLE}"),
        ("target", f"V{HANDLE}"),
        ("sent", BLOCK, MOST_RANKS),
        ("received", BLOCK, MOST_RANKS),
    ]
)
"""What a rank posts of a call: its mark, or `ON_HOST`; parts in which it is to be run; handles of the rank's event
and of the memory of its buffers; and their blocks: number (-1: none), offset in bytes, count of units."""

ENTRY = np.dtype(
    [("number", "i8"), ("launched", "i8"), ("posted", "i8", 2), ("version", "i8", 2), ("waits", "i8", 2)]
    + [("records", RECORD, 2)]
)
"""State of one rank on one channel: number of its latest meeting or call with host arrays, and of the latest launch (of
the leader). Then of its two latest posts, that with an even number first: their numbers, the versions of their records,
1 if the leader's stream is to wait for the rank's event, and the records. A rank posts after all have reached the
number before, and so have read the post that it replaces."""

LAUNCHED, POSTED, VERSION, WAITS = 1, 2, 4, 6
"""Places of these fields of an entry, in words of 8 bytes; the number is the first word."""

HEADER = 64
CLOSED = 2
"""Bytes before a rank's entries, and the word of them that is set once the rank has closed all that others own."""

ON_HOST = -1

_retired: list[tuple[list[memoryview], list[object]]] = []
"""Memory of communicators that were closed here, by the boards of the ranks that may have it open."""


class SharedGpu:
    """GPU that all ranks of a communicator share, or several with access: exported memory, a board for every channel.

    `links` are those between several GPUs; None for one.
    """

    links: PeerLinks | None = None

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
        """Allocate an array in exported memory; free that of arrays collected before. Collective.

        `OutOfMemory` on all ranks if one cannot allocate.
        """
        unused, array, error = self.exported.unused(), None, ""
        handles = [handle for handles in comm.allgather([one.handle for one in unused]) for handle in handles]
        try:
            self.exported.close(handles)
        except RuntimeError as refused:
            error = str(refused)
        refusal = first_error(comm, error)  # also a barrier: all have closed what is freed
        if refusal:
            raise RuntimeError(f"cannot close the memory of other ranks: {refusal}")
        self.exported.release(unused)
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
            self.links.replace(handles, {self.node_memory.places[rank]: one for rank, (_, one) in enumerate(everyone)})
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


class Post(NamedTuple):
    """Record, and its version: a number that differs between the records of a rank on a channel.

    A record of a version that is known need not be written, or read, again.
    """

    record: np.ndarray
    version: int


class GpuChannel:
    """Meetings of one channel, on which one call at a time runs: numbers, this rank's event, and its workspace."""

    def __init__(self, gpu: SharedGpu, number: int) -> None:
        self.gpu, self.number, self._version = gpu, 0, 0
        self._at = (HEADER + number * ENTRY.itemsize) // 8
        self._records = [one[number]["records"] for one in gpu.entries]
        self._count = gpu.entries[gpu.rank]["number"][number : number + 1]
        self.count: Callable[[], object] = partial(np.add, self._count, np.ones(1, np.int64), out=self._count)
        """Count a call with host arrays: an operation that compiled programs have."""

        self.event, self.handle = gpu.exported.new_event()
        self._counted = self.new_post(ON_HOST).record
        self._workspaces: dict[str, ExportedBlock] = {}
        with gpu.cupy.cuda.Device(gpu.device):
            self.unused = gpu.cupy.cuda.Event(disable_timing=True)
        """End of the work on the workspaces: the next call, which may be on another stream, waits for it."""

    def workspace(self, end: str, nbytes: int) -> ExportedBlock:
        """Exported memory for the "source" or "target" of a call; RuntimeError or MemoryError if CUDA refuses."""
        if end not in self._workspaces or self._workspaces[end].nbytes < nbytes:
            self._workspaces[end] = self.gpu.exported.allocate(nbytes)  # the smaller one stays open elsewhere
        return self._workspaces[end]

    def meet(self, post: Post, waits: bool = False) -> Iterator[None]:
        """Post, and iterate until all ranks have posted or counted. `waits`: for this rank's event, recorded before."""
        fence, own, number = self.gpu.node_memory.fence, self.gpu.words[self.gpu.rank], int(self._count[0]) + 1
        yield from self._reached(number - 1)
        self.number, turn = number, number % 2
        if own[self._at + VERSION + turn] != post.version:
            self._records[self.gpu.rank][turn], own[self._at + VERSION + turn] = post
        own[self._at + WAITS + turn], own[self._at + POSTED + turn] = waits, number
        if fence is not None:
            fence()
        own[self._at] = number
        yield from self._reached(number)
        if fence is not None:
            fence()

    def _reached(self, number: int) -> Iterator[None]:
        """Iterate until all ranks have posted or counted so many calls."""
        at, boards = self._at, self.gpu.words
        while min([words[at] for words in boards]) < number:
            if self.gpu.watch.is_due:
                self.gpu.watch.check(place for place, words in enumerate(boards) if words[at] < number)
            yield

    def new_post(self, mark: int, parts: int = 1) -> Post:
        """Post without buffers."""
        record = np.zeros((), RECORD)
        record["mark"], record["parts"], record["event"] = mark, parts, np.void(self.handle)
        record["sent"]["block"] = record["received"]["block"] = -1
        self._version += 1
        return Post(record, self._version)

    @property
    def versions(self) -> list[int]:
        """Versions of the records of this meeting, by rank; 0 for a rank that has only counted."""
        at, posted = self._at + VERSION + self.number % 2, self._at + POSTED + self.number % 2
        return [words[at] if words[posted] == self.number else 0 for words in self.gpu.words]

    @property
    def records(self) -> list[np.ndarray]:
        """Records of this meeting, by rank; one without buffers for a rank that has only counted."""
        turn = self.number % 2
        posts = zip(self.versions, self._records)
        return [records[turn] if version else self._counted for version, records in posts]

    @property
    def waiting(self) -> list[int]:
        """Ranks for whose events the leader's stream is to wait."""
        at = self._at + WAITS + self.number % 2
        return [rank for rank, words in enumerate(self.gpu.words) if words[at]]

    def event_of(self, rank: int) -> bytes:
        """Handle of the event of a rank that has posted in this meeting."""
        return bytes(self._records[rank][self.number % 2]["event"].tobytes())

    def show_launch(self) -> None:
        """Tell the other ranks that the leader's event is recorded."""
        if self.gpu.node_memory.fence is not None:
            self.gpu.node_memory.fence()
        self.gpu.words[self.gpu.rank][self._at + LAUNCHED] = self.number

    def is_launched(self) -> bool:
        return bool(self.gpu.words[LEADER][self._at + LAUNCHED] >= self.number)


def set_place(record: np.ndarray, end: str, handle: bytes, blocks: Sequence[tuple[int, int, int]]) -> None:
    """Write to a record the handle of its "source" or "target", and the blocks there: (block, offset, count)."""
    record[end] = np.void(handle.ljust(HANDLE, b"\0"))
    rows = record["sent" if end == "source" else "received"]
    rows[: len(blocks)] = blocks


class SharingResult(NamedTuple):
    """The shared GPU, or GPUs, or None and the reason why there are none; the same kind on all ranks."""

    gpu: SharedGpu | None
    reason: str


def share_gpu(comm: MPI.Intracomm, node: NodeMemory | None, wanted: bool) -> SharingResult:
    """Export memory and an event of every rank, and read the memory of others. Collective over `comm`.

    Where ranks share one GPU, each reads its neighbour's memory; otherwise all read that of all, and send each other a
    message. `node` is that of all ranks, or None; ranks may differ in `wanted`. Needs CuPy imported on all ranks.
    """
    cupy = sys.modules.get("cupy")
    if not reduced(comm, wanted and cupy is not None, MPI.LAND) or cupy is None:
        return SharingResult(None, "not wanted, or CuPy not imported, on some rank")
    if node is None or not 2 <= node.size <= MOST_RANKS:
        return SharingResult(None, f"needs 2 to {MOST_RANKS} ranks on one node that share memory")
    bus, error = "", ""
    with suppress(RuntimeError):
        device = cupy.cuda.Device().id
        bus = str(cupy.cuda.runtime.deviceGetPCIBusId(device))
        if not cupy.cuda.runtime.deviceGetAttribute(IPC_EVENTS, device):
            error = "the device has no events between processes"
    everyone = comm.allgather((bus, error))
    buses = [bus for bus, _ in everyone]
    if not all(buses):
        return SharingResult(None, "some rank uses no GPU")
    several = len(set(buses)) > 1
    refusal = first_error(comm, error or (refused_access(cupy, device, bus, buses) if several else ""))
    if refusal:
        return SharingResult(None, refusal)
    free_retired()
    boards = map_all(node.comm, HEADER + CHANNELS * ENTRY.itemsize)
    if not reduced(comm, bool(boards), MPI.LAND):
        return SharingResult(None, "the ranks may not map each other's memory")
    gpu = SharedGpu(node, boards, cupy, device)
    if several:
        links = PeerLinks(node, cupy, gpu.exported, flags=len(set(buses)) == len(buses))
        gpu.links, refusal = links, connect(node.comm, links)
    else:
        refusal = _refusal(comm, gpu)
    if refusal:
        gpu.close()
        return SharingResult(None, refusal)
    return SharingResult(gpu, "")


def _refusal(comm: MPI.Intracomm, gpu: SharedGpu) -> str:
    """Reason why the token of the previous rank cannot be read here, or elsewhere; "" if all can. Collective."""
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
