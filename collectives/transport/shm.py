"""Messages through memory that the ranks of a node share: no system call for short ones, one copy for long ones.

Messages pass through mailboxes (`mailbox`). What a slot of one holds is the sender's choice, made from what it alone
knows, and its flag says which it was:

- a short message lies beside the flag, in the same cache line;
- a middle one in the slot's cell: the sender copies in, the receiver copies or combines straight out;
- of a long one only the address, and also of a middle one that lies in memory which the receiver sees (`heap`): the
  receiver takes it from there, or reads the sender's memory itself (`reader`), and the sender may change it when the
  acknowledgement has come.

A message that finds no free slot queues. Whoever waits lets its queued messages leave, takes what comes in the order in
which it comes, and lets MPI go on, so that no rank waits with work left that others need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.buffers.memory import view
from collectives.transport.compiled_exchange import SEEN
from collectives.transport.fused_exchange import FusedExchange
from collectives.transport.mailbox import (
    ADDRESSES,
    CELLS,
    GOT,
    INLINE,
    KIND,
    MASK,
    SENT,
    SLOTS,
    WORDS,
    MailboxEdge,
    NodeMemory,
    label,
    told_label,
)
from collectives.transport.mpi_transport import PersistentTransport
from collectives.transport.wire import Iovec, pause
from collectives.types import Wait

STREAMED = 1 << 19
"""Bytes up to which messages go through cells; longer ones are read where they lie, if ranks may do that."""

CHUNK = 1 << 19
"""Bytes of a long message that are read and combined at a time, so that they are combined while in the cache."""

FEW_TOLD = 8
"""Addresses of one message for which the calls are remembered: it mostly comes from the same one."""


class _EagerSend:
    """A message that is copied into its slot; it has left when it has started."""

    __slots__ = ("_copies", "_fence", "_number", "_pieces", "edge", "flags", "label", "late", "nbytes")

    def __init__(self, edge: MailboxEdge, place: int, pieces: Sequence[Iovec], mark: int) -> None:
        nbytes = sum(piece.nbytes for piece in pieces)
        memory = edge.node.bytes[place]
        self.edge, self._fence = edge, edge.node.fence
        self.flags = [edge.outbox + slot * WORDS for slot in range(SLOTS)]
        self.late = False
        self._number = 0
        self.nbytes, self.label = nbytes, label(nbytes, mark)
        self._pieces = list(pieces)
        self._copies = []
        for slot in range(SLOTS):
            start, copies = edge.slot_out(slot, nbytes), []
            for address, length in pieces:
                copies.append(_words(memory[start : start + length], view(address, length, _BYTE)))
                start += length
            self._copies.append(copies)

    def start(self) -> None:
        self._number = -1
        self.edge.enter(self)

    def leave(self) -> None:
        """Fill the next slot, which is free."""
        edge = self.edge
        number = self._number = edge.counts[SENT] = edge.counts[SENT] + 1
        slot = number & MASK
        for target, source in self._copies[slot]:
            target[...] = source
        if self.nbytes > INLINE:
            edge.mine[self.flags[slot] + 1] = self.nbytes
        if self._fence is not None:
            self._fence()
        edge.mine[self.flags[slot]] = number * KIND + self.label

    def wait(self) -> None:
        if self._number < 0:
            self.edge.left(self)

    def test(self) -> bool:
        if self._number < 0:
            self.edge.flush()
        return self._number >= 0

    def outgoing(self, source: np.ndarray, like: np.ndarray) -> list[np.ndarray] | None:
        """Arrays over the data of the outgoing message in each slot; None if it is not all of `source`."""
        nbytes = source.nbytes
        if self._pieces != [Iovec(MPI.Get_address(source), nbytes)] or like.nbytes != nbytes or not nbytes:
            return None
        memory, edge = self.edge.node.bytes[self.edge.node.place], self.edge
        starts = [edge.slot_out(slot, nbytes) for slot in range(SLOTS)]
        return [memory[start : start + nbytes].view(like.dtype).reshape(like.shape) for start in starts]


class _RendezvousSend:
    """Rendezvous send: the receiver reads the data at the given address and acknowledges it."""

    __slots__ = ("_flags", "_label", "_number", "_pack", "_pieces", "edge", "late")

    def __init__(self, edge: MailboxEdge, pieces: Sequence[Iovec], mark: int) -> None:
        self.edge = edge
        self._number = 0
        self.late = False
        self._flags = [edge.outbox + slot * WORDS for slot in range(SLOTS)]
        self._pack: list[tuple[np.ndarray, np.ndarray]] = []
        if len(pieces) > ADDRESSES:
            whole = np.empty(sum(piece.nbytes for piece in pieces), np.uint8)
            start = 0
            for address, length in pieces:
                self._pack.append((whole[start : start + length], view(address, length, _BYTE)))
                start += length
            pieces = [Iovec(MPI.Get_address(whole), whole.nbytes)]
        self._pieces = list(pieces)
        self._label = told_label(len(self._pieces), mark)

    def start(self) -> None:
        self._number = -1
        self.edge.enter(self)

    def leave(self) -> None:
        """Fill the next slot, which is free."""
        edge = self.edge
        number = self._number = edge.counts[SENT] = edge.counts[SENT] + 1
        for target, source in self._pack:
            target[...] = source
        words, flag = edge.mine, self._flags[number & MASK]
        at = flag
        for address, nbytes in self._pieces:
            words[at + 1] = address
            words[at + 2] = nbytes
            at += 2
        if edge.node.fence is not None:
            edge.node.fence()
        words[flag] = number * KIND + self._label

    def wait(self) -> None:
        if self._number < 0:
            self.edge.left(self)
        self.edge.acknowledged(self._number)

    def test(self) -> bool:
        edge = self.edge
        if self._number < 0:
            edge.flush()
        if self._number < 0 or edge.theirs[edge.their_ack] < self._number:
            return False
        edge.acknowledged(self._number)
        return True


class _EagerRecv:
    """A message to come. `takes[slot]` are the calls that take its data out of a slot; `fetch` gives those that take it
    by what was told of it."""

    __slots__ = ("_fence", "_fetch", "_number", "_takes", "_told", "combines", "edge", "flags", "label", "nbytes")

    def __init__(
        self,
        edge: MailboxEdge,
        takes: Sequence[Sequence[Callable[[], object]]],
        fetch: _RendezvousRead,
        mark: int,
    ) -> None:
        self.edge, self._takes, self._fetch, self._fence = edge, takes, fetch, edge.node.fence
        self.combines, self.nbytes = fetch.combines, fetch.nbytes
        self.label, self._told = label(self.nbytes, mark), told_label(0, mark)
        self._number = 0
        self.flags = [edge.inbox + slot * WORDS for slot in range(SLOTS)]

    def start(self) -> None:
        edge = self.edge
        self._number = edge.counts[GOT] = edge.counts[GOT] + 1
        edge.awaited.append(self)

    def wait(self) -> None:
        awaited = self.edge.awaited
        while self._number:  # those before it come before it
            awaited[0].take()

    def test(self) -> bool:
        awaited = self.edge.awaited
        while self._number and awaited[0].is_there():
            awaited[0].take()
        return not self._number

    def is_there(self) -> bool:
        """True if the message has arrived."""
        number = self._number
        return self.edge.theirs[self.flags[number & MASK]] >= number * KIND

    def take(self) -> None:
        """Wait for the message, which is the next of its edge, and take it.

        Raises
        ------
        Mismatch
            If another call sent it, or its length is not the expected one.
        """
        edge, number = self.edge, self._number
        slot = number & MASK
        words, at, wanted = edge.theirs, self.flags[slot], number * KIND
        if words[at] < wanted:
            edge.arrived(at, wanted)
        if self._fence is not None:
            self._fence()
        found = words[at] - wanted
        if found == self.label and (self.nbytes <= INLINE or words[at + 1] == self.nbytes):
            for take in self._takes[slot]:
                take()
        else:
            addresses = found - self._told
            told = tuple(words[at + 1 : at + 1 + 2 * addresses]) if 1 <= addresses <= ADDRESSES else (0, -1)
            if sum(told[1::2]) != self.nbytes:
                error = edge.mismatch(at, self.nbytes)
                self._acknowledge(number)  # the sender may go on, as one of a message that MPI truncates
                raise error
            for take in self._fetch(told):
                take()
        self._acknowledge(number)

    def _acknowledge(self, number: int) -> None:
        """Tell the sender that its message was taken."""
        edge = self.edge
        if self._fence is not None:
            self._fence()  # all of it was read before the sender learns that it may write there again
        self._number = 0
        edge.awaited.popleft()
        if self._fence is not None:
            self._fence()
        edge.mine[edge.my_ack] = number

    def incoming(
        self, source: np.ndarray, target: np.ndarray, like: np.ndarray
    ) -> tuple[list[np.ndarray], Any, bool] | None:
        """Arrays over the incoming data in each slot, and the ufunc that combines it with all of `source`, or None
        if it is copied; and whether it stands on the right. None if not all of `target` is written, and at once."""
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


_BYTE = np.dtype(np.uint8)


def _is(array: np.ndarray, other: np.ndarray) -> bool:
    """True if two arrays are the same memory."""
    return array.nbytes == other.nbytes and MPI.Get_address(array) == MPI.Get_address(other)


def _words(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two runs of bytes as wider elements where both allow it, which NumPy copies with less ado."""
    if target.size % 8 == 0 and not (MPI.Get_address(target) | MPI.Get_address(source)) % 8 and target.size:
        return target.view(np.int64), source.view(np.int64)
    return target, source


class _Combination(NamedTuple):
    """Reduction on arrival: pairs of (mine, out), concatenated, and the function that binds a range of them."""

    rows: Sequence[tuple[Any, Any]]
    bind: Callable[[Any, Any, Any], Callable[[], object]]


class _RendezvousRead:
    """The calls that take a message of which the address was told: `fetch(told)`, remembered for the next time.

    What lies in memory that this rank sees is taken straight from there; all else is read from its owner, in parts
    that are combined while they are in the cache. They are read to where the result goes, unless a term lies there.
    """

    def __init__(self, edge: MailboxEdge, targets: Sequence[np.ndarray], combination: _Combination | None) -> None:
        self._edge, self._targets, self._combination = edge, targets, combination
        self.combines, self.nbytes = combination is not None, sum(target.nbytes for target in targets)
        self._known: dict[tuple[int, ...], list[Callable[[], object]]] = {}

    def __call__(self, told: tuple[int, ...]) -> Sequence[Callable[[], object]]:
        """Receive function for a message given as (address, bytes, address, bytes ...)."""
        calls = self._known.get(told)
        if calls is None:
            if len(self._known) >= FEW_TOLD:
                self._known.clear()
            calls = self._known[told] = [call for run in self._runs(told) for call in self._taking(*run)]
        return calls

    def _runs(self, told: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
        """Ranges contiguous at both ends: (address, number of the target, first byte, end byte)."""
        pieces = [Iovec(*told[i : i + 2]) for i in range(0, len(told), 2)]
        targets = [Iovec(0, target.nbytes) for target in self._targets]
        ends = sorted({*accumulate(piece.nbytes for piece in pieces), *accumulate(t.nbytes for t in targets)})
        piece = target = low = used = filled = 0
        for high in ends:
            length = high - low
            if length:
                while used == pieces[piece].nbytes:
                    piece, used = piece + 1, 0
                while filled == targets[target].nbytes:
                    target, filled = target + 1, 0
                yield pieces[piece].address + used, target, filled, filled + length
                used, filled, low = used + length, filled + length, high

    def _taking(self, address: int, target: int, start: int, stop: int) -> Iterator[Callable[[], object]]:
        edge, node = self._edge, self._edge.node
        seen = node.heap.seen(edge.place, address, stop - start)
        read = node.readers[edge.place].read
        if self._combination is None:
            into = self._targets[target].view(np.uint8)[start:stop]
            if seen is not None:
                yield partial(np.copyto, *_words(into, seen))
            else:
                yield partial(read, MPI.Get_address(into), address, stop - start)
            return
        (mine, out), bind = self._combination.rows[target], self._combination.bind
        size = out.dtype.itemsize
        mine, out = mine[start // size : stop // size], out[start // size : stop // size]
        if seen is not None:
            yield bind(seen.view(out.dtype), mine, out)
            return
        step = max(1, CHUNK // size)
        landing = np.empty(min(step, len(out)), out.dtype) if np.may_share_memory(mine, out) else None
        for first in range(0, len(out), step):
            part = out[first : first + step]
            incoming = part if landing is None else landing[: len(part)]
            yield partial(read, MPI.Get_address(incoming), address + first * size, part.nbytes)
            yield bind(incoming, mine[first : first + step], part)


class SharedMemoryTransport:
    """One channel of the node's mailboxes, for one rank: the wire between neighbours.

    `compiles` says whether its swaps will be done often enough to be compiled; `seen`, the same at both ends of every
    edge, whether nearly all that is sent lies in memory that the receiver sees. Then no message is cut. `mark` is a
    number below `MARKS` that both ends of every edge compute from the call: a message with another mark raises.
    """

    def __init__(
        self,
        node: NodeMemory,
        channel: int,
        edges: dict[int, MailboxEdge],
        compiles: bool = False,
        seen: bool = False,
        mark: int = 0,
    ) -> None:
        self._node, self._channel, self._edges, self._compiles = node, channel, edges, compiles
        self.mark = mark
        self._longest = 0 if seen else STREAMED

    def _edge(self, peer: int) -> MailboxEdge:
        edge = self._edges.get(peer)
        if edge is None:
            edge = self._edges[peer] = MailboxEdge(self._node, self._channel, self._node.places[peer])
        return edge

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> _EagerSend | _RendezvousSend:
        edge = self._edge(peer)
        nbytes = sum(piece.nbytes for piece in pieces)
        if nbytes > edge.cell or (nbytes >= SEEN and stable and self._shown(pieces)):
            return _RendezvousSend(edge, pieces, self.mark)
        return _EagerSend(edge, self._node.place, pieces, self.mark)

    def _shown(self, pieces: Sequence[Iovec]) -> bool:
        """True if all pieces are in memory that the peers have mapped."""
        return len(pieces) <= ADDRESSES and all(self._node.heap.shows(*piece) for piece in pieces)

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> _EagerRecv:
        edge = self._edge(peer)
        targets = [view(*piece, _BYTE) for piece in pieces]
        takes = self._takes(edge, targets, lambda index, source: partial(np.copyto, *_words(targets[index], source)))
        return _EagerRecv(edge, takes, _RendezvousRead(edge, targets, None), self.mark)

    def combine(
        self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Callable[[Any, Any, Any], Callable[[], object]]
    ) -> _EagerRecv:
        """A message whose elements are combined with `rows` of (mine, out) as they lie, or as they are read."""
        edge, dtype = self._edge(peer), rows[0][0].dtype
        outs = [out for _, out in rows]
        takes = self._takes(edge, outs, lambda index, source: bind(source.view(dtype), *rows[index]))
        return _EagerRecv(edge, takes, _RendezvousRead(edge, outs, _Combination(rows, bind)), self.mark)

    def _takes(
        self, edge: MailboxEdge, targets: Sequence[np.ndarray], take: Callable[[int, Any], Callable[[], object]]
    ) -> list[list[Callable[[], object]]]:
        """For every slot the calls ``take(number of the target, its data)``; none if it is longer."""
        takes: list[list[Callable[[], object]]] = [[] for _ in range(SLOTS)]
        nbytes = sum(target.nbytes for target in targets)
        if nbytes <= edge.cell:
            memory = self._node.bytes[edge.place]
            for slot, calls in enumerate(takes):
                start = edge.slot_in(slot, nbytes)
                for index, target in enumerate(targets):
                    calls.append(take(index, memory[start : start + target.nbytes]))
                    start += target.nbytes
        return takes

    def split_size(self, peer: int, nbytes: int) -> int | None:
        if not self._node.reaches(peer):
            return None
        cell = self._node.cells[self._channel]
        whole = nbytes <= cell or (nbytes > self._longest and self._node.reads)
        return 0 if whole else cell

    def completes_locally(self, peer: int, nbytes: int, before: int) -> bool:
        return nbytes <= self._node.cells[self._channel] and before < CELLS

    def start_calls(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        """Start functions. The first messages to a peer start at once; the others start during the wait."""
        ahead: dict[MailboxEdge, int] = defaultdict(int)
        for message in messages:
            if not isinstance(message, _EagerRecv):
                message.late = ahead[message.edge] >= CELLS
                ahead[message.edge] += 1
        return [message.start for message in messages if isinstance(message, _EagerRecv) or not message.late]

    def wait_calls(self, messages: Sequence[Any]) -> Sequence[Wait]:
        arriving = [message for message in messages if isinstance(message, _EagerRecv)]
        leaving = [message for message in messages if not isinstance(message, _EagerRecv)]
        late = [message for message in leaving if message.late]
        if late:
            return [_streaming(late, arriving, leaving)]
        copied: list[Any] = [message for message in leaving if isinstance(message, _EagerSend)]
        told = [message for message in leaving if isinstance(message, _RendezvousSend)]
        if any(message.combines for message in arriving):  # into memory that must have left before
            return [Wait(message.wait, message.test) for message in (*copied, *arriving, *told)]
        return [Wait(message.wait, message.test) for message in (*arriving, *copied, *told)]

    def swap(self, messages: Sequence[Any]) -> FusedExchange | None:
        """All of the messages as one swap, if they are no more than that."""
        out = [message for message in messages if isinstance(message, _EagerSend)]
        into = [message for message in messages if isinstance(message, _EagerRecv)]
        if self._node.fence is not None or len(out) + len(into) < len(messages) or len(out) > 1 or len(into) > 1:
            return None
        return FusedExchange(out[0] if out else None, into[0] if into else None, self._channel > 0, self._compiles)

    def free(self) -> None:
        """The mailboxes are the node's."""


def _streaming(late: Sequence[Any], arriving: Sequence[Any], leaving: Sequence[Any]) -> Wait:
    """One wait for a stream of parts: start sends that fit, receive arrived parts, peer by peer."""
    state: list[list[Any]] = []

    def queues(messages: Sequence[Any]) -> list[Any]:
        by_edge: dict[MailboxEdge, list[Any]] = defaultdict(list)
        for message in reversed(messages):
            by_edge[message.edge].append(message)
        return list(by_edge.values())

    def test() -> bool:
        if not state:
            state.extend([queues(late), queues(arriving)])
        moved = True
        while moved:
            moved = False
            late[0].edge.node.flush()
            for queue in state[0]:
                if queue and not queue[-1].edge.queue and queue[-1].edge.has_room():
                    queue.pop().start()
                    moved = True
            for queue in state[1]:
                if queue and queue[-1].test():
                    queue.pop()
                    moved = True
        if any(map(any, state)) or not all([message.test() for message in leaving]):
            return False
        state.clear()
        return True

    def wait() -> None:
        spins, node = late[0].edge.spins, late[0].edge.node
        while not test():
            spins -= 1
            if spins < 0:
                node.yielding()

    return Wait(wait, test)


class NodeAwareTransport:
    """Each edge over the best wire that both of its ends have: shared memory within the node, MPI to other nodes."""

    def __init__(self, shared: SharedMemoryTransport, far: PersistentTransport) -> None:
        self._shared, self._far = shared, far
        self.mark = shared.mark

    def _wire(self, peer: int) -> SharedMemoryTransport | PersistentTransport:
        return self._shared if self._shared.split_size(peer, 0) is not None else self._far

    def send(self, peer: int, pieces: Sequence[Iovec], stable: bool = True) -> Any:
        return self._wire(peer).send(peer, pieces, stable)

    def receive(self, peer: int, pieces: Sequence[Iovec]) -> Any:
        return self._wire(peer).receive(peer, pieces)

    def split_size(self, peer: int, nbytes: int) -> int | None:
        return self._shared.split_size(peer, nbytes)

    def completes_locally(self, peer: int, nbytes: int, before: int) -> bool:
        return self.split_size(peer, nbytes) is not None and self._shared.completes_locally(peer, nbytes, before)

    def combine(
        self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Callable[[Any, Any, Any], Callable[[], object]]
    ) -> Any:
        return self._shared.combine(peer, rows, bind)

    def _split(self, messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        near = [message for message in messages if isinstance(message, (_EagerSend, _RendezvousSend, _EagerRecv))]
        return near, [
            message for message in messages if not isinstance(message, (_EagerSend, _RendezvousSend, _EagerRecv))
        ]

    def start_calls(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        near, far = self._split(messages)
        return [*self._far.start_calls(far), *self._shared.start_calls(near)] if far else self._shared.start_calls(near)

    def wait_calls(self, messages: Sequence[Any]) -> Sequence[Wait]:
        near, far = self._split(messages)
        if not (near and far):
            return self._far.wait_calls(far) if far else self._shared.wait_calls(near)
        return [_together([*self._far.wait_calls(far), *self._shared.wait_calls(near)])]

    def swap(self, messages: Sequence[Any]) -> FusedExchange | None:
        near, far = self._split(messages)
        return None if far else self._shared.swap(near)

    def free(self) -> None:
        self._far.free()


def _together(waits: Sequence[Wait]) -> Wait:
    """One wait for several: MPI must go on while a flag is watched, since others may hang on it."""
    pending = list(waits)

    def test() -> bool:
        pending[:] = [wait for wait in pending if not wait.test()]
        if pending:
            return False
        pending.extend(waits)
        return True

    def wait() -> None:
        while not test():
            pause()

    return Wait(wait, test)
