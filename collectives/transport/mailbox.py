"""Mailboxes between the ranks of a node: message slots with flags in shared memory.

Every ordered pair of ranks has a mailbox of a few slots. To send, a rank fills the next slot and then sets the slot's
flag to the number of the message; the receiver watches the flag, takes what is there, and writes the number to its
acknowledgement, which frees the slot.

A flag also carries a label: the length of the message and a mark of the call that sent it. A message whose label is not
the expected one belongs to another call, and the receiver raises `Mismatch`. The label of either end is computed when
the message is bound, so that the check is the comparison of the flag that is made anyway.

Flags are 8-byte words that Python stores and loads whole. Processors of the x86 family keep stores in order and loads
in order, so the flag needs no fence there; on others `MPI.Win.Sync` is called before a flag is set, after one is seen,
and before it is acknowledged.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.errors import Mismatch, mismatch
from collectives.transport.cross_memory import CrossMemoryAttach
from collectives.transport.memories import Memories
from collectives.transport.reduced import reduced
from collectives.transport.shared_heap import SharedHeap
from collectives.transport.wire import pause

LINE = 64
SLOTS = 4
CELLS = 2
INLINE = 56
"""Bytes that fit beside a flag."""

WORDS = LINE // 8
MASK = SLOTS - 1
ADDRESSES = 3
"""Pieces of memory that fit in a slot as (address, bytes)."""

LENGTHS = 64
IN_CELL = INLINE + 1
"""A label is a mark times `LENGTHS`, plus the bytes of a message that lies beside the flag, `IN_CELL` for one in the
cell, whose length is then the word after the flag, or `IN_CELL` plus the number of addresses."""

MARKS = 1 << 12
"""Marks are below this number."""

KIND = LENGTHS * MARKS
"""Flags are the message's number times this, plus its label. Numbers have 45 bits: enough for a year of messages."""

SENT, ACKED, GOT, TOLD, AWAKE, OUTBOX, INBOX, MY_ACK, THEIR_ACK, CELL_BYTES, CELLS_OUT = range(11)
"""What an edge keeps as numbers, by place: messages to the peer, begun and known to be taken; messages from it that are
awaited or were taken; the last one to it that was told by address; how often to look for one; the addresses of
mailboxes and acknowledgements; the bytes and the addresses of cells."""

MOST_SEGMENTS = 8

CELLS_IN, SHOWN = CELLS_OUT + CELLS, CELLS_OUT + 2 * CELLS
SEEN_SEGMENTS = SHOWN + 1 + 2 * MOST_SEGMENTS
"""There, how many segments of memory the peer sees of this rank, then where each begins and ends; and how many this
rank sees of the peer, then where each begins and ends for the peer, and where it begins here."""

CELL = 1 << 18
"""Bytes of a cell, where the budget allows: messages are cut to fit, so that one part is taken while the next comes."""

CHANNELS = 32
"""Streams with mailboxes of their own: the first for blocking calls, the others for persistent ones."""

BUDGET = 1 << 22
"""Bytes of cells that a rank may own; fewer where the node has little shared memory."""


SPINS = 4000
"""How often a flag is looked at before others may run, where every rank has a core of its own."""


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shared_memory() -> int:
    """Bytes of shared memory that are left on the node; containers are often given little."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 4 * BUDGET  # not a system where that can be told


def label(nbytes: int, mark: int) -> int:
    """The label of a message whose data lies in the slot."""
    return mark * LENGTHS + (nbytes if nbytes <= INLINE else IN_CELL)


def told_label(addresses: int, mark: int) -> int:
    """The label of a message of which the slot holds so many addresses."""
    return mark * LENGTHS + IN_CELL + addresses


class NodeMemory:
    """The shared memory of the ranks of a communicator that are on one node. Making it is collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks of this node, for this node's use alone; `free` frees it.
    rank : int
        The number by which other ranks, of this node and others, know this one.
    heap : Heap
        The arrays of these ranks that all of them see.
    """

    def __init__(self, comm: MPI.Intracomm, rank: int, heap: SharedHeap) -> None:
        self.comm, self.heap = comm, heap
        self.place, self.size = self.comm.Get_rank(), self.comm.Get_size()
        neighbours = self.comm.allgather((rank, os.getpid()))
        self.places = {rank: place for place, (rank, _) in enumerate(neighbours)}
        self.readers = [CrossMemoryAttach(pid) for _, pid in neighbours]
        self.spins = SPINS if _cores() >= self.size else 30
        budget = reduced(self.comm, min(BUDGET, _shared_memory() // (4 * self.size)), MPI.MIN)
        self.cells = [min(CELL, max(256, budget // (CELLS * self.size) // LINE * LINE))]
        self.cells += [max(256, budget // (CHANNELS * CELLS * self.size) // LINE * LINE)] * (CHANNELS - 1)
        self.box = LINE * (SLOTS + 1)
        offsets = [0]
        for cell in self.cells:
            offsets.append(offsets[-1] + self.size * (self.box + CELLS * cell))
        self.offsets = offsets
        self._memories = Memories(self.comm, offsets[-1])
        self.bytes, self.fence = self._memories.views, self._memories.fence
        self.addresses = [MPI.Get_address(memory) for memory in self.bytes]
        self.words = [memory.data.cast("B").cast("q") for memory in self.bytes]
        for channel in range(CHANNELS):  # flags and acknowledgements only: cells stay untouched until they are used
            start = offsets[channel]
            self.bytes[self.place][start : start + self.size * self.box] = 0
        self.backlog: set[MailboxEdge] = set()
        self.reads = self._reads()

    def _reads(self) -> bool:
        """True if all ranks may read each other's memory."""
        mine, found = np.array([self.place + 1], np.int64), np.zeros(1, np.int64)
        addresses = self.comm.allgather(MPI.Get_address(mine))
        peer = (self.place + 1) % self.size
        able = self.readers[peer].able(MPI.Get_address(found), addresses[peer], 8) and found[0] == peer + 1
        return bool(reduced(self.comm, bool(able), MPI.LAND))  # also a barrier: all flags are clean, `mine` was read

    def yielding(self) -> None:
        """Let other processes run, and let MPI go on: others may hang on what this rank gave it to send."""
        self.comm.Iprobe()
        pause()

    def flush(self) -> None:
        """Let leave what has queued for room, to whomever."""
        for edge in tuple(self.backlog):
            edge.flush()

    def reaches(self, rank: int) -> bool:
        """True if the rank is on this node."""
        return rank in self.places

    def free(self) -> None:
        """Give the memory back. No rank waits for another."""
        for words in self.words:
            words.release()
        self.words, self.bytes = [], []
        self._memories.free()
        self.comm.Free()


class MailboxEdge:
    """Both directions between this rank and a neighbour on one channel: where their words lie, and how far they are."""

    __slots__ = (
        *(
            "awaited",
            "cell",
            "cells_in",
            "cells_out",
            "counts",
            "inbox",
            "mine",
            "my_ack",
            "node",
            "numbers",
            "outbox",
            "place",
        ),
        *("queue", "spins", "their_ack", "theirs"),
    )

    def __init__(self, node: NodeMemory, channel: int, peer: int) -> None:
        place, self.node = node.place, node
        base, box, cell = node.offsets[channel], node.box, node.cells[channel]
        cells = base + node.size * box
        self.mine, self.theirs = node.words[place], node.words[peer]
        self.outbox, self.inbox = (base + peer * box) // 8, (base + place * box) // 8
        self.my_ack, self.their_ack = self.outbox + SLOTS * WORDS, self.inbox + SLOTS * WORDS
        self.cells_out = [cells + (peer * CELLS + slot % CELLS) * cell for slot in range(SLOTS)]
        self.cells_in = [cells + (place * CELLS + slot % CELLS) * cell for slot in range(SLOTS)]
        self.cell, self.place, self.spins = cell, peer, node.spins
        self.numbers = np.zeros(SEEN_SEGMENTS + 1 + 3 * MOST_SEGMENTS, np.int64)
        self.counts = self.numbers.data  # the same, which Python reads faster
        here, there = node.addresses[place], node.addresses[peer]
        self.numbers[AWAKE:CELLS_OUT] = (
            node.spins * 8,  # compiled code looks that much faster
            here + self.outbox * 8,
            there + self.inbox * 8,
            here + self.my_ack * 8,
            there + self.their_ack * 8,
            cell,
        )
        self.numbers[CELLS_OUT:CELLS_IN] = [here + at for at in self.cells_out[:CELLS]]
        self.numbers[CELLS_IN:SHOWN] = [there + at for at in self.cells_in[:CELLS]]
        self.look()
        self.awaited: deque[Any] = deque()  # messages that come and were not taken, in the order in which they come
        self.queue: deque[Any] = deque()  # messages that were started when there was no room

    def look(self) -> None:
        """Note the memory that the two ranks show each other by now."""
        shown, seen = (self.node.heap.segments(place)[-MOST_SEGMENTS:] for place in (self.node.place, self.place))
        self.numbers[SHOWN], self.numbers[SEEN_SEGMENTS] = len(shown), len(seen)
        for index, (base, memory) in enumerate(shown):
            at = SHOWN + 1 + 2 * index
            self.numbers[at : at + 2] = base, base + memory.size
        for index, (base, memory) in enumerate(seen):
            at = SEEN_SEGMENTS + 1 + 3 * index
            self.numbers[at : at + 3] = base, base + memory.size, MPI.Get_address(memory)

    def mismatch(self, at: int, expected: int) -> Mismatch:
        """The error for the message whose flag is at `at`, where one of `expected` bytes was due."""
        kind, words = self.theirs[at] % LENGTHS, self.theirs[at + 1 : at + 1 + 2 * ADDRESSES].tolist()
        found = kind if kind <= INLINE else words[0] if kind == IN_CELL else sum(words[1 : 2 * (kind - IN_CELL) : 2])
        ranks = {place: rank for rank, place in self.node.places.items()}
        return mismatch(ranks[self.node.place], ranks[self.place], expected, found)

    def has_room(self) -> bool:
        """True if the slot and the eager buffer of the next message are free."""
        counts = self.counts
        if counts[SENT] - counts[ACKED] < CELLS:
            return True
        counts[ACKED] = self.theirs[self.their_ack]
        return counts[SENT] - counts[ACKED] < CELLS

    def enter(self, message: Any) -> None:
        """A message leaves if there is room and none before it waits for some; otherwise it queues."""
        if self.queue or not self.has_room():
            self.queue.append(message)
            self.node.backlog.add(self)
        else:
            message.leave()

    def flush(self) -> None:
        """Let leave what has queued."""
        queue = self.queue
        while queue and self.has_room():
            queue.popleft().leave()
        if not queue:
            self.node.backlog.discard(self)

    def left(self, message: Any) -> None:
        """Wait until a message that has queued is gone."""
        spins = self.spins
        while message in self.queue:
            self.node.flush()
            spins -= 1
            if spins < 0:
                self.node.yielding()

    def arrived(self, at: int, wanted: int) -> None:
        """Wait until the flag is set, while others' room is filled with what has queued for it."""
        theirs, spins, backlog = self.theirs, self.spins, self.node.backlog
        while theirs[at] < wanted:
            if backlog:
                self.node.flush()
            spins -= 1
            if spins < 0:
                self.node.yielding()

    def acknowledged(self, number: int) -> None:
        """Wait until the peer has taken the message."""
        theirs, at, spins, backlog = self.theirs, self.their_ack, self.spins, self.node.backlog
        acked = theirs[at]
        while acked < number:
            if backlog:
                self.node.flush()
            spins -= 1
            if spins < 0:
                self.node.yielding()
            acked = theirs[at]
        self.counts[ACKED] = acked

    def slot_out(self, slot: int, nbytes: int) -> int:
        """Offset of an outgoing message's data in this rank's memory."""
        return (self.outbox + slot * WORDS + 1) * 8 if nbytes <= INLINE else self.cells_out[slot]

    def holds(self, array: np.ndarray) -> bool:
        """True if the array is the incoming data of the first slot."""
        return bool(MPI.Get_address(array) == self.node.addresses[self.place] + self.slot_in(0, array.nbytes))

    def slot_in(self, slot: int, nbytes: int) -> int:
        """Offset of an incoming message's data in the peer's memory."""
        return (self.inbox + slot * WORDS + 1) * 8 if nbytes <= INLINE else self.cells_in[slot]
