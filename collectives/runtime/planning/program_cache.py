"""Cache of bound programs, looked up by call arguments.

A repeated call is found by its name, operation, root, algorithm and segments, and by its buffers: without their
addresses if its program can run on any arrays, and by the addresses too otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.instructions import CHANNEL_COUNT, REFUSED
from collectives.errors import RanksDisagree, Timeout
from collectives.runtime.arguments.argument_keys import UNCACHEABLE, CallKey, held, key_fields, with_addresses
from collectives.runtime.arguments.call import Call
from collectives.runtime.binding.any_counts import placement_of
from collectives.runtime.binding.call_binding import memories, separate_bytes, spans_meet
from collectives.runtime.execution.operation import Operation
from collectives.runtime.execution.program import Placement, Program
from collectives.runtime.execution.progress import orphans, run_program
from collectives.runtime.planning.compiled_calls import CompiledCallTable

MAX_PROGRAMS = 256
"""Programs of a cache."""

MAX_BYTES = 1 << 28
"""Scratch memory of all cached programs of blocking calls."""

_ndarray = np.ndarray

Run = Callable[[Any, Any], int]


class CachedCall(NamedTuple):
    """Cache entry of a call.

    ``run(sendbuf, recvbuf)`` runs a blocking call, or returns False if the buffers do not fit; it starts a non-blocking
    one, and returns a result of the engine.
    """

    run: Run
    program: Program


class ProgramCache:
    """Cache of the programs of one communicator's blocking calls, or of its non-blocking ones.

    `rank` is for error messages. Non-blocking calls take `channels` in turn (`instructions.STARTED`), and a program
    belongs to one of them.

    Attributes
    ----------
    bound
        Programs, the oldest first, by the properties that calls of one program share, and the channel.
    fixed
        Keys of calls for which there is no program for any length.
    calls
        For each channel, calls by `CallKey.arguments`, or by `CallKey.addresses`.
    compiled_calls
        Compiled programs by the arguments of calls, searched first; then `calls` are.
    nbytes
        Scratch memory of all programs.
    begins
        A call looks for a program, and starts it.
    broken
        Description of an aborted call. Its messages may still arrive, so that no later call can be trusted.
    """

    def __init__(self, rank: int, channels: np.ndarray | None = None) -> None:
        self._rank, self._blocking = rank, channels is None
        if channels is None:
            channels = np.array([0, 1, 0], np.int64)  # one channel, which no call holds
        self.bound: dict[Hashable, Program] = {}
        self.calls = [dict[Hashable, CachedCall]() for _ in range(channels[CHANNEL_COUNT])]
        self.compiled_calls = CompiledCallTable(channels)
        self.fixed: set[Hashable] = set()
        self.nbytes = 0
        self.broken: str | None = None
        self.begins = False

    # -------------------------------------------------------------------------------- lookup

    def find(
        self, channel: int, name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
    ) -> tuple[CachedCall, Any, Any] | CallKey:
        """A cached call and its two arrays. Else the key for `store`."""
        try:
            arguments, s, r = key_fields(name, sendbuf, recvbuf, op, root, algorithm, segments)
            calls = self.calls[channel]
            call = calls.get(arguments) or calls.get(with_addresses(arguments, s, r))
        except TypeError:  # arguments that are not hashable, or buffers of other kinds
            return UNCACHEABLE
        return (call, s, r) if call else CallKey(arguments, s, r, (sendbuf, recvbuf, op, root, algorithm, segments))

    def run_cached(self, found: int, name: str, *arguments: Any) -> CallKey | tuple[()]:
        """Run a blocking call if it is in the cache and return an empty tuple. Else return its key for `store`.

        `found` is the result of ``compiled_calls.run[name]`` for this call.
        """
        if found != REFUSED:
            _held = held(arguments[0]), held(arguments[1])  # another thread may replace or resize them
            self.compiled_calls.started(name, found)[0].go_on()
            return ()
        cached = self.find(0, name, *arguments)
        if isinstance(cached, CallKey):
            return cached
        return () if self.run(name, *cached) else UNCACHEABLE

    def run(self, name: str, call: CachedCall, s: Any, r: Any) -> int:
        """``call.run(s, r)``, and poison the cache if that raises."""
        try:
            return call.run(s, r)
        except BaseException as error:
            self.poison(name, error, call.program, s, r)
            raise

    # -------------------------------------------------------------------------------- new calls

    def store(self, key: CallKey, bound: tuple[Any, ...], call: Call, channel: int = 0, classes: int = 0) -> None:
        """Register `key`, which `find` returned, for the program already stored under `bound`.

        `classes` has a bit for each size class of calls that may use a program for any length. Calls of these classes
        then find the programs of other channels, too. A no-op for `UNCACHEABLE`, an evicted program and a full cache.
        """
        program = self.bound.get(bound)
        if (
            key is UNCACHEABLE
            or program is None
            or len(self.calls[channel]) >= 4 * MAX_PROGRAMS
            or not key.identifies(memories(call))
        ):
            return
        runs_on_others = program.relocatable and not spans_meet(call)  # else: one array, whose parts are both buffers
        if runs_on_others and (self._blocking or program.needs_no_mpi):
            programs = {channel: program}
            for other in range(len(self.calls)) if classes else ():
                found = self.bound.get((*bound[:-1], bound[-1] - channel + other))  # the key ends with the channel
                if found is not None:
                    programs[other] = found
            for other, found in programs.items():
                if program.has_blocks:
                    found.expect_blocks(memories(call))
                    if not self._blocking:
                        found.shorten_calls()
                else:
                    self.calls[other][key.arguments] = self._on_arrays(key, found, call)
            self.compiled_calls.add(programs, key, classes, call)
        elif self._blocking:
            placement = placement_of(program, call) if program.relocatable else ((), 0)
            known, run = self._on_memory(key, program, placement)
            self.calls[channel][known] = CachedCall(run, program)

    def _on_arrays(self, key: CallKey, program: Program, call: Call) -> CachedCall:
        """Entry of a program that runs on any arrays like those of a call."""
        arrays, places = (key.sendbuf, key.recvbuf), memories(call)
        program.expect(arrays, places, separate_bytes(call), call.lengths[0])
        if self._blocking:
            return CachedCall(program.on_arrays, program)
        program.shorten_calls()
        return CachedCall(program.start_on, program)

    @staticmethod
    def _on_memory(key: CallKey, program: Program, placement: Placement) -> tuple[Hashable, Run]:
        """Key in `calls` of a blocking call whose program runs at a placement, and the function that runs it."""
        if program.stream is not None:
            return key.arguments if key.has_addresses else key.addresses, partial(_run, program, placement)
        if program.runs_native is not None and key.plain and key.sendbuf is not key.recvbuf:
            return key.arguments, program.runs_native
        return key.addresses, partial(_run, program, placement)

    # -------------------------------------------------------------------------------- programs

    def add(self, key: Hashable, program: Program, in_use: Iterable[Operation] = ()) -> None:
        """Add a program, and `free_surplus`."""
        self.bound[key] = program
        self.nbytes += program.nbytes
        self.free_surplus(in_use, program)

    @property
    def has_surplus(self) -> bool:
        """True if there are programs beyond `MAX_PROGRAMS`, or those of several blocking calls beyond `MAX_BYTES`."""
        return len(self.bound) > MAX_PROGRAMS or (self._blocking and self.nbytes > MAX_BYTES and len(self.bound) > 1)

    def free_surplus(self, in_use: Iterable[Operation], *needed: Program) -> None:
        """Free the oldest programs while there are too many, but not those needed or in use."""
        if not self.has_surplus:
            return
        kept = {id(one.program) for one in in_use} | {id(one) for one in needed}
        oldest = (key for key in list(self.bound) if key in self.bound and id(self.bound[key]) not in kept)
        while self.has_surplus and (key := next(oldest, None)) is not None:
            self.evict(key).free()

    def is_busy(self, key: Hashable, active: Callable[[], Iterable[Operation]]) -> bool:
        """True if one of the active calls runs the program of a key, and does so by MPI. Others wait for each other."""
        program = self.bound.get(key)
        if program is None or program.wire.in_mailboxes:
            return False
        return any(one.program is program for one in active())

    def evict(self, key: Hashable) -> Program:
        """Remove a program and all cached calls that use it, and return it, not freed: its messages may be active."""
        program = self.bound.pop(key)
        self.nbytes -= program.nbytes
        self.compiled_calls.discard(program)
        for calls in self.calls:
            for known in [known for known, call in calls.items() if call.program is program]:
                del calls[known]
        return program

    def free(self) -> None:
        for program in self.bound.values():
            program.free()
        self.bound.clear()
        self._forget_calls()
        self.compiled_calls.clear()

    def _forget_calls(self) -> None:
        for calls in self.calls:
            calls.clear()

    # -------------------------------------------------------------------------------- aborted calls

    def break_off(self, error: BaseException, name: str, *memory: object) -> None:
        """Poison the cache if an error has left a compiled call of a method unfinished.

        Ctrl-C may be noticed as soon as compiled code returns, before the call goes on in Python.
        """
        for program in self.compiled_calls.unfinished(name):
            self.poison(name, error, program, *memory)
        if isinstance(error, Timeout) and self.broken is None:  # in an exchange before the program
            self.poison(name, error, None, *memory)

    def poison(self, name: str, error: BaseException | None, program: Program | None, *memory: object) -> None:
        """Make all later calls raise, as messages of an aborted one of method `name` may still arrive.

        Its program and memory are kept, the arrays in lists too, as these messages are read from and written to them.
        """
        for bound in [bound for bound, found in self.bound.items() if found is program]:
            self.evict(bound)
        if program is not None:
            program.leave()
        form = "blocking" if self._blocking else "non-blocking"
        cause = "" if error is None else f" by {type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        self.broken = f"a {form} {name.lower()} was broken off on rank {self._rank}{cause}"
        orphans.extend((program, *(tuple(one) if type(one) is list else one for one in memory)))
        self._forget_calls()
        self.compiled_calls.run.clear()  # other threads may still look up a call that they have just started

    @contextmanager
    def poisoning(self, call: Call, program: Program) -> Iterator[None]:
        """Let all later calls raise if an exception leaves this block, in which a call runs its program."""
        try:
            yield
        except BaseException as error:
            self.poison(call.collective, error, program, call)
            raise

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Let no frame that interrupts this block free programs, such as the one that is about to start."""
        outer = self.begins
        try:
            self.begins = True
            yield
        finally:
            self.begins = outer

    def check_in_step(self) -> None:
        if self.broken is not None:
            message = f"{self.broken}; its messages may still arrive: go on with a new Communicator"
            raise RanksDisagree(MPI.ERR_OTHER, message)


def _run(program: Program, placement: Placement, sendbuf: Any, recvbuf: Any) -> bool:
    program.place(*placement)  # other calls may have used it meanwhile
    if program.stream is not None:  # then an array on the host is one that MPI ignores on this rank
        program.stream.follow(*[array for array in (sendbuf, recvbuf) if type(array) is not _ndarray])
    run_program(program)
    return True
