"""Messages through memory that the ranks of a node share: no system call for short ones, one copy for long ones.

Every ordered pair of ranks has a mailbox of a few slots. To send, a rank fills the next slot and then sets the slot's
flag to the number of the message; the receiver watches the flag, takes what is there, and writes the number to its
acknowledgement, which frees the slot. What a slot holds is the sender's choice, made from what it alone knows, and the
flag says which it was:

- a short message lies beside the flag, in the same cache line;
- a middle one in the slot's cell: the sender copies in, the receiver copies or combines straight out;
- of a long one only the address: the receiver reads the sender's memory itself, by the kernel's `process_vm_readv`, and
  the sender may change it when the acknowledgement has come.

A message that finds no free slot queues. Whoever waits lets its queued messages leave, takes what comes in the order in
which it comes, and lets MPI go on, so that no rank waits with work left that others need.

Flags are 8-byte words that Python stores and loads whole. Processors of the x86 family keep stores in order and loads
in order, so the flag needs no fence there; on others `MPI.Win.Sync` is called before a flag is set and after one is
seen.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.buffers import view
from collectives.transport.mpi import Persistent
from collectives.transport.wire import Piece, Wait, pause

LINE = 64
SLOTS = 4
CELLS = 2
INLINE = 56
"""Bytes that fit beside a flag."""

WORDS = LINE // 8
MASK = SLOTS - 1
KIND = 8
"""Flags are the message's number times this, plus how many addresses the slot holds (0: the data itself)."""

ADDRESSES = 3
"""Pieces of memory that fit in a slot as (address, bytes)."""

CELL = 1 << 19
"""Bytes of a cell, where the budget allows: messages are cut to fit, so that one part is taken while the next comes."""

STREAMED = 1 << 22
"""Bytes up to which messages go through cells; longer ones are read where they lie, if ranks may do that."""

CHUNK = 1 << 18
"""Bytes of a long message that are read and combined at a time."""

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


class _Iov(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _reader() -> Any:
    """The C library's process_vm_readv, or None where there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return function


class Node:
    """The shared memory of the ranks of a communicator that are on one node. Making and `free` are collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks of this node, for this node's use alone; `free` frees it.
    rank : int
        The number by which other ranks, of this node and others, know this one.
    """

    def __init__(self, comm: MPI.Intracomm, rank: int) -> None:
        self.comm = comm
        self.place, self.size = self.comm.Get_rank(), self.comm.Get_size()
        neighbours = self.comm.allgather((rank, os.getpid()))
        self.places = {rank: place for place, (rank, _) in enumerate(neighbours)}
        self.pids = [pid for _, pid in neighbours]
        self.spins = SPINS if _cores() >= self.size else 30
        budget = self.comm.allreduce(min(BUDGET, _shared_memory() // (4 * self.size)), MPI.MIN)
        self.cells = [min(CELL, max(256, budget // (CELLS * self.size) // LINE * LINE))]
        self.cells += [min(1 << 10, self.cells[0])] * (CHANNELS - 1)
        self.box = LINE * (SLOTS + 1)
        offsets = [0]
        for cell in self.cells:
            offsets.append(offsets[-1] + self.size * (self.box + CELLS * cell))
        self.offsets = offsets
        self.window = MPI.Win.Allocate_shared(offsets[-1], 1, comm=self.comm)
        memories: list[Any] = [self.window.Shared_query(place)[0] for place in range(self.size)]
        self.addresses = [MPI.Get_address(memory) for memory in memories]
        self.words = [memoryview(memory).cast("B").cast("q") for memory in memories]
        self.bytes = [np.frombuffer(memory, np.uint8) for memory in memories]
        self.bytes[self.place][: offsets[1]] = 0
        for channel in range(CHANNELS):  # flags and acknowledgements only: cells stay untouched until they are used
            start = offsets[channel]
            self.bytes[self.place][start : start + self.size * self.box] = 0
        self.fence: Callable[[], object] | None = None
        if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
            self.fence = self.window.Sync
        self.window.Lock_all(MPI.MODE_NOCHECK)
        self.backlog: set[Edge] = set()
        self.read = _reader()
        self._probe()

    def _probe(self) -> None:
        """Find out whether ranks may read each other's memory, all of them or none."""
        mine = np.array([self.place + 1], np.int64)
        addresses = self.comm.allgather(MPI.Get_address(mine))
        peer = (self.place + 1) % self.size
        able = self.read is not None
        if able and self.size > 1:
            found = np.zeros(1, np.int64)
            local, remote = _Iov(MPI.Get_address(found), 8), _Iov(addresses[peer], 8)
            got = self.read(self.pids[peer], ctypes.addressof(local), 1, ctypes.addressof(remote), 1, 0)
            able = bool(got == 8 and found[0] == peer + 1)
        if not self.comm.allreduce(able, MPI.LAND):  # also a barrier: all flags are clean, `mine` was read
            self.read = None

    def yielding(self) -> None:
        """Let other processes run, and let MPI go on: others may hang on what this rank gave it to send."""
        self.comm.Iprobe()
        pause()

    def flush(self) -> None:
        """Let leave what has queued for room, to whomever."""
        for edge in tuple(self.backlog):
            edge.flush()

    def reaches(self, rank: int) -> bool:
        """Whether the rank is on this node."""
        return rank in self.places

    def free(self) -> None:
        """Give the memory back."""
        for words in self.words:
            words.release()
        self.words, self.bytes = [], []
        self.window.Unlock_all()
        self.window.Free()
        self.comm.Free()


class Edge:
    """Both directions between this rank and a neighbour on one channel: where their words lie, and how far they are."""

    __slots__ = (
        *(
            "acked",
            "awaited",
            "cell",
            "cells_in",
            "cells_out",
            "got",
            "inbox",
            "mine",
            "my_ack",
            "node",
            "outbox",
            "pid",
        ),
        *("queue", "sent", "spins", "their_ack", "theirs"),
    )

    def __init__(self, node: Node, channel: int, peer: int) -> None:
        place, self.node = node.place, node
        base, box, cell = node.offsets[channel], node.box, node.cells[channel]
        cells = base + node.size * box
        self.mine, self.theirs = node.words[place], node.words[peer]
        self.outbox, self.inbox = (base + peer * box) // 8, (base + place * box) // 8
        self.my_ack, self.their_ack = self.outbox + SLOTS * WORDS, self.inbox + SLOTS * WORDS
        self.cells_out = [cells + (peer * CELLS + slot % CELLS) * cell for slot in range(SLOTS)]
        self.cells_in = [cells + (place * CELLS + slot % CELLS) * cell for slot in range(SLOTS)]
        self.cell, self.pid, self.spins = cell, node.pids[peer], node.spins
        self.sent = self.acked = 0  # messages to the peer: begun, and known to be taken
        self.got = 0  # messages from the peer that are awaited or were taken
        self.awaited: deque[_Arriving] = deque()  # those that were not, in the order in which they come
        self.queue: deque[_Copied | _Told] = deque()  # started, but there was no room yet

    def has_room(self) -> bool:
        """Whether the slot and the cell of the next message are free."""
        if self.sent - self.acked < CELLS:
            return True
        self.acked = self.theirs[self.their_ack]
        return self.sent - self.acked < CELLS

    def enter(self, message: _Copied | _Told) -> None:
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

    def left(self, message: _Copied | _Told) -> None:
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
        self.acked = acked

    def slot_out(self, slot: int, nbytes: int) -> int:
        """Where in this rank's memory the data of a message goes."""
        return (self.outbox + slot * WORDS + 1) * 8 if nbytes <= INLINE else self.cells_out[slot]

    def slot_in(self, slot: int, nbytes: int) -> int:
        """Where in the peer's memory the data of a message lies."""
        return (self.inbox + slot * WORDS + 1) * 8 if nbytes <= INLINE else self.cells_in[slot]


class _Copied:
    """A message that is copied into its slot; it has left when it has started."""

    __slots__ = ("_copies", "_fence", "_number", "_pieces", "edge", "flags", "late")

    def __init__(self, edge: Edge, place: int, pieces: Sequence[Piece]) -> None:
        nbytes = sum(piece.nbytes for piece in pieces)
        memory = edge.node.bytes[place]
        self.edge, self._fence = edge, edge.node.fence
        self.flags = [edge.outbox + slot * WORDS for slot in range(SLOTS)]
        self.late = False
        self._number = 0
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
        number = self._number = edge.sent = edge.sent + 1
        slot = number & MASK
        for target, source in self._copies[slot]:
            target[...] = source
        if self._fence is not None:
            self._fence()
        edge.mine[self.flags[slot]] = number * KIND

    def wait(self) -> None:
        if self._number < 0:
            self.edge.left(self)

    def test(self) -> bool:
        if self._number < 0:
            self.edge.flush()
        return self._number >= 0

    def outgoing(self, source: np.ndarray, like: np.ndarray) -> list[np.ndarray] | None:
        """What the message fills in each slot, as arrays like the given one; None if it is not all of `source`."""
        nbytes = source.nbytes
        if self._pieces != [Piece(MPI.Get_address(source), nbytes)] or like.nbytes != nbytes or not nbytes:
            return None
        memory, edge = self.edge.node.bytes[self.edge.node.place], self.edge
        starts = [edge.slot_out(slot, nbytes) for slot in range(SLOTS)]
        return [memory[start : start + nbytes].view(like.dtype).reshape(like.shape) for start in starts]


class _Told:
    """A message of which only the address is told; it has left when the receiver says so."""

    __slots__ = ("_flags", "_number", "_pack", "_pieces", "edge", "late")

    def __init__(self, edge: Edge, pieces: Sequence[Piece]) -> None:
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
            pieces = [Piece(MPI.Get_address(whole), whole.nbytes)]
        self._pieces = list(pieces)

    def start(self) -> None:
        self._number = -1
        self.edge.enter(self)

    def leave(self) -> None:
        """Fill the next slot, which is free."""
        edge = self.edge
        number = self._number = edge.sent = edge.sent + 1
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
        words[flag] = number * KIND + len(self._pieces)

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


class _Arriving:
    """A message to come. `takes[slot]` are the calls that take its data out of a slot; `fetch` takes it by address."""

    __slots__ = ("_fence", "_fetch", "_number", "_takes", "combines", "edge", "flags")

    def __init__(
        self,
        edge: Edge,
        takes: Sequence[Sequence[Callable[[], object]]],
        fetch: Callable[[list[Piece]], None],
        combines: bool = False,
    ) -> None:
        self.edge, self._takes, self._fetch, self._fence = edge, takes, fetch, edge.node.fence
        self.combines = combines
        self._number = 0
        self.flags = [edge.inbox + slot * WORDS for slot in range(SLOTS)]

    def start(self) -> None:
        edge = self.edge
        self._number = edge.got = edge.got + 1
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
        """Whether the message can be taken at once."""
        number = self._number
        return self.edge.theirs[self.flags[number & MASK]] >= number * KIND

    def take(self) -> None:
        """Wait for the message, which is the next of its edge, and take it."""
        edge, number = self.edge, self._number
        slot = number & MASK
        words, at, wanted = edge.theirs, self.flags[slot], number * KIND
        if words[at] < wanted:
            edge.arrived(at, wanted)
        if self._fence is not None:
            self._fence()
        flag = words[at]
        if flag == wanted:
            for take in self._takes[slot]:
                take()
        else:
            told = range(at + 1, at + 1 + 2 * (flag - wanted), 2)
            self._fetch([Piece(words[i], words[i + 1]) for i in told])
        self._number = 0
        edge.awaited.popleft()
        edge.mine[edge.my_ack] = number

    def incoming(
        self, source: np.ndarray, target: np.ndarray, like: np.ndarray
    ) -> tuple[list[np.ndarray], Any, bool] | None:
        """What arrives in each slot, as arrays like the given one; the ufunc that joins it to all of `source`, or None
        if it is copied; and whether it stands on the right. None if not all of `target` is written, and at once."""
        arrays: list[np.ndarray] = []
        ufunc, mine_first = None, False
        for takes in self._takes:
            take = takes[0] if len(takes) == 1 else None
            if not isinstance(take, partial) or take.keywords or like.nbytes != target.nbytes or not target.nbytes:
                return None
            if take.func is np.copyto:
                out, array = take.args
            elif isinstance(take.func, np.ufunc) and len(take.args) == 3:
                left, right, out = take.args
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


class Swap:
    """At most one short message out and one in, which is all that some programs do."""

    def __init__(self, out: _Copied | None, into: _Arriving | None) -> None:
        self._out, self._into = out, into

    def between(
        self, source: np.ndarray, target: np.ndarray, sent: np.ndarray, received: np.ndarray
    ) -> Callable[[np.ndarray, np.ndarray], None] | None:
        """The swap straight between the user's arrays, in place of the program's own memory.

        Parameters
        ----------
        source, target : numpy.ndarray
            The memory that the program is bound to; all of it must be sent, and all of it written.
        sent, received : numpy.ndarray
            Arrays of the shapes and dtypes that the swap will be called with.

        Returns
        -------
        callable or None
            ``swap(sendbuf, recvbuf)``; None if the program does more than that.
        """
        ends = self._ends(source, target, sent, received)
        if ends is None:
            return None
        begin, last = ends.begin(), ends.end()
        if last is None:
            assert begin is not None
            return lambda sendbuf, recvbuf: begin(sendbuf)
        end, _ = last
        if begin is None:
            return end

        def swap(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
            begin(sendbuf)
            end(sendbuf, recvbuf)

        return swap

    def halves(self, source: np.ndarray, target: np.ndarray) -> tuple[Callable[[], object] | None, Wait | None] | None:
        """What begins the swap of the program's own memory, and what ends it; None if it is no such swap."""
        ends = self._ends(source, target, source, target)
        if ends is None:
            return None
        begin, last = ends.begin(), ends.end()
        first = None if begin is None else partial(begin, source)
        if last is None:
            return first, None
        end, there = last

        def test() -> bool:
            if not there():
                return False
            end(source, target)
            return True

        return first, Wait(partial(end, source, target), test)

    def _ends(self, source: np.ndarray, target: np.ndarray, sent: np.ndarray, received: np.ndarray) -> _Ends | None:
        if self._out is None and self._into is None:
            return None
        outgoing = None if self._out is None else self._out.outgoing(source, sent)
        incoming = None if self._into is None else self._into.incoming(source, target, received)
        if (self._out is not None and outgoing is None) or (self._into is not None and incoming is None):
            return None
        return _Ends(self._out, outgoing, self._into, incoming)


class _Ends:
    """Both ends of a swap with everything at hand that they need: the same steps as `start` and `wait` of messages."""

    def __init__(self, out: _Copied | None, outgoing: Any, into: _Arriving | None, incoming: Any) -> None:
        self._out, self._outgoing = out, outgoing
        self._into, self._incoming = into, incoming

    def begin(self) -> Callable[[np.ndarray], None] | None:
        """``begin(sendbuf)`` sends."""
        if self._out is None:
            return None
        edge, flags, outgoing = self._out.edge, self._out.flags, self._outgoing
        mine, ahead = edge.mine, SLOTS if outgoing[0].nbytes <= INLINE else CELLS

        def begin(sendbuf: np.ndarray) -> None:
            number = edge.sent = edge.sent + 1
            if number - edge.acked > ahead:
                edge.acknowledged(number - ahead)
            slot = number & MASK
            outgoing[slot][...] = sendbuf
            mine[flags[slot]] = number * KIND

        return begin

    def end(self) -> tuple[Callable[[np.ndarray, np.ndarray], None], Callable[[], bool]] | None:
        """``end(sendbuf, recvbuf)`` waits and takes what comes; the other says whether it is there."""
        if self._into is None:
            return None
        edge, flags = self._into.edge, self._into.flags
        arrays, ufunc, mine_first = self._incoming
        mine, theirs, my_ack = edge.mine, edge.theirs, edge.my_ack

        def end(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
            number = edge.got = edge.got + 1
            slot = number & MASK
            at, wanted = flags[slot], number * KIND
            if theirs[at] < wanted:
                edge.arrived(at, wanted)
            if ufunc is None:
                recvbuf[...] = arrays[slot]
            elif mine_first:
                ufunc(sendbuf, arrays[slot], recvbuf)
            else:
                ufunc(arrays[slot], sendbuf, recvbuf)
            mine[my_ack] = number

        def there() -> bool:
            number = edge.got + 1
            return theirs[flags[number & MASK]] >= number * KIND

        return end, there


_BYTE = np.dtype(np.uint8)


def _is(array: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are the same run of memory."""
    return array.nbytes == other.nbytes and MPI.Get_address(array) == MPI.Get_address(other)


def _words(target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two runs of bytes as wider elements where both allow it, which NumPy copies with less ado."""
    if target.size % 8 == 0 and not (MPI.Get_address(target) | MPI.Get_address(source)) % 8 and target.size:
        return target.view(np.int64), source.view(np.int64)
    return target, source


def _cut(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The part of a message from byte `start` to `stop`."""
    parts = []
    for address, nbytes in pieces:
        low, high = max(start, 0), min(stop, nbytes)
        if low < high:
            parts.append(Piece(address + low, high - low))
        start -= nbytes
        stop -= nbytes
    return parts


class Shared:
    """One channel of the node's mailboxes, for one rank: the wire between neighbours."""

    def __init__(self, node: Node, channel: int, edges: dict[int, Edge]) -> None:
        self._node, self._channel, self._edges = node, channel, edges
        self._landing: np.ndarray | None = None

    def _edge(self, peer: int) -> Edge:
        edge = self._edges.get(peer)
        if edge is None:
            edge = self._edges[peer] = Edge(self._node, self._channel, self._node.places[peer])
        return edge

    def send(self, peer: int, pieces: Sequence[Piece]) -> _Copied | _Told:
        edge = self._edge(peer)
        if sum(piece.nbytes for piece in pieces) <= edge.cell:
            return _Copied(edge, self._node.place, pieces)
        return _Told(edge, pieces)

    def receive(self, peer: int, pieces: Sequence[Piece]) -> _Arriving:
        edge, pieces = self._edge(peer), list(pieces)
        nbytes = sum(piece.nbytes for piece in pieces)
        memory = self._node.bytes[self._node.places[peer]]
        takes: list[list[Callable[[], object]]] = [[] for _ in range(SLOTS)]
        if nbytes <= edge.cell:
            for slot, calls in enumerate(takes):
                start = edge.slot_in(slot, nbytes)
                for address, length in pieces:
                    target, source = _words(view(address, length, _BYTE), memory[start : start + length])
                    calls.append(partial(np.copyto, target, source))
                    start += length
        return _Arriving(edge, takes, partial(self._read, edge.pid, pieces))

    def combine(
        self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Callable[[Any, Any, Any], Callable[[], object]]
    ) -> _Arriving:
        """A message whose elements are combined with `rows` of (mine, out) as they lie, or as they are read."""
        edge = self._edge(peer)
        dtype = rows[0][0].dtype
        nbytes = sum(mine.nbytes for mine, _ in rows)
        memory = self._node.bytes[self._node.places[peer]]
        takes: list[list[Callable[[], object]]] = [[] for _ in range(SLOTS)]
        if nbytes <= edge.cell:
            for slot, calls in enumerate(takes):
                start = edge.slot_in(slot, nbytes)
                for mine, out in rows:
                    incoming = memory[start : start + mine.nbytes].view(dtype)
                    calls.append(bind(incoming, mine, out))
                    start += mine.nbytes
            return _Arriving(edge, takes, self._unexpected, combines=True)
        fetch = partial(self._read_and_combine, edge.pid, self._steps(rows, dtype, bind))
        return _Arriving(edge, takes, fetch, combines=True)

    def _steps(
        self, rows: Sequence[tuple[Any, Any]], dtype: Any, bind: Callable[[Any, Any, Any], Callable[[], object]]
    ) -> list[tuple[_Iov, int, Callable[[], object]]]:
        """A long combination in steps: where to read to, how much, and the call that combines it."""
        room = max(CHUNK, dtype.itemsize)
        if self._landing is None:
            self._landing = np.empty(room + LINE, np.uint8)
        skew = -MPI.Get_address(self._landing) % LINE
        landing = self._landing[skew : skew + room]
        address, elements = MPI.Get_address(landing), room // dtype.itemsize
        steps = []
        for mine, out in rows:
            for start in range(0, len(mine), elements):
                part = mine[start : start + elements]
                incoming = landing[: part.nbytes].view(dtype)
                call = bind(incoming, part, out[start : start + elements])
                steps.append((_Iov(address, part.nbytes), part.nbytes, call))
        return steps

    def _read_and_combine(
        self, pid: int, steps: Sequence[tuple[_Iov, int, Callable[[], object]]], told: list[Piece]
    ) -> None:
        start = 0
        for local, nbytes, combine in steps:
            self._fetch(pid, [local], _cut(told, start, start + nbytes), nbytes)
            combine()
            start += nbytes

    def _read(self, pid: int, pieces: Sequence[Piece], told: list[Piece]) -> None:
        local = [_Iov(piece.address, piece.nbytes) for piece in pieces]
        self._fetch(pid, local, told, sum(piece.nbytes for piece in told))

    def _fetch(self, pid: int, local: Sequence[_Iov], told: Sequence[Piece], nbytes: int) -> None:
        """Read the pieces of another rank's memory."""
        into = (_Iov * len(local))(*local)
        remote = (_Iov * len(told))(*(_Iov(piece.address, piece.nbytes) for piece in told))
        got = self._node.read(pid, ctypes.addressof(into), len(into), ctypes.addressof(remote), len(remote), 0)
        if got != nbytes:
            error = ctypes.get_errno()
            raise OSError(error, f"reading {nbytes} bytes of process {pid} gave {got}: {os.strerror(error)}")

    def _unexpected(self, told: list[Piece]) -> None:
        raise AssertionError("a short message came by address")

    def grain(self, peer: int, nbytes: int) -> int | None:
        if not self._node.reaches(peer):
            return None
        cell = self._node.cells[self._channel]
        whole = nbytes <= cell or (nbytes > STREAMED and self._node.read is not None)
        return 0 if whole else cell

    def leaves(self, peer: int, nbytes: int, before: int) -> bool:
        return nbytes <= self._node.cells[self._channel] and before < CELLS

    def starting(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        """Of the messages to a peer the first ones find room at once; the others start while all are awaited."""
        ahead: dict[Edge, int] = defaultdict(int)
        for message in messages:
            if not isinstance(message, _Arriving):
                message.late = ahead[message.edge] >= CELLS
                ahead[message.edge] += 1
        return [message.start for message in messages if isinstance(message, _Arriving) or not message.late]

    def waiting(self, messages: Sequence[Any]) -> Sequence[Wait]:
        arriving = [message for message in messages if isinstance(message, _Arriving)]
        leaving = [message for message in messages if not isinstance(message, _Arriving)]
        late = [message for message in leaving if message.late]
        if late:
            return [_streaming(late, arriving, leaving)]
        copied: list[Any] = [message for message in leaving if isinstance(message, _Copied)]
        told = [message for message in leaving if isinstance(message, _Told)]
        if any(message.combines for message in arriving):  # into memory that must have left before
            return [Wait(message.wait, message.test) for message in (*copied, *arriving, *told)]
        return [Wait(message.wait, message.test) for message in (*arriving, *copied, *told)]

    def swap(self, messages: Sequence[Any]) -> Swap | None:
        """All of the messages as one swap, if they are no more than that."""
        out = [message for message in messages if isinstance(message, _Copied)]
        into = [message for message in messages if isinstance(message, _Arriving)]
        if self._node.fence is not None or len(out) + len(into) < len(messages) or len(out) > 1 or len(into) > 1:
            return None
        return Swap(out[0] if out else None, into[0] if into else None)

    def free(self) -> None:
        """The mailboxes are the node's."""


def _streaming(late: Sequence[Any], arriving: Sequence[Any], leaving: Sequence[Any]) -> Wait:
    """One wait for a stream of parts: whatever finds room starts, and whatever has come is taken, peer by peer."""
    state: list[list[Any]] = []

    def queues(messages: Sequence[Any]) -> list[Any]:
        by_edge: dict[Edge, list[Any]] = defaultdict(list)
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


class Nearest:
    """Each edge over the best wire that both of its ends have: shared memory within the node, MPI to other nodes."""

    def __init__(self, shared: Shared, far: Persistent) -> None:
        self._shared, self._far = shared, far

    def _wire(self, peer: int) -> Shared | Persistent:
        return self._shared if self._shared.grain(peer, 0) is not None else self._far

    def send(self, peer: int, pieces: Sequence[Piece]) -> Any:
        return self._wire(peer).send(peer, pieces)

    def receive(self, peer: int, pieces: Sequence[Piece]) -> Any:
        return self._wire(peer).receive(peer, pieces)

    def grain(self, peer: int, nbytes: int) -> int | None:
        return self._shared.grain(peer, nbytes)

    def leaves(self, peer: int, nbytes: int, before: int) -> bool:
        return self.grain(peer, nbytes) is not None and self._shared.leaves(peer, nbytes, before)

    def combine(
        self, peer: int, rows: Sequence[tuple[Any, Any]], bind: Callable[[Any, Any, Any], Callable[[], object]]
    ) -> Any:
        return self._shared.combine(peer, rows, bind)

    def _split(self, messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        near = [message for message in messages if isinstance(message, (_Copied, _Told, _Arriving))]
        return near, [message for message in messages if not isinstance(message, (_Copied, _Told, _Arriving))]

    def starting(self, messages: Sequence[Any]) -> Sequence[Callable[[], object]]:
        near, far = self._split(messages)
        return [*self._far.starting(far), *self._shared.starting(near)] if far else self._shared.starting(near)

    def waiting(self, messages: Sequence[Any]) -> Sequence[Wait]:
        near, far = self._split(messages)
        if not (near and far):
            return self._far.waiting(far) if far else self._shared.waiting(near)
        return [_together([*self._far.waiting(far), *self._shared.waiting(near)])]

    def swap(self, messages: Sequence[Any]) -> Swap | None:
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
