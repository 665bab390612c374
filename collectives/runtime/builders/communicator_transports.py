"""Transports of one communicator: mailboxes in shared memory for peers of the node, MPI for all others.

Messages of different communicators cannot match: each has a duplicate of its MPI communicator and mailboxes of its own,
in memory that all communicators of a node's ranks share.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.instructions import CHANNEL_COUNT, HELD, STARTED
from collectives.errors import Mismatch, OutOfMemory, mismatch
from collectives.runtime.execution.progress import progress_thread
from collectives.selection.timing_table import Form
from collectives.transport.gpu.device_copies import pin_mailboxes
from collectives.transport.gpu.device_messages import DeviceNodeTransport
from collectives.transport.gpu.device_network import DeviceNetworkTransport, PinnedBuffers, largest_part
from collectives.transport.gpu.device_wire import DeviceTransport
from collectives.transport.gpu.gpu_channel import GpuChannel
from collectives.transport.gpu.peer_messages import PeerLinks, PeerTransport
from collectives.transport.gpu.shared_gpu import share_gpu
from collectives.transport.memory.copy_speed import MessageSpeed
from collectives.transport.memory.shared_heap import MOST, SharedHeap
from collectives.transport.mpi.mpi_transport import MpiTransport
from collectives.transport.node.machine import world_ranks
from collectives.transport.node.mailbox import MailboxEdge, open_mailboxes
from collectives.transport.node.mailbox_layout import NONBLOCKING
from collectives.transport.node.placement import NodePlacement
from collectives.transport.node.shm import NodeAwareTransport
from collectives.transport.node.staging_chunks import StagingChunks, part_size, share_chunks
from collectives.transport.wire import Wire

BLOCKING_CHANNEL = 0
"""Channel of the node's mailboxes for blocking calls."""

FIRST_NONBLOCKING = 1
"""First of the `NONBLOCKING` channels for non-blocking calls."""

RANK_SHIFT = 24
"""Position of the world's rank of rank 0 in the number of a communicator, above how many this process has made."""

_numbers = count(1)

PROBES = 2
"""Probes for messages at the end: the first one may only take in what has arrived (Intel MPI)."""


class Transports:
    """Shared-memory and MPI transports of one communicator, and the tags of its calls. Creation is collective.

    Ranks of one node use the memory of their `placement`, if there is any; there is none with device memory (`aware`):
    no rank knows where its peers' messages are, and both ends of a message must use the same transport. `gpu`, the best
    transfer of device memory to use where that is possible: "kernel", by the kernels of a GPU that all ranks share, or
    between GPUs with peer access; "pinned", through pinned memory; "staged". Arguments are equal on all ranks.

    `number` is one that all ranks know the communicator by, `world_ranks` are their ranks in MPI.COMM_WORLD.
    """

    def __init__(self, comm: MPI.Intracomm, placement: NodePlacement, aware: bool, gpu: str = "staged") -> None:
        self.comm, self.placement, self.nodes, self.aware = comm, placement, placement.nodes, aware
        number = MPI.COMM_WORLD.Get_rank() << RANK_SHIFT | next(_numbers)
        self.node, has_cupy, self.number = open_mailboxes(comm, placement, "cupy" in sys.modules, number)
        self.world_ranks = world_ranks(comm)
        self.heap = SharedHeap(comm) if self.node is None else self.node.heap
        everyone = self.node if self.nodes is None else None
        self.alone = comm.Get_size() == 1
        self.sharing = share_gpu(comm, everyone, gpu == "kernel" and has_cupy)
        pins = gpu != "staged" and has_cupy and self.sharing.gpu is None and not (self.alone or self.aware)
        self.pinning = pin_mailboxes(comm, self.node, self.nodes, pins)
        self.chunks: StagingChunks | None = None
        self._cut: Callable[[int], int] | None = None
        if self.pinning.mailboxes is not None:
            self.chunks = None if self.node is None else share_chunks(self.node)
            self._cut = partial(part_size, most=largest_part(comm.Get_size()))
        self._buffers = PinnedBuffers()
        self.edges: dict[int, dict[int, MailboxEdge]] = {}  # by channel and rank
        self.nonblocking = np.zeros(HELD + NONBLOCKING, np.int64)
        self.nonblocking[CHANNEL_COUNT] = NONBLOCKING
        """Words of the channels of non-blocking calls: see `instructions.STARTED`."""

        self._persistent_requests = 0
        largest_tag = comm.Get_attr(MPI.TAG_UB)
        self._tags = (32767 if largest_tag is None else int(largest_tag)) // 2

    def reserve(self, channel: int) -> bool:
        """Allocate the mailboxes of a channel unless it has them. False on all ranks if one cannot. Collective."""
        if self.node is None or channel in self.node.channels:
            return True
        found = self.node.add_channel(channel)
        if found and self.pinning.mailboxes is not None:
            with suppress(RuntimeError):  # the device copies from and to other memory too, but takes more time
                self.pinning.mailboxes.pin(self.node.ranges()[-1])
        return found

    def allocate(self, nbytes: int) -> np.ndarray:
        """Allocate a uint8 array of `nbytes`, in shared memory if the ranks of the node share any. Collective."""
        array = self.heap.allocate(nbytes)
        with progress_thread.portion:  # in which it may read them
            for edges in self.edges.values():
                for edge in edges.values():
                    edge.update_segments()
        return array

    def allocate_on_gpu(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Allocate a CuPy array, in memory that the ranks which share the GPU can open, if they do. Collective."""
        if self.sharing.gpu is not None:
            return self.sharing.gpu.allocate(self.comm, shape, dtype)
        array, error = None, ""
        try:
            array = import_module("cupy").empty(shape, dtype)
        except (ImportError, RuntimeError, MemoryError) as refused:
            error = f"{type(refused).__name__}: {refused}"
        for rank, found in enumerate(self.comm.allgather(error)):
            if found:
                raise OutOfMemory(MPI.ERR_NO_MEM, f"rank {rank} cannot have an array on the GPU: {found}")
        return array

    @property
    def message_speed(self) -> MessageSpeed:
        """Speed of messages on the slowest node. Zeros without shared memory, or cores enough."""
        return MessageSpeed() if self.node is None else self.node.speed

    def consume_tag(self) -> int:
        """Return a new MPI tag for the next non-blocking call. The same on all ranks, which count these calls."""
        self.nonblocking[STARTED] += 1
        return 1 + int(self.nonblocking[STARTED]) % (self._tags - 1)

    def consume_persistent_tag(self) -> None:
        self._persistent_requests += 1

    def wire(
        self,
        form: Form,
        mark: int,
        channel: int | None = BLOCKING_CHANNEL,
        itemsize: int = 1,
        streamed: int = 0,
        device: DeviceMemory | None = None,
    ) -> Wire:
        """Create the transport of a program: mailboxes of `channel` within the node, MPI with a tag between nodes.

        MPI alone without mailboxes, or if `channel` is None. Messages are split between elements: an element larger
        than a cell needs reads from peer memory, or MPI. Messages longer than a cell are cut up to `streamed` bytes, or
        all of them if ranks may not read each other's memory. With pinned memory `device` is that of the messages.
        """
        # Blocking calls share tag 0, as a communicator runs one at a time; every other call has its own.
        tag = self._tags + self._persistent_requests % self._tags if form == "persistent" else 0
        mailboxes, cut, far = self.pinning.mailboxes, self._cut, None
        if device is not None and mailboxes is not None and cut is not None:
            copies = mailboxes.copies(device.number)
            far = DeviceNetworkTransport(self.comm, tag, device, copies, self._buffers, cut)
        network = MpiTransport(self.comm, tag, cut, typed=device is not None)
        if self.node is None or channel is None or (itemsize > self.node.cells[channel] and not self.node.reads):
            return far or network
        if channel not in self.edges:
            self.edges[channel] = {
                rank: MailboxEdge(self.node, channel, place) for rank, place in self.node.places.items()
            }
        links = self._links
        if links is not None and device is not None:
            return PeerTransport(channel, self.edges[channel], mark, device, links)
        if far is not None:
            edges, copies = self.edges[channel], far.copies
            near = DeviceNodeTransport(self.node, channel, edges, mark, far.device, copies, self.chunks)
            return near if self.nodes is None else DeviceTransport(near, far, edges)
        if mailboxes is not None:  # a message may be in a device's memory, at either end
            streamed = MOST
        edges = self.edges[channel]
        return NodeAwareTransport(self.node, channel, edges, network, streamed, mark, self.chunks, itemsize)

    def gpu_channel(self, channel: int | None) -> GpuChannel | None:
        """Meetings of a channel's calls on the GPU that all ranks share, or on several with access. None without."""
        return None if self.sharing.gpu is None or channel is None else self.sharing.gpu.channel(channel)

    @property
    def _links(self) -> PeerLinks | None:
        return None if self.sharing.gpu is None else self.sharing.gpu.links

    def fits_cells(self, channel: int | None, itemsize: int) -> bool:
        """True if messages of elements of `itemsize` bytes fit cells and buffers that devices copy from and to."""
        if channel is None or self.node is None or (self.pinning.mailboxes is None and self._links is None):
            return self.pinning.mailboxes is not None  # all messages use MPI
        both = (self.node, self._links)
        return all(itemsize <= one.cells[channel] for one in both if one is not None)

    @property
    def device_transfer(self) -> str:
        """Transfer of device memory: "direct", "kernel", "peer", "pinned" or "staged", or "none", and why no better."""
        if self.alone:
            return "none: one rank"
        if self.aware:
            return "direct"
        if self.sharing.gpu is not None:
            return "kernel" if self._links is None else "peer"
        reasons = [self.sharing.reason, *([] if self.pinning.mailboxes else [self.pinning.reason])]
        return f"{'staged' if len(reasons) > 1 else 'pinned'}: {'; '.join(dict.fromkeys(reasons))}"

    def leave(self) -> Mismatch | None:
        """Mark this rank as one that makes no more calls. The error of a message that it, or a peer, has not read."""
        status = MPI.Status()
        if any(self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) for _ in range(PROBES)):
            return mismatch(self.comm.Get_rank(), status.Get_source(), None, status.Get_count(MPI.BYTE))
        return None if self.node is None else self.node.leave(self.edges)

    def free(self, is_broken: bool = False) -> None:
        """Free shared memory. Programs must have been freed before, but for those of a call that `is_broken`."""
        if self.sharing.gpu is not None:
            self.sharing.gpu.close()
        if self.pinning.mailboxes is not None:
            self.pinning.mailboxes.free()
        if self.chunks is not None:
            self.chunks.free()
        self._buffers.free()
        self.heap.free()
        if self.node is not None:
            self.node.free(is_broken)
        self.placement = self.placement._replace(shared=None)
