"""Messages through the mailboxes of a node: eager sends, rendezvous sends, and receives of both.

All are bound once and started any number of times. A started send that finds no free slot queues at its edge.
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
from collectives.transport.mailbox import (
    ADDRESSES,
    INLINE,
    KIND,
    MASK,
    RECEIVED,
    SENT,
    SLOTS,
    WORDS,
    MailboxEdge,
    address_label,
    label,
)
from collectives.transport.wire import Iovec

CHUNK = 1 << 19
"""Bytes of a long message that are read and reduced at a time, so that they are reduced while in the cache."""

CACHED_RENDEZVOUS = 8
"""Rendezvous addresses of one message for which the calls are cached: a sender mostly uses the same memory."""

BYTE = np.dtype(np.uint8)


class _Send:
    """Base class of sends through a mailbox: `write` fills the next free slot; `_number` is -1 while queued."""

    __slots__ = ("_number", "edge", "flags", "label", "late", "nbytes")

    def __init__(self, edge: MailboxEdge, nbytes: int, label: int) -> None:
        self.edge, self.nbytes, self.label = edge, nbytes, label
        self.flags = [edge.outbox + slot * WORDS for slot in range(SLOTS)]
        self.late = False  # started by the wait, not by the start: see `NodeAwareTransport.start_calls`
        self._number = 0

    def start(self) -> None:
        self._number = -1
        self.edge.enter(self)


class EagerSend(_Send):
    """Send that copies its data into the mailbox slot; complete as soon as it is copied."""

    __slots__ = ("_copies", "_fence", "_pieces")

    def __init__(self, edge: MailboxEdge, pieces: Sequence[Iovec], mark: int) -> None:
        nbytes = sum(piece.nbytes for piece in pieces)
        super().__init__(edge, nbytes, label(nbytes, mark))
        self._fence, self._pieces = edge.node.fence, list(pieces)
        memory = edge.node.bytes[edge.node.place]
        self._copies = []
        for slot in range(SLOTS):
            start = edge.slot_out(slot, nbytes)
            slot_memory = memory[start : start + nbytes]
            self._copies.append([as_words(target, source) for target, source in _pair_up(slot_memory, pieces)])

    def write(self) -> None:
        edge = self.edge
        number = self._number = edge.counts[SENT] = edge.counts[SENT] + 1
        slot = number & MASK
        for target, source in self._copies[slot]:
            target[...] = source
        if self.nbytes > INLINE:
            edge.mine[self.flags[slot] + 1] = self.nbytes
        if self._fence is not None:
            self._fence()  # the data must be visible before the flag
        edge.mine[self.flags[slot]] = number * KIND + self.label

    def wait(self) -> None:
        if self._number < 0:
            self.edge.wait_sent(self)

    def test(self) -> bool:
        if self._number < 0:
            self.edge.flush()
        return self._number >= 0

    def outgoing(self, source: np.ndarray, like: np.ndarray) -> list[np.ndarray] | None:
        """Arrays over each slot's data, with dtype and shape of `like`; None unless the message is all of `source`."""
        nbytes = source.nbytes
        if self._pieces != [Iovec(MPI.Get_address(source), nbytes)] or like.nbytes != nbytes or not nbytes:
            return None
        memory, edge = self.edge.node.bytes[self.edge.node.place], self.edge
        starts = [edge.slot_out(slot, nbytes) for slot in range(SLOTS)]
        return [memory[start : start + nbytes].view(like.dtype).reshape(like.shape) for start in starts]


class RendezvousSend(_Send):
    """Rendezvous send: the receiver reads the data at the given addresses and acknowledges it.

    More pieces than a slot has room for are packed into one first.
    """

    __slots__ = ("_pack", "_pieces")

    def __init__(self, edge: MailboxEdge, pieces: Sequence[Iovec], mark: int) -> None:
        nbytes = sum(piece.nbytes for piece in pieces)
        self._pack: list[tuple[np.ndarray, np.ndarray]] = []
        if len(pieces) > ADDRESSES:
            packed = np.empty(nbytes, np.uint8)
            self._pack = list(_pair_up(packed, pieces))
            pieces = [Iovec(MPI.Get_address(packed), nbytes)]
        self._pieces = list(pieces)
        super().__init__(edge, nbytes, address_label(len(self._pieces), mark))

    def write(self) -> None:
        edge = self.edge
        number = self._number = edge.counts[SENT] = edge.counts[SENT] + 1
        for target, source in self._pack:
            target[...] = source
        words, flag = edge.mine, self.flags[number & MASK]
        at = flag
        for address, nbytes in self._pieces:
            words[at + 1] = address
            words[at + 2] = nbytes
            at += 2
        if edge.node.fence is not None:
            edge.node.fence()  # the addresses, and the data there, must be visible before the flag
        words[flag] = number * KIND + self.label

    def wait(self) -> None:
        if self._number < 0:
            self.edge.wait_sent(self)
        self.edge.wait_acknowledged(self._number)

    def test(self) -> bool:
        edge = self.edge
        if self._number < 0:
            edge.flush()
        if self._number < 0 or edge.theirs[edge.their_ack] < self._number:
            return False
        edge.wait_acknowledged(self._number)
        return True


def _pair_up(memory: np.ndarray, pieces: Sequence[Iovec]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pair pieces with consecutive ranges of the memory: yields (range, piece)."""
    start = 0
    for address, length in pieces:
        yield memory[start : start + length], view(address, length, BYTE)
        start += length


class Receive:
    """Receive of an eager or a rendezvous message through a mailbox.

    `_takes[slot]` are the calls that copy or reduce the data of an eager message out of a slot; `_read` returns those
    for the addresses of a rendezvous message.
    """

    __slots__ = (
        "_address_label", "_fence", "_number", "_read", "_takes", "combines", "edge", "flags", "label", "nbytes",
    )  # fmt: skip

    def __init__(
        self, edge: MailboxEdge, takes: Sequence[Sequence[Callable[[], object]]], read: RendezvousRead, mark: int
    ) -> None:
        self.edge, self._takes, self._read, self._fence = edge, takes, read, edge.node.fence
        self.combines, self.nbytes = read.combination is not None, read.nbytes
        self.label, self._address_label = label(self.nbytes, mark), address_label(0, mark)
        self._number = 0
        self.flags = [edge.inbox + slot * WORDS for slot in range(SLOTS)]

    def start(self) -> None:
        edge = self.edge
        self._number = edge.counts[RECEIVED] = edge.counts[RECEIVED] + 1
        edge.awaited.append(self)

    def wait(self) -> None:
        awaited = self.edge.awaited
        while self._number:  # earlier messages arrive first
            awaited[0].take()

    def test(self) -> bool:
        awaited = self.edge.awaited
        while self._number and awaited[0].has_arrived():
            awaited[0].take()
        return not self._number

    def has_arrived(self) -> bool:
        number = self._number
        return self.edge.theirs[self.flags[number & MASK]] >= number * KIND

    def take(self) -> None:
        """Wait for this message, the next one from its peer, and receive it.

        Raises `Mismatch` if another call sent it, or its length is not the expected one.
        """
        edge, number = self.edge, self._number
        slot = number & MASK
        words, at, wanted = edge.theirs, self.flags[slot], number * KIND
        if words[at] < wanted:
            edge.wait_flag(at, wanted)
        if self._fence is not None:
            self._fence()  # nothing below may be loaded before the flag
        found = words[at] - wanted
        if found == self.label and (self.nbytes <= INLINE or words[at + 1] == self.nbytes):
            for take in self._takes[slot]:
                take()
        else:
            addresses = found - self._address_label
            pieces = tuple(words[at + 1 : at + 1 + 2 * addresses]) if 1 <= addresses <= ADDRESSES else (0, -1)
            if sum(pieces[1::2]) != self.nbytes:
                error = edge.mismatch(at, self.nbytes)
                self._acknowledge(number)  # the sender continues, as with a message that MPI truncates
                raise error
            for take in self._read.calls(pieces):
                take()
        self._acknowledge(number)

    def _acknowledge(self, number: int) -> None:
        """Acknowledge message `number` to the sender, which frees the slot, and complete this receive."""
        edge = self.edge
        self._number = 0
        edge.awaited.popleft()
        if self._fence is not None:
            self._fence()  # all data must be read before the sender may overwrite it
        edge.mine[edge.my_ack] = number

    def incoming(
        self, source: np.ndarray, target: np.ndarray, like: np.ndarray
    ) -> tuple[list[np.ndarray], Any, bool] | None:
        """Describe the receive as one array operation, (data in each slot, ufunc, mine_first); None if it is not one.

        The ufunc combines the data with all of `source`, which is its first operand if `mine_first`; None for a copy.
        The operation must write all of `target`.
        """
        arrays: list[np.ndarray] = []
        ufunc, mine_first = None, False
        for takes in self._takes:
            take = takes[0] if len(takes) == 1 else None
            if not isinstance(take, partial) or like.nbytes != target.nbytes or not target.nbytes:
                return None
            arguments = [*take.args, *take.keywords.values()]  # of keywords none but `out` is ever bound
            if take.func is np.copyto:
                out, array = arguments
            elif isinstance(take.func, np.ufunc) and len(arguments) == 3:
                left, right, out = arguments
                ufunc, mine_first = take.func, _is(left, source)
                array = right if mine_first else left
                if not _is(left if mine_first else right, source):
                    return None
            else:
                return None
            if not _is(out, target):
                return None
            arrays.append(array.view(np.uint8).view(like.dtype).reshape(like.shape))
        return arrays, ufunc, mine_first


def _is(array: np.ndarray, other: np.ndarray) -> bool:
    """True if two arrays are the same memory."""
    return array.nbytes == other.nbytes and MPI.Get_address(array) == MPI.Get_address(other)


def as_words(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """View two byte arrays as int64, which NumPy copies faster, if lengths and alignment allow; else return them."""
    if target.size % 8 == 0 and not (MPI.Get_address(target) | MPI.Get_address(source)) % 8 and target.size:
        return target.view(np.int64), source.view(np.int64)
    return target, source


class Combination(NamedTuple):
    """Reduction of an incoming message: array pairs (local operand, result), and the function that binds the calls."""

    rows: Sequence[tuple[Any, Any]]
    bind: Callable[[Any, Any, Any], Callable[[], object]]


class RendezvousRead:
    """Functions that read a rendezvous message from the sender's memory, cached by its addresses.

    Data in memory that this rank has mapped is read directly. All other data is read from the sender's process, in
    parts that are reduced while they are in the cache, through the result's memory unless an operand is there.
    """

    def __init__(self, edge: MailboxEdge, targets: Sequence[np.ndarray], combination: Combination | None) -> None:
        self._edge, self._targets, self.combination = edge, targets, combination
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
        piece_ends, target_ends = (list(accumulate(sizes)) for sizes in (lengths, [t.nbytes for t in self._targets]))
        low = 0
        for high in sorted({*piece_ends, *target_ends} - {0}):
            piece, target = bisect_right(piece_ends, low), bisect_right(target_ends, low)
            used = low - (piece_ends[piece] - lengths[piece])
            filled = low - (target_ends[target] - self._targets[target].nbytes)
            yield addresses[piece] + used, target, filled, filled + high - low
            low = high

    def _read_run(self, address: int, target: int, start: int, stop: int) -> Iterator[Callable[[], object]]:
        edge, node = self._edge, self._edge.node
        shared = node.heap.peer_view(edge.place, address, stop - start)
        read = node.readers[edge.place].read
        if self.combination is None:
            into = self._targets[target].view(np.uint8)[start:stop]
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
