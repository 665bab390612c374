"""A short message for a message: all that an allreduce of two ranks is, straight between the user's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from collectives.transport import compiled_exchange as compiled
from collectives.transport.mailbox import (
    ACKED,
    CELLS,
    GOT,
    INLINE,
    KIND,
    LENGTHS,
    MASK,
    SENT,
    SLOTS,
    TOLD,
    WORDS,
    MailboxEdge,
    label,
    told_label,
)
from collectives.types import Wait


class ExchangeSend(Protocol):
    """A message that is copied into its slot."""

    edge: MailboxEdge
    flags: list[int]
    label: int

    def outgoing(self, source: np.ndarray, like: np.ndarray) -> list[np.ndarray] | None:
        """Arrays over the data of the outgoing message in each slot; None if it is not all of `source`."""
        ...


class ExchangeRecv(Protocol):
    """A message that is taken out of its slot."""

    edge: MailboxEdge
    flags: list[int]
    label: int
    nbytes: int

    def incoming(
        self, source: np.ndarray, target: np.ndarray, like: np.ndarray
    ) -> tuple[list[np.ndarray], Any, bool] | None:
        """Arrays over the incoming data in each slot, and the ufunc that combines it with all of `source`, or None
        if it is copied; and whether it stands on the right. None if not all of `target` is written, and at once."""
        ...

    def start(self) -> None:
        """Await it, as the next message of its edge."""
        ...

    def wait(self) -> None:
        """Receive the message, eager or by address."""
        ...


class SplitExchange(NamedTuple):
    """A split exchange: `leave` sends and returns True, or False if the slot is full; `end` receives."""

    leave: Callable[[], int]
    end: Wait


Halves = tuple[Callable[[], object] | None, Wait]

_NOTHING = Wait(lambda: None, lambda: True)


def _waiting_for_room(edge: MailboxEdge, parts: SplitExchange) -> Halves:
    """Non-blocking start and the wait of an exchange; the wait sends the message if the slot was full at the start."""
    leave, (end, ended) = parts
    left = True

    def begin() -> None:
        nonlocal left
        left = bool(leave())

    def wait() -> None:
        nonlocal left
        while not left:
            edge.acknowledged(edge.counts[SENT] + 1 - CELLS)
            left = bool(leave())
        end()

    def test() -> bool:
        nonlocal left
        left = left or bool(leave())
        return left and ended()

    return begin, Wait(wait, test)


def _join(ufunc: np.ufunc, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    ufunc(left, right, out=out)  # NumPy 2.4 deprecates the third position of some


class FusedExchange:
    """At most one short message out and one in, which is all that some programs do.

    `alone` says that no other messages travel between the two, and `compiles` that it is done often enough.
    """

    def __init__(self, out: ExchangeSend | None, into: ExchangeRecv | None, alone: bool, compiles: bool) -> None:
        self._out, self._into, self._alone, self._compiles = out, into, alone, compiles

    def bind_arrays(
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

    def split(self, source: np.ndarray, target: np.ndarray) -> Halves | None:
        """Start and wait functions of the exchange on the program's memory; None if it is not supported."""
        ends = self._ends(source, target, source, target)
        if ends is None:
            return None
        quick = None
        if self._compiles and compiled.available() and source.nbytes < compiled.SEEN:
            quick = ends.compiled(source, target)
        parts = ends.parts(source, target) if quick is None else quick.parts(source, target)
        if self._out is None:
            return None, parts.end
        # Who has a stream for itself and swaps has had the peer's last message, so the one before it was taken, and
        # there is always room.
        if self._alone and self._into is not None:
            return parts.leave, parts.end
        return _waiting_for_room(self._out.edge, parts)

    def _ends(
        self, source: np.ndarray, target: np.ndarray, sent: np.ndarray, received: np.ndarray
    ) -> _ExchangeEnds | None:
        if (self._out is None and self._into is None) or sent.shape != received.shape:
            return None
        outgoing = None if self._out is None else self._out.outgoing(source, sent)
        incoming = None if self._into is None else self._into.incoming(source, target, received)
        if (self._out is not None and outgoing is None) or (self._into is not None and incoming is None):
            return None
        told = None if self._into is None else _AddressMessage(self._into, source, target)
        return _ExchangeEnds(self._out, outgoing, self._into, incoming, told)


class _AddressMessage(NamedTuple):
    """A message that came by its address and not in the slot: it is taken by way of the program's own memory."""

    message: ExchangeRecv
    source: np.ndarray
    target: np.ndarray

    def take(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Take it as the next message of its edge."""
        source, target = (array.view(np.uint8) for array in (self.source, self.target))
        source.view(sendbuf.dtype).reshape(sendbuf.shape)[...] = sendbuf
        self.message.start()
        self.message.wait()
        recvbuf[...] = target.view(recvbuf.dtype).reshape(recvbuf.shape)


class CompiledExchange(NamedTuple):
    """A swap as a compiled call: ``begin(sendbuf, recvbuf, numbers, plan)``, and `finish` for what that leaves.

    `told(sendbuf, recvbuf)` takes what comes in a way that only Python knows.
    """

    begin: Callable[..., int]
    numbers: np.ndarray
    plan: np.ndarray
    edge: MailboxEdge
    end: Callable[..., int]
    told: Callable[[np.ndarray, np.ndarray], None] | None

    def finish(self, said: int, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Complete an exchange for which `begin` returned neither DONE nor NO."""
        edge, counts = self.edge, self.edge.counts
        if said != compiled.UNTAKEN:
            number = counts[GOT] + 1
            edge.arrived(edge.inbox + (number & MASK) * WORDS, number * KIND)
            if self.end(sendbuf, recvbuf, self.numbers, self.plan) != compiled.DONE:
                assert self.told is not None
                self.told(sendbuf, recvbuf)
        if counts[TOLD] > counts[ACKED]:
            edge.acknowledged(counts[TOLD])

    def parts(self, source: np.ndarray, target: np.ndarray) -> SplitExchange:
        """Its parts between these arrays."""
        sends, receives = self.plan.copy(), self.plan.copy()
        sends[compiled.INTO_COUNT] = receives[compiled.OUT_COUNT] = receives[compiled.COPIED] = 0
        begin = partial(self.begin, source, target, self.numbers, sends)
        end, finish, edge = partial(self.begin, source, target, self.numbers, receives), self.finish, self.edge

        def wait() -> None:
            said = end()
            if said != compiled.DONE:
                finish(said, source, target)

        def test() -> bool:
            number = edge.counts[GOT] + 1
            if edge.theirs[edge.inbox + (number & MASK) * WORDS] < number * KIND:
                return False
            finish(compiled.LATE, source, target)
            return True

        return SplitExchange(begin, Wait(wait, test) if self.plan[compiled.INTO_COUNT] else _NOTHING)


def compile_swap(
    edge: MailboxEdge,
    dtype: np.dtype,
    numbers: Mapping[int, int],
    told: Callable[[np.ndarray, np.ndarray], None] | None,
    mark: int,
) -> CompiledExchange:
    """The swap that the numbers describe, by their places in a plan (see `compiled`); those left out are 0."""
    plan = np.zeros(compiled.TOLD_LABEL + 1, np.int64)
    for place, number in numbers.items():
        plan[place] = number
    plan[compiled.OUT_LABEL] = label(int(plan[compiled.OUT_COUNT]) * dtype.itemsize, mark)
    plan[compiled.INTO_LABEL] = label(int(plan[compiled.INTO_COUNT]) * dtype.itemsize, mark)
    plan[compiled.TOLD_LABEL] = told_label(1, mark)
    begin, end = compiled.swap(dtype)
    return CompiledExchange(begin, edge.numbers, plan, edge, end, told)


class _ExchangeEnds:
    """Both ends of a swap with everything at hand that they need: the same steps as `start` and `wait` of messages."""

    def __init__(
        self,
        out: ExchangeSend | None,
        outgoing: Any,
        into: ExchangeRecv | None,
        incoming: Any,
        told: _AddressMessage | None,
    ) -> None:
        self._out, self._outgoing = out, outgoing
        self._into, self._incoming, self._told = into, incoming, told

    def compiled(self, sent: np.ndarray, received: np.ndarray) -> CompiledExchange | None:
        """All of it in one compiled call, between such arrays."""
        edges = {message.edge for message in (self._out, self._into) if message is not None}
        _, ufunc, mine_first = ([], None, False) if self._into is None else self._incoming
        alike = sent.dtype == received.dtype and sent.shape == received.shape and sent.ndim == 1
        if len(edges) > 1 or not alike or sent.dtype not in compiled.DTYPES or ufunc not in compiled.OPERATIONS:
            return None
        if self._into is not None and not self._into.edge.holds(self._incoming[0][0]):
            return None  # MPI.NO_OP, which takes one's own term for what comes
        (edge,) = edges
        numbers = {
            compiled.SEND_BYTES: sent.nbytes,
            compiled.RECV_BYTES: received.nbytes,
            compiled.OUT_COUNT: 0 if self._out is None else sent.size,
            compiled.INTO_COUNT: 0 if self._into is None else received.size,
            compiled.OPERATION: compiled.OPERATIONS.index(ufunc),
            compiled.MINE_FIRST: int(mine_first),
            compiled.ONE: int(MPI.Get_address(sent) == MPI.Get_address(received)),
        }
        (mark,) = {message.label // LENGTHS for message in (self._out, self._into) if message is not None}
        return compile_swap(edge, sent.dtype, numbers, None if self._told is None else self._told.take, mark)

    def parts(self, source: np.ndarray, target: np.ndarray) -> SplitExchange:
        """Its parts between these arrays."""
        begin, last = self.begin(), self.end()

        def leave() -> bool:
            if begin is None or self._out is None or not self._out.edge.has_room():
                return False
            begin(source)
            return True

        if last is None:
            return SplitExchange(leave, _NOTHING)
        end, there = last

        def test() -> bool:
            if not there():
                return False
            end(source, target)
            return True

        return SplitExchange(leave, Wait(partial(end, source, target), test))

    def begin(self) -> Callable[[np.ndarray], None] | None:
        """``begin(sendbuf)`` sends."""
        if self._out is None:
            return None
        edge, flags, outgoing = self._out.edge, self._out.flags, self._outgoing
        counts, mine, nbytes, tag = edge.counts, edge.mine, outgoing[0].nbytes, self._out.label
        ahead = SLOTS if nbytes <= INLINE else CELLS

        def begin(sendbuf: np.ndarray) -> None:
            number = counts[SENT] = counts[SENT] + 1
            if number - counts[ACKED] > ahead:
                edge.acknowledged(number - ahead)
            slot = number & MASK
            outgoing[slot][...] = sendbuf
            if nbytes > INLINE:
                mine[flags[slot] + 1] = nbytes
            mine[flags[slot]] = number * KIND + tag

        return begin

    def end(self) -> tuple[Callable[[np.ndarray, np.ndarray], None], Callable[[], bool]] | None:
        """``end(sendbuf, recvbuf)`` waits and receives; the second function tests for arrival."""
        if self._into is None:
            return None
        edge, flags, tag, nbytes = self._into.edge, self._into.flags, self._into.label, self._into.nbytes
        (arrays, ufunc, mine_first), told = self._incoming, self._told
        join = ufunc if ufunc not in (np.maximum, np.minimum) else partial(_join, ufunc)
        counts, mine, theirs, my_ack = edge.counts, edge.mine, edge.theirs, edge.my_ack

        def end(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
            number = counts[GOT] + 1
            slot = number & MASK
            at, wanted = flags[slot], number * KIND
            if theirs[at] < wanted:
                edge.arrived(at, wanted)
            if theirs[at] != wanted + tag or (nbytes > INLINE and theirs[at + 1] != nbytes):
                assert told is not None
                told.take(sendbuf, recvbuf)
                return
            counts[GOT] = number
            if ufunc is None:
                recvbuf[...] = arrays[slot]
            elif mine_first:
                join(sendbuf, arrays[slot], recvbuf)
            else:
                join(arrays[slot], sendbuf, recvbuf)
            mine[my_ack] = number

        def there() -> bool:
            number = counts[GOT] + 1
            return theirs[flags[number & MASK]] >= number * KIND

        return end, there
