"""Programs of non-blocking calls, bound and compiled, for later calls with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Any

from collectives.runtime.call import Call
from collectives.runtime.compiled_calls import CompiledCallTable
from collectives.runtime.compiled_program import CompiledProgram, compile_program
from collectives.runtime.operation import Operation
from collectives.runtime.program import Program
from collectives.runtime.program_cache import MAX_PROGRAMS, UNCACHEABLE, CallKey, ProgramCache, with_addresses
from collectives.transport.mailbox import NONBLOCKING


class NonblockingPrograms:
    """Programs of the non-blocking calls of one communicator; `cache`, of its blocking ones, counts repeated calls.

    Calls take the mailbox channels in turn, and a program belongs to one channel.

    Attributes
    ----------
    bound
        Programs, the oldest first, by the properties that calls of one program share, and the channel.
    known
        For each channel, compiled programs by `CallKey.arguments`, or by the key in `bound` if they are `deferred`; and
        programs of frequent calls that cannot be compiled, by `CallKey.addresses`.
    calls
        For each channel, compiled programs by the arguments of calls, searched first.
    """

    def __init__(self, cache: ProgramCache) -> None:
        self._cache = cache
        self.bound: dict[Hashable, Program] = {}
        self.known = [dict[Hashable, Program | CompiledProgram]() for _ in range(NONBLOCKING)]
        self.calls = [CompiledCallTable() for _ in range(NONBLOCKING)]
        self._made: set[Hashable] = set()  # arguments of calls that were not compiled

    def free_surplus(self, in_use: Iterable[Program | CompiledProgram]) -> None:
        """Free the oldest programs beyond `MAX_PROGRAMS`, but not those in use."""
        surplus = len(self.bound) - MAX_PROGRAMS
        if surplus <= 0:
            return
        busy = {id(one.program) for one in in_use}
        for old in list(islice((old for old, program in self.bound.items() if id(program) not in busy), surplus)):
            freed = self.bound.pop(old)
            for channel, known in enumerate(self.known):
                self.known[channel] = {key: one for key, one in known.items() if one.program is not freed}
                self.calls[channel].discard(freed)
            freed.free()

    def is_busy(self, key: Hashable, active: Callable[[], Iterable[Operation]]) -> bool:
        """True if one of the active calls runs the program of a key, and does so by MPI; others wait for each other."""
        program = self.bound.get(key)
        waits = program is None or program.wire.in_mailboxes
        return not waits and any(one.program.program is program for one in active())

    def in_portions(self, program: Program, key: Hashable, channel: int) -> Program | CompiledProgram:
        """The compiled form of a `deferred` program with this key, which the progress thread runs; else `program`."""
        if not program.deferred or key is None:
            return program
        known = self.known[channel].get(key) or compile_program(program)
        if known is not None:
            self.known[channel][key] = known
        return known or program

    def find(self, channel: int, arguments: tuple[Any, ...], s: Any, r: Any) -> Program | CompiledProgram | None:
        """Program of a call by its key; TypeError for arguments that cannot be looked up."""
        known = self.known[channel]
        return known.get(arguments) or known.get(with_addresses(arguments, s, r))

    def store(self, program: Program, key: CallKey, channel: int, call: Call) -> None:
        """Let later calls find the program of a repeated call if calls are frequent.

        It is compiled, for any arrays with these arguments, or found for arrays at the same addresses.
        """
        if program.stream is not None or key is UNCACHEABLE:
            return
        if len(self.known[channel]) >= MAX_PROGRAMS or not key.identifies(call):
            return
        if key.arguments not in self._made:
            if len(self._made) >= 4 * MAX_PROGRAMS:
                self._made.clear()
            self._made.add(key.arguments)
            return
        self._cache.count_repeat()
        compiled = self._cache.compile(program, key, call)
        if compiled is not None:
            compiled.shorten_calls()
            self.known[channel][key.arguments] = compiled
            self.calls[channel].add(key.arguments[0], compiled, key.given)
        elif self._cache.calls_are_frequent and program.needs_no_mpi and not program.deferred:
            self.known[channel][key.addresses] = program

    def free(self) -> None:
        for program in self.bound.values():
            program.free()
        self.bound.clear()
        for known, calls in zip(self.known, self.calls):
            known.clear()
            calls.clear()
        self._made.clear()
