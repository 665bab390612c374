"""A program: one collective call bound to memory and a transport, as a flat list of function calls.

A blocking collective runs through the list; for a non-blocking one the position in the list is the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.buffers.staging import DeviceMemory
from collectives.schedule.chunks import MemorySpan
from collectives.schedule.steps import Schedule
from collectives.transport.wire import ExchangeSupport, Wire
from collectives.types import Wait

SOURCE, TARGET, SCRATCH, LANDING = range(4)
"""Memories of a program: the user's buffers, scratch for forwarded chunks, and landing memory for operands."""


class Task(NamedTuple):
    """One rank's part of a call: its schedule, and lengths and locations of chunks, before binding to memory.

    `source` and `target` are the initial locations of the rank's chunks and the final locations of its results.
    Messages longer than `segment` bytes, the same on all ranks, are cut, so that one segment is reduced while the next
    arrives; 0: never cut.
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


def _address(array: Any) -> int:
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.__cuda_array_interface__["data"][0])


class Program:
    """A schedule bound to memory and a transport: `run` executes it at once, `start` and `advance` without blocking.

    Attributes
    ----------
    calls, opening, rest
        All calls in order, for `run`; those up to the first wait, for `start`; and the rest.
    tests
        For each call that is a wait its test, None for all others.
    begins
        Non-empty rounds and their first index in `calls`.
    position, first
        Index of the next call, and of the first wait, where it is after `start`.
    nbytes
        Scratch memory of the program.
    stream
        In-order queue of asynchronous local work: waited for before messages that depend on it start, and at the end.
    swap
        The whole program as one exchange, if it only sends one message and receives one.
    broken
        A run was aborted; its messages may still be active.
    waits_in_mpi
        It can only run as a whole, as it contains a blocking MPI call.
    is_native
        It is a collective of the MPI, which may need many polls: its wait is faster than our tests.
    """

    swap: ExchangeSupport | None = None
    broken = waits_in_mpi = is_native = False
    begins: tuple[tuple[int, int], ...] = ()

    def __init__(
        self,
        steps: Sequence[Callable[[], object] | Wait],
        wire: Wire,
        nbytes: int,
        keep: object,
        stream: DeviceMemory | None = None,
    ) -> None:
        self.calls = tuple(step.wait if isinstance(step, Wait) else step for step in steps)
        self.tests = tuple(step.test if isinstance(step, Wait) else None for step in steps)
        self.first = next((i for i, test in enumerate(self.tests) if test is not None), len(self.calls))
        self.opening, self.rest = self.calls[: self.first], self.calls[self.first :]
        self.position = self.first
        self._keep = keep
        self.wire = wire
        self.nbytes = nbytes
        self.stream = stream

    def run(self) -> None:
        for call in self.calls:
            call()

    def start(self) -> None:
        """Run up to the first wait. `finish` must follow, or `advance` until it returns True."""
        for call in self.opening:
            call()

    def finish(self) -> None:
        """Run the remaining calls to the end, blocking in every wait."""
        calls = self.calls[self.position :]
        self.position = self.first
        for call in calls:
            call()

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
            position = self.first
            return True
        finally:
            self.position = position

    def free(self) -> None:
        self.calls = self.opening = self.rest = (_freed,)
        self.tests = (None,)
        self._keep = None
        self.wire.free()


def _freed() -> None:
    raise RuntimeError("this program was freed")
