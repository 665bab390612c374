"""Transport of device memory within a node, through mailboxes whose pages are pinned.

The cells of the mailboxes are the staging buffers. A send copies from the device into the next cell, and sets its flag
when the copy has ended; a receive copies out of the cell, and acknowledges it when that has ended. Long messages are
cut to the length of a cell, and there are two cells each way: one part leaves its device while the part before enters
another. Flags and labels are those of `shm_messages`, so the peer's memory may be on the host.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.buffers.staging import DeviceMemory
from collectives.transport.device_copies import DeviceCopies
from collectives.transport.mailbox import (
    ADDRESSES,
    INLINE,
    KIND,
    MASK,
    RECEIVED,
    SENT,
    WORDS,
    MailboxEdge,
    NodeMemory,
    address_label,
    label,
)
from collectives.transport.shm_messages import RendezvousRead
from collectives.transport.wire import Iovec, Wire
from collectives.types import Wait


class DeviceSend:
    """Send of at most a cell of device memory; `begin` starts its copy, `end` sets the flag."""

    done = True

    def __init__(self, edge: MailboxEdge, pieces: Sequence[Iovec], mark: int, copies: DeviceCopies) -> None:
        self._edge, self._pieces, self._copies = edge, list(pieces), copies
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._label = label(mark, self._nbytes)
        self._slots = [int(part.ctypes.data) for (part,) in edge.outgoing.parts([self._nbytes])]

    def begin(self, ahead: int) -> _Copy | None:
        """Start to copy into the next slot; None if none is free. `ahead` sends have begun and not ended."""
        edge = self._edge
        if not edge.has_room(len(self._slots)):
            return None
        edge.counts[SENT] = number = edge.counts[SENT] + 1
        host = self._slots[(number & MASK) % len(self._slots)]
        return _Copy(self, number, self._copies.to_host(host, self._pieces))

    def end(self, number: int) -> None:
        edge = self._edge
        at = edge.outbox + (number & MASK) * WORDS
        if self._nbytes > INLINE:
            edge.mine[at + 1] = self._nbytes
        if edge.node.fence is not None:
            edge.node.fence()
        edge.mine[at] = number * KIND + self._label


class DeviceReceive:
    """Receive of at most a cell into device memory; `begin` starts its copy, `end` acknowledges it."""

    done = True

    def __init__(
        self, edge: MailboxEdge, pieces: Sequence[Iovec], mark: int, copies: DeviceCopies, device: DeviceMemory
    ) -> None:
        self._edge, self._pieces, self._copies, self._device = edge, list(pieces), copies, device
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._label, self._address_label = label(mark, self._nbytes), address_label(mark)
        self._slots = [int(part.ctypes.data) for (part,) in edge.incoming.parts([self._nbytes])]
        self._host: np.ndarray | None = None
        self._read: RendezvousRead | None = None

    def begin(self, ahead: int) -> _Copy | None:
        """Start to copy the next message; None if it has not arrived. `ahead` receives have begun and not ended."""
        edge = self._edge
        number = edge.counts[RECEIVED] + 1 + ahead
        at = edge.inbox + (number & MASK) * WORDS
        found = edge.theirs[at] - number * KIND
        if found < 0:
            return None
        if edge.node.fence is not None:
            edge.node.fence()
            found = edge.theirs[at] - number * KIND
        if found == self._label and (self._nbytes <= INLINE or edge.theirs[at + 1] == self._nbytes):
            host = self._slots[(number & MASK) % len(self._slots)]
            return _Copy(self, number, self._copies.to_device(self._pieces, host))
        addresses = found - self._address_label
        pieces = tuple(edge.theirs[at + 1 : at + 1 + 2 * addresses]) if 1 <= addresses <= ADDRESSES else ()
        if pieces and sum(pieces[1::2]) == self._nbytes:
            return _Copy(self, number, self._copies.to_device(self._pieces, self._fetch(pieces)))
        if ahead:
            return None  # those before are acknowledged first
        raise edge.refuse(self._nbytes)

    def _fetch(self, pieces: tuple[int, ...]) -> int:
        """Read a message that is in the memory of a peer's process; return the address of its copy here."""
        if self._read is None:
            self._host = self._device.pinned(self._nbytes)
            self._read = RendezvousRead(self._edge, [self._host], None)
        for read in self._read.calls(pieces):
            read()
        return MPI.Get_address(self._host)

    def end(self, number: int) -> None:
        edge = self._edge
        if edge.node.fence is not None:
            edge.node.fence()
        edge.counts[RECEIVED] = number
        edge.mine[edge.my_ack] = number


class _Copy(NamedTuple):
    """A message whose copy was started: its number on the edge, and the event of its end."""

    message: DeviceSend | DeviceReceive
    number: int
    event: Any


class _Lane:
    """Messages to, or from, one peer, in the order of their starts: those that wait, and those that are copied."""

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._waiting: deque[DeviceSend | DeviceReceive] = deque()
        self._begun: deque[_Copy] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._begun)

    def add(self, message: DeviceSend | DeviceReceive) -> None:
        message.done = False
        self._waiting.append(message)

    def advance(self) -> None:
        """Begin and end messages as far as possible, in order."""
        while self._waiting:
            begun = self._waiting[0].begin(len(self._begun))
            if begun is None:
                break
            self._begun.append(begun)
            self._waiting.popleft()
        while self._begun and self._begun[0].event.done:
            message, number, event = self._begun.popleft()
            message.end(number)
            message.done = True
            self._copies.recycle(event)


class _Parts(NamedTuple):
    """A message: parts that fit a cell, and the lane that they take."""

    parts: Sequence[DeviceSend | DeviceReceive]
    lane: _Lane


class DeviceNodeTransport(Wire):
    """Transport between devices of a node: one channel of its pinned mailboxes; all ranks are on the node.

    `edges` and `mark` are as in `NodeAwareTransport`, which must cut all messages to the length of a cell.
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
    ) -> None:
        self._memory, self._channel, self._edges, self._mark = memory, channel, edges, mark
        self._device, self._copies = device, copies
        self._lanes: dict[tuple[type, int], _Lane] = defaultdict(partial(_Lane, copies))

    def _edge(self, peer: int) -> MailboxEdge:
        return self._edges[peer]

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> _Parts:
        edge, lane = self._edge(peer), self._lanes[DeviceSend, peer]
        return _Parts([DeviceSend(edge, part, self._mark, self._copies) for part in self._cut(pieces)], lane)

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> _Parts:
        edge, lane, rest = self._edge(peer), self._lanes[DeviceReceive, peer], (self._mark, self._copies, self._device)
        return _Parts([DeviceReceive(edge, part, *rest) for part in self._cut(pieces)], lane)

    def _cut(self, pieces: Sequence[Iovec]) -> list[list[Iovec]]:
        """Cut a message into parts that fit a cell; programs bind no longer ones, see `split_size`."""
        parts: list[list[Iovec]] = [[]]
        room = cell = self._memory.cells[self._channel]
        for address, nbytes in pieces:
            end = address + nbytes
            while end - address > room:
                parts[-1].append(Iovec(address, room))
                parts.append([])
                address, room = address + room, cell
            parts[-1].append(Iovec(address, end - address))
            room -= end - address
        return parts

    def split_size(self, peer: int, nbytes: int) -> int | None:
        cell = self._memory.cells[self._channel]
        return 0 if nbytes <= cell else cell

    def start_calls(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        return [partial(self._start, messages)] if messages else []

    def _start(self, messages: Sequence[_Parts]) -> None:
        for parts, lane in messages:
            for part in parts:
                lane.add(part)
        self._advance()

    def _advance(self) -> None:
        for lane in self._lanes.values():
            lane.advance()

    def wait_calls(self, messages: Sequence[Any]) -> Sequence[Wait]:
        mine = [part for parts, _ in messages for part in parts]

        def test() -> bool:
            self._advance()
            return all(part.done for part in mine)

        def wait() -> None:
            spins = self._memory.spins
            while not test():
                spins -= 1
                if spins < 0:
                    self._memory.yielding(-spins)

        return [Wait(wait, test)] if mine else []

    def free(self) -> None:
        """Wait for the copies of a call that was aborted; the mailboxes belong to the node."""
        if any(lane.is_busy for lane in self._lanes.values()):
            self._copies.finish()
