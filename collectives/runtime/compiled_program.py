"""Compile a program to a table, which one compiled function runs; needs numba (the extra ``fast``).

`table_layout` translates it, if a table has all of its operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import RLock

import numpy as np
from mpi4py import MPI

from collectives.runtime import program_table as table
from collectives.runtime.program import Program
from collectives.runtime.progress import active_requests, progress_until, progress_words
from collectives.runtime.table_layout import NotCompilableError, TableLayout, place_of
from collectives.transport.mailbox import PID, NodeMemory
from collectives.transport.shm_messages import CHUNK
from quant.kernels.availability import has_compiler

ALONE = 1024
"""Factor of `calls_before_compiling` for a communicator of one rank, which saves only some 4 us per compiled call."""

YIELDS = 16
"""Polls of compiled code, each followed by a yield of the core, before Python drives MPI, if ranks share cores."""

START_POLLS = 100
"""Polls of the start of a non-blocking call: about 5 us, as much as a pending request costs."""

POLLED_BYTES = 1 << 9
"""Bytes of its longest message per further poll, up to `AWAITED_BYTES`: a peer copies about as many in that time."""

AWAITED_BYTES = 1 << 19

NETWORK_POLLS = 400
"""Most polls of compiled code while it waits for messages between nodes: some 200 us."""

PATIENT_POLLS = 200
"""Polls between two sleeps of the progress thread: some 10 us."""


@cache
def available() -> bool:
    """True if kernels are compiled, and objects laid out as compiled code reads them: not in free-threaded Python."""
    return has_compiler() and object.__basicsize__ == 16


def load_compiler() -> None:
    """Load the compiler, or compiled functions, now; a no-op without numba."""
    if available():
        from collectives.runtime import call_kernel

        call_kernel.functions()


def calls_before_compiling(usual: int, alone: bool) -> int:
    """Number of equal calls after which programs are compiled; `alone`: the communicator has one rank."""
    return usual * (ALONE if alone else 1)


class CompiledProgram:
    """A program as a table, and the functions that run it. The `Program` that it is made from keeps its memory.

    `on_arrays` runs it on other arrays than those it was bound to, of the same shapes and dtypes; see `expect`.
    """

    broken = False
    prefers_finish = is_reentrant = True
    is_waiting, polls = False, 1

    def __init__(self, program: Program, node: NodeMemory) -> None:
        from collectives.runtime import call_kernel  # needs numba, which takes a while to load

        layout = TableLayout(program.steps, program.wire)
        self.program, self.node, self._operations = program, node, layout.operations
        reduced = [one.nbytes for one in layout.operations if one.edge is not None and one.kernel]
        self._spare = np.empty(min(CHUNK, max(reduced, default=0)), np.uint8)
        self._table = layout.numbers(program.memories, self._spare)
        self.needs_no_mpi, self._table[table.USES_MPI] = not layout.messages, bool(layout.messages)
        ranges = [(memory.address, memory.address + memory.array.nbytes) for memory in program.memories]
        pieces = [piece for operation in layout.operations for piece in operation.pieces if piece.out]
        self._written = {place_of(ranges, piece.out, piece.nbytes)[0] for piece in pieces}
        self._table[table.SHARED_CORES], self._table[table.DEFERRED] = self.node.shares_cores, program.deferred
        self.deferred = program.deferred
        self.spins = YIELDS if self.node.shares_cores else self.node.spins * 8  # compiled code polls that much faster
        if layout.messages:
            self.spins = min(self.spins, NETWORK_POLLS)
        self._table[table.POLLS] = self._table[table.CALL_POLLS] = self.spins
        self._table[table.PROGRESS] = MPI.Get_address(progress_words)
        self._words = self._table.data  # the same memory, which Python reads faster
        self.address = MPI.Get_address(self._table)
        functions = call_kernel.functions()
        self._run, self._advance, self.copy = functions.run, functions.advance, functions.copy
        self._advance_patiently = functions.advance_patiently
        self.start_for, self.end_for = functions.start(self._table), functions.end(self._table)
        self.activate_for, self._take_back = functions.activate(self._table), functions.take_back(self._table)

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

    def shorten_calls(self) -> None:
        """Let calls of the program, a non-blocking one, wait for a moment at most."""
        longest = max((operation.nbytes for operation in self._operations), default=0)
        polls = START_POLLS + min(longest, AWAITED_BYTES) // POLLED_BYTES
        self._table[table.CALL_POLLS] = 0 if self.node.shares_cores else polls

    @property
    def ended(self) -> bool:
        """True once the program has ended, until it is started again; compiled code notes the end."""
        return self._words[table.STARTED_RUN] == 0

    @property
    def position(self) -> int:
        """Number of the current round."""
        return int(self._table[table.ROUND])

    def on_arrays(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> bool:
        """Run the program on these arrays; False, and nothing is done, if they are not like those of `expect`."""
        result = self.start_on(sendbuf, recvbuf)
        if result == table.WAITING:
            self.go_on()
        return result != table.REFUSED

    def go_on(self) -> None:
        """Run to the end after a start, with progress of all active requests meanwhile."""
        if active_requests:
            progress_until(self.advance)
        else:
            self.finish()

    def start_on(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> int:
        """Start the program on these arrays; the result is as in `program_table`, or an error is raised.

        It is `REFUSED` if they are not like those of `expect`.
        """
        result = self._run(sendbuf, recvbuf, self.address)
        if result not in (table.DONE, table.REFUSED):
            self.note(result)
        return result

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
        return self._take_back(request)

    def note(self, result: int) -> None:
        """Raise if a message has failed, by the result of a compiled function."""
        if result <= table.WAITING:
            return
        operation = self._operations[self._table[table.FAILED]]
        if operation.message is not None:
            raise operation.message.error(result)
        assert operation.edge is not None, "only messages fail"
        if result == table.MISMATCH:
            raise operation.edge.refuse(None if operation.kind == table.CHECK_MAILBOX else operation.nbytes)
        raise OSError(f"the memory of process {operation.edge.numbers[PID]} cannot be accessed")

    def start(self) -> bool:
        """Start the program on the memory it was bound to, and `advance` unless that is `deferred`."""
        self._words[table.STARTED_RUN] = 1
        return not self.deferred and self.advance()

    def advance(self) -> bool:
        """Run as far as possible without blocking; True if the end is reached."""
        self.note(self._advance(self.address, 0))
        return self.ended

    def advance_patiently(self, naps: int) -> int:
        """Run as far as possible without the interpreter's lock (GIL); the result is for `note`.

        It sleeps up to `naps` times while it waits for messages.
        """
        return self._advance_patiently(self.address, PATIENT_POLLS, naps)

    def poll(self) -> bool:
        """`advance` after some polls for messages; True if the end is reached."""
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
        self._words[table.STARTED_RUN] = 1
        self.finish()

    def free(self) -> None:
        self.program.free()


_compiling = RLock()
_is_compiling = False


def compile_program(program: Program, blocking: bool = False) -> CompiledProgram | None:
    """Compile a program, which must not be running; None if it has operations that tables do not have.

    Messages over MPI are compiled in `blocking` calls only: others may progress in several threads. None too in a
    signal handler or finalizer that has interrupted the compiler.
    """
    global _is_compiling
    node = program.wire.node
    if node is None or not available() or not (blocking or program.exchanges):
        return None
    with _compiling:
        if _is_compiling:
            return None
        try:
            _is_compiling = True
            compiled = CompiledProgram(program, node)
        except NotCompilableError:
            return None
        finally:
            _is_compiling = False
    return compiled if blocking or compiled.needs_no_mpi else None
