"""Transport of device memory within a node, through mailboxes whose pages are pinned.

The bounce buffers of the mailboxes are the staging buffers of messages that fit them. A send copies from the device
into the next bounce buffer, and sets its flag when the copy has ended. A receive copies out of it, and acknowledges it
at the end of the copy. Longer messages are cut into parts for the larger `staging_chunks`, or for bounce buffers
without these. One part leaves its device while earlier parts enter another. Flags and labels have the engine's format,
so the peer's memory may be on the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.instructions import ADDRESSES, INLINE, KIND, RECEIVED, SENT, SLOTS, WORDS
from collectives.transport.gpu.device_copies import DeviceCopies
from collectives.transport.gpu.device_wire import DeviceWire, MessageParts
from collectives.transport.node.mailbox import MASK, MailboxEdge, NodeMemory, address_label, label
from collectives.transport.node.peer_watch import PeerWatch
from collectives.transport.node.staging_chunks import CHUNK, StagingChunks, part_size
from collectives.transport.waits import Pauses
from collectives.transport.wire import Iovec


class DeviceSend:
    """Send of device memory that fits a bounce buffer.

    `begin` starts its copy to one of the `slots`, `end` sets the flag.
    """

    done = True

    def __init__(
        self, edge: MailboxEdge, pieces: Sequence[Iovec], mark: int, copies: DeviceCopies, slots: Sequence[int]
    ) -> None:
        self._edge, self._pieces, self._mark, self._copies, self._slots = edge, list(pieces), mark, copies, slots
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._label = label(mark, self._nbytes)

    def begin(self, ahead: int) -> DeviceCopy | None:
        """Start to copy into the next slot. None if none is free. `ahead` sends have begun and not ended."""
        number = self.next_number()
        return None if number is None else DeviceCopy(self, number, self.copy(number))

    def next_number(self) -> int | None:
        """Number of the next message. None if its slot is not free."""
        edge = self._edge
        if not edge.has_room(min(SLOTS, len(self._slots))):
            return None
        edge.counts[SENT] = number = edge.counts[SENT] + 1
        return int(number)

    def slot(self, number: int) -> int:
        """Address of the slot of a message."""
        return self._slots[number % len(self._slots)]

    def copy(self, number: int) -> Any:
        """Start to copy the message. Return the event of the end."""
        return self._copies.to_host(self.slot(number), self._pieces)

    def end(self, number: int) -> Any:
        """Set the flag. None, or an event to wait for before it ends."""
        self.set_flag(number, self._label, *([self._nbytes] if self._nbytes > INLINE else []))

    def set_flag(self, number: int, label: int, *words: int) -> None:
        """Set the mailbox's flag of a message, after the words beside it."""
        edge = self._edge
        at = edge.outbox + (number & MASK) * WORDS
        for place, word in enumerate(words, at + 1):
            edge.mine[place] = word
        edge.node.fence()
        edge.mine[at] = number * KIND + label


class ChunkSend(DeviceSend):
    """Send of at most a chunk of device memory, through a chunk of this rank's."""

    def __init__(self, chunks: StagingChunks, *message: Any) -> None:
        super().__init__(*message)
        self._chunks, self._chunk = chunks, 0

    def next_number(self) -> int | None:
        edge = self._edge
        chunk = self._chunks.take(edge, self._copies) if edge.has_room(SLOTS) else None
        if chunk is None:
            return None
        self._chunk = chunk
        edge.counts[SENT] = number = edge.counts[SENT] + 1
        return int(number)

    def slot(self, _: int) -> int:
        return self._chunk

    def end(self, number: int) -> Any:
        self.set_flag(number, address_label(self._mark, 1), self._chunk, self._nbytes)


class DeviceReceive:
    """Receive of one bounce buffer or chunk into device memory. `begin` starts its copy, `end` acknowledges it."""

    done = True

    def __init__(
        self,
        edge: MailboxEdge,
        pieces: Sequence[Iovec],
        mark: int,
        copies: DeviceCopies,
        slots: Sequence[int],
        device: DeviceMemory,
        chunks: StagingChunks | None = None,
    ) -> None:
        self._edge, self._pieces, self._copies, self._slots = edge, list(pieces), copies, slots
        self._device, self._nbytes = device, sum(piece.nbytes for piece in pieces)
        self._label, self._address_label = label(mark, self._nbytes), address_label(mark)
        self._chunks = chunks
        self._host: np.ndarray | None = None

    def begin(self, ahead: int) -> DeviceCopy | None:
        """Start to copy the next message. None if it has not arrived. `ahead` receives have begun and not ended."""
        edge, number = self._edge, self.next_number(ahead)
        found = self.found(number)
        if found < 0:
            return None
        if self.is_expected(number):
            host = self._slots[number % len(self._slots)]
            return DeviceCopy(self, number, self._copies.to_device(self._pieces, host))
        at, addresses = edge.inbox + (number & MASK) * WORDS, found - self._address_label
        pieces = tuple(edge.theirs[at + 1 : at + 1 + 2 * addresses]) if 1 <= addresses <= ADDRESSES else ()
        if pieces and sum(pieces[1::2]) == self._nbytes:
            return DeviceCopy(self, number, self._copies.to_device(self._pieces, self.fetch(pieces)))
        if ahead:
            return None  # those before are acknowledged first
        raise edge.refuse(self._nbytes)

    def next_number(self, ahead: int) -> int:
        return int(self._edge.counts[RECEIVED] + 1 + ahead)

    def found(self, number: int) -> int:
        """Label in the mailbox of the message with a number. Negative if that has not arrived."""
        edge = self._edge
        at = edge.inbox + (number & MASK) * WORDS
        found = edge.theirs[at] - number * KIND
        if found >= 0:
            edge.node.fence()
            found = edge.theirs[at] - number * KIND
        return int(found)

    def is_expected(self, number: int) -> bool:
        """True if the message in the mailbox has this call and length, and is beside its flag or in a bounce buffer."""
        at = self._edge.inbox + (number & MASK) * WORDS
        is_long = self._nbytes > INLINE
        return self.found(number) == self._label and (not is_long or self._edge.theirs[at + 1] == self._nbytes)

    def fetch(self, pieces: tuple[int, ...]) -> int:
        """Local address of a message in a peer's memory: of its chunk, or of a copy read from the peer's process."""
        if self._chunks is not None and len(pieces) == 2:
            chunk = self._chunks.find(self._edge.place, *pieces, self._copies)
            if chunk is not None:
                return chunk
        if self._host is None:
            self._host = self._device.pinned(self._nbytes)
        self._edge.read(pieces, self._host)
        return MPI.Get_address(self._host)

    def end(self, number: int) -> Any:
        """Acknowledge the message. None, or an event to wait for before it ends."""
        edge = self._edge
        edge.node.fence()
        edge.counts[RECEIVED] = number
        edge.mine[edge.my_ack] = number


class DeviceCopy(NamedTuple):
    """A message whose copy was started: its number on the edge, and the event of its end."""

    message: DeviceSend | DeviceReceive
    number: int
    event: Any


class Lane:
    """Messages to, or from, one peer, in the order of their starts: those that wait, and those that are copied."""

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._waiting: deque[DeviceSend | DeviceReceive] = deque()
        self._begun: deque[DeviceCopy] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._begun)

    def add(self, message: DeviceSend | DeviceReceive) -> None:
        message.done = False
        self._waiting.append(message)

    def advance(self) -> None:
        """Begin and end messages as far as possible, in order."""
        self._begin()
        before = len(self._begun)
        while self._begun and self._begun[0].event.done:
            message, number, event = self._begun[0]
            self._copies.recycle(event)
            another = message.end(number)
            if another is not None:
                self._begun[0] = DeviceCopy(message, number, another)
                continue
            self._begun.popleft()
            message.done = True
        if len(self._begun) < before:
            self._begin()

    def _begin(self) -> None:
        while self._waiting:
            begun = self._waiting[0].begin(len(self._begun))
            if begun is None:
                break
            self._begun.append(begun)
            self._waiting.popleft()


class DeviceNodeTransport(DeviceWire):
    """Transport between devices of a node: one channel of its pinned mailboxes.

    `edges` and `mark`: see `NodeAwareTransport`. Both ends must cut messages by the same rule: to bounce buffers, or
    with `chunks` by `part_size`.
    """

    in_mailboxes = True

    def __init__(
        self,
        memory: NodeMemory,
        channel: int,
        edges: dict[int, MailboxEdge],
        mark: int,
        device: DeviceMemory,
        copies: DeviceCopies,
        chunks: StagingChunks | None = None,
    ) -> None:
        super().__init__()
        self._memory, self._channel, self._edges, self._mark = memory, channel, edges, mark
        self._device, self._copies, self._cell = device, copies, memory.cells[channel]
        self._chunks = chunks
        self._watch = PeerWatch({peer: int(edge.link["pid"][0]) for peer, edge in edges.items()})

    def _edge(self, peer: int) -> MailboxEdge:
        return self._edges[peer]

    def outgoing(self, peer: int, pieces: Sequence[Iovec]) -> MessageParts:
        parts = [self.bind_send(self._edge(peer), part) for part in self._cut(pieces)]
        return MessageParts(parts, self.lane(DeviceSend, peer))

    def incoming(self, peer: int, pieces: Sequence[Iovec]) -> MessageParts:
        parts = [self.bind_receive(self._edge(peer), part) for part in self._cut(pieces)]
        return MessageParts(parts, self.lane(DeviceReceive, peer))

    def lane(self, kind: type, peer: int) -> Lane:
        """Lane of the messages to a peer (`DeviceSend`) or from it (`DeviceReceive`)."""
        lane: Lane = self.lanes.setdefault((kind, peer), Lane(self._copies))
        return lane

    def bind_send(self, edge: MailboxEdge, pieces: Sequence[Iovec]) -> DeviceSend:
        """Bind a send of at most a bounce buffer or a chunk."""
        nbytes = sum(piece.nbytes for piece in pieces)
        if self._chunks is not None and nbytes > self._cell:
            return ChunkSend(self._chunks, edge, pieces, self._mark, self._copies, ())
        return DeviceSend(edge, pieces, self._mark, self._copies, edge.outgoing.addresses(nbytes))

    def bind_receive(self, edge: MailboxEdge, pieces: Sequence[Iovec]) -> DeviceReceive:
        """Bind a receive of at most a bounce buffer or a chunk."""
        nbytes = sum(piece.nbytes for piece in pieces)
        slots = edge.incoming.addresses(nbytes) if nbytes <= self._cell else ()
        return DeviceReceive(edge, pieces, self._mark, self._copies, slots, self._device, self._chunks)

    def _cut(self, pieces: Sequence[Iovec]) -> list[list[Iovec]]:
        """Cut a message into parts that fit a bounce buffer or a chunk.

        Programs bind no longer messages, see `split_size`.
        """
        parts: list[list[Iovec]] = [[]]
        room = cell = self._cell if self._chunks is None else CHUNK
        for address, nbytes in pieces:
            end = address + nbytes
            while end - address > room:
                parts[-1].append(Iovec(address, room))
                parts.append([])
                address, room = address + room, cell
            parts[-1].append(Iovec(address, end - address))
            room -= end - address
        return parts

    def split_size(self, peer: int, nbytes: int) -> int:
        if nbytes <= self._cell:
            return 0
        return self._cell if self._chunks is None else part_size(nbytes)

    def advance(self) -> None:
        super().advance()
        if self._watch.is_due:
            self._watch.check({peer for (_, peer), lane in self.lanes.items() if lane.is_busy})

    def yielding(self, pauses: Pauses) -> None:
        self._memory.yielding(pauses)

    def free(self) -> None:
        """Wait for the copies of a call that was aborted. The mailboxes are the node's, and stay."""
        if self.is_busy:
            self._copies.finish()
