"""Transport between the GPUs of a node's ranks that can access each other's memory.

Every rank exports a block of device memory that all others open. Flags of messages are in the mailboxes in host memory
(see `device_messages`). The data take one of three ways:

- up to `FLAGGED` bytes: a kernel writes them into a slot in the receiver's block, and sets a flag beside them. The
  receiver's kernel waits for it for some time, then the host waits for the mailbox's flag, set later.
- memory of `comm.empty(like=cupy)`: the mailbox has its address, and the receiver copies from it.
- all other: the sender copies into a bounce buffer of its block, the receiver out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.instructions import LINE
from collectives.transport.gpu.device_copies import DeviceCopies
from collectives.transport.gpu.device_messages import DeviceCopy, DeviceNodeTransport, DeviceReceive, DeviceSend, Lane
from collectives.transport.gpu.exported_memory import ExportedBlock, ExportedMemory
from collectives.transport.gpu.peer_kernels import HEAD, MOST_PIECES, PeerKernels, flag_of
from collectives.transport.mpi.reduced import reduced
from collectives.transport.node.mailbox import MailboxEdge, NodeMemory, address_label
from collectives.transport.node.mailbox_layout import CHANNELS
from collectives.transport.wire import Iovec

PEER_CELL, PEER_BUDGET = 1 << 20, 1 << 25
"""Most bytes of a bounce buffer, and of a rank's for blocking calls (the same for all other channels together)."""

CELLS = 4
"""Cells from one rank to another, taken in turn."""

FLAGGED = 1 << 12
"""Bytes up to which messages are written by a kernel that sets a flag."""

SLOT = HEAD + FLAGGED

TOKEN = 256
"""Bytes that every rank reads of every other one's memory."""

PROBE = 1 << 40
"""Number of a short message that tests the flags. Messages do not get that far."""


class PeerBlock(NamedTuple):
    """Memory of `comm.empty` on a rank: its address in that rank's process, bytes, and handle."""

    address: int
    nbytes: int
    handle: bytes


class PeerLinks:
    """Blocks of device memory of all ranks of a node for messages between them, and their other exported arrays.

    `bases` are the local addresses of every rank's block, `shared` the arrays of every rank that others may open.
    `flags`: kernels write short messages. This needs a GPU per rank.
    """

    def __init__(self, node: NodeMemory, cupy: ModuleType, exported: ExportedMemory, flags: bool) -> None:
        self.node, self.exported, self.flags = node, exported, flags
        self._cupy, self.kernels = cupy, PeerKernels(cupy, exported.device)
        most = PEER_BUDGET // (CELLS * node.size)
        self.cells = [min(PEER_CELL, most)] + [most // (CHANNELS - 1) // LINE * LINE] * (CHANNELS - 1)
        self._offsets = list(accumulate((node.size * CELLS * cell for cell in self.cells), initial=0))
        self.shared: list[list[PeerBlock]] = [[] for _ in range(node.size)]
        self.bases: list[int] = []
        self._copies: dict[int, DeviceCopies] = {}

    def allocate(self) -> ExportedBlock:
        """Allocate this rank's block, with slots of zeros."""
        block = self.exported.allocate(self._offsets[-1] + CHANNELS * self.node.size * CELLS * SLOT)
        self.exported.view(block.address + self._offsets[-1], block.nbytes - self._offsets[-1])[...] = 0
        self.stream.synchronize()
        return block

    def open(self, own: ExportedBlock, handles: Sequence[bytes]) -> None:
        """Open the blocks of the other ranks, given by their handles. RuntimeError if CUDA refuses."""
        here = self.node.place
        self.bases = [
            own.address if place == here else self.exported.open(handle) for place, handle in enumerate(handles)
        ]

    def cells_of(self, channel: int, sender: int, receiver: int) -> list[int]:
        """Local addresses of the bounce buffers between two ranks, in the sender's block."""
        start = self.bases[sender] + self._offsets[channel] + receiver * CELLS * self.cells[channel]
        return [start + turn * self.cells[channel] for turn in range(CELLS)]

    def slots_of(self, channel: int, sender: int, receiver: int) -> list[int]:
        """Local addresses of the slots between two ranks, in the receiver's block."""
        start = self.bases[receiver] + self._offsets[-1] + (channel * self.node.size + sender) * CELLS * SLOT
        return [start + turn * SLOT for turn in range(CELLS)]

    def copies(self, place: int) -> DeviceCopies:
        """Streams of the messages from and to a rank. Streams of different ranks do not wait for each other."""
        if place not in self._copies:
            self._copies[place] = DeviceCopies(self._cupy, self.exported.device, between_devices=True)
        return self._copies[place]

    def holds(self, address: int, nbytes: int) -> bool:
        """True if memory of this rank can be opened by the others."""
        return _find(self.shared[self.node.place], address, nbytes) is not None

    def translate(self, place: int, address: int, nbytes: int) -> int:
        """Local address of another rank's memory."""
        block = _find(self.shared[place], address, nbytes)
        if block is None:
            raise RuntimeError(f"{nbytes} bytes at {address:#x} are not memory that the rank with place {place} shares")
        return self.exported.open(block.handle) + address - block.address

    def forget(self, freed: Sequence[bytes]) -> None:
        """Note that blocks of `comm.empty`, by their handles, were freed."""
        for blocks in self.shared:
            blocks[:] = [block for block in blocks if block.handle not in freed]

    def new_word(self) -> np.ndarray:
        """Word of host memory that kernels write."""
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(8), np.uint64, 1)

    @property
    def stream(self) -> Any:
        """CuPy's current stream."""
        return self._cupy.cuda.get_current_stream()

    def finish(self) -> None:
        """Wait for all copies."""
        for copies in self._copies.values():
            copies.finish()
        self._copies.clear()


def _find(blocks: Sequence[PeerBlock], address: int, nbytes: int) -> PeerBlock | None:
    fitting = (one for one in blocks if one.address <= address and address + nbytes <= one.address + one.nbytes)
    return next(fitting, None)


def refused_access(cupy: ModuleType, device: int, bus: str, buses: Sequence[str]) -> str:
    """Reason why a device, by number and PCI bus, has no access to the GPU of a rank. "" if CUDA reports none.

    Devices that are not visible to this process are left to `connect`.
    """
    runtime = cupy.cuda.runtime
    for rank, other in enumerate(buses):
        with suppress(RuntimeError):
            if other != bus and not runtime.deviceCanAccessPeer(device, runtime.deviceGetByPCIBusId(other)):
                return f"no peer access from GPU {bus} to GPU {other} of rank {rank}"
    return ""


def first_error(comm: MPI.Intracomm, error: str) -> str:
    """First error of all ranks, with its rank. "" if none has any. Collective."""
    return next((f"rank {rank}: {found}" for rank, found in enumerate(comm.allgather(error)) if found), "")


def connect(comm: MPI.Intracomm, links: PeerLinks) -> str:
    """Open the blocks of all ranks of the node, and send a token to and from each. The reason if that failed.

    Collective. Without `flags` afterwards if only the kernels failed.
    """
    block, error = None, ""
    try:
        block = links.allocate()
    except (RuntimeError, MemoryError) as refused:
        error = f"CUDA exports no memory: {refused}"
    handles, refusal = comm.allgather(b"" if block is None else block.handle), first_error(comm, error)
    if refusal or block is None:
        return refusal
    here, others = comm.Get_rank(), [place for place in range(comm.Get_size()) if place != comm.Get_rank()]
    try:
        links.open(block, handles)
        for place in others:
            links.exported.view(links.cells_of(0, here, place)[0], TOKEN)[...] = 1 + here
        links.stream.synchronize()
    except RuntimeError as refused:
        error = f"CUDA opens no memory of another GPU: {refused}"
    refusal = first_error(comm, error)  # also a barrier: all have written
    if refusal:
        return refusal
    try:
        for place in others:
            found = links.exported.view(links.cells_of(0, place, here)[0], TOKEN).get()
            if (found != 1 + place).any():
                error = f"expected {1 + place} in the memory of rank {place}, found {found[0]}"
    except RuntimeError as refused:
        error = f"CUDA reads no memory of another GPU: {refused}"
    refusal = first_error(comm, error)
    if links.flags and not refusal:
        links.flags = bool(reduced(comm, _flags_arrive(comm, links, others), MPI.LAND))
    return refusal


def _flags_arrive(comm: MPI.Intracomm, links: PeerLinks, others: Sequence[int]) -> bool:
    """True if a short message of every other rank arrives in this rank's slots. Collective."""
    here, last, flag, seen = comm.Get_rank(), CHANNELS - 1, flag_of(PROBE, 0), links.new_word()
    arrived, slots = True, links.slots_of
    with suppress(RuntimeError):  # nothing arrives
        for place in others:
            links.kernels.put([], slots(last, here, place)[0], flag).put(links.stream.ptr)
        links.stream.synchronize()
    comm.Barrier()
    for place in others:
        seen[0] = 0
        with suppress(RuntimeError):
            kernel = links.kernels.take([], slots(last, place, here)[0], flag, MPI.Get_address(seen))
            kernel.put(links.stream.ptr)
            links.stream.synchronize()
        arrived &= bool(seen[0] == flag)
    return arrived


class _Read:
    """Event of a message that is sent by its address: the receiver has acknowledged it."""

    def __init__(self, edge: MailboxEdge, number: int) -> None:
        self._edge, self._number = edge, number

    @property
    def done(self) -> bool:
        return self._edge.is_acknowledged(self._number)


class _Shown:
    """Event of a message whose flag a kernel has waited for in vain: its mailbox has a flag."""

    def __init__(self, message: DeviceReceive, number: int) -> None:
        self._message, self._number = message, number

    @property
    def done(self) -> bool:
        return self._message.found(self._number) >= 0


class PeerSend(DeviceSend):
    """Send of at most a bounce buffer. `slots` are the slots of short messages, or None."""

    def __init__(self, links: PeerLinks, slots: Sequence[int] | None, *message: Any) -> None:
        super().__init__(*message)
        self._links, self._short_slots, self._is_read = links, slots, False

    def begin(self, ahead: int) -> DeviceCopy | None:
        self._is_read = self._short_slots is None and len(self._pieces) == 1 and self._links.holds(*self._pieces[0])
        if not self._is_read:
            return super().begin(ahead)
        number = self.next_number()
        if number is None:
            return None
        self.set_flag(number, address_label(self._mark, 1), *self._pieces[0])
        return DeviceCopy(self, number, _Read(self._edge, number))

    def copy(self, number: int) -> Any:
        if self._short_slots is None:
            return super().copy(number)
        pieces: Sequence[Iovec] = self._pieces
        if len(pieces) > MOST_PIECES:
            self._copies.to_host(self.slot(number), pieces)
            pieces = [Iovec(self.slot(number), self._nbytes)]
        slot, flag = self._short_slots[number % CELLS], flag_of(number, self._nbytes)
        return self._copies.launch(self._links.kernels.put(pieces, slot, flag), sends=True)

    def end(self, number: int) -> Any:
        return None if self._is_read else super().end(number)


class PeerReceive(DeviceReceive):
    """Receive of at most a bounce buffer. `slots` are the slots of short messages, or None."""

    def __init__(self, links: PeerLinks, slots: Sequence[int] | None, *message: Any) -> None:
        super().__init__(*message)
        self._links, self._short_slots = links, slots
        self._seen = links.new_word()
        self._is_shown = self._is_copied = False

    def begin(self, ahead: int) -> DeviceCopy | None:
        if self._short_slots is None:
            return super().begin(ahead)
        if ahead:
            return None  # one kernel waits at a time
        self._is_shown = self._is_copied = False
        number = self.next_number(ahead)
        return DeviceCopy(self, number, self._take(number))

    def _take(self, number: int) -> Any:
        """Launch the kernel that waits for a message. Return the event of its end."""
        assert self._short_slots is not None
        self._seen[0] = 0
        pieces = self._pieces if len(self._pieces) <= MOST_PIECES else []
        slot, flag = self._short_slots[number % CELLS], flag_of(number, self._nbytes)
        kernel = self._links.kernels.take(pieces, slot, flag, MPI.Get_address(self._seen))
        return self._copies.launch(kernel, sends=False)

    def end(self, number: int) -> Any:
        if self._short_slots is None:
            return super().end(number)
        if self._seen[0] == flag_of(number, self._nbytes):
            if len(self._pieces) <= MOST_PIECES or self._is_copied:
                return super().end(number)
            self._is_copied = True
            return self._copies.to_device(self._pieces, self._short_slots[number % CELLS] + HEAD)
        if not self._is_shown:  # the sender is late
            self._is_shown = True
            return _Shown(self, number)
        if not self.is_expected(number):
            raise self._edge.refuse(self._nbytes)
        return self._take(number)

    def fetch(self, pieces: tuple[int, ...]) -> int:
        return self._links.translate(self._edge.place, *pieces)


class PeerTransport(DeviceNodeTransport):
    """Transport between GPUs whose memory `links` connects: one channel of a node that holds all ranks."""

    def __init__(
        self, channel: int, edges: dict[int, MailboxEdge], mark: int, device: DeviceMemory, links: PeerLinks
    ) -> None:
        super().__init__(links.node, channel, edges, mark, device, links.copies(links.node.place))
        self._links, self._cell = links, links.cells[channel]

    def lane(self, kind: type, peer: int) -> Lane:
        lane: Lane = self.lanes.setdefault((kind, peer), Lane(self._links.copies(self._edge(peer).place)))
        return lane

    def bind_send(self, edge: MailboxEdge, pieces: Sequence[Iovec]) -> DeviceSend:
        short, cells = self._places(pieces, self._memory.place, edge.place)
        return PeerSend(self._links, short, edge, pieces, self._mark, self._links.copies(edge.place), cells)

    def bind_receive(self, edge: MailboxEdge, pieces: Sequence[Iovec]) -> DeviceReceive:
        short, cells = self._places(pieces, edge.place, self._memory.place)
        copies = self._links.copies(edge.place)
        return PeerReceive(self._links, short, edge, pieces, self._mark, copies, cells, self._device)

    def _places(self, pieces: Sequence[Iovec], sender: int, receiver: int) -> tuple[list[int] | None, list[int]]:
        """Slots of a message (None if it is too long for them) and its bounce buffers."""
        is_short = self._links.flags and 0 < sum(piece.nbytes for piece in pieces) <= FLAGGED
        channel, links = self._channel, self._links
        slots = links.slots_of(channel, sender, receiver) if is_short else None
        return slots, links.cells_of(channel, sender, receiver)

    def free(self) -> None:
        """Wait for the copies of a call that was aborted."""
        if self.is_busy:
            self._links.finish()
