"""Cache of bound programs, looked up by call arguments.

A repeated blocking call is found by its name, operation, root, algorithm and segments, and by its buffers: without
their addresses if its program can run on any arrays, as compiled ones can, and by the addresses too otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.errors import RanksDisagree
from collectives.runtime import compiled_program
from collectives.runtime import program_table as table
from collectives.runtime.argument_keys import counts_key, describe, is_constant, place_of
from collectives.runtime.binding import EagerBuffers, memories, program_of, separate_bytes
from collectives.runtime.call import Call
from collectives.runtime.compiled_calls import NO_ARRAY, CompiledCallTable
from collectives.runtime.compiled_program import CompiledProgram, calls_before_compiling, compile_program
from collectives.runtime.program import Program
from collectives.runtime.progress import run_program

MAX_PROGRAMS = 256
"""Cached programs, of blocking and of non-blocking calls each."""

MAX_BYTES = 1 << 28
"""Scratch memory of all cached programs of blocking calls."""

COMPILE_AFTER = 16
"""Repeated calls after which programs are compiled. Loading compiled code takes up to a second; compiling it, once per
installation, took 8.5 seconds."""

_ndarray = np.ndarray

Run = Callable[[Any, Any], bool]


class CallKey(NamedTuple):
    """Cache key of a call, by its arguments without addresses of NumPy arrays, and its arrays: a single one twice.

    The arrays are NumPy's or CuPy's; the arguments have the addresses of the latter. `given` are the arguments
    themselves: send buffer, receive buffer, operation, root, algorithm and segments.
    """

    arguments: tuple[Any, ...]
    sendbuf: Any
    recvbuf: Any
    given: tuple[Any, ...] = ()

    @property
    def addresses(self) -> tuple[Any, ...]:
        return with_addresses(self.arguments, self.sendbuf, self.recvbuf)

    def identifies(self, call: Call) -> bool:
        """True if calls with this key are like `call`: an operation of MPI's own, and no memory before the arrays.

        Other arrays may have none there.
        """
        ends = zip(memories(call), (self.sendbuf, self.recvbuf))
        return is_constant(self.arguments[1]) and all(at is None or at >= place_of(array)[0] for at, array in ends)

    @property
    def has_addresses(self) -> bool:
        """True if the arguments alone have the addresses: all arrays are CuPy's."""
        return type(self.sendbuf) is not _ndarray and type(self.recvbuf) is not _ndarray

    @property
    def plain(self) -> bool:
        """True if each buffer is an array without counts, displacements or datatype."""
        return len(self.arguments) == 9 or max(map(len, self.arguments[5:])) <= 2


def with_addresses(arguments: tuple[Any, ...], s: Any, r: Any) -> tuple[Any, ...]:
    """Key that includes the addresses of two arrays; TypeError if they have gaps."""
    return arguments, *place_of(s), *place_of(r)


def key_fields(
    name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
) -> tuple[tuple[Any, ...], Any, Any]:
    """Fields of a `CallKey`, as a tuple: a lookup needs no more. TypeError for buffers that `describe` refuses."""
    if type(root) is not int:
        root = counts_key(root)
    if segments is not None and type(segments) is not int:  # 1.0 and True are equal to 1
        segments = counts_key(segments)
    if type(sendbuf) is _ndarray and type(recvbuf) is _ndarray:
        s, r = sendbuf, recvbuf
        arguments = name, id(op), root, algorithm, segments, s.shape, s.dtype, r.shape, r.dtype
        return arguments, s, r
    (send, sent), (recv, received) = describe(sendbuf), describe(recvbuf)
    if send is None:
        send = NO_ARRAY if recv is None else recv
    if recv is None:
        recv = send
    return (name, id(op), root, algorithm, segments, sent, received), send, recv


UNCACHEABLE = CallKey((), NO_ARRAY, NO_ARRAY)
"""Key of calls whose arguments cannot be looked up; compared by identity."""


class CachedCall(NamedTuple):
    """Cache entry of a blocking call: ``run(sendbuf, recvbuf)`` runs it, or returns False if these do not fit.

    `key` is that of its program in `ProgramCache.bound`.
    """

    run: Run
    key: Hashable


class ProgramCache:
    """Cache of the programs of blocking calls on one communicator; `rank` is for error messages.

    With `alone` the communicator has one rank.

    Attributes
    ----------
    bound
        Programs, the oldest first, by the properties that calls of one program share.
    calls
        Calls by `CallKey.arguments`, or by `CallKey.addresses`.
    compiled_calls
        Compiled programs by the arguments of calls, searched first; then `calls` are, by `run_by_key`.
    nbytes
        Scratch memory of all programs.
    broken
        Error that aborted a blocking call. Its messages may still arrive, so that no later call can be trusted.
    """

    def __init__(self, rank: int, alone: bool = False) -> None:
        self._rank, self._alone = rank, alone
        self.bound: dict[Hashable, Program | EagerBuffers] = {}
        self.calls: dict[tuple[Any, ...], CachedCall] = {}
        self.compiled_calls = CompiledCallTable(self.run_by_key)
        self._repeats = 0
        self.nbytes = 0
        self.broken: str | None = None
        self._orphans: list[object] = []

    def run_cached(
        self, found: Any, name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
    ) -> CallKey | tuple[()]:
        """Run a blocking call if it is in the cache and return an empty tuple; else return its key for `store`.

        `found` is the result of ``compiled_calls.run[name]`` for this call.
        """
        if isinstance(found, CallKey):
            return found
        if found == table.REFUSED:
            return self.run_by_key(name, sendbuf, recvbuf, op, root, algorithm, segments)
        program, result = self.compiled_calls.started(name, found)
        program.go_on(result)
        return ()

    def break_off(self, error: BaseException, name: str, *memory: object) -> None:
        """Poison the cache if an error has left a compiled call of a method unfinished.

        Ctrl-C may be noticed as soon as compiled code returns, before the call goes on in Python.
        """
        for program in self.compiled_calls.unfinished(name):
            self.poison(error, program, *memory)
            for bound in [bound for bound, entry in self.bound.items() if program_of(entry) is program.program]:
                self.evict(bound)

    def run_by_key(
        self, name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
    ) -> CallKey | tuple[()]:
        """As `run_cached`, but only by `calls`."""
        try:
            arguments, s, r = key_fields(name, sendbuf, recvbuf, op, root, algorithm, segments)
            call = self.calls.get(arguments)
            if call is None:
                call = self.calls.get(with_addresses(arguments, s, r))
                if call is None:
                    return CallKey(arguments, s, r, (sendbuf, recvbuf, op, root, algorithm, segments))
        except TypeError:  # arguments that are not hashable, or buffers of other kinds
            return UNCACHEABLE
        try:
            return () if call.run(s, r) else UNCACHEABLE
        except BaseException as error:
            self.poison(error, call, s, r)
            if call.key in self.bound:
                self.evict(call.key)
            raise

    def store(self, key: CallKey, bound: Hashable, call: Call) -> None:
        """Let later calls with these arguments find the program already stored under `bound`; no-op where impossible.

        `key` is what `run_cached` returned. A no-op for `UNCACHEABLE`, an evicted program, a user-defined operation and
        a full cache. Once calls are frequent, the program is compiled.
        """
        entry = self.bound.get(bound)
        if key is UNCACHEABLE or entry is None or len(self.calls) >= 4 * MAX_PROGRAMS or not key.identifies(call):
            return
        name, s, r, program = key.arguments[0], key.sendbuf, key.recvbuf, program_of(entry)
        if program.stream is not None:
            known = key.arguments if key.has_addresses else key.addresses
            self.calls[known] = CachedCall(partial(_run, program), bound)
            return
        compiled = self.compile(program, key, call, blocking=True)
        if compiled is not None:
            self.calls[key.arguments] = CachedCall(compiled.on_arrays, bound)
            self.compiled_calls.add(name, compiled, key.given)
        elif isinstance(entry, EagerBuffers) and key.plain and (run := entry.on_arrays(s, r)) is not None:
            self.calls[key.arguments] = CachedCall(self._counting(run), bound)
        elif program.on_arrays is not None and key.plain and s is not r:
            self.calls[key.arguments] = CachedCall(program.on_arrays, bound)
        else:
            run = entry.on_call(call) if isinstance(entry, EagerBuffers) else partial(_run, program)
            self.calls[key.addresses] = CachedCall(self._counting(run), bound)

    def compile(self, program: Program, key: CallKey, call: Call, blocking: bool = False) -> CompiledProgram | None:
        """Compile a program for calls like this one once calls are frequent; None if that is not possible."""
        if not self.calls_are_frequent:
            return None
        compiled = compile_program(program, blocking)
        if compiled is not None:
            compiled.expect((key.sendbuf, key.recvbuf), memories(call), separate_bytes(call))
        return compiled

    @property
    def calls_are_frequent(self) -> bool:
        return self._repeats >= calls_before_compiling(COMPILE_AFTER, self._alone)

    def count_repeat(self) -> None:
        """Count a repeated call that is not compiled; once calls are frequent, all are forgotten.

        Their programs are then compiled as they are called again.
        """
        self._repeats += 1
        if self._repeats == calls_before_compiling(COMPILE_AFTER, self._alone):
            self.calls.clear()

    def _counting(self, run: Run) -> Run:
        """The function `run` that also counts the repeated calls."""
        if not compiled_program.available():
            return run

        def counted(sendbuf: Any, recvbuf: Any) -> bool:
            self.count_repeat()
            return run(sendbuf, recvbuf)

        return counted

    def add(self, key: Hashable, entry: Program | EagerBuffers) -> None:
        """Add a program to the cache; free the oldest ones beyond `MAX_PROGRAMS` and `MAX_BYTES`."""
        self.bound[key] = entry
        self.nbytes += program_of(entry).nbytes
        while len(self.bound) > MAX_PROGRAMS or (self.nbytes > MAX_BYTES and len(self.bound) > 1):
            self.evict(next(iter(self.bound))).free()

    def evict(self, key: Hashable) -> Program:
        """Remove a program and all cached calls that use it, and return it, not freed: its messages may be active."""
        program = program_of(self.bound.pop(key))
        self.nbytes -= program.nbytes
        self.compiled_calls.discard(program)
        for known in [known for known, call in self.calls.items() if call.key == key]:
            del self.calls[known]
        return program

    def poison(self, error: BaseException, *memory: object) -> None:
        """Make all later blocking calls on this communicator raise, as messages of the aborted one may still arrive.

        `memory`, of the aborted call, is kept, since these messages are read from it and written to it.
        """
        self.broken = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._orphans += memory
        self.calls.clear()
        self.compiled_calls.clear()

    def check_in_step(self) -> None:
        if self.broken is not None:
            message = (
                f"a blocking call was broken off on rank {self._rank} by {self.broken}; its messages may still arrive"
            )
            raise RanksDisagree(MPI.ERR_OTHER, f"{message}: go on with a new Communicator")

    def free(self) -> None:
        for entry in self.bound.values():
            program_of(entry).free()
        self.bound.clear()
        self.calls.clear()
        self.compiled_calls.clear()


def _run(program: Program, sendbuf: Any, recvbuf: Any) -> bool:
    if program.stream is not None:  # then an array on the host is one that MPI ignores on this rank
        program.stream.follow(*[array for array in (sendbuf, recvbuf) if type(array) is not _ndarray])
    run_program(program)
    return True
