"""Programs of non-blocking calls, bound and compiled, for later calls with the same arguments."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice

from collectives.runtime.call import Call
from collectives.runtime.compiled_calls import CompiledCallTable
from collectives.runtime.compiled_program import CompiledProgram, compile_program
from collectives.runtime.program import Program
from collectives.runtime.program_cache import MAX_PROGRAMS, UNCACHEABLE, CallKey, ProgramCache
from collectives.transport.mailbox import NONBLOCKING


class NonblockingPrograms:
    """Programs of the non-blocking calls of one communicator; `cache`, of its blocking ones, counts repeated calls.

    Calls take the mailbox channels in turn, and a program belongs to one channel.

    Attributes
    ----------
    bound
        Programs, the oldest first, by the properties that calls of one program share, and the channel.
    compiled
        For each channel, compiled programs by `CallKey.arguments`, or by the key in `bound` if they are `deferred`.
    calls
        For each channel, compiled programs by the arguments of calls, searched first.
    """

    def __init__(self, cache: ProgramCache) -> None:
        self._cache = cache
        self.bound: dict[Hashable, Program] = {}
        self.compiled = [dict[Hashable, CompiledProgram]() for _ in range(NONBLOCKING)]
        self.calls = [CompiledCallTable() for _ in range(NONBLOCKING)]
        self._made: set[Hashable] = set()  # arguments of calls that were not compiled

    def free_surplus(self, in_use: Iterable[Program | CompiledProgram]) -> None:
        """Free the oldest programs beyond `MAX_PROGRAMS`, but not those in use."""
        surplus = len(self.bound) - MAX_PROGRAMS
        if surplus <= 0:
            return
        busy = {id(one.program if isinstance(one, CompiledProgram) else one) for one in in_use}
        for old in list(islice((old for old, program in self.bound.items() if id(program) not in busy), surplus)):
            freed = self.bound.pop(old)
            for channel, compiled in enumerate(self.compiled):
                self.compiled[channel] = {key: one for key, one in compiled.items() if one.program is not freed}
                self.calls[channel].discard(freed)
            freed.free()

    def in_portions(self, program: Program, key: Hashable, channel: int) -> Program | CompiledProgram:
        """The compiled form of a `deferred` program with this key, which the progress thread runs; else `program`."""
        if not program.deferred or key is None:
            return program
        compiled = self.compiled[channel].get(key) or compile_program(program)
        if compiled is not None:
            self.compiled[channel][key] = compiled
        return compiled or program

    def compile(self, program: Program, key: CallKey, channel: int, call: Call) -> None:
        """Compile the program of a repeated call if calls are frequent, for any arrays with these arguments."""
        if key is UNCACHEABLE or len(self.compiled[channel]) >= MAX_PROGRAMS or not key.identifies(call):
            return
        if key.arguments not in self._made:
            if len(self._made) >= 4 * MAX_PROGRAMS:
                self._made.clear()
            self._made.add(key.arguments)
            return
        self._cache.count_repeat()
        compiled = self._cache.compile(program, key, call)
        if compiled is not None:
            self.compiled[channel][key.arguments] = compiled
            self.calls[channel].add(key.arguments[0], compiled, key.given, compiled.start_spins)

    def free(self) -> None:
        for program in self.bound.values():
            program.free()
        self.bound.clear()
        for compiled, calls in zip(self.compiled, self.calls):
            compiled.clear()
            calls.clear()
        self._made.clear()
