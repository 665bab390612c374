"""A program: one collective call bound to memories and a transport, and the engine that runs its rows.

The position in each stream of the current round is the whole state of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.assembly import Rounds, Rows, assemble, flat, new_bases
from collectives.engine.extension import available, engine_class
from collectives.engine.fence import is_ordered
from collectives.engine.instructions import DONE, IGNORED, LANDING, MISMATCH, REFUSED, SOURCE, TARGET, WAITING, Kind
from collectives.runtime.execution.awaited_program import AwaitedProgram
from collectives.runtime.execution.local_steps import PendingWork, call_rounds
from collectives.runtime.execution.program_memory import ElementArray, Scale
from collectives.runtime.execution.progress import active_requests, progress_until
from collectives.transport.waits import Pauses, has_deadline
from collectives.transport.wire import Wire

YIELDS = 16
"""Polls of the engine, each followed by a yield of the core, before Python drives MPI, if ranks share cores."""

FASTER = 8
"""Polls of the compiled engine in the time of one of the interpreter."""

START_POLLS = 100
"""Polls of the start of a non-blocking call: about 5 us, as much as a pending request costs."""

POLLED_BYTES, AWAITED_BYTES = 1 << 9, 1 << 19
"""Bytes of its longest message per further poll, up to the second: a peer copies about as many in that time."""

NETWORK_POLLS = 400
"""Most polls of the engine while it waits for messages between nodes: some 200 us."""

PATIENT_POLLS = 200
"""Polls between two sleeps of the progress thread: some 10 us."""


Placement = tuple[Sequence[int | None], int | np.ndarray]
"""Addresses of a call's memories, and its length, or the bounds of its blocks. See `Program.place`."""


class Program(AwaitedProgram):
    """A call bound to memories and a transport: `run` executes it at once, `start` and `advance` without blocking.

    Attributes
    ----------
    rounds
        The instructions, of rounds and streams; they may be changed before the first run.
    nbytes, places, scale
        Scratch memory that no other program uses; the memories of the user's send and receive buffer; and lengths of a
        program for any length.
    stream
        In-order queue of asynchronous local work: waited for before messages that depend on it start, and at the end.
    waits_in_mpi
        It can only run as a whole, as it contains a blocking MPI call.
    relocatable
        `place` and `start_on` let it run on other arrays than those that it was bound to.
    deferred
        `start` runs nothing: the progress thread begins the work, or the first `advance`.
    """

    waits_in_mpi = deferred = relocatable = False
    scale: Scale | None = None
    places = (SOURCE, TARGET)
    recorded: tuple[np.ndarray, np.ndarray] | None = None
    """Entry of its calls in the record, and the number of calls on its channel."""

    runs_native: Callable[[Any, Any], bool] | None = None
    """``runs_native(sendbuf, recvbuf)`` runs the MPI's collective on other arrays like these. False if it cannot."""

    def __init__(
        self,
        rounds: Rounds,
        wire: Wire,
        nbytes: int = 0,
        memories: Sequence[ElementArray] = (),
        stream: DeviceMemory | None = None,
    ) -> None:
        self.rounds, self.wire, self.stream = rounds, wire, stream
        self._bases = new_bases()
        self.hold(memories, nbytes)

    def hold(self, memories: Sequence[ElementArray], nbytes: int) -> None:
        """Set the memories of the program, of which no other program uses `nbytes` of scratch memory."""
        self.memories, self.nbytes = memories, nbytes
        for number, memory in enumerate(memories):
            self._bases[number] = memory.address

    # -------------------------------------------------------------------------------- the engine

    @cached_property
    def instructions(self) -> list[Any]:
        return flat(self.rounds)

    @cached_property
    def rows(self) -> Rows:
        """The arrays that the engine runs."""
        return assemble(self.rounds, self._bases, self.scale is not None)

    @cached_property
    def engine(self) -> Any:
        """The program as the engine has it."""
        engine, node = engine_class("RowProgram")(*self.rows), self.wire.node
        engine.is_deferred, engine.shares_cores = self.deferred, node is not None and bool(node.shares_cores)
        engine.polls = engine.call_polls = self.spins
        if self.recorded is not None:
            engine.describe(*self.recorded)
        if self.scale is not None:
            units, order = self.rows.operands.copy(), self.scale.order
            bounds = np.zeros(2 * len(order) + LANDING + 1, np.int64)
            may_choose = np.array([one.address_label != 0 for one in self.instructions], np.uint8)
            engine.scale(self.scale.record, units, order, bounds, may_choose)
        return engine

    def assemble(self) -> None:
        """Make the engine's rows now: a signal handler that finds a program half assembled would make others."""
        self.engine  # noqa: B018

    @cached_property
    def spins(self) -> int:
        """Polls of the engine in a wait, before the core is yielded."""
        node = self.wire.node
        if self._waits:
            return 0
        if node is None:
            return NETWORK_POLLS
        spins: int = YIELDS if node.shares_cores else node.spins * (FASTER if available() else 1)
        return spins if self.needs_no_mpi else min(spins, NETWORK_POLLS)

    @cached_property
    def kinds(self) -> set[int]:
        """Kinds of all instructions."""
        return {one.kind for one in self.instructions}

    @cached_property
    def _written(self) -> set[int]:
        """Memories to which it writes."""
        return {operand.out.memory for one in self.instructions for operand in one.operands}

    @cached_property
    def _waits(self) -> list[PendingWork]:
        """Waits for pending work."""
        return [one.call for one in self.instructions if isinstance(one.call, PendingWork)]

    @cached_property
    def needs_no_mpi(self) -> bool:
        """True if it only reads and writes memory."""
        calls = self.kinds & {Kind.CALL, Kind.NET_SEND, Kind.NET_RECV}
        return not calls and self.wire.node is not None and (available() or is_ordered())

    @cached_property
    def is_reentrant(self) -> bool:
        """True if `advance` and `finish` may interrupt each other at any point, in signal handlers and finalizers."""
        return available() and Kind.CALL not in self.kinds

    @cached_property
    def is_compiled(self) -> bool:
        """True if the compiled engine can manage its requests, and run it without the interpreter's lock (GIL)."""
        return available() and self.needs_no_mpi

    def place(self, addresses: Sequence[int | None], length: int | np.ndarray = 0) -> None:
        """Let the next run use source and target at other addresses. None for memory of the program's own.

        `length`: that of the call, for a program for any length, or the bounds of its blocks, for one for any counts.
        """
        if self.scale is not None:
            self.engine.resize(length)
        for number, address in zip(self.places, addresses):
            if address is not None:
                self._bases[number] = address

    # -------------------------------------------------------------------------------- calls

    def expect(
        self, arrays: Sequence[np.ndarray], memories: Sequence[int | None], separate: Sequence[int], length: int = 0
    ) -> None:
        """Describe the arrays of `on_arrays` by those of a call with the same key: send and receive buffer.

        The program's source and target begin at the addresses `memories` in them; None for own memory. Their first
        `separate` bytes may not overlap. `length` is that of the call, for a program for any length.
        """
        for number, array, address, nbytes in zip((0, 1), arrays, memories, separate, strict=True):
            memory = self.places[number]
            place = (IGNORED, 0) if address is None else (memory, address - MPI.Get_address(array))
            per_element = 0 if self.scale is None or address is None else array.nbytes // length
            self.engine.expect(number, memory in self._written, *place, nbytes, per_element)

    def expect_blocks(self, memories: Sequence[int | None]) -> None:
        """Describe the arrays of calls of a program for any counts, by the addresses of those of a call."""
        for number, address in enumerate(memories):
            memory = IGNORED if address is None else self.places[number]
            self.engine.expect(number, memory in self._written, memory, 0, 0, 0)

    def shorten_calls(self) -> None:
        """Let calls of the program, a non-blocking one, wait for a moment at most."""
        longest = max((one.nbytes for one in self.instructions), default=0)
        polls = START_POLLS + min(longest, AWAITED_BYTES) // POLLED_BYTES
        shares = self.wire.node is None or self.wire.node.shares_cores
        self.engine.call_polls = 0 if shares else polls if available() else polls // FASTER

    def go_on(self) -> None:
        """Run to the end after a start, with progress of all active requests meanwhile."""
        if active_requests:
            progress_until(self.advance, self)
        else:
            self.finish()

    def on_arrays(self, sendbuf: Any, recvbuf: Any) -> bool:
        """Run the program on these arrays. False, and nothing is done, if they are not like those of `expect`."""
        result = self.start_on(sendbuf, recvbuf)
        if result == WAITING:
            self.go_on()
        return result != REFUSED

    def start_on(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> int:
        """Start the program on these arrays. Returns a result of the engine, or an error is raised.

        It is `REFUSED` if they are not like those of `expect`.
        """
        result = int(self.engine.run(sendbuf, recvbuf))
        if result not in (DONE, REFUSED):
            self.note(result)
        return result

    # -------------------------------------------------------------------------------- runs

    @property
    def ended(self) -> bool:
        """True once the program has ended, until it is started again. The engine notes the end."""
        return not self.engine.is_running

    @property
    def has_blocks(self) -> bool:
        """True for a program for any counts."""
        return self.scale is not None and self.scale.blocks is not None

    @property
    def position(self) -> int:
        """Number of the current round."""
        return int(self.engine.round)

    @property
    def is_startable(self) -> bool:
        """True if the engine may start the program for its idle persistent request."""
        return bool(self.engine.is_idle)

    def note(self, result: int) -> None:
        """Raise if a message has failed, by a result of the engine."""
        if result <= WAITING:
            return
        failed, nbytes = self.instructions[self.engine.failed], int(self.rows.rows["nbytes"][self.engine.failed])
        if failed.message is not None:
            number = int(self.rows.rows["link"][self.engine.failed])
            raise failed.message.error(result, self.rows.messages[number], nbytes)
        assert failed.link is not None, "only messages fail"
        if result == MISMATCH:
            raise failed.link.refuse(None if failed.kind == Kind.EXPECT_NONE else nbytes)
        raise OSError(f"the memory of process {failed.link.link['pid'][0]} cannot be accessed")

    def use_tag(self, tag: int) -> None:
        """Set the tag of messages between nodes that start from now on."""
        self.rows.messages["tag"] = tag
        self.wire.use_tag(tag)

    def start(self) -> bool:
        """Start the program, and `advance` unless it is `deferred`. If False, `advance` or `finish` must follow."""
        self.engine.begin()
        return not self.deferred and self.advance()

    def advance(self) -> bool:
        """Run as far as possible without blocking. True if the end is reached."""
        self.note(self.engine.advance(0))
        return self.ended

    def advance_patiently(self, naps: int) -> int:
        """Run as far as possible without the interpreter's lock (GIL). The result is for `note`.

        It sleeps up to `naps` times while it waits for messages.
        """
        return int(self.engine.advance_patiently(PATIENT_POLLS, naps))

    def poll(self) -> bool:
        """`advance` after some polls for messages. True if the end is reached."""
        self.note(self.engine.advance(self.spins))
        return self.ended

    def run(self) -> None:
        """Run the program on the memory it was bound to, or placed at."""
        self.engine.begin()
        self.finish()

    def finish(self) -> None:
        """Run to the end, blocking."""
        try:
            self._let_block(True)
            poll, pauses = self.poll, None
            while not self.ended and not poll():
                pauses = pauses or Pauses(self)
                self.wire.yielding(pauses)
                poll = self.advance if pauses.is_long else self.poll
        finally:
            self._let_block(False)

    def _let_block(self, blocks: bool) -> None:
        for wait in self._waits:
            wait.blocks = blocks and not has_deadline()

    def free(self) -> None:
        """Free the messages. The program cannot run again."""
        self.wire.free()
        for derived in ("instructions", "rows", "engine", "kinds", "_written", "_waits"):
            self.__dict__.pop(derived, None)
        self.rounds, self.memories = call_rounds([_freed]), ()


def _freed() -> None:
    raise RuntimeError("this program was freed")
