"""Translation of a program to a table: its operations, and their places in the sections of the table.

A program can be translated if a table has all of its operations: messages through mailboxes, persistent messages over
MPI, copies, and reductions that have a compiled kernel. The table follows the protocol of the Python code exactly, so
that ranks with and without numba work together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int64
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.runtime import program_table as table
from collectives.runtime.binder import copy_array
from collectives.runtime.ops import ReproducibleFunction
from collectives.runtime.program import ElementArray
from collectives.transport.exchange import After, Exchange, Stream
from collectives.transport.mailbox import MailboxEdge
from collectives.transport.mpi_transport import PersistentMessage
from collectives.transport.shm_messages import Acknowledgement, MailboxReceive, MailboxSend, NothingUnread
from collectives.transport.wire import Iovec, Wire
from collectives.types import Wait

MOST_PACKED = 1 << 16
"""Most bytes of a message over MPI that compiled code packs."""


class NotCompilableError(Exception):
    """An operation of the program does not exist in tables."""


class Piece(NamedTuple):
    """Addresses of a piece's operands: the left or only one, the right one, and the result; 0 where there is none."""

    nbytes: int
    left: int = 0
    right: int = 0
    out: int = 0


class MessageWords:
    """Words of a persistent message over MPI, for compiled code, and a buffer to pack it if it has several pieces.

    Without packing, MPI would need a datatype of the pieces for each place of the user's arrays.
    """

    def __init__(self, message: PersistentMessage) -> None:
        self.description, self.receives = message, message.length is not None
        self.nbytes = sum(nbytes for _, nbytes in message.pieces)
        packs = len(message.pieces) > 1
        if packs and self.nbytes > MOST_PACKED:
            raise NotCompilableError
        self.words = np.zeros(table.MESSAGE_WORDS + (-(-self.nbytes // 8) if packs else 0), np.int64)
        handles = (c_int64(handle).value for handle in (message.comm.handle, MPI.BYTE.handle))
        self.words[table.PEER : table.MPI_REQUEST] = message.peer, message.tag, *handles, self.receives
        self.address = MPI.Get_address(self.words)
        room = self.address + 8 * table.MESSAGE_WORDS
        places = accumulate((nbytes for _, nbytes in message.pieces), initial=room)
        self.packing = [*zip(places, message.pieces)] if packs else []
        """Where each piece is packed, and the piece."""

        self.sent_pieces = [Iovec(room, self.nbytes)] if packs else message.pieces

    def error(self, result: int) -> Exception:
        """The error by which a start or end of the message has failed with this result."""
        if result == table.FAILED_IN_MPI:
            return MPI.Exception(int(self.words[table.ERROR]))
        return self.description.refuse(int(self.words[table.COUNT]))


class TableOperation(NamedTuple):
    """Operation of a table. `waits_for`: a condition on a stream, or the send that must be acknowledged."""

    kind: int
    pieces: Sequence[Piece] = ()
    edge: MailboxEdge | None = None
    labels: tuple[int, int] = (0, 0)
    kernel: int = 0
    mine_first: bool = False
    waits_for: After | MailboxSend | None = None
    message: MessageWords | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


# ------------------------------------------------------------------------------------------ operations


def _address(array: np.ndarray) -> int:
    if not array.flags.c_contiguous:
        raise NotCompilableError
    return MPI.Get_address(array)


def _kernel(ufunc: Any, dtype: np.dtype[Any]) -> int:
    from collectives.runtime.reduction_kernels import kernel_address  # needs numba

    address = kernel_address(ufunc, dtype)
    if not address:
        raise NotCompilableError
    return address


def _translate(operation: Any, message_of: Callable[[Any], MessageWords]) -> list[TableOperation]:
    """Translate an operation of a program to operations of a table; `message_of` has the words of a request of MPI."""
    if isinstance(operation, Wait):
        if not operation.awaited:
            raise NotCompilableError
        return [step for one in operation.awaited for step in _translate_end(message_of(one))]
    if isinstance(operation, After):
        return [TableOperation(table.WAIT_STREAM, waits_for=operation)]
    if isinstance(operation, Acknowledgement):
        wait = TableOperation(table.WAIT_READ, edge=operation.send.edge, waits_for=operation.send)
        return [*_translate(operation.sent, message_of), wait]
    if isinstance(operation, MailboxSend):
        return _translate_send(operation)
    if isinstance(operation, NothingUnread):
        return [TableOperation(table.CHECK_MAILBOX, edge=operation.edge)]
    if isinstance(operation, MailboxReceive):
        return [_translate_receive(operation)]
    if not isinstance(operation, partial):
        raise NotCompilableError
    if operation.func in (MPI.Prequest.Start, MPI.Prequest.Startall):
        (started,) = operation.args
        requests = started if isinstance(started, list) else operation.args
        return [step for one in requests for step in _translate_start(message_of(one))]
    arrays = [*operation.args, *operation.keywords.values()]  # of keywords none but `out` is ever bound
    if operation.func in (np.copyto, copy_array):
        out, source = arrays
        return [TableOperation(table.LOCAL_WORK, [Piece(out.nbytes, _address(source), 0, _address(out))])]
    ufunc = operation.func.ufunc if isinstance(operation.func, ReproducibleFunction) else operation.func
    if not isinstance(ufunc, np.ufunc):
        raise NotCompilableError
    left, right, out = arrays
    piece = Piece(out.nbytes, _address(left), _address(right), _address(out))
    return [TableOperation(table.LOCAL_WORK, [piece], kernel=_kernel(ufunc, out.dtype))]


def _translate_start(message: MessageWords) -> list[TableOperation]:
    if message.receives:
        pieces = [Piece(nbytes, out=address) for address, nbytes in message.sent_pieces]
        return [TableOperation(table.START_RECEIVE, pieces, message=message)]
    pieces = [Piece(nbytes, address) for address, nbytes in message.sent_pieces]
    packing = [Piece(nbytes, address, 0, place) for place, (address, nbytes) in message.packing]
    start = TableOperation(table.START_SEND, pieces, message=message)
    return [TableOperation(table.LOCAL_WORK, packing), start] if packing else [start]


def _translate_end(message: MessageWords) -> list[TableOperation]:
    wait = TableOperation(table.WAIT_MESSAGE, [Piece(nbytes) for _, nbytes in message.sent_pieces], message=message)
    unpacking = [Piece(nbytes, place, 0, out) for place, (out, nbytes) in message.packing if message.receives]
    return [wait, TableOperation(table.LOCAL_WORK, unpacking)] if unpacking else [wait]


def _translate_send(send: MailboxSend) -> list[TableOperation]:
    before = []
    if send.packs:
        copies = [Piece(part.nbytes, _address(source), 0, _address(part)) for part, source in send.packs]
        before.append(TableOperation(table.LOCAL_WORK, copies))
    pieces = [Piece(length, address) for address, length in send.pieces]
    return [*before, TableOperation(table.SEND_MESSAGE, pieces, send.edge, (send.label, send.address_label))]


def _translate_receive(receive: MailboxReceive) -> TableOperation:
    read = receive.read
    labels = receive.label, receive.address_label
    if read.combination is None:
        pieces = [Piece(target.nbytes, out=_address(target)) for target in read.targets]
        return TableOperation(table.RECEIVE_MESSAGE, pieces, receive.edge, labels)
    rows, bind = read.combination
    pieces = [Piece(out.nbytes, _address(mine), 0, _address(out)) for mine, out in rows]
    kernel = _kernel(bind.ufunc, rows[0][0].dtype)
    return TableOperation(table.RECEIVE_MESSAGE, pieces, receive.edge, labels, kernel, bind.mine_first)


# ------------------------------------------------------------------------------------------ the table


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


class TableLayout:
    """Places of the operations of a program in a table: `rounds`, `streams` and `operations`, in this order."""

    def __init__(self, steps: Sequence[Any], wire: Wire) -> None:
        self._wire = wire
        self.messages: dict[int, MessageWords] = {}  # over MPI, by the id of the request
        self.operations: list[TableOperation] = []
        self.streams: list[tuple[int, int]] = []  # first operation, and end
        self.rounds = [0]
        self._places: dict[int, tuple[int, list[int]]] = {}  # by a stream's id: its number; ends of its operations
        self._sends: dict[int, int] = {}  # by the id of a send: its place
        for streams in _rounds(steps):
            for stream in streams:
                self._add(stream)
            self.rounds.append(len(self.streams))

    def _add(self, stream: Stream) -> None:
        first, ends = len(self.operations), []
        for operation in stream.operations:
            self.operations += _translate(operation, self._message)
            ends.append(len(self.operations) - first)
            if isinstance(operation, MailboxSend):
                self._sends[id(operation)] = len(self.operations) - 1
        self._places[id(stream)] = len(self.streams), ends
        self.streams.append((first, len(self.operations)))

    def _message(self, request: Any) -> MessageWords:
        if id(request) not in self.messages:
            self.messages[id(request)] = MessageWords(self._wire.describe(request))
        return self.messages[id(request)]

    def numbers(self, memories: Sequence[ElementArray], spare: np.ndarray) -> np.ndarray:
        """Write the table; addresses in the `memories` become offsets."""
        pieces = [piece for operation in self.operations for piece in operation.pieces]
        sizes = len(self.rounds), table.STREAM_WORDS * len(self.streams), table.OPERATION_WORDS * len(self.operations)
        rounds, streams, operations, end = accumulate(sizes, initial=table.HEADER_WORDS)
        numbers = np.zeros(end + table.PIECE_WORDS * len(pieces), np.int64)
        start = MPI.Get_address(numbers)
        sections = (start + 8 * at for at in (rounds, streams, operations))
        numbers[table.ROUNDS : table.FAILED] = len(self.rounds) - 1, *sections
        numbers[table.READ_BUFFER : table.VECTOR] = MPI.Get_address(spare), spare.nbytes
        numbers[table.BASES : table.BASES + len(memories)] = [memory.address for memory in memories]
        numbers[rounds:streams] = self.rounds
        numbers[streams:operations] = [word for first, stop in self.streams for word in (first, stop, first)]
        at = start + 8 * end
        for number, operation in enumerate(self.operations):
            words = numbers[operations + table.OPERATION_WORDS * number :]
            words[table.KIND] = operation.kind
            if operation.edge is not None:
                words[table.EDGE] = MPI.Get_address(operation.edge.numbers)
            elif operation.message is not None:
                words[table.EDGE] = operation.message.address
            words[table.LABEL], words[table.BY_ADDRESS_LABEL] = operation.labels
            words[table.BYTES] = operation.nbytes
            words[table.PIECES], words[table.PIECE_COUNT] = at, len(operation.pieces)
            words[table.KERNEL], words[table.MINE_FIRST] = operation.kernel, operation.mine_first
            if isinstance(operation.waits_for, After):
                stream, ends = self._places[id(operation.waits_for.stream)]
                words[table.DEPENDENCY] = start + 8 * (streams + table.STREAM_WORDS * stream)
                words[table.NUMBER] = ends[operation.waits_for.number - 1]
            elif operation.waits_for is not None:
                words[table.DEPENDENCY] = start + 8 * (
                    operations + table.OPERATION_WORDS * self._sends[id(operation.waits_for)]
                )
            at += 8 * table.PIECE_WORDS * len(operation.pieces)
        ranges = [(memory.address, memory.address + memory.array.nbytes) for memory in memories]
        for words, piece in zip(numbers[end:].reshape(-1, table.PIECE_WORDS), pieces):
            words[table.LENGTH] = piece.nbytes
            for place, address in zip((table.LEFT, table.RIGHT, table.OUT), piece[1:]):
                words[place : place + 2] = place_of(ranges, address, piece.nbytes)
        return numbers


def place_of(memories: Sequence[tuple[int, int]], address: int, nbytes: int) -> tuple[int, int]:
    """Memory and offset of an address; `table.ABSOLUTE` and the address if it is in none of them."""
    for memory, (start, stop) in enumerate(memories):
        if start <= address and address + nbytes <= stop:
            return memory, address - start
    return table.ABSOLUTE, address
