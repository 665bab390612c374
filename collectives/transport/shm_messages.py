"""Messages through the mailboxes of a node: sends by copy or by address, and receives of both.

All are bound once and run any number of times, as operations of an `exchange`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.buffers.memory import view
from collectives.engine.instructions import SLOTS
from collectives.transport.exchange import After
from collectives.transport.mailbox import (
    ACKED,
    ADDRESSES,
    INLINE,
    KIND,
    MASK,
    RECEIVED,
    RENDEZVOUS_BYTES,
    SENT,
    WORDS,
    MailboxEdge,
    address_label,
    label,
)
from collectives.transport.wire import Iovec, Reduction

CHUNK = 1 << 19
"""Bytes of a long message that are read and reduced at a time, so that they are reduced while in the cache."""

CACHED_RENDEZVOUS = 8
"""Rendezvous addresses of one message for which the calls are cached: a sender mostly uses the same memory."""

BYTE = np.dtype(np.uint8)


class MailboxSend:
    """Send through a mailbox: of its data, copied into the slot, or of its addresses, where the receiver reads it.

    `by_address` is what Python code does: for data longer than an eager buffer, in memory that the receiver has mapped,
    or where copies are slow. Data that is not `stable` is only then sent by address if it is too long for a copy. More
    pieces than a slot has room for are packed into one first. Compiled code may choose anew at each start, unless
    `address_label` is 0.
    """

    __slots__ = (
        "_copies", "_fence", "_flags", "_period", "address_label", "by_address", "edge", "label", "nbytes",
        "number", "packs", "pieces",
    )  # fmt: skip

    def __init__(self, edge: MailboxEdge, pieces: Sequence[Iovec], mark: int, stable: bool) -> None:
        node, lengths = edge.node, [piece.nbytes for piece in pieces]
        self.edge, self.nbytes, self._fence = edge, sum(lengths), node.fence
        may_choose = stable and self.nbytes >= RENDEZVOUS_BYTES and len(pieces) <= ADDRESSES
        self.by_address = self.nbytes > edge.outgoing.cell_bytes or (
            may_choose and (self.nbytes > node.copied or all(node.heap.is_shared(*piece) for piece in pieces))
        )
        self.packs: list[tuple[np.ndarray, np.ndarray]] = []
        if self.by_address and len(pieces) > ADDRESSES:
            packed = np.empty(self.nbytes, BYTE)
            self.packs = list(zip(np.split(packed, list(accumulate(lengths[:-1]))), _views(pieces)))
            pieces = [Iovec(MPI.Get_address(packed), self.nbytes)]
        self.pieces = list(pieces)
        self.label = label(mark, self.nbytes)
        self.address_label = address_label(mark, len(pieces)) if may_choose or self.by_address else 0
        self.number = 0  # to be acknowledged: none of an eager message
        self._flags = range(edge.outbox, edge.outbox + SLOTS * WORDS, WORDS)
        self._period = edge.outgoing.period(self.nbytes)
        self._copies: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # by place

    def attempt(self) -> bool:
        """Copy the data, or write its addresses, into the next slot; False if none is free."""
        edge = self.edge
        counts, mine = edge.counts, edge.mine
        number = counts[SENT] + 1
        if number - counts[ACKED] > SLOTS and not edge.has_room(SLOTS):
            return False
        counts[SENT] = number
        at = self._flags[number & MASK]
        if self.by_address:
            self._write_addresses(at)
            self.number, label = number, self.address_label
        else:
            place, label = number % self._period, self.label
            copies = self._copies.get(place)
            if copies is None:
                parts = edge.outgoing.parts(place, [piece.nbytes for piece in self.pieces])
                copies = self._copies[place] = list(map(as_words, parts, _views(self.pieces)))
            for target, source in copies:
                target[...] = source
            if self.nbytes > INLINE:
                mine[at + 1] = self.nbytes
        if self._fence is not None:
            self._fence()  # the data must be visible before the flag
        mine[at] = number * KIND + label
        return True

    def is_waiting(self) -> bool:
        """True if no slot is free."""
        counts = self.edge.counts
        return counts[SENT] + 1 - counts[ACKED] > SLOTS and not self.edge.has_room(SLOTS)

    def _write_addresses(self, at: int) -> None:
        """Write the addresses of the pieces behind the flag that is the word `at` of the mailboxes."""
        for target, source in self.packs:
            target[...] = source
        words = self.edge.mine
        for address, nbytes in self.pieces:
            words[at + 1] = address
            words[at + 2] = nbytes
            at += 2


def _views(pieces: Sequence[Iovec]) -> list[np.ndarray]:
    """Arrays of bytes at the pieces of a message."""
    return [view(*piece, BYTE) for piece in pieces]


class Acknowledgement(NamedTuple):
    """Operation that waits until the receiver has read a message sent by address; `sent` is the end of the send."""

    send: MailboxSend
    sent: After

    def attempt(self) -> bool:
        return self.sent.attempt() and self.send.edge.is_acknowledged(self.send.number)

    def is_waiting(self) -> bool:
        return not self.attempt()


class MailboxReceive:
    """Receive of an eager or a rendezvous message through a mailbox.

    ``take(parts)`` returns the functions that copy or reduce an eager message out of its memory, in as many parts as
    the targets; `read.calls(pieces)` returns those for a rendezvous message.
    """

    __slots__ = ("_fence", "_flags", "_period", "_take", "_takes", "address_label", "edge", "label", "nbytes", "read")

    def __init__(
        self,
        edge: MailboxEdge,
        take: Callable[[Sequence[np.ndarray]], Sequence[Callable[[], object]]],
        read: RendezvousRead,
        mark: int,
    ) -> None:
        self.edge, self.read, self._take, self._fence = edge, read, take, edge.node.fence
        self.nbytes = read.nbytes
        self.label, self.address_label = label(mark, self.nbytes), address_label(mark)
        self._flags = range(edge.inbox, edge.inbox + SLOTS * WORDS, WORDS)
        self._period = edge.incoming.period(self.nbytes)
        self._takes: dict[int, Sequence[Callable[[], object]]] = {}  # by place

    def is_waiting(self) -> bool:
        """True if no message has arrived."""
        number = self.edge.counts[RECEIVED] + 1
        return self.edge.theirs[self._flags[number & MASK]] < number * KIND

    def attempt(self) -> bool:
        """Receive the next message from the peer; False if it has not arrived.

        Raises `Mismatch` if another call sent it, or its length is not the expected one.
        """
        edge = self.edge
        words, number = edge.theirs, edge.counts[RECEIVED] + 1
        at = self._flags[number & MASK]
        found = words[at] - number * KIND
        if found < 0:
            return False
        if self._fence is not None:
            self._fence()  # nothing below may be loaded before the flag
            found = words[at] - number * KIND
        if found == self.label and (self.nbytes <= INLINE or words[at + 1] == self.nbytes):
            place = number % self._period
            takes = self._takes.get(place)
            if takes is None:
                parts = edge.incoming.parts(place, [target.nbytes for target in self.read.targets])
                takes = self._takes[place] = self._take(parts)
            for take in takes:
                take()
        else:
            addresses = found - self.address_label
            pieces = tuple(words[at + 1 : at + 1 + 2 * addresses]) if 1 <= addresses <= ADDRESSES else ()
            if not pieces or sum(pieces[1::2]) != self.nbytes:
                raise edge.refuse(self.nbytes)
            for take in self.read.calls(pieces):
                take()
        if self._fence is not None:
            self._fence()  # all data must be read before the sender may overwrite it
        edge.counts[RECEIVED] = number
        edge.mine[edge.my_ack] = number
        return True


class NothingUnread(NamedTuple):
    """Operation that raises `Mismatch` if a message from a peer has arrived, before this rank has sent any."""

    edge: MailboxEdge

    def attempt(self) -> None:
        if self.edge.has_unread:
            raise self.edge.refuse(None)


def as_words(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """View two byte arrays as int64, which NumPy copies faster, if lengths and alignment allow; else return them."""
    if target.size % 8 == 0 and not (MPI.Get_address(target) | MPI.Get_address(source)) % 8 and target.size:
        return target.view(np.int64), source.view(np.int64)
    return target, source


class Combination(NamedTuple):
    """Reduction of an incoming message: array pairs (local operand, result), and the function that binds the calls."""

    rows: Sequence[tuple[Any, Any]]
    bind: Reduction


class RendezvousRead:
    """Functions that read a rendezvous message from the sender's memory, cached by its addresses.

    Data in memory that this rank has mapped is read directly. Other data is read from the sender's process, in parts
    that are reduced while in the cache: into the result's memory, or a temporary buffer if that overlaps the operand.
    """

    def __init__(self, edge: MailboxEdge, targets: Sequence[np.ndarray], combination: Combination | None) -> None:
        self._edge, self.targets, self.combination = edge, targets, combination
        self.nbytes = sum(target.nbytes for target in targets)
        self._cached: dict[tuple[int, ...], list[Callable[[], object]]] = {}

    def calls(self, pieces: tuple[int, ...]) -> Sequence[Callable[[], object]]:
        """Functions that receive a message whose data is at `pieces`: (address, bytes, address, bytes ...)."""
        calls = self._cached.get(pieces)
        if calls is None:
            if len(self._cached) >= CACHED_RENDEZVOUS:
                self._cached.clear()
            calls = self._cached[pieces] = [call for run in self._runs(pieces) for call in self._read_run(*run)]
        return calls

    def _runs(self, pieces: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
        """Split `pieces` into ranges contiguous at both ends: (address, index of the target, first byte, end byte)."""
        addresses, lengths = pieces[::2], pieces[1::2]
        piece_ends, target_ends = (list(accumulate(sizes)) for sizes in (lengths, [t.nbytes for t in self.targets]))
        low = 0
        for high in sorted({*piece_ends, *target_ends} - {0}):
            piece, target = bisect_right(piece_ends, low), bisect_right(target_ends, low)
            used = low - (piece_ends[piece] - lengths[piece])
            filled = low - (target_ends[target] - self.targets[target].nbytes)
            yield addresses[piece] + used, target, filled, filled + high - low
            low = high

    def _read_run(self, address: int, target: int, start: int, stop: int) -> Iterator[Callable[[], object]]:
        edge, node = self._edge, self._edge.node
        shared = node.heap.peer_view(edge.place, address, stop - start)
        read = node.readers[edge.place].read
        if self.combination is None:
            into = self.targets[target].view(np.uint8)[start:stop]
            if shared is not None:
                yield partial(np.copyto, *as_words(into, shared))
            else:
                yield partial(read, MPI.Get_address(into), address, stop - start)
            return
        (mine, out), bind = self.combination.rows[target], self.combination.bind
        size = out.dtype.itemsize
        mine, out = mine[start // size : stop // size], out[start // size : stop // size]
        if shared is not None:
            yield bind(shared.view(out.dtype), mine, out)
            return
        step = max(1, CHUNK // size)
        landing = np.empty(min(step, len(out)), out.dtype) if np.may_share_memory(mine, out) else None
        for first in range(0, len(out), step):
            part = out[first : first + step]
            incoming = part if landing is None else landing[: len(part)]
            yield partial(read, MPI.Get_address(incoming), address + first * size, part.nbytes)
            yield bind(incoming, mine[first : first + step], part)
