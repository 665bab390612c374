"""A program: one collective call bound to memory and a transport, as a flat list of function calls.

A blocking collective runs through the list; for a non-blocking one the position in the list, and in the
streams of an exchange, is the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.instructions import DONE, LINE, REFUSED, WAITING
from collectives.schedule.chunks import MemorySpan
from collectives.schedule.steps import Schedule
from collectives.transport.exchange import Exchange
from collectives.transport.wire import Wire
from collectives.types import Wait

START_POLLS = 8
"""Polls of the start of a non-blocking call: some 3 us, less than a pending request costs."""

POLLS = 500
"""Polls of a wait, some 200 us, before other requests progress."""


class Task(NamedTuple):
    """One rank's part of a call: its schedule, and lengths and locations of chunks, before binding to memory.

    `source` and `target` are the initial locations of the rank's chunks and the final locations of its results.
    Messages longer than `segment` bytes, the same on all ranks, are cut, so that one segment is reduced while the next
    arrives, and few are in the network at once; 0: never cut.
    """

    schedule: Schedule
    lengths: Sequence[int]
    source: Mapping[int, MemorySpan]
    target: Mapping[int, MemorySpan]
    itemsize: int
    segment: int = 0


class ElementArray(NamedTuple):
    """A 1-D array, on the host or a device, and its memory address."""

    array: Any
    address: int

    @classmethod
    def allocate(cls, count: int, dtype: Any, xp: Any = np) -> ElementArray:
        array = xp.empty(count, dtype)
        return cls(array, _address(array))


SHARED_SCRATCH = 1 << 25
"""Most bytes that programs share as scratch memory."""


class ScratchMemory:
    """Scratch memory of host programs of which only one runs at a time, as those of blocking calls: all use the same.

    A program that needs more than `SHARED_SCRATCH` has memory of its own.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def arrays(self, counts: Sequence[int], dtype: np.dtype[Any]) -> tuple[list[ElementArray], int]:
        """Arrays of so many elements, apart from each other, and the bytes that no other program uses."""
        sizes = [count * dtype.itemsize for count in counts]
        ends = list(accumulate(size + -size % LINE for size in sizes))
        if ends[-1] > SHARED_SCRATCH:
            return [ElementArray.allocate(count, dtype) for count in counts], sum(sizes)
        if ends[-1] > len(self._bytes):  # programs that exist keep the smaller one
            self._bytes = np.empty(min(max(ends[-1], 2 * len(self._bytes)), SHARED_SCRATCH) + LINE, np.uint8)
            skipped = -_address(self._bytes) % LINE
            self._bytes = self._bytes[skipped : len(self._bytes) - LINE + skipped]
        arrays = [self._bytes[end - size - -size % LINE :][:size].view(dtype) for end, size in zip(ends, sizes)]
        return [ElementArray(array, _address(array)) for array in arrays], 0


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.__cuda_array_interface__["data"][0])


class Program:
    """A schedule bound to memory and a transport: `run` executes it at once, `start` and `advance` without blocking.

    Attributes
    ----------
    calls, tests
        All calls in order; for each call that is a wait its test, None for all others.
    begins
        Non-empty rounds and their first index in `calls`.
    position
        Index of the next call; the number of calls once the program has ended, until it is started again.
    nbytes
        Scratch memory that no other program uses.
    stream
        In-order queue of asynchronous local work: waited for before messages that depend on it start, and at the end.
    on_arrays
        ``on_arrays(sendbuf, recvbuf)`` runs the whole program on other arrays of the same lengths and types, and
        returns False if they are not; None if it cannot.
    steps
        The calls, and pairs of wait and test, that the program was made from.
    exchanges
        Exchanges, if the program consists of these alone; else None.
    memories
        The memories that the program is bound to.
    broken
        A run was aborted; its messages may still be active.
    waits_in_mpi
        It can only run as a whole, as it contains a blocking MPI call.
    deferred
        `start` runs nothing: the progress thread begins the work, or the first `advance`.
    prefers_finish
        `finish` is faster than repeated `advance`, as for a collective of the MPI, which may need many polls.
    is_reentrant
        `advance` and `finish` may interrupt each other at any point, in signal handlers and finalizers.
    """

    on_arrays: Callable[[Any, Any], bool] | None = None
    exchanges: tuple[Exchange, ...] | None = None
    broken = waits_in_mpi = prefers_finish = deferred = is_startable = is_reentrant = False
    begins: tuple[tuple[int, int], ...] = ()
    position = 0

    def __init__(
        self,
        steps: Sequence[Callable[[], object] | Wait],
        wire: Wire,
        nbytes: int,
        memories: Sequence[ElementArray],
        stream: DeviceMemory | None = None,
    ) -> None:
        self.steps = steps
        self.calls = tuple(step.wait if isinstance(step, Wait) else step for step in steps)
        self.tests = tuple(step.test if isinstance(step, Wait) else None for step in steps)
        self.memories = memories
        self.wire = wire
        self.nbytes = nbytes
        self.stream = stream

    @property
    def program(self) -> Program:
        """This program itself, as a `CompiledProgram` has one."""
        return self

    @property
    def needs_no_mpi(self) -> bool:
        """True if it only reads and writes shared memory."""
        return self.exchanges is not None and not any(
            exchange.uses_network or exchange.node.fence is not None for exchange in self.exchanges
        )

    @property
    def is_waiting(self) -> bool:
        """True if `advance` would do nothing until a peer acts; changes nothing itself."""
        left = (self.exchanges or ())[self.position : self.position + 1]
        return bool(left) and left[0].is_waiting

    @property
    def polls(self) -> int:
        """Polls for messages within the node before a wait looks at other requests."""
        assert self.exchanges is not None, "it needs no MPI"
        return 1 if any(exchange.node.shares_cores for exchange in self.exchanges[:1]) else POLLS

    def run(self) -> None:
        for call in self.calls:
            call()

    def start(self) -> bool:
        """Start the program, and `advance` unless it is `deferred`; if False, `advance` or `finish` must follow."""
        self.position = 0
        return not self.deferred and self.advance()

    def advance(self) -> bool:
        """Run as far as possible without blocking; True if the end is reached."""
        calls, tests, position = self.calls, self.tests, self.position
        try:
            while position < len(calls):
                test = tests[position]
                if test is None:
                    calls[position]()
                elif not test():
                    return False
                position += 1
            return True
        finally:
            self.position = position

    def finish(self) -> None:
        """Run the remaining calls to the end, blocking in every wait."""
        calls = self.calls[self.position :]
        self.position = len(self.calls)
        for call in calls:
            call()

    def start_on(self, *_: Any) -> int:
        """Start a program that `needs_no_mpi`, and wait for a moment at most; returns a result of the engine."""
        return DONE if self.start() or any(self.advance() for _ in range(min(self.polls, START_POLLS))) else WAITING

    def runs_for(self, *_: object) -> bool:
        """False: compiled code does not manage a request of this program ."""
        return False

    def end_for(self, *_: object) -> int:
        """Return that Python code advances the request; see `runs_for`."""
        return REFUSED

    start_for = activate_for = take_back = end_for

    def free(self) -> None:
        self.calls = (_freed,)
        self.tests = (None,)
        self.steps, self.memories, self.exchanges = (), (), None
        self.wire.free()


def _freed() -> None:
    raise RuntimeError("this program was freed")
