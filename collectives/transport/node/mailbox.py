"""Mailboxes between the ranks of a node: message slots with flags in shared memory.

Every ordered pair of ranks has a mailbox of a few slots. To send, a rank fills the next slot and then sets the slot's
flag to the number of the message. The receiver polls the flag, reads the slot, and writes the number to its
acknowledgement. This frees the slot.

A flag also carries a label: the length of the message and a mark of the call that sent it. A message with another
label than expected belongs to another call, and the receiver raises `Mismatch`. Both ends compute the label when the
message is bound, so the check costs only the comparison of the flag.

Flags are 8-byte words that Python stores and loads whole. Processors of the x86 family keep stores in order and loads
in order, so the flag needs no fence. On other processors a fence (`MPI.Win.Sync`) runs before a flag is set, after it
was found set, and before it is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import available
from collectives.engine.fence import memory_fence
from collectives.engine.instructions import (
    ACKNOWLEDGED,
    ADDRESSES,
    INLINE,
    KIND,
    LABELS,
    LINE,
    LINK,
    MOST_SEGMENTS,
    RECEIVED,
    SENT,
    SHORT_SPACING,
    SLOTS,
    WORDS,
)
from collectives.errors import Mismatch, mismatch
from collectives.transport.memory.copy_speed import MessageSpeed, copies_past_caches
from collectives.transport.memory.shared_heap import SharedHeap
from collectives.transport.memory.shared_node import NodeRange
from collectives.transport.mpi.reduced import gathered
from collectives.transport.node.mailbox_layout import (
    CELL,
    FIRST_CHANNELS,
    ChannelMemory,
    Layout,
    SlotMemory,
    head_bytes,
    mailbox_bytes,
)
from collectives.transport.node.placement import NodePlacement
from collectives.transport.waits import Others, Pauses, cores_are_shared, share_cores

MASK = SLOTS - 1

IN_CELL = INLINE + 1
"""A label is a mark times `LABELS`, plus a code.

The code is the number of bytes of a message beside the flag, `IN_CELL` for a message in the bounce buffer (the word
after the flag has its length), or `IN_CELL` plus the number of addresses. See `label`, `address_label`.
"""

MARKS = KIND // LABELS
"""Marks are below this number."""

STREAMED, STREAMED_NEAR, STREAMED_BOTH_WAYS, STREAMED_REDUCED = 1 << 22, 1 << 20, 1 << 21, 1 << 23
"""Bytes of the longest messages that go through the bounce buffers in parts: one part is read while the next is
written. Longer ones are copied at once between the processes, if permitted (`joint_copy`): by system calls, but one
copy instead of two. The second number holds between cores that share a cache, the third where ranks send and receive
at once, so that each makes both copies. The fourth for messages that are reduced: with cross-memory reads the receiver
alone would copy them, since the sender cannot reduce."""

COPIED_WHOLE = 4
"""All limits, in bounce buffers, if copies cannot be non-temporal, and the first limit if ranks share cores.

The other limits are then one bounce buffer: the work of all copies counts, and a cross-memory read is one copy.
"""

ONE_COPY, ONE_COPY_REDUCED = 1 << 16, 1 << 20
"""Bytes of the longest messages that go through a bounce buffer, whole and in parts as they are reduced.

They hold where one copy between the processes takes less time than two (`MessageSpeed.one_copy_pays`). Longer messages
use cross-memory reads.
"""

FAR_COPIED = 1 << 13
"""Bytes up to which messages are copied through bounce buffers between cores where that is slow. See `copy_speed`."""

RENDEZVOUS_BYTES = 1 << 13
"""Bytes from which a message in shared memory is sent by its address, without a copy into the mailbox."""

PROBE_EVERY = 64
"""Messages after which compiled code measures again which copies into bounce buffers are faster."""

SPINS = 4000
"""Polls of a flag before the core is yielded, if every rank has a core of its own."""


def mark_of(call: int, nbytes: int) -> int:
    """Mark of a call of this many bytes. `call` is the mark of everything else that must be equal on all ranks."""
    return (call + ((nbytes * 2654435761 & 0xFFFFFFFF) >> 20)) % MARKS  # Knuth's multiplicative hash


def label(mark: int, nbytes: int) -> int:
    """Return the label of a message of `nbytes` bytes beside its flag or in a bounce buffer. `mark` is the call's."""
    return mark * LABELS + min(nbytes, IN_CELL)


def address_label(mark: int, addresses: int = 0) -> int:
    """Return the label of a message that is sent by this many addresses."""
    return mark * LABELS + IN_CELL + addresses


class NodeMemory:
    """Mailboxes of a communicator's ranks of one node, in ranges of their `SharedNode`. Made by `open_mailboxes`.

    Lists are indexed by rank on the node. `places` maps ranks in `comm` to ranks on the node.

    Attributes
    ----------
    channels : memory of every channel that has been used
    fence : orders loads and stores before it and after it
    reads, writes : all ranks may read, and write, each other's memory
    streamed, streamed_both_ways, streamed_reduced : bytes up to which messages are cut to go through bounce buffers,
        equal on all ranks
    far : True if this rank's copies into bounce buffers are slow
    part : most bytes of a part of such a message, equal on all ranks
    speed : of messages on the slowest node, equal on all ranks. Zeros where ranks share cores
    copied, copied_compiled : bytes up to which Python, or compiled, code copies a message that a cross-memory read
    could transfer on_one_machine : all ranks of all nodes are on this machine cores, crowded, shares_cores : cores
    that the ranks of the machine may use, if less than the ranks of this
        communicator, or of an earlier one of any rank
    """

    def __init__(
        self, comm: MPI.Intracomm, placement: NodePlacement, memory: NodeRange, speed: MessageSpeed, shares_cores: bool
    ) -> None:
        shared, places = placement.shared, placement.neighbours
        assert shared is not None, "mailboxes are in the memory of a node"
        self.comm, self._shared, self._shared_places, self._ranges = comm, shared, places, [memory]
        self.places = {rank: place for place, rank in enumerate(places)}
        self.place, self.size = self.places[comm.Get_rank()], len(places)
        self.readers = [shared.readers[place] for place in places.values()]
        self.cores, self.crowded = placement.cores, placement.crowded
        self.on_one_machine = len(placement.usable) == placement.size
        self.shares_cores, self.spins = shares_cores, 0 if shares_cores else SPINS
        self._layout = Layout(self.size, memory.halvings)
        self.cells, self.short, self.box = self._layout.cells, self._layout.short, self._layout.box
        self.channels: dict[int, ChannelMemory] = {}
        self._add(FIRST_CHANNELS, memory, head_bytes(self.size))
        self.fence = memory_fence()
        self.reads, self.writes, self.far = shared.reads, shared.writes, shared.far
        self.speed, one_copy = speed, speed.one_copy_pays and not shared.any_far
        self.part = ONE_COPY if one_copy else CELL
        self.copied = FAR_COPIED if self.far else self.part
        self.copied_compiled = CELL if self.far and copies_past_caches() else self.copied
        self.streamed, self.streamed_both_ways, self.streamed_reduced = self._streamed_limits(one_copy)
        self.heap = SharedHeap(comm, list(places))

    def _streamed_limits(self, one_copy: bool) -> tuple[int, int, int]:
        """Return `streamed`, `streamed_both_ways` and `streamed_reduced`, equal on all ranks."""
        if self.shares_cores:
            return self.cells[0] * COPIED_WHOLE, self.cells[0], self.cells[0]
        if one_copy:
            return 0, 0, ONE_COPY_REDUCED
        if not self._shared.past_caches:
            return (COPIED_WHOLE * self.cells[0],) * 3
        return STREAMED if self._shared.any_far else STREAMED_NEAR, STREAMED_BOTH_WAYS, STREAMED_REDUCED

    def _add(self, channels: Sequence[int], memory: NodeRange, head: int) -> None:
        words = [view.data.cast("B").cast("q") for view in memory.views]
        starts, _ = self._layout.starts(channels, head)
        for channel, (flags, cells) in zip(channels, starts, strict=True):
            self.channels[channel] = ChannelMemory(memory.views, words, flags, cells)

    def add_channel(self, channel: int) -> bool:
        """Allocate the memory of a channel. False on all ranks if one of them cannot. Collective over `comm`."""
        halvings = self._ranges[0].halvings
        _, nbytes = self._layout.starts([channel], 0)
        memory, _ = self._shared.allocate(self.comm, self._shared_places, lambda _: nbytes, halvings)
        if memory is not None:
            self._ranges.append(memory)
            self._add([channel], memory, 0)
        return memory is not None

    def ranges(self) -> list[list[np.ndarray]]:
        """Memory of all mailboxes, by range and rank on the node."""
        return [memory.views for memory in self._ranges]

    def gone_at(self, place: int) -> int:
        """Word of a rank's mailboxes for the rank at `place` that is 1 once it makes no more calls."""
        return (self.channels[0].flags + place * self.box) // 8 + SLOTS * WORDS + 1

    def leave(self, edges: dict[int, dict[int, MailboxEdge]]) -> Mismatch | None:
        """Mark this rank as one that makes no more calls. Return the error of an unread message, if there is one.

        Of two ranks that have left, the second one finds every message that either has not read: no rank waits.
        """
        peers = {rank: place for rank, place in self.places.items() if place != self.place}
        for place in peers.values():
            self.channels[0].words[self.place][self.gone_at(place)] = 1
        # marks are visible before messages are looked at: of two leaving ranks one sees the other's
        self.fence()
        for channel, (rank, place) in product(self.channels, peers.items()):
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
        memory = self.channels[channel]
        flag = (memory.flags + self.place * self.box) // 8 + (1 & MASK) * WORDS
        return bool(memory.words[place][flag] >= KIND)

    def _rank_at(self, place: int) -> int:
        return int(next(rank for rank, other in self.places.items() if other == place))

    def yielding(self, pauses: Pauses) -> None:
        """Pause in a wait. First drive MPI progress, since peers may wait for our sends."""
        self.comm.Iprobe()
        pauses.pause()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Poll until `done` returns True, then yield the core between polls."""
        for _ in range(self.spins):
            if done():
                return
        pauses = Pauses(Others("a call on GPUs"))
        while not done():
            self.yielding(pauses)

    def free(self, is_broken: bool = False) -> None:
        """Free the mailboxes without synchronising with other ranks.

        No other communicator gets the memory if a call `is_broken`: code that it has left may still use it.
        """
        self.heap.free()
        if not is_broken:
            self.fence()
            for view in self._ranges[0].views:  # the last access to memory of others
                view[: 8 * self.size].view(np.int64)[self.place] = 1
            self._shared.retire(self._ranges[0].views[self.place][: 8 * self.size].view(np.int64), self._ranges)
        for words in {id(channel.words): channel.words for channel in self.channels.values()}.values():
            for each in words:
                each.release()
        self.channels, self._ranges = {}, []
        del self._shared  # its memory goes with the last communicator


class Opened(NamedTuple):
    """Result of `open_mailboxes`: the memory, True if all ranks gave `trait`, and the number that rank 0 gave."""

    node: NodeMemory | None
    all_have_trait: bool
    number: int


def open_mailboxes(comm: MPI.Intracomm, placement: NodePlacement, trait: bool, number: int) -> Opened:
    """Allocate the mailboxes of a communicator. None on all ranks without memory of nodes. Collective over `comm`."""
    shared, places = placement.shared, placement.neighbours
    if shared is None:
        traits = gathered(comm, trait | number << 2)
        return Opened(None, all(one & 1 for one in traits), traits[0] >> 2)
    mine = trait | (placement.crowded or cores_are_shared()) << 1 | number << 2  # one exchange for all three
    memory, traits = shared.allocate(comm, places, partial(mailbox_bytes, len(places)), traits=mine)
    shares_cores = any(traits[rank] & 2 for rank in placement.usable)
    if shares_cores:
        share_cores()
    node = None
    if memory is not None:
        speed = MessageSpeed() if all(one & 2 for one in traits) else placement.speed
        node = NodeMemory(comm, placement, memory, speed, shares_cores)
    return Opened(node, all(one & 1 for one in traits), traits[0] >> 2)


class MailboxEdge:
    """Link to the rank with node rank `peer` on one channel: mailbox offsets and message counts of both directions."""

    __slots__ = (
        "counts", "inbox", "incoming", "link", "mine", "my_ack", "node", "outbox", "outgoing", "place", "their_ack",
        "theirs",
    )  # fmt: skip

    def __init__(self, node: NodeMemory, channel: int, peer: int) -> None:
        place, self.node = node.place, node
        memory, box, cell = node.channels[channel], node.box, node.cells[channel]
        base, cells = memory.flags, memory.cells
        self.mine, self.theirs = memory.words[place], memory.words[peer]
        self.outbox, self.inbox = (base + peer * box) // 8, (base + place * box) // 8
        self.my_ack, self.their_ack = self.outbox + SLOTS * WORDS, self.inbox + SLOTS * WORDS
        cells_out, cells_in = (cells + rank * SLOTS * cell for rank in (peer, place))
        short, shorts = node.short[channel], cells + node.size * SLOTS * cell
        short_out, short_in = (shorts + rank * SLOTS * SHORT_SPACING * short for rank in (peer, place))
        self.outgoing = SlotMemory(memory.memory[place], self.outbox * 8 + 8, short_out, short, cells_out, cell)
        self.incoming = SlotMemory(memory.memory[peer], self.inbox * 8 + 8, short_in, short, cells_in, cell)
        self.place = peer
        self.link = np.zeros(1, LINK)
        self.counts = self.link.view(np.int64).data  # the same memory. Python reads it faster
        here, there = (MPI.Get_address(memory.memory[rank]) for rank in (place, peer))
        chooses = copies_past_caches() and not node.shares_cores
        values = {
            "pid": node.readers[peer].pid,
            "outbox": here + self.outbox * 8,
            "inbox": there + self.inbox * 8,
            "my_ack": here + self.my_ack * 8,
            "their_ack": there + self.their_ack * 8,
            "cell_bytes": cell,
            "copied_bytes": min(cell, node.copied_compiled if available() else node.copied),
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

    @property
    def rank(self) -> int:
        """Rank of the peer in the communicator."""
        return self.node._rank_at(self.place)

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
        words, gone = self.node.channels[0].words[self.place], self.node.gone_at(self.node.place)
        is_gone = words[gone] != 0  # before the acknowledgements of its last call
        return is_gone and not self.is_acknowledged(self.counts[SENT])

    def refuse(self, expected: int | None) -> Mismatch:
        """Acknowledge the next message, so that its sender continues, and return the error: not of `expected` bytes."""
        number = self.counts[RECEIVED] = self.counts[RECEIVED] + 1
        at = self.inbox + (number & MASK) * WORDS
        kind, words = self.theirs[at] % LABELS, self.theirs[at + 1 : at + 1 + 2 * ADDRESSES].tolist()
        self.mine[self.my_ack] = number
        found = kind if kind <= INLINE else words[0] if kind == IN_CELL else sum(words[1 : 2 * (kind - IN_CELL) : 2])
        return mismatch(self.node._rank_at(self.node.place), self.rank, expected, found)

    def read(self, pieces: Sequence[int], into: np.ndarray) -> None:
        """Read a message that the peer has sent by (address, bytes, address, bytes ...) into these bytes."""
        start = 0
        for address, nbytes in zip(pieces[::2], pieces[1::2]):
            part = into[start : start + nbytes]
            shared = self.node.heap.peer_view(self.place, address, nbytes)
            if shared is not None:
                part[...] = shared
            else:
                self.node.readers[self.place].read(MPI.Get_address(part), address, nbytes)
            start += nbytes

    def has_room(self, slots: int) -> bool:
        """True if the next outgoing message finds its slot free. It uses one of `slots` slots in turn."""
        counts = self.counts
        counts[ACKNOWLEDGED] = self.theirs[self.their_ack]
        return counts[SENT] - counts[ACKNOWLEDGED] < slots

    def is_acknowledged(self, number: int) -> bool:
        """True if the peer has acknowledged message `number`."""
        counts = self.counts
        if counts[ACKNOWLEDGED] < number:
            counts[ACKNOWLEDGED] = self.theirs[self.their_ack]
        return counts[ACKNOWLEDGED] >= number
