"""Programs that the compiled engine runs: `program_rows` translates them, if there are rows for all operations."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import available
from collectives.engine.instructions import DONE, IGNORED, MISMATCH, REFUSED, SOURCE, TARGET, WAITING, Kind
from collectives.runtime.program import Program
from collectives.runtime.program_rows import NoRowsError, ProgramRows
from collectives.runtime.progress import active_requests, progress_until
from collectives.transport.mailbox import NodeMemory

YIELDS = 16
"""Polls of the engine, each followed by a yield of the core, before Python drives MPI, if ranks share cores."""

START_POLLS = 100
"""Polls of the start of a non-blocking call: about 5 us, as much as a pending request costs."""

POLLED_BYTES = 1 << 9
"""Bytes of its longest message per further poll, up to `AWAITED_BYTES`: a peer copies about as many in that time."""

AWAITED_BYTES = 1 << 19

NETWORK_POLLS = 400
"""Most polls of the engine while it waits for messages between nodes: some 200 us."""

PATIENT_POLLS = 200
"""Polls between two sleeps of the progress thread: some 10 us."""


class CompiledProgram:
    """A program as a table, and the functions that run it. The `Program` that it is made from keeps its memory.

    `on_arrays` runs it on other arrays than those it was bound to, of the same shapes and dtypes; see `expect`.
    """

    broken = False
    prefers_finish = is_reentrant = True
    is_waiting, polls = False, 1

    def __init__(self, program: Program, node: NodeMemory) -> None:
        rows = ProgramRows(program.steps, program.wire)
        self.program, self.node, self._rows = program, node, rows.descriptions
        self._engine, self._messages = rows.program(program.memories)
        self.needs_no_mpi, self._written = not rows.messages, rows.written(program.memories)
        self._engine.shares_cores, self._engine.is_deferred = bool(node.shares_cores), program.deferred
        self.deferred = program.deferred
        self.spins = YIELDS if node.shares_cores else node.spins * 8  # the engine polls that much faster
        if rows.messages:
            self.spins = min(self.spins, NETWORK_POLLS)
        self._engine.polls = self._engine.call_polls = self.spins
        self.start_for, self.end_for = self._engine.start, self._engine.end
        self.activate_for, self.take_back = self._engine.activate, self._engine.take_back
        self.runs_for, self.manage = self._engine.runs_for, self._engine.manage

    def expect(self, arrays: Sequence[np.ndarray], memories: Sequence[int | None], separate: Sequence[int]) -> None:
        """Describe the arrays of `on_arrays` by those of a call with the same key: send and receive buffer.

        The program's source and target begin at the addresses `memories` in them; None for own memory. Their first
        `separate` bytes may not overlap.
        """
        for number, array, address, nbytes in zip((0, 1), arrays, memories, separate, strict=True):
            memory = (SOURCE, TARGET)[number]
            place = (IGNORED, 0) if address is None else (memory, address - MPI.Get_address(array))
            self._engine.expect(number, memory in self._written, *place, nbytes)

    def shorten_calls(self) -> None:
        """Let calls of the program, a non-blocking one, wait for a moment at most."""
        longest = max((row.nbytes for row in self._rows), default=0)
        polls = START_POLLS + min(longest, AWAITED_BYTES) // POLLED_BYTES
        self._engine.call_polls = 0 if self.node.shares_cores else polls

    @property
    def engine(self) -> Any:
        """The program as the engine has it."""
        return self._engine

    @property
    def ended(self) -> bool:
        """True once the program has ended, until it is started again; the engine notes the end."""
        return not self._engine.is_running

    @property
    def position(self) -> int:
        """Number of the current round."""
        return int(self._engine.round)

    @property
    def is_startable(self) -> bool:
        """True if the engine may start the program for its idle persistent request."""
        return bool(self._engine.is_idle)

    def on_arrays(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> bool:
        """Run the program on these arrays; False, and nothing is done, if they are not like those of `expect`."""
        result = self.start_on(sendbuf, recvbuf)
        if result == WAITING:
            self.go_on()
        return result != REFUSED

    def go_on(self) -> None:
        """Run to the end after a start, with progress of all active requests meanwhile."""
        if active_requests:
            progress_until(self.advance)
        else:
            self.finish()

    def start_on(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> int:
        """Start the program on these arrays; returns a result of the engine, or an error is raised.

        It is `REFUSED` if they are not like those of `expect`.
        """
        result = int(self._engine.run(sendbuf, recvbuf))
        if result not in (DONE, REFUSED):
            self.note(result)
        return result

    def note(self, result: int) -> None:
        """Raise if a message has failed, by a result of the engine."""
        if result <= WAITING:
            return
        row = self._rows[self._engine.failed]
        if row.message is not None:
            raise row.message.error(result, self._messages[row.message.number])
        assert row.edge is not None, "only messages fail"
        if result == MISMATCH:
            raise row.edge.refuse(None if row.kind == Kind.EXPECT_NONE else row.nbytes)
        raise OSError(f"the memory of process {row.edge.link['pid'][0]} cannot be accessed")

    def start(self) -> bool:
        """Start the program on the memory it was bound to, and `advance` unless that is `deferred`."""
        self._engine.is_running = True
        return not self.deferred and self.advance()

    def advance(self) -> bool:
        """Run as far as possible without blocking; True if the end is reached."""
        self.note(self._engine.advance(0))
        return self.ended

    def advance_patiently(self, naps: int) -> int:
        """Run as far as possible without the interpreter's lock (GIL); the result is for `note`.

        It sleeps up to `naps` times while it waits for messages.
        """
        return int(self._engine.advance_patiently(PATIENT_POLLS, naps))

    def poll(self) -> bool:
        """`advance` after some polls for messages; True if the end is reached."""
        self.note(self._engine.advance(self.spins))
        return self.ended

    def finish(self) -> None:
        """Run to the end, blocking."""
        turn = 0
        while not self.ended:
            if not self.poll():
                self.node.yielding(turn := turn + 1)

    def run(self) -> None:
        """Run the program on the memory it was bound to."""
        self._engine.is_running = True
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
        except NoRowsError:
            return None
        finally:
            _is_compiling = False
    return compiled if blocking or compiled.needs_no_mpi else None
