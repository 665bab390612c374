"""A short message for a message: all that an allreduce of two ranks is, straight between the user's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from collectives.transport import compiled_exchange as compiled
from collectives.transport.mailbox import ACKED, CELLS, GOT, INLINE, KIND, MASK, SENT, SLOTS, TOLD, WORDS, Edge
from collectives.transport.wire import Wait


class Leaving(Protocol):
    """A message that is copied into its slot."""

    edge: Edge
    flags: list[int]

    def outgoing(self, source: np.ndarray, like: np.ndarray) -> list[np.ndarray] | None:
        """What the message fills in each slot, as arrays like the given one; None if it is not all of `source`."""
        ...


class Arriving(Protocol):
    """A message that is taken out of its slot."""

    edge: Edge
    flags: list[int]

    def incoming(
        self, source: np.ndarray, target: np.ndarray, like: np.ndarray
    ) -> tuple[list[np.ndarray], Any, bool] | None:
        """What arrives in each slot, as arrays like the given one; the ufunc that joins it to all of `source`, or None
        if it is copied; and whether it stands on the right. None if not all of `target` is written, and at once."""
        ...

    def start(self) -> None:
        """Await it, as the next message of its edge."""
        ...

    def wait(self) -> None:
        """Take it, in whatever way it comes."""
        ...


class Parts(NamedTuple):
    """A swap in parts: `leave` sends and says so, or says that there is no room; `end` takes what comes."""

    leave: Callable[[], int]
    end: Wait


Halves = tuple[Callable[[], object] | None, Wait]

_NOTHING = Wait(lambda: None, lambda: True)


def _waiting_for_room(edge: Edge, parts: Parts) -> Halves:
    """What begins a swap and never waits, and what ends it: there the message leaves if there was no room for it."""
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


class Swap:
    """At most one short message out and one in, which is all that some programs do.

    `alone` says that no other messages travel between the two, and `compiles` that it is done often enough.
    """

    def __init__(self, out: Leaving | None, into: Arriving | None, alone: bool, compiles: bool) -> None:
        self._out, self._into, self._alone, self._compiles = out, into, alone, compiles

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

    def halves(self, source: np.ndarray, target: np.ndarray) -> Halves | None:
        """What begins the swap of the program's own memory, and what ends it; None if it is no such swap."""
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

    def _ends(self, source: np.ndarray, target: np.ndarray, sent: np.ndarray, received: np.ndarray) -> _Ends | None:
        if (self._out is None and self._into is None) or sent.shape != received.shape:
            return None
        outgoing = None if self._out is None else self._out.outgoing(source, sent)
        incoming = None if self._into is None else self._into.incoming(source, target, received)
        if (self._out is not None and outgoing is None) or (self._into is not None and incoming is None):
            return None
        told = None if self._into is None else _Told(self._into, source, target)
        return _Ends(self._out, outgoing, self._into, incoming, told)


class _Told(NamedTuple):
    """A message that came by its address and not in the slot: it is taken by way of the program's own memory."""

    message: Arriving
    source: np.ndarray
    target: np.ndarray

    def take(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Take it as the next message of its edge."""
        source, target = (array.view(np.uint8) for array in (self.source, self.target))
        source.view(sendbuf.dtype).reshape(sendbuf.shape)[...] = sendbuf
        self.message.start()
        self.message.wait()
        recvbuf[...] = target.view(recvbuf.dtype).reshape(recvbuf.shape)


class Compiled(NamedTuple):
    """A swap as a compiled call: ``begin(sendbuf, recvbuf, numbers, plan)``, and `finish` for what that leaves.

    `told(sendbuf, recvbuf)` takes what comes in a way that only Python knows.
    """

    begin: Callable[..., int]
    numbers: np.ndarray
    plan: np.ndarray
    edge: Edge
    end: Callable[..., int]
    told: Callable[[np.ndarray, np.ndarray], None] | None

    def finish(self, said: int, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Do what is left after `begin` has said anything but DONE and NO."""
        edge, counts = self.edge, self.edge.counts
        if said != compiled.UNTAKEN:
            number = counts[GOT] + 1
            edge.arrived(edge.inbox + (number & MASK) * WORDS, number * KIND)
            if self.end(sendbuf, recvbuf, self.numbers, self.plan) != compiled.DONE:
                assert self.told is not None
                self.told(sendbuf, recvbuf)
        if counts[TOLD] > counts[ACKED]:
            edge.acknowledged(counts[TOLD])

    def parts(self, source: np.ndarray, target: np.ndarray) -> Parts:
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

        return Parts(begin, Wait(wait, test) if self.plan[compiled.INTO_COUNT] else _NOTHING)


def compile_swap(
    edge: Edge, dtype: np.dtype, numbers: Mapping[int, int], told: Callable[[np.ndarray, np.ndarray], None] | None
) -> Compiled:
    """The swap that the numbers describe, by their places in a plan (see `compiled`); those left out are 0."""
    plan = np.zeros(compiled.ONE + 1, np.int64)
    for place, number in numbers.items():
        plan[place] = number
    begin, end = compiled.swap(dtype)
    return Compiled(begin, edge.numbers, plan, edge, end, told)


class _Ends:
    """Both ends of a swap with everything at hand that they need: the same steps as `start` and `wait` of messages."""

    def __init__(
        self, out: Leaving | None, outgoing: Any, into: Arriving | None, incoming: Any, told: _Told | None
    ) -> None:
        self._out, self._outgoing = out, outgoing
        self._into, self._incoming, self._told = into, incoming, told

    def compiled(self, sent: np.ndarray, received: np.ndarray) -> Compiled | None:
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
        return compile_swap(edge, sent.dtype, numbers, None if self._told is None else self._told.take)

    def parts(self, source: np.ndarray, target: np.ndarray) -> Parts:
        """Its parts between these arrays."""
        begin, last = self.begin(), self.end()

        def leave() -> bool:
            if begin is None or self._out is None or not self._out.edge.has_room():
                return False
            begin(source)
            return True

        if last is None:
            return Parts(leave, _NOTHING)
        end, there = last

        def test() -> bool:
            if not there():
                return False
            end(source, target)
            return True

        return Parts(leave, Wait(partial(end, source, target), test))

    def begin(self) -> Callable[[np.ndarray], None] | None:
        """``begin(sendbuf)`` sends."""
        if self._out is None:
            return None
        edge, flags, outgoing = self._out.edge, self._out.flags, self._outgoing
        counts, mine, ahead = edge.counts, edge.mine, SLOTS if outgoing[0].nbytes <= INLINE else CELLS

        def begin(sendbuf: np.ndarray) -> None:
            number = counts[SENT] = counts[SENT] + 1
            if number - counts[ACKED] > ahead:
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
        (arrays, ufunc, mine_first), told = self._incoming, self._told
        join = ufunc if ufunc not in (np.maximum, np.minimum) else partial(_join, ufunc)
        counts, mine, theirs, my_ack = edge.counts, edge.mine, edge.theirs, edge.my_ack

        def end(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
            number = counts[GOT] + 1
            slot = number & MASK
            at, wanted = flags[slot], number * KIND
            if theirs[at] < wanted:
                edge.arrived(at, wanted)
            if theirs[at] != wanted:
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
