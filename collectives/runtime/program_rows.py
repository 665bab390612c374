"""Translation of a program to rows, which the compiled engine runs.

A program can be translated if there are rows for all of its operations: messages through mailboxes, persistent messages
over MPI, copies, and reductions that the engine has. Rows follow the protocol of the Python code exactly, so that ranks
with and without the engine work together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import engine, reduction_number, use_mpi
from collectives.engine.instructions import ABSOLUTE, COPY, FAILED_IN_MPI, NET_MESSAGE, OPERAND, ROW, STREAM, Kind
from collectives.runtime.binder import copy_array
from collectives.runtime.ops import ReproducibleFunction
from collectives.runtime.program import ElementArray
from collectives.transport.exchange import After, Exchange, Stream
from collectives.transport.mailbox import MailboxEdge
from collectives.transport.mpi_transport import PersistentMessage
from collectives.transport.shm_messages import CHUNK, Acknowledgement, MailboxReceive, MailboxSend, NothingUnread
from collectives.transport.wire import Iovec, Wire
from collectives.types import Wait

MOST_PACKED = 1 << 16
"""Most bytes of a message over MPI that is packed."""


class NoRowsError(Exception):
    """There are no rows for an operation of the program."""


class Piece(NamedTuple):
    """Addresses of an operand: the left or only one, the right one, and the result; 0 where there is none."""

    nbytes: int
    left: int = 0
    right: int = 0
    out: int = 0


class NetworkMessage:
    """Persistent message over MPI, and a buffer to pack it if it has several pieces.

    Without packing, MPI would need a datatype of the pieces for each place of the user's arrays.
    """

    def __init__(self, message: PersistentMessage, number: int) -> None:
        self.number, self.receives, self._description = number, message.length is not None, message
        self.nbytes = sum(nbytes for _, nbytes in message.pieces)
        packs = len(message.pieces) > 1
        if packs and self.nbytes > MOST_PACKED:
            raise NoRowsError
        self._packed = np.empty(self.nbytes if packs else 0, np.uint8)
        room = MPI.Get_address(self._packed)
        places = accumulate((nbytes for _, nbytes in message.pieces), initial=room)
        self.packing = [*zip(places, message.pieces)] if packs else []
        """Where each piece is packed, and the piece."""

        self.sent_pieces = [Iovec(room, self.nbytes)] if packs else message.pieces

    def describe(self, record: Any) -> None:
        """Fill the record of the message for the engine."""
        message = self._description
        handles = (c_int64(handle).value for handle in (message.comm.handle, MPI.BYTE.handle))
        record["comm"], record["datatype"] = handles
        record["peer"], record["tag"], record["receives"] = message.peer, message.tag, self.receives

    def error(self, result: int, record: Any) -> Exception:
        """The error by which a start or end of the message has failed with this result."""
        if result == FAILED_IN_MPI:
            return MPI.Exception(int(record["error"]))
        return self._description.refuse(int(record["count"]))


class RowDescription(NamedTuple):
    """Row before its places are known. `waits_for`: a condition on a stream, or the send that must be acknowledged."""

    kind: Kind
    pieces: Sequence[Piece] = ()
    edge: MailboxEdge | None = None
    labels: tuple[int, int] = (0, 0)
    reduction: int = COPY
    mine_first: bool = False
    waits_for: After | MailboxSend | None = None
    message: NetworkMessage | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


# ------------------------------------------------------------------------------------------ operations


def _address(array: np.ndarray) -> int:
    if not array.flags.c_contiguous:
        raise NoRowsError
    return MPI.Get_address(array)


def _reduction(ufunc: Any, dtype: np.dtype[Any]) -> int:
    number = reduction_number(ufunc, dtype) if isinstance(ufunc, np.ufunc) else -1
    if number < 0:
        raise NoRowsError
    return number


def _translate(operation: Any, message_of: Callable[[Any], NetworkMessage]) -> list[RowDescription]:
    """Rows of an operation of a program; `message_of` describes a request of MPI."""
    if isinstance(operation, Wait):
        if not operation.awaited:
            raise NoRowsError
        return [row for one in operation.awaited for row in _translate_end(message_of(one))]
    if isinstance(operation, After):
        return [RowDescription(Kind.WAIT_STREAM, waits_for=operation)]
    if isinstance(operation, Acknowledgement):
        wait = RowDescription(Kind.WAIT_READ, edge=operation.send.edge, waits_for=operation.send)
        return [*_translate(operation.sent, message_of), wait]
    if isinstance(operation, MailboxSend):
        return _translate_send(operation)
    if isinstance(operation, NothingUnread):
        return [RowDescription(Kind.EXPECT_NONE, edge=operation.edge)]
    if isinstance(operation, MailboxReceive):
        return [_translate_receive(operation)]
    if not isinstance(operation, partial):
        raise NoRowsError
    if operation.func in (MPI.Prequest.Start, MPI.Prequest.Startall):
        (started,) = operation.args
        requests = started if isinstance(started, list) else operation.args
        return [row for one in requests for row in _translate_start(message_of(one))]
    arrays = [*operation.args, *operation.keywords.values()]  # of keywords none but `out` is ever bound
    if operation.func in (np.copyto, copy_array):
        out, source = arrays
        return [RowDescription(Kind.LOCAL, [Piece(out.nbytes, _address(source), 0, _address(out))])]
    ufunc = operation.func.ufunc if isinstance(operation.func, ReproducibleFunction) else operation.func
    left, right, out = arrays
    piece = Piece(out.nbytes, _address(left), _address(right), _address(out))
    return [RowDescription(Kind.LOCAL, [piece], reduction=_reduction(ufunc, out.dtype))]


def _translate_start(message: NetworkMessage) -> list[RowDescription]:
    if message.receives:
        pieces = [Piece(nbytes, out=address) for address, nbytes in message.sent_pieces]
        return [RowDescription(Kind.NET_RECV, pieces, message=message)]
    pieces = [Piece(nbytes, address) for address, nbytes in message.sent_pieces]
    packing = [Piece(nbytes, address, 0, place) for place, (address, nbytes) in message.packing]
    start = RowDescription(Kind.NET_SEND, pieces, message=message)
    return [RowDescription(Kind.LOCAL, packing), start] if packing else [start]


def _translate_end(message: NetworkMessage) -> list[RowDescription]:
    wait = RowDescription(Kind.NET_WAIT, [Piece(nbytes) for _, nbytes in message.sent_pieces], message=message)
    unpacking = [Piece(nbytes, place, 0, out) for place, (out, nbytes) in message.packing if message.receives]
    return [wait, RowDescription(Kind.LOCAL, unpacking)] if unpacking else [wait]


def _translate_send(send: MailboxSend) -> list[RowDescription]:
    before = []
    if send.packs:
        copies = [Piece(part.nbytes, _address(source), 0, _address(part)) for part, source in send.packs]
        before.append(RowDescription(Kind.LOCAL, copies))
    pieces = [Piece(length, address) for address, length in send.pieces]
    base = send.address_label - len(pieces) if send.address_label else 0
    return [*before, RowDescription(Kind.SEND, pieces, send.edge, (send.label, base))]


def _translate_receive(receive: MailboxReceive) -> RowDescription:
    read = receive.read
    labels = receive.label, receive.address_label
    if read.combination is None:
        pieces = [Piece(target.nbytes, out=_address(target)) for target in read.targets]
        return RowDescription(Kind.RECV, pieces, receive.edge, labels)
    rows, bind = read.combination
    pieces = [Piece(out.nbytes, _address(mine), 0, _address(out)) for mine, out in rows]
    reduction = _reduction(bind.ufunc, rows[0][0].dtype)
    return RowDescription(Kind.RECV, pieces, receive.edge, labels, reduction, bind.mine_first)


# ------------------------------------------------------------------------------------------ the rows


def _rounds(steps: Sequence[Any]) -> Iterator[Sequence[Stream]]:
    """Streams of each round: those of an exchange, or one of all steps up to the next exchange."""

    def is_exchange(step: Any) -> bool:
        return isinstance(step, Wait) and any(isinstance(one, Exchange) for one in step.awaited)

    for exchange, run in groupby(steps, is_exchange):
        if exchange:
            yield from (step.awaited[0].streams for step in run)
        else:
            stream = Stream()
            for step in run:
                stream.add(step)
            yield [stream]


class ProgramRows:
    """Rows of a program, in streams and rounds.

    Attributes
    ----------
    descriptions : of the rows, in order
    messages : NetworkMessage of each request of MPI, by its id
    """

    def __init__(self, steps: Sequence[Any], wire: Wire) -> None:
        self._wire = wire
        self.messages: dict[int, NetworkMessage] = {}
        self.descriptions: list[RowDescription] = []
        self._streams: list[tuple[int, int]] = []  # first row, and end
        self._rounds = [0]
        self._places: dict[int, tuple[int, list[int]]] = {}  # by a stream's id: its number; ends of its operations
        self._sends: dict[int, int] = {}  # by the id of a send: its row
        for streams in _rounds(steps):
            for stream in streams:
                self._add(stream)
            self._rounds.append(len(self._streams))

    def _add(self, stream: Stream) -> None:
        first, ends = len(self.descriptions), []
        for operation in stream.operations:
            self.descriptions += _translate(operation, self._message)
            ends.append(len(self.descriptions) - first)
            if isinstance(operation, MailboxSend):
                self._sends[id(operation)] = len(self.descriptions) - 1
        self._places[id(stream)] = len(self._streams), ends
        self._streams.append((first, len(self.descriptions)))

    def _message(self, request: Any) -> NetworkMessage:
        if id(request) not in self.messages:
            self.messages[id(request)] = NetworkMessage(self._wire.describe(request), len(self.messages))
        return self.messages[id(request)]

    def program(self, memories: Sequence[ElementArray]) -> tuple[Any, np.ndarray]:
        """Program of the engine on these memories, and the records of its network messages."""
        ranges = [(memory.address, memory.address + memory.array.nbytes) for memory in memories]
        messages = np.zeros(len(self.messages), NET_MESSAGE)
        for message, record in zip(self.messages.values(), messages):
            message.describe(record)
            use_mpi()
        links = {id(one.edge): one.edge for one in self.descriptions if one.edge is not None}
        numbers = {key: number for number, key in enumerate(links)}
        addresses = np.array([MPI.Get_address(edge.link) for edge in links.values()], np.int64)
        made = engine.Program(
            np.array(list(self._row_values(numbers)), ROW),
            np.array([_operand(ranges, piece) for one in self.descriptions for piece in one.pieces], OPERAND),
            np.array([(first, stop, first) for first, stop in self._streams], STREAM),
            np.array(self._rounds, np.int64),
            addresses,
            messages,
            np.empty(min(CHUNK, max(self._reduced_lengths(), default=0)), np.uint8),
        )
        for number, memory in enumerate(memories):
            made.place(number, memory.address)
        return made, messages

    def _reduced_lengths(self) -> Iterator[int]:
        """Bytes of messages that are reduced."""
        return (one.nbytes for one in self.descriptions if one.edge is not None and one.reduction != COPY)

    def _row_values(self, links: dict[int, int]) -> Iterator[tuple[int, ...]]:
        """Values of the rows, in the order of the fields of `ROW`."""
        first = 0
        for one in self.descriptions:
            link = links.get(id(one.edge), 0) if one.message is None else one.message.number
            after, count = self._dependency(one.waits_for)
            last = one.reduction, one.kind, one.mine_first
            yield *one.labels, one.nbytes, 0, first, len(one.pieces), link, after, count, *last
            first += len(one.pieces)

    def _dependency(self, waits_for: After | MailboxSend | None) -> tuple[int, int]:
        """Index of the stream or row that is waited for, and the number of rows of the stream."""
        if isinstance(waits_for, After):
            stream, ends = self._places[id(waits_for.stream)]
            return stream, ends[waits_for.number - 1]
        return (0 if waits_for is None else self._sends[id(waits_for)]), 0

    def written(self, memories: Sequence[ElementArray]) -> set[int]:
        """Numbers of the memories that the program writes."""
        ranges = [(memory.address, memory.address + memory.array.nbytes) for memory in memories]
        pieces = (piece for one in self.descriptions for piece in one.pieces if piece.out)
        return {place_of(ranges, piece.out, piece.nbytes)[0] for piece in pieces}


def _operand(ranges: Sequence[tuple[int, int]], piece: Piece) -> tuple[int, ...]:
    places = [place_of(ranges, address, piece.nbytes) for address in piece[1:]]
    return piece.nbytes, *(offset for _, offset in places), *(memory for memory, _ in places), 0


def place_of(memories: Sequence[tuple[int, int]], address: int, nbytes: int) -> tuple[int, int]:
    """Memory and offset of an address; `ABSOLUTE` and the address if it is in none of them."""
    for memory, (start, stop) in enumerate(memories):
        if start <= address and address + nbytes <= stop:
            return memory, address - start
    return ABSOLUTE, address
