"""Fused exchange: one eager send and one receive as one function on the user's arrays.

An allreduce of two ranks is no more than that. The steps are those of `shm_messages`, in one Python function or in one
compiled function (`compiled_exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.transport import compiled_exchange as compiled
from collectives.transport.mailbox import (
    ACKED,
    BY_ADDRESS,
    CELLS,
    INLINE,
    KIND,
    LENGTHS,
    MASK,
    RECEIVED,
    SENT,
    SLOTS,
    WORDS,
    MailboxEdge,
    address_label,
    label,
)
from collectives.transport.shm_messages import EagerSend, Receive
from collectives.types import Wait

Halves = tuple[Callable[[], object] | None, Wait]

_NOTHING = Wait(lambda: None, lambda: True)


class SplitExchange(NamedTuple):
    """An exchange in two halves: `send` returns True, or False if the slot is full; `receive` completes it."""

    send: Callable[[], int]
    receive: Wait

    def waiting_for_room(self, edge: MailboxEdge) -> Halves:
        """Start function that never blocks, and a wait that first sends the message if the slot was full before."""
        send, (receive, received) = self
        sent = True

        def start() -> None:
            nonlocal sent
            sent = bool(send())

        def wait() -> None:
            nonlocal sent
            while not sent:
                edge.wait_acknowledged(edge.counts[SENT] + 1 - CELLS)
                sent = bool(send())
            receive()

        def test() -> bool:
            nonlocal sent
            sent = sent or bool(send())
            return sent and received()

        return start, Wait(wait, test)


class FusedExchange:
    """Fused exchange for a bound collective that is one eager send, one receive, or both, and nothing else.

    `alone`: no other messages use the channel between the two ranks. `compiles`: it is run often enough.
    """

    def __init__(self, out: EagerSend | None, into: Receive | None, alone: bool, compiles: bool) -> None:
        self._out, self._into, self._alone, self._compiles = out, into, alone, compiles

    def bind_arrays(
        self, source: np.ndarray, target: np.ndarray, sent: np.ndarray, received: np.ndarray
    ) -> Callable[[np.ndarray, np.ndarray], None] | None:
        """Function ``exchange(sendbuf, recvbuf)`` for arrays like `sent` and `received`; None if not supported.

        `source` and `target` are the memory that the program is bound to: all of it must be sent, and written.
        """
        ends = self._ends(source, target, sent, received)
        if ends is None:
            return None
        send, receive = ends.sending(), ends.receiving()
        if receive is None:
            assert send is not None
            return lambda sendbuf, recvbuf: send(sendbuf)
        end, _ = receive
        if send is None:
            return end

        def exchange(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
            send(sendbuf)
            end(sendbuf, recvbuf)

        return exchange

    def split(self, source: np.ndarray, target: np.ndarray) -> Halves | None:
        """Start and wait functions of the exchange between `source` and `target`; None if it is not supported."""
        ends = self._ends(source, target, source, target)
        if ends is None:
            return None
        fast = None
        if self._compiles and compiled.available() and source.nbytes < compiled.RENDEZVOUS_BYTES:
            fast = ends.compiled(source, target)
        parts = (fast or ends).parts(source, target)
        if self._out is None:
            return None, parts.receive
        # Alone on the channel, this rank has received the peer's message of the previous exchange, which the peer began
        # after it had received ours of the exchange before that: only one cell is in use. Not so if another rank than
        # the receiver sends, as in a scan.
        if self._alone and self._into is not None and self._into.edge is self._out.edge:
            return parts.send, parts.receive
        return parts.waiting_for_room(self._out.edge)

    def _ends(
        self, source: np.ndarray, target: np.ndarray, sent: np.ndarray, received: np.ndarray
    ) -> _ExchangeEnds | None:
        if (self._out is None and self._into is None) or sent.shape != received.shape:
            return None
        outgoing = None if self._out is None else self._out.outgoing(source, sent)
        incoming = None if self._into is None else self._into.incoming(source, target, received)
        if (self._out is not None and outgoing is None) or (self._into is not None and incoming is None):
            return None
        slow = None if self._into is None else partial(_receive, self._into, source, target)
        return _ExchangeEnds(self._out, outgoing, self._into, incoming, slow)


def _receive(
    message: Receive, source: np.ndarray, target: np.ndarray, sendbuf: np.ndarray, recvbuf: np.ndarray
) -> None:
    """Receive a message that is not eager, through the bound arrays `source` and `target`, into `recvbuf`."""
    source, target = source.view(np.uint8), target.view(np.uint8)
    source.view(sendbuf.dtype).reshape(sendbuf.shape)[...] = sendbuf
    message.start()
    message.wait()
    recvbuf[...] = target.view(recvbuf.dtype).reshape(recvbuf.shape)


class CompiledExchange(NamedTuple):
    """Exchange as a compiled call: ``begin(sendbuf, recvbuf, numbers, plan)``, completed by `finish` if necessary.

    ``receive(sendbuf, recvbuf)`` receives messages that only Python code can.
    """

    begin: Callable[..., int]
    numbers: np.ndarray
    plan: np.ndarray
    edge: MailboxEdge
    end: Callable[..., int]
    receive: Callable[[np.ndarray, np.ndarray], None] | None

    def finish(self, result: int, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """Wait for the rest of an exchange that `begin` started but did not complete; `result` is its return value."""
        edge, counts = self.edge, self.edge.counts
        if result != compiled.UNTAKEN:
            number = counts[RECEIVED] + 1
            edge.wait_flag(edge.inbox + (number & MASK) * WORDS, number * KIND)
            if self.end(sendbuf, recvbuf, self.numbers, self.plan) != compiled.DONE:
                assert self.receive is not None
                self.receive(sendbuf, recvbuf)
        if counts[BY_ADDRESS] > counts[ACKED]:
            edge.wait_acknowledged(counts[BY_ADDRESS])

    def parts(self, source: np.ndarray, target: np.ndarray) -> SplitExchange:
        """Split the exchange between these arrays into its send and its receive."""
        sends, receives = self.plan.copy(), self.plan.copy()
        sends[compiled.INTO_COUNT] = receives[compiled.OUT_COUNT] = receives[compiled.COPIED] = 0
        send = partial(self.begin, source, target, self.numbers, sends)
        end, finish, edge = partial(self.begin, source, target, self.numbers, receives), self.finish, self.edge

        def wait() -> None:
            result = end()
            if result != compiled.DONE:
                finish(result, source, target)

        def test() -> bool:
            number = edge.counts[RECEIVED] + 1
            if edge.theirs[edge.inbox + (number & MASK) * WORDS] < number * KIND:
                return False
            finish(compiled.LATE, source, target)
            return True

        return SplitExchange(send, Wait(wait, test) if self.plan[compiled.INTO_COUNT] else _NOTHING)


def compile_swap(
    edge: MailboxEdge,
    dtype: np.dtype,
    numbers: Mapping[int, int],
    receive: Callable[[np.ndarray, np.ndarray], None] | None,
    mark: int,
) -> CompiledExchange:
    """Compile an exchange from its plan: `numbers` are entries by index, labels follow from `mark`, others are 0."""
    plan = np.zeros(compiled.ADDRESS_LABEL + 1, np.int64)
    for place, number in numbers.items():
        plan[place] = number
    plan[compiled.OUT_LABEL] = label(int(plan[compiled.OUT_COUNT]) * dtype.itemsize, mark)
    plan[compiled.INTO_LABEL] = label(int(plan[compiled.INTO_COUNT]) * dtype.itemsize, mark)
    plan[compiled.ADDRESS_LABEL] = address_label(1, mark)
    begin, end = compiled.swap(dtype)
    return CompiledExchange(begin, edge.numbers, plan, edge, end, receive)


class _ExchangeEnds(NamedTuple):
    """Send and receive of an exchange, with arrays over their mailbox slots.

    `outgoing` and `incoming` are results of `EagerSend.outgoing` and `Receive.incoming`. `slow` receives a
    message that is not eager.
    """

    out: EagerSend | None
    outgoing: Any
    into: Receive | None
    incoming: Any
    slow: Callable[[np.ndarray, np.ndarray], None] | None

    def compiled(self, sent: np.ndarray, received: np.ndarray) -> CompiledExchange | None:
        """Compile the exchange for arrays like `sent` and `received`; None if that is not supported."""
        messages = [message for message in (self.out, self.into) if message is not None]
        _, ufunc, mine_first = self.incoming or ([], None, False)
        equal = sent.dtype == received.dtype and sent.shape == received.shape and sent.ndim == 1
        edges = {message.edge for message in messages}
        if len(edges) > 1 or not equal or sent.dtype not in compiled.DTYPES or ufunc not in compiled.OPERATIONS:
            return None
        if self.into is not None and not self.into.edge.is_incoming(self.incoming[0][0]):
            return None  # MPI.NO_OP: the local operand takes the place of the message
        (edge,) = edges
        numbers = {
            compiled.SEND_BYTES: sent.nbytes,
            compiled.RECV_BYTES: received.nbytes,
            compiled.OUT_COUNT: 0 if self.out is None else sent.size,
            compiled.INTO_COUNT: 0 if self.into is None else received.size,
            compiled.OPERATION: compiled.OPERATIONS.index(ufunc),
            compiled.MINE_FIRST: int(mine_first),
            compiled.ONE: int(MPI.Get_address(sent) == MPI.Get_address(received)),
        }
        (mark,) = {message.label // LENGTHS for message in messages}
        return compile_swap(edge, sent.dtype, numbers, self.slow, mark)

    def parts(self, source: np.ndarray, target: np.ndarray) -> SplitExchange:
        """Split the exchange between these arrays into its send and its receive."""
        begin, receive = self.sending(), self.receiving()

        def send() -> bool:
            if begin is None or self.out is None or not self.out.edge.has_room():
                return False
            begin(source)
            return True

        if receive is None:
            return SplitExchange(send, _NOTHING)
        end, has_arrived = receive

        def test() -> bool:
            if not has_arrived():
                return False
            end(source, target)
            return True

        return SplitExchange(send, Wait(partial(end, source, target), test))

    def sending(self) -> Callable[[np.ndarray], None] | None:
        """Function ``send(sendbuf)``, an inlined `EagerSend.write` that waits for a slot; None if nothing is sent."""
        if self.out is None:
            return None
        edge, flags, outgoing = self.out.edge, self.out.flags, self.outgoing
        counts, mine, nbytes, tag = edge.counts, edge.mine, outgoing[0].nbytes, self.out.label
        room = SLOTS if nbytes <= INLINE else CELLS

        def send(sendbuf: np.ndarray) -> None:
            number = counts[SENT] = counts[SENT] + 1
            if number - counts[ACKED] > room:
                edge.wait_acknowledged(number - room)
            slot = number & MASK
            outgoing[slot][...] = sendbuf
            if nbytes > INLINE:
                mine[flags[slot] + 1] = nbytes
            mine[flags[slot]] = number * KIND + tag

        return send

    def receiving(self) -> tuple[Callable[[np.ndarray, np.ndarray], None], Callable[[], bool]] | None:
        """Functions (receive(sendbuf, recvbuf), has_arrived()), inlined from `Receive`; None if nothing is received."""
        if self.into is None or self.slow is None:
            return None
        edge, flags, tag, nbytes = self.into.edge, self.into.flags, self.into.label, self.into.nbytes
        (arrays, ufunc, mine_first), slow = self.incoming, self.slow
        join = ufunc if ufunc not in (np.maximum, np.minimum) else partial(_join, ufunc)
        counts, mine, theirs, my_ack = edge.counts, edge.mine, edge.theirs, edge.my_ack

        def receive(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
            number = counts[RECEIVED] + 1
            slot = number & MASK
            at, wanted = flags[slot], number * KIND
            if theirs[at] < wanted:
                edge.wait_flag(at, wanted)
            if theirs[at] != wanted + tag or (nbytes > INLINE and theirs[at + 1] != nbytes):
                slow(sendbuf, recvbuf)
                return
            counts[RECEIVED] = number
            if ufunc is None:
                recvbuf[...] = arrays[slot]
            elif mine_first:
                join(sendbuf, arrays[slot], recvbuf)
            else:
                join(arrays[slot], sendbuf, recvbuf)
            mine[my_ack] = number

        def has_arrived() -> bool:
            number = counts[RECEIVED] + 1
            return theirs[flags[number & MASK]] >= number * KIND

        return receive, has_arrived


def _join(ufunc: np.ufunc, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    ufunc(left, right, out=out)  # NumPy 2.4 deprecates the third position of some
