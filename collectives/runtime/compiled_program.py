"""Compile a program to a table, which one compiled function runs; needs numba (the extra ``fast``).

A program can be compiled if all of it is exchanges within a node, of operations that the table has: messages through
mailboxes, copies, and reductions that have a compiled kernel. The table follows the mailbox protocol of the Python code
exactly, so that ranks with and without numba work together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.runtime import program_table as table
from collectives.runtime.binder import copy_array
from collectives.runtime.program import ElementArray, Program
from collectives.runtime.progress import active_requests, progress_until, progress_words
from collectives.transport.exchange import After, Exchange, Stream
from collectives.transport.mailbox import LENGTHS, PID, RENDEZVOUS_BYTES, MailboxEdge, address_label, label
from collectives.transport.shm_messages import CHUNK, Acknowledgement, EagerSend, Receive, RendezvousSend

YIELDS = 16
"""Polls of compiled code, each followed by a yield of the core, before Python drives MPI, if ranks share cores."""

START_POLLS = 40
"""Polls of the start of a non-blocking call: some 1 us, less than a pending request costs."""

PATIENT_POLLS = 200
"""Polls between two sleeps of the progress thread: some 10 us."""


@cache
def available() -> bool:
    """True if numba is installed, and objects are laid out as compiled code reads them: not in free-threaded Python."""
    return find_spec("numba") is not None and object.__basicsize__ == 16


def load_compiler() -> None:
    """Load the compiler, or compiled functions, now; a no-op without numba."""
    if available():
        from collectives.runtime import call_kernel

        call_kernel.functions()


class _NotCompilableError(Exception):
    """An operation of the program does not exist in tables."""


class _Piece(NamedTuple):
    """Addresses of a piece's operands: the left or only one, the right one, and the result; 0 where there is none."""

    nbytes: int
    left: int = 0
    right: int = 0
    out: int = 0


class _Operation(NamedTuple):
    """Operation of a table. `waits_for`: a condition on a stream, or the send that must be acknowledged."""

    kind: int
    pieces: Sequence[_Piece] = ()
    edge: MailboxEdge | None = None
    labels: tuple[int, int] = (0, 0)
    kernel: int = 0
    mine_first: bool = False
    waits_for: After | EagerSend | RendezvousSend | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


# ------------------------------------------------------------------------------------------ operations


def _address(array: np.ndarray) -> int:
    if not array.flags.c_contiguous:
        raise _NotCompilableError
    return MPI.Get_address(array)


def _kernel(ufunc: Any, dtype: np.dtype[Any]) -> int:
    from collectives.runtime.reduction_kernels import kernel_address  # needs numba

    address = kernel_address(ufunc, dtype)
    if not address:
        raise _NotCompilableError
    return address


def _translate(operation: Any) -> list[_Operation]:
    """Translate an operation of an exchange to operations of a table."""
    if isinstance(operation, After):
        return [_Operation(table.WAIT_STREAM, waits_for=operation)]
    if isinstance(operation, Acknowledgement):
        return [*_translate(operation.sent), _Operation(table.WAIT_READ, waits_for=operation.send)]
    if isinstance(operation, (EagerSend, RendezvousSend)):
        return _translate_send(operation)
    if isinstance(operation, Receive):
        return [_translate_receive(operation)]
    if not isinstance(operation, partial):
        raise _NotCompilableError
    arrays = [*operation.args, *operation.keywords.values()]  # of keywords none but `out` is ever bound
    if operation.func in (np.copyto, copy_array):
        out, source = arrays
        return [_Operation(table.LOCAL_WORK, [_Piece(out.nbytes, _address(source), 0, _address(out))])]
    if not isinstance(operation.func, np.ufunc):
        raise _NotCompilableError
    left, right, out = arrays
    piece = _Piece(out.nbytes, _address(left), _address(right), _address(out))
    return [_Operation(table.LOCAL_WORK, [piece], kernel=_kernel(operation.func, out.dtype))]


def _translate_send(send: EagerSend | RendezvousSend) -> list[_Operation]:
    mark, nbytes = send.label // LENGTHS, send.nbytes
    before = []
    if isinstance(send, RendezvousSend) and send.packs:
        copies = [_Piece(part.nbytes, _address(source), 0, _address(part)) for part, source in send.packs]
        before.append(_Operation(table.LOCAL_WORK, copies))
    pieces = [_Piece(length, address) for address, length in send.pieces]
    by_address = isinstance(send, RendezvousSend) or send.may_go_by_address
    labels = label(nbytes, mark), address_label(len(pieces), mark) if by_address else 0
    return [*before, _Operation(table.SEND_MESSAGE, pieces, send.edge, labels)]


def _translate_receive(receive: Receive) -> _Operation:
    mark, read = receive.label // LENGTHS, receive.read
    labels = receive.label, address_label(0, mark)
    if read.combination is None:
        pieces = [_Piece(target.nbytes, out=_address(target)) for target in read.targets]
        return _Operation(table.RECEIVE_MESSAGE, pieces, receive.edge, labels)
    rows, bind = read.combination
    pieces = [_Piece(out.nbytes, _address(mine), 0, _address(out)) for mine, out in rows]
    kernel = _kernel(bind.ufunc, rows[0][0].dtype)
    return _Operation(table.RECEIVE_MESSAGE, pieces, receive.edge, labels, kernel, bind.mine_first)


# ------------------------------------------------------------------------------------------ the table


class _TableLayout:
    """Places of the operations of some exchanges in a table: `rounds`, `streams` and `operations`, in this order."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.operations: list[_Operation] = []
        self.streams: list[tuple[int, int]] = []  # first operation, and end
        self.rounds = [0]
        self._places: dict[int, tuple[int, list[int]]] = {}  # by a stream's id: its number; ends of its operations
        self._sends: dict[int, int] = {}  # by the id of a send: its place
        for exchange in exchanges:
            reads = Stream()  # the kernel may send these by address: the round then ends after they have been read
            for stream in exchange.streams:
                self._add(stream)
                for count, send in enumerate(stream.operations, 1):
                    if isinstance(send, EagerSend) and send.may_go_by_address:
                        reads.add(Acknowledgement(send, After(stream, count)))
            if reads.calls:
                self._add(reads)
            self.rounds.append(len(self.streams))

    def _add(self, stream: Stream) -> None:
        first, ends = len(self.operations), []
        for operation in stream.operations:
            self.operations += _translate(operation)
            ends.append(len(self.operations) - first)
            if isinstance(operation, (EagerSend, RendezvousSend)):
                self._sends[id(operation)] = len(self.operations) - 1
        self._places[id(stream)] = len(self.streams), ends
        self.streams.append((first, len(self.operations)))

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
            words[table.EDGE] = 0 if operation.edge is None else MPI.Get_address(operation.edge.numbers)
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
                words[place : place + 2] = _place(ranges, address, piece.nbytes)
        return numbers


def _place(memories: Sequence[tuple[int, int]], address: int, nbytes: int) -> tuple[int, int]:
    """Memory and offset of an address; `table.ABSOLUTE` and the address if it is in none of them."""
    for memory, (start, stop) in enumerate(memories):
        if start <= address and address + nbytes <= stop:
            return memory, address - start
    return table.ABSOLUTE, address


class CompiledProgram:
    """A program as a table, and the functions that run it. The `Program` that it is made from keeps its memory.

    `on_arrays` runs it on other arrays than those it was bound to, of the same shapes and dtypes; see `expect`.
    """

    broken = False
    prefers_finish = needs_no_mpi = True
    ended: bool
    """True once the program has ended, until it is started again."""

    def __init__(self, program: Program, exchanges: Sequence[Exchange]) -> None:
        from collectives.runtime import call_kernel  # needs numba, which takes a while to load

        layout = _TableLayout(exchanges)
        self.program, self.node, self._operations = program, exchanges[0].node, layout.operations
        reduced = [one.nbytes for one in layout.operations if one.edge is not None and one.kernel]
        self._spare = np.empty(min(CHUNK, max((n for n in reduced if n >= RENDEZVOUS_BYTES), default=0)), np.uint8)
        self._table = layout.numbers(program.memories, self._spare)
        ranges = [(memory.address, memory.address + memory.array.nbytes) for memory in program.memories]
        pieces = [piece for operation in layout.operations for piece in operation.pieces if piece.out]
        self._written = {_place(ranges, piece.out, piece.nbytes)[0] for piece in pieces}
        self._table[table.SHARED_CORES], self._table[table.DEFERRED] = self.node.shares_cores, program.deferred
        self.deferred = program.deferred
        self.spins = YIELDS if self.node.shares_cores else self.node.spins * 8  # compiled code polls that much faster
        self.start_spins = 0 if self.node.shares_cores else START_POLLS
        self._table[table.POLLS], self._table[table.PROGRESS] = self.spins, MPI.Get_address(progress_words)
        self._words = self._table.data  # the same memory, which Python reads faster
        self.ended = True
        self.address = MPI.Get_address(self._table)
        functions = call_kernel.functions()
        self._run, self._advance, self.copy = functions.run, functions.advance, functions.copy
        self._advance_patiently = functions.advance_patiently
        self.start_for, self.end_for = partial(functions.start, self._table), partial(functions.end, self._table)
        self.activate_for = partial(functions.activate, self._table)
        self._take_back = partial(functions.take_back, self._table)

    def expect(self, arrays: Sequence[np.ndarray], memories: Sequence[int | None], separate: Sequence[int]) -> None:
        """Describe the arrays of `on_arrays` by those of a call with the same key: send and receive buffer.

        The program's source and target begin at the addresses `memories` in them; None for own memory. Their first
        `separate` bytes may not overlap.
        """
        places = (table.SEND_ARRAY, table.SOURCE), (table.RECV_ARRAY, table.TARGET)
        for (place, memory), array, address, nbytes in zip(places, arrays, memories, separate, strict=True):
            words = self._table[place : place + table.ARRAY_WORDS]
            words[table.WRITTEN], words[table.NBYTES] = memory in self._written, nbytes
            words[table.MEMORY] = table.IGNORED if address is None else memory
            words[table.OFFSET] = 0 if address is None else address - MPI.Get_address(array)

    @property
    def position(self) -> int:
        """Number of the current round."""
        return int(self._table[table.ROUND])

    def on_arrays(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> bool:
        """Run the program on these arrays; False, and nothing is done, if they are not like those of `expect`."""
        result = self._run(sendbuf, recvbuf, self.address, self.spins)
        if result == table.REFUSED:
            return False
        if result != table.DONE:
            self.go_on(result)
        return True

    def go_on(self, result: int) -> None:
        """Run to the end after this result of a compiled function, with progress of all active requests meanwhile."""
        self.note(result)
        if active_requests:
            progress_until(self.advance)
        else:
            self.finish()

    def start_on(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> int:
        """Start the program on these arrays, waiting for a moment at most; the result is as in `program_table`.

        It is `REFUSED` if they are not like those of `expect`.
        """
        return self._run(sendbuf, recvbuf, self.address, self.start_spins)

    def manage(self, request: object, active: bool) -> None:
        """Let compiled code start and end the program for its persistent request, which is active now or not."""
        self._words[table.REQUEST], self._words[table.STARTABLE] = id(request) if active else 0, 1

    @property
    def is_startable(self) -> bool:
        """True if compiled code may start the program for its idle persistent request."""
        return self._words[table.STARTABLE] != 0 and self._words[table.REQUEST] == 0

    def runs_for(self, request: object) -> bool:
        """True if the program runs for an active request that compiled code manages."""
        return self._words[table.REQUEST] == id(request)

    def take_back(self, request: object) -> int:
        """Leave a request that compiled code manages to Python; see `call_kernel.Functions`."""
        result = self._take_back(request)
        if result == table.WAITING:
            self.ended = False
        return result

    def note(self, result: int) -> None:
        """Note by the result of a compiled function if the program has ended; raises if a message has failed."""
        if result <= table.WAITING:
            self.ended = result == table.DONE
            return
        operation = self._operations[self._table[table.FAILED]]
        assert operation.edge is not None, "only messages fail"
        if result == table.MISMATCH:
            raise operation.edge.refuse(operation.nbytes)
        raise OSError(f"the memory of process {operation.edge.numbers[PID]} cannot be read")

    def start(self) -> bool:
        """Start the program on the memory it was bound to, and `advance` unless that is `deferred`."""
        self.ended = False
        return not self.deferred and self.advance()

    def advance(self) -> bool:
        """Run as far as possible without blocking; True if the end is reached."""
        if not self.ended:
            self.note(self._advance(self.address, 0))
        return self.ended

    def advance_patiently(self, naps: int) -> int:
        """Run as far as possible without the interpreter's lock (GIL); the result is for `note`.

        It sleeps up to `naps` times while it waits for messages.
        """
        return table.DONE if self.ended else self._advance_patiently(self.address, PATIENT_POLLS, naps)

    def poll(self) -> bool:
        """`advance` after some polls for messages; True if the end is reached."""
        if not self.ended:
            self.note(self._advance(self.address, self.spins))
        return self.ended

    def finish(self) -> None:
        """Run to the end, blocking."""
        turn = 0
        while not self.ended:
            if not self.poll():
                self.node.yielding(turn := turn + 1)

    def run(self) -> None:
        """Run the program on the memory it was bound to."""
        self.ended = False
        self.finish()

    def free(self) -> None:
        self.program.free()


def compile_program(program: Program) -> CompiledProgram | None:
    """Compile a program, which must not be running; None if it has operations that tables do not have."""
    if not program.exchanges or not available():
        return None
    try:
        return CompiledProgram(program, program.exchanges)
    except _NotCompilableError:
        return None
