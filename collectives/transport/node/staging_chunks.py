"""Chunks of pinned memory that the ranks of a node share: staging buffers of long messages between devices.

Copies of a mailbox's bounce buffer are short: starting, ending and polling them takes longer than moving the data. 128
KiB move at a third of the link's speed, 4 MiB at nine tenths. Longer bounce buffers would need too much memory: there
are sixteen each way for every peer and channel, and compiled code writes all in turn. So every rank has an area of
chunks beside its mailboxes, in a memory file that the others map. Calls on all channels share these chunks. The
mailbox of a message has the address of its chunk, like the address of an array in shared memory, so ranks with arrays
on the host read both in the same way. Ranks with arrays on the host send long messages by cross-memory reads, or
through chunks if ranks may not read each other's memory.

A chunk is in use until its message is acknowledged. This may be late: its receiver may wait for another message first.
So `SHARED` chunks are for all receivers, at most `IN_FLIGHT` for one receiver on one channel. If these are in use, a
receiver without a chunk gets one that is reserved for it. Therefore no message waits for messages to other receivers.

Pages are allocated, and pinned by sender and receiver, when the first message takes the chunk: a rank that sends long
messages by one call at a time uses at most 64 MiB, with two ranks 16 MiB. Each further call at the same time may add
4 MiB per receiver. The rest of the area is addresses without memory.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np
from mpi4py import MPI

from collectives.buffers.memory import view
from collectives.engine.instructions import KIND, SENT, SLOTS, WORDS
from collectives.transport.memory.shared_heap import HeapSegment, map_all
from collectives.transport.mpi.reduced import gathered
from collectives.transport.node.mailbox import MASK, MailboxEdge, NodeMemory, address_label
from collectives.transport.node.mailbox_layout import CHANNELS

CHUNK, SHORTEST = 1 << 22, 1 << 20
"""Bytes of a chunk, and of the shortest parts that a message is cut to."""

PARTS = 16
"""Parts that a message is cut to, if these are no chunks: the first one is not copied while another is."""

IN_FLIGHT, SHARED = 4, (8, 16)
"""Chunks in use by messages to one receiver. Least and most chunks for all."""

MOST_RANKS = 16
"""Ranks of a node up to which such chunks exist. Each rank maps the areas of all, 33 GiB of addresses at most."""


def part_size(nbytes: int, most: int = CHUNK) -> int:
    """Bytes of the parts of a message longer than a bounce buffer, equal at both ends. `most`: bytes of the largest.

    >>> [part_size(mib << 20) >> 20 for mib in (1, 16, 32, 256)]
    [1, 1, 2, 4]
    """
    return min(most, max(SHORTEST, nbytes // PARTS))


class MemoryPinner(Protocol):
    """Pins host memory for copies from and to a device, as `DeviceCopies` does."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pin host memory. RuntimeError if CUDA refuses."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""


class StagingChunks:
    """Areas of chunks of all ranks of a node, mapped in this process.

    `bases` are their addresses in the ranks' processes.
    """

    def __init__(self, node: NodeMemory, areas: list[np.ndarray], bases: list[int]) -> None:
        self._place, self._areas, self._bases = node.place, areas, bases
        self._addresses = [MPI.Get_address(area) for area in areas]
        peers = node.size - 1
        self._shared = min(max(IN_FLIGHT * peers, SHARED[0]), SHARED[1])
        self._most = min(IN_FLIGHT, max(1, self._shared // peers))
        self._free = list(range(self._shared))[::-1]  # the last one used is used next
        self._own: dict[MailboxEdge, int] = {}  # chunks of receivers that found no other one
        self._taken: dict[MailboxEdge, deque[tuple[int, int]]] = {}  # (number of the message, chunk)
        self._pinned: dict[int, MemoryPinner | None] = {}  # by address, None if CUDA refused

    def take(self, edge: MailboxEdge, copies: MemoryPinner | None) -> int | None:
        """Address of a chunk for the next message on an edge. None if messages before must be acknowledged first.

        It is pinned for `copies`, if any.
        """
        taken = self._taken.setdefault(edge, deque())
        self._give_back(edge, taken)
        if len(taken) >= self._most:
            return None
        if not self._free:
            for other, used in self._taken.items():
                self._give_back(other, used)
        if self._free:
            chunk = self._free.pop()
        elif not taken:
            chunk = self._own.setdefault(edge, self._shared + len(self._own))
        else:
            return None
        taken.append((edge.counts[SENT] + 1, chunk))
        return self._pin(self._place, chunk * CHUNK, copies)

    def _give_back(self, edge: MailboxEdge, taken: deque[tuple[int, int]]) -> None:
        """Take back the chunks of acknowledged messages."""
        while taken and edge.is_acknowledged(taken[0][0]):
            _, chunk = taken.popleft()
            if chunk < self._shared:
                self._free.append(chunk)

    def find(self, place: int, address: int, nbytes: int, copies: MemoryPinner) -> int | None:
        """Local address of data in a chunk of the rank with a place on the node. None if it is not in a chunk."""
        start = address - self._bases[place]
        inside = start >= 0 and start + nbytes <= self._areas[place].size
        return self._pin(place, start, copies) if inside else None

    def _pin(self, place: int, start: int, copies: MemoryPinner | None) -> int:
        """Pin the chunk at an offset in an area. Return the offset's address.

        If CUDA refuses, it copies from and to the chunk all the same, but takes more time.
        """
        address = self._addresses[place] + start
        chunk = address - start % CHUNK
        if copies is not None and chunk not in self._pinned:
            self._pinned[chunk] = None
            with suppress(RuntimeError):
                copies.pin(chunk, CHUNK)
                self._pinned[chunk] = copies
        return address

    def free(self) -> None:
        """Unpin all chunks, and drop the areas. All copies must have ended."""
        for address, copies in self._pinned.items():
            if copies is not None:
                copies.unpin(address)
        self._pinned.clear()
        self._areas = []


class HostChunkSend:
    """Send of at most a chunk of host memory, by a copy into a chunk of this rank's."""

    def __init__(self, chunks: StagingChunks, edge: MailboxEdge, nbytes: int, mark: int) -> None:
        self._edge, self._chunks, self._label = edge, chunks, address_label(mark, 1)
        self._nbytes = nbytes

    def bind(self, *data: np.ndarray) -> Callable[[], bool]:
        """Function that sends these arrays of bytes, or returns False if no slot or chunk is free."""
        return partial(self._attempt, data)

    def _attempt(self, arrays: Sequence[np.ndarray]) -> bool:
        edge = self._edge
        chunk = self._chunks.take(edge, None) if edge.has_room(SLOTS) else None
        if chunk is None:
            return False
        edge.counts[SENT] = number = edge.counts[SENT] + 1
        start = chunk
        for data in arrays:
            view(start, data.nbytes, data.dtype)[...] = data
            start += data.nbytes
        at = edge.outbox + (number & MASK) * WORDS
        edge.mine[at + 1], edge.mine[at + 2] = chunk, self._nbytes
        edge.node.fence()
        edge.mine[at] = number * KIND + self._label
        return True


def share_chunks(node: NodeMemory) -> StagingChunks | None:
    """Map the areas of all ranks of a node. None on all of them if that fails, or if they are too many.

    Collective over all nodes.
    """
    nbytes = (SHARED[1] + CHANNELS * node.size) * CHUNK if 1 < node.size <= MOST_RANKS else 0
    areas = map_all(node.comm, list(node.places), nbytes)
    addresses = gathered(node.comm, MPI.Get_address(areas[node.place]) if areas else 0)
    if not areas:
        return None
    bases = [addresses[rank] for rank in node.places]
    for place, area in enumerate(areas):
        node.heap.add(place, HeapSegment(bases[place], area))
    return StagingChunks(node, areas, bases)
