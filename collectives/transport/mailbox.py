"""Mailboxes between the ranks of a node: message slots with flags in shared memory.

Every ordered pair of ranks has a mailbox of a few slots. To send, a rank fills the next slot and then sets the slot's
flag to the number of the message. The receiver polls the flag, reads the slot, and writes the number to its
acknowledgement, which frees the slot.

A flag also carries a label: the length of the message and a mark of the call that sent it. A message with another label
than expected belongs to another call, and the receiver raises `Mismatch`. Both ends compute the label when the message
is bound, so the check costs only the comparison of the flag.

Flags are 8-byte words that Python stores and loads whole. Processors of the x86 family keep stores in order and loads
in order, so the flag needs no fence there. On others a fence (`MPI.Win.Sync`) runs before a flag is set, after it was
found set, and before it is acknowledged.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.instructions import LINE, LINK, MOST_SEGMENTS, SLOTS
from collectives.errors import Mismatch, mismatch
from collectives.transport.copy_speed import MessageSpeed, copies_past_caches, measure
from collectives.transport.cross_memory import CrossMemoryAttach, permitted
from collectives.transport.machine import machine_name, usable_cores
from collectives.transport.reduced import reduced
from collectives.transport.shared_heap import SharedHeap, map_all
from collectives.transport.wire import cores_are_shared, pause, share_cores

SHORT, SHORT_PARTS = 1 << 10, 64
"""A short message, which has the buffer of its slot, is at most this long, and at most a cell divided by the second
number. Longer ones take less time in a cell, into which compiled code copies past the caches."""

SHORT_SPACING = 2
"""Distance of two short buffers, in their length: a processor that reads one fetches lines after its end, too, and the
sender would have to take these back."""

INLINE = 56
"""Bytes that fit beside a flag."""

WORDS = LINE // 8
MASK = SLOTS - 1
ADDRESSES = 3
"""Most (address, bytes) pairs in a slot."""

LENGTHS = 64
IN_CELL = INLINE + 1
"""A label is a mark times `LENGTHS`, plus the bytes of a message beside the flag, `IN_CELL` for a message in the cell,
whose length is the word after the flag, or `IN_CELL` plus the number of addresses; see `label`, `address_label`."""

SPREAD = 1 << 13
"""Bytes from which messages shorter than a cell use all of it in turn, for the same reason as all cells."""

MARKS = 1 << 12
"""Marks are below this number."""

KIND = LENGTHS * MARKS
"""Flags are the message's number times this, plus its label. Numbers have 45 bits: enough for a year of messages."""

CELL = 1 << 17
"""Most bytes of a cell, the eager buffer of a medium message."""

STREAMED, STREAMED_NEAR, STREAMED_BOTH_WAYS, STREAMED_REDUCED = 1 << 22, 1 << 20, 1 << 21, 1 << 23
"""Bytes of the longest messages that go through the cells in parts: one part is read while the next is written. Longer
ones are copied at once between the processes, if permitted (`joint_copy`): by system calls, but one copy instead of
two. The second number holds between cores that share a cache, the third where ranks send and receive at once, so that
each makes both copies; the fourth for messages that are reduced: by address the receiver alone would copy them, since
the sender cannot reduce."""

COPIED_WHOLE = 4
"""All limits, in cells, if copies cannot go past the caches; and the first one if ranks share cores. The others are one
cell then: the work of all copies counts, and by address there is one."""

ONE_COPY, ONE_COPY_REDUCED = 1 << 16, 1 << 20
"""Bytes of the longest messages that go through a cell, and of those that do in parts as they are reduced, where one
copy between the processes takes less time than two through a cell (`MessageSpeed.one_copy_pays`). Longer ones go by
address there."""

FAR_COPIED = 1 << 13
"""Bytes up to which messages are copied through cells between cores for which that is slow; see `copy_speed`."""

RENDEZVOUS_BYTES = 1 << 13
"""Bytes from which a message in shared memory is sent by its address, without a copy into the mailbox."""

CHANNELS = 32
"""Independent sets of mailboxes: the first for blocking calls, the next `NONBLOCKING` for non-blocking ones, the others
for persistent requests."""

NONBLOCKING = 4
"""Channels of non-blocking calls, which take them in turn."""

BUDGET, OTHER_BUDGET = 1 << 24, 1 << 26
"""Most bytes of cells per rank: for blocking calls, and for all other channels together. Memory of a cell is allocated
when it is first used."""

PROBE_EVERY = 64
"""Messages after which compiled code measures again which copies into cells are faster."""

SPINS = 4000
"""Polls of a flag before the core is yielded, if every rank has a core of its own."""

SENT, ACKED, RECEIVED = (list(LINK.names or ()).index(name) for name in ("sent", "acknowledged", "received"))
"""Words of a link that Python counts messages in."""


def label(mark: int, nbytes: int) -> int:
    """Return the label of a message of `nbytes` bytes beside its flag or in a cell; `mark` is that of the call."""
    return mark * LENGTHS + min(nbytes, IN_CELL)


def address_label(mark: int, addresses: int = 0) -> int:
    """Return the label of a message that is sent by this many addresses."""
    return mark * LENGTHS + IN_CELL + addresses


class SlotMemory(NamedTuple):
    """Memory for the data of eager messages in one direction: a rank's mailboxes, and byte offsets in them.

    `inline` is that of the data beside the first flag, `short` that of the first buffer of `short_bytes`, and `cell`
    that of the first one of `cell_bytes`. Messages of a length use places 0, 1, 2 ... up to `period` in turn.
    """

    memory: np.ndarray
    inline: int
    short: int
    short_bytes: int
    cell: int
    cell_bytes: int

    def period(self, nbytes: int) -> int:
        """Number of places of messages of this length: the memory of one is used again so many messages later."""
        fit = nbytes and self.cell_bytes // (-(-nbytes // LINE) * LINE)
        return SLOTS * fit if nbytes >= SPREAD and fit else SLOTS

    def start(self, place: int, nbytes: int) -> int:
        """Byte offset of a message's place."""
        turn, slot = divmod(place, SLOTS)
        if nbytes <= INLINE:
            return self.inline + slot * LINE
        if nbytes <= self.short_bytes:
            return self.short + slot * SHORT_SPACING * self.short_bytes
        return self.cell + slot * self.cell_bytes + turn * (-(-nbytes // LINE) * LINE)

    def parts(self, place: int, lengths: Sequence[int]) -> list[np.ndarray]:
        """Memory of a message at most as long as a cell, cut into parts of these lengths."""
        start = self.start(place, sum(lengths))
        bounds = pairwise(accumulate(lengths, initial=start))
        return [self.memory[low:high] for low, high in bounds]

    def addresses(self, nbytes: int) -> list[int]:
        """Addresses of all places of messages of this length."""
        first = MPI.Get_address(self.memory)
        return [first + self.start(place, nbytes) for place in range(self.period(nbytes))]


class NodeMemory:
    """Mailboxes of the ranks of a node, in shared memory. `free` also frees `comm`, the communicator of the node.

    Creation is collective over `everyone`, all ranks of all nodes; OSError on all of them if some may not map their
    neighbours' memory. Lists are indexed by rank on the node; `places` maps ranks in `everyone` to it.

    Attributes
    ----------
    bytes, words, addresses : mailboxes that each rank writes, as bytes, as 8-byte words, and their addresses here
    fence : None on processors that keep stores and loads in order
    reads, writes : all ranks may read, and write, each other's memory
    streamed, streamed_both_ways, streamed_reduced : bytes up to which messages are cut to go through cells, equal on
        all ranks
    far : True if copies into cells take this rank long
    part : most bytes of a part of such a message, equal on all ranks
    copied, copied_compiled : bytes up to which Python, or compiled, code copies a message that may go by address
    speed : of messages on the slowest node, equal on all ranks
    on_one_machine : all ranks of all nodes are on this machine
    cores, crowded, shares_cores : cores that the ranks of the machine may use; if there are fewer than ranks of this
        communicator; or of one that any of them has made before
    """

    def __init__(self, comm: MPI.Intracomm, everyone: MPI.Intracomm, heap: SharedHeap) -> None:
        self.comm, self.heap = comm, heap
        self.place, self.size = self.comm.Get_rank(), self.comm.Get_size()
        neighbours = self.comm.allgather((everyone.Get_rank(), os.getpid()))
        self.places = {rank: place for place, (rank, _) in enumerate(neighbours)}
        self.readers = [CrossMemoryAttach(pid) for _, pid in neighbours]
        mine = machine_name(), usable_cores(), cores_are_shared()
        machines = everyone.allgather(mine)  # with other, emulated nodes
        here = [(cores, shared) for name, cores, shared in machines if name == machine_name()]
        self.cores = len(set[int]().union(*(cores for cores, _ in here)))
        self.crowded, self.on_one_machine = self.cores < len(here), len(here) == len(machines)
        self.shares_cores = self.crowded or any(shared for _, shared in here)
        self.spins = 0 if self.shares_cores else SPINS
        if self.shares_cores:
            share_cores()
        self.cells = [min(CELL, max(256, BUDGET // (SLOTS * self.size) // LINE * LINE))]
        self.cells += [max(256, OTHER_BUDGET // (CHANNELS * SLOTS * self.size) // LINE * LINE)] * (CHANNELS - 1)
        self.short = [min(SHORT, cell // SHORT_PARTS // LINE * LINE) for cell in self.cells]
        self.box = LINE * (SLOTS + 2)  # flags, acknowledgements, an offer
        offsets = [0]
        for cell, short in zip(self.cells, self.short, strict=True):
            offsets.append(offsets[-1] + self.size * (self.box + SLOTS * cell + SLOTS * SHORT_SPACING * short))
        self.offsets = offsets
        self.bytes = map_all(self.comm, offsets[-1])
        if not reduced(everyone, bool(self.bytes), MPI.LAND):
            raise OSError("the ranks of a node may not map each other's memory")
        self._window: MPI.Win | None = None
        self.fence: Callable[[], object] | None = None
        if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
            self._window = MPI.Win.Allocate_shared(8, 1, comm=MPI.COMM_SELF)  # only for its Sync
            self._window.Lock_all(MPI.MODE_NOCHECK)
            self.fence = self._window.Sync
        self.addresses = [MPI.Get_address(memory) for memory in self.bytes]
        self.words = [memory.data.cast("B").cast("q") for memory in self.bytes]
        for channel in range(CHANNELS):  # flags and acknowledgements only: pages of cells are allocated on first use
            start = offsets[channel]
            self.bytes[self.place][start : start + self.size * self.box] = 0
        self.reads, self.writes = self._reads_and_writes()
        self.far, speed = False, MessageSpeed()
        if self.size > 1 and not self.shares_cores:
            self.far, speed = measure(self, SLOTS * self.cells[0])
        self.speed = speed.slowest(everyone)
        far = bool(reduced(self.comm, self.far, MPI.LOR))
        one_copy = self.speed.one_copy_pays and not far
        self.part = ONE_COPY if one_copy else CELL
        self.copied = FAR_COPIED if self.far else self.part
        self.copied_compiled = CELL if self.far and copies_past_caches() else self.copied
        self.streamed, self.streamed_both_ways, self.streamed_reduced = self._streamed_limits(far, one_copy)

    def _streamed_limits(self, far: bool, one_copy: bool) -> tuple[int, int, int]:
        """Return `streamed`, `streamed_both_ways` and `streamed_reduced`. Collective."""
        if reduced(self.comm, self.shares_cores, MPI.LOR):
            return self.cells[0] * COPIED_WHOLE, self.cells[0], self.cells[0]
        if one_copy:
            return 0, 0, ONE_COPY_REDUCED
        if not reduced(self.comm, copies_past_caches(), MPI.LAND):
            return (COPIED_WHOLE * self.cells[0],) * 3
        return STREAMED if far else STREAMED_NEAR, STREAMED_BOTH_WAYS, STREAMED_REDUCED

    def _reads_and_writes(self) -> tuple[bool, bool]:
        """If all ranks of the node may read, and may write, each other's memory (cross-memory attach). Collective."""
        mine, found = np.array([self.place + 1, 0], np.int64), np.zeros(1, np.int64)
        addresses = self.comm.allgather(MPI.Get_address(mine))
        peer, here = (self.place + 1) % self.size, MPI.Get_address(found)
        reads = permitted(self.readers[peer].read, here, addresses[peer], 8) and found[0] == peer + 1
        writes = permitted(self.readers[peer].write, here, addresses[peer] + 8, 8)
        both = reduced(self.comm, reads | (reads and writes) << 1, MPI.BAND)  # also a barrier: all flags are zero
        intact = reduced(self.comm, int(mine[1]) == self.place + 1, MPI.LAND)  # what the neighbour read and wrote back
        return bool(both & 1), bool(both & 2 and intact)

    def gone_at(self, place: int) -> int:
        """Word of a rank's mailboxes for the rank at `place` that is 1 once it makes no more calls."""
        return (self.offsets[0] + place * self.box) // 8 + SLOTS * WORDS + 1

    def leave(self, edges: dict[int, dict[int, MailboxEdge]]) -> Mismatch | None:
        """Mark this rank as one that makes no more calls; return the error of an unread message, if there is one.

        Of two ranks that have left, the second one finds every message that either has not read: no rank waits.
        """
        peers = {rank: place for rank, place in self.places.items() if place != self.place}
        for place in peers.values():
            self.words[self.place][self.gone_at(place)] = 1
        if self.fence is not None:
            self.fence()
        for channel, (rank, place) in product(range(CHANNELS), peers.items()):
            edge = edges.get(channel, {}).get(rank)
            if edge is None and not self._has_first(channel, place):
                continue
            edge = edge or MailboxEdge(self, channel, place)
            if edge.has_unread:
                return edge.refuse(None)
            if edge.is_left:
                text = f"rank {rank} has left a message of rank {self._rank_at(self.place)} unread"
                return Mismatch(MPI.ERR_TRUNCATE, f"{text}: the two ranks call different collectives")
        return None

    def _has_first(self, channel: int, place: int) -> bool:
        """True if the first message of a rank to this one on a channel has arrived."""
        flag = (self.offsets[channel] + self.place * self.box) // 8 + (1 & MASK) * WORDS
        return bool(self.words[place][flag] >= KIND)

    def _rank_at(self, place: int) -> int:
        return int(next(rank for rank, other in self.places.items() if other == place))

    def yielding(self, turn: int = 0) -> None:
        """Pause after `turn` pauses in this wait; first drive MPI progress, since peers may wait for our sends."""
        self.comm.Iprobe()
        pause(turn)

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Poll until `done` returns True, then yield the core between polls."""
        spins = self.spins
        while not done():
            spins -= 1
            if spins < 0:
                self.yielding(-spins)

    def free(self) -> None:
        """Free the mailboxes and the node's communicator without synchronising with other ranks."""
        for words in self.words:
            words.release()
        self.words, self.bytes = [], []
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()
        self.comm.Free()


class MailboxEdge:
    """Link to the rank with node rank `peer` on one channel: mailbox offsets and message counts of both directions."""

    __slots__ = (
        "counts", "inbox", "incoming", "link", "mine", "my_ack", "node", "outbox", "outgoing", "place", "their_ack",
        "theirs",
    )  # fmt: skip

    def __init__(self, node: NodeMemory, channel: int, peer: int) -> None:
        place, self.node = node.place, node
        base, box, cell = node.offsets[channel], node.box, node.cells[channel]
        cells = base + node.size * box
        self.mine, self.theirs = node.words[place], node.words[peer]
        self.outbox, self.inbox = (base + peer * box) // 8, (base + place * box) // 8
        self.my_ack, self.their_ack = self.outbox + SLOTS * WORDS, self.inbox + SLOTS * WORDS
        cells_out, cells_in = (cells + rank * SLOTS * cell for rank in (peer, place))
        short, shorts = node.short[channel], cells + node.size * SLOTS * cell
        short_out, short_in = (shorts + rank * SLOTS * SHORT_SPACING * short for rank in (peer, place))
        self.outgoing = SlotMemory(node.bytes[place], self.outbox * 8 + 8, short_out, short, cells_out, cell)
        self.incoming = SlotMemory(node.bytes[peer], self.inbox * 8 + 8, short_in, short, cells_in, cell)
        self.place = peer
        self.link = np.zeros(1, LINK)
        self.counts = self.link.view(np.int64).data  # the same memory, which Python reads faster
        here, there = node.addresses[place], node.addresses[peer]
        chooses = copies_past_caches() and not node.shares_cores
        values = {
            "pid": node.readers[peer].pid,
            "outbox": here + self.outbox * 8,
            "inbox": there + self.inbox * 8,
            "my_ack": here + self.my_ack * 8,
            "their_ack": there + self.their_ack * 8,
            "cell_bytes": cell,
            "copied_bytes": min(cell, node.copied_compiled),
            "short_bytes": short,
            "short_out": here + short_out,
            "short_in": there + short_in,
            "cells_out": here + cells_out,
            "cells_in": there + cells_in,
            "my_offer": here + self.my_ack * 8 + LINE,
            "their_offer": there + self.their_ack * 8 + LINE,
            "writes": node.writes and not node.shares_cores,
            "past_caches": chooses and node.far,
            "until_probe": PROBE_EVERY if chooses else -1,
        }
        for name, value in values.items():
            self.link[name] = value
        self.update_segments()

    def update_segments(self) -> None:
        """Update in `link` the newest shared-memory segments that the two ranks have mapped of each other."""
        ours, theirs = (self.node.heap.segments(place)[-MOST_SEGMENTS:] for place in (self.node.place, self.place))
        link = self.link[0]
        link["own_segments"], link["peer_segments"] = len(ours), len(theirs)
        for segment, (base, memory) in zip(link["own"], ours):
            segment["start"], segment["end"] = base, base + memory.size
        for segment, (base, memory) in zip(link["theirs"], theirs):
            segment["start"], segment["end"] = base, base + memory.size
            segment["here"] = MPI.Get_address(memory)

    @property
    def has_unread(self) -> bool:
        """True if a message of the peer has arrived."""
        number = self.counts[RECEIVED] + 1
        return bool(self.theirs[self.inbox + (number & MASK) * WORDS] >= number * KIND)

    @property
    def is_left(self) -> bool:
        """True if the peer has freed the communicator and left a message of this rank unread."""
        is_gone = self.theirs[self.node.gone_at(self.node.place)] != 0  # before the acknowledgements of its last call
        return is_gone and not self.is_acknowledged(self.counts[SENT])

    def refuse(self, expected: int | None) -> Mismatch:
        """Acknowledge the next message, so that its sender continues, and return the error: not of `expected` bytes."""
        number = self.counts[RECEIVED] = self.counts[RECEIVED] + 1
        at = self.inbox + (number & MASK) * WORDS
        kind, words = self.theirs[at] % LENGTHS, self.theirs[at + 1 : at + 1 + 2 * ADDRESSES].tolist()
        self.mine[self.my_ack] = number
        found = kind if kind <= INLINE else words[0] if kind == IN_CELL else sum(words[1 : 2 * (kind - IN_CELL) : 2])
        return mismatch(self.node._rank_at(self.node.place), self.node._rank_at(self.place), expected, found)

    def has_room(self, slots: int) -> bool:
        """True if the next outgoing message, which may use that many slots in turn, finds its slot free."""
        counts = self.counts
        counts[ACKED] = self.theirs[self.their_ack]
        return counts[SENT] - counts[ACKED] < slots

    def is_acknowledged(self, number: int) -> bool:
        """True if the peer has acknowledged message `number`."""
        counts = self.counts
        if counts[ACKED] < number:
            counts[ACKED] = self.theirs[self.their_ack]
        return counts[ACKED] >= number
