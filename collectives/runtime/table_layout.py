"""Translation of a program to a table: its operations, and their places in the sections of the table.

A program can be translated if all of it is operations that the table has: messages through mailboxes, persistent
messages over MPI of one piece of memory, copies, and reductions that have a compiled kernel. The table follows the
protocol of the Python code exactly, so that ranks with and without numba work together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import c_int64
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.runtime import program_table as table
from collectives.runtime.binder import copy_array
from collectives.runtime.program import ElementArray
from collectives.transport.exchange import After, Exchange, Stream
from collectives.transport.mailbox import MailboxEdge
from collectives.transport.mpi_transport import PersistentMessage
from collectives.transport.shm_messages import Acknowledgement, MailboxReceive, MailboxSend
from collectives.transport.wire import Wire
from collectives.types import Wait


class NotCompilableError(Exception):
    """An operation of the program does not exist in tables."""


class Piece(NamedTuple):
    """Addresses of a piece's operands: the left or only one, the right one, and the result; 0 where there is none."""

    nbytes: int
    left: int = 0
    right: int = 0
    out: int = 0


class TableOperation(NamedTuple):
    """Operation of a table. `waits_for`: a condition on a stream, or the send that must be acknowledged."""

    kind: int
    pieces: Sequence[Piece] = ()
    edge: MailboxEdge | None = None
    labels: tuple[int, int] = (0, 0)
    kernel: int = 0
    mine_first: bool = False
    waits_for: After | MailboxSend | None = None
    message: PersistentMessage | None = None

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


def _translate(operation: Any, wire: Wire) -> list[TableOperation]:
    """Translate an operation of an exchange to operations of a table."""
    if isinstance(operation, Wait):
        if not operation.awaited:
            raise NotCompilableError
        return [_translate_message(table.WAIT_MESSAGE, wire.describe(one)) for one in operation.awaited]
    if isinstance(operation, After):
        return [TableOperation(table.WAIT_STREAM, waits_for=operation)]
    if isinstance(operation, Acknowledgement):
        wait = TableOperation(table.WAIT_READ, edge=operation.send.edge, waits_for=operation.send)
        return [*_translate(operation.sent, wire), wait]
    if isinstance(operation, MailboxSend):
        return _translate_send(operation)
    if isinstance(operation, MailboxReceive):
        return [_translate_receive(operation)]
    if not isinstance(operation, partial):
        raise NotCompilableError
    if operation.func in (MPI.Prequest.Start, MPI.Prequest.Startall):
        (started,) = operation.args
        messages = map(wire.describe, started if isinstance(started, list) else operation.args)
        return [_translate_message(table.START_RECEIVE if one.length else table.START_SEND, one) for one in messages]
    arrays = [*operation.args, *operation.keywords.values()]  # of keywords none but `out` is ever bound
    if operation.func in (np.copyto, copy_array):
        out, source = arrays
        return [TableOperation(table.LOCAL_WORK, [Piece(out.nbytes, _address(source), 0, _address(out))])]
    if not isinstance(operation.func, np.ufunc):
        raise NotCompilableError
    left, right, out = arrays
    piece = Piece(out.nbytes, _address(left), _address(right), _address(out))
    return [TableOperation(table.LOCAL_WORK, [piece], kernel=_kernel(operation.func, out.dtype))]


def _translate_message(kind: int, message: PersistentMessage) -> TableOperation:
    if len(message.pieces) > 1:  # a datatype, bound to its addresses
        raise NotCompilableError
    pieces = [
        Piece(nbytes, out=address) if message.length else Piece(nbytes, address) for address, nbytes in message.pieces
    ]
    return TableOperation(kind, pieces, message=message)


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
        self.messages: dict[int, np.ndarray] = {}  # words of messages over MPI, by the id of their description
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
            self.operations += _translate(operation, self._wire)
            ends.append(len(self.operations) - first)
            if isinstance(operation, MailboxSend):
                self._sends[id(operation)] = len(self.operations) - 1
        self._places[id(stream)] = len(self.streams), ends
        self.streams.append((first, len(self.operations)))

    def _words_of(self, message: PersistentMessage) -> np.ndarray:
        if id(message) not in self.messages:
            words = self.messages[id(message)] = np.zeros(table.MESSAGE_WORDS, np.int64)
            handles = (c_int64(handle).value for handle in (message.comm.handle, MPI.BYTE.handle))
            words[table.PEER : table.MPI_REQUEST] = message.peer, message.tag, *handles, message.length is not None
        return self.messages[id(message)]

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
                words[table.EDGE] = MPI.Get_address(self._words_of(operation.message))
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
