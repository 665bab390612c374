"""Planner: binds collective calls to programs and runs them, for blocking, non-blocking and persistent calls.

Small blocking calls are copied through eager buffers; larger ones are bound to the user's memory without extra copies.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from mpi4py import MPI

from collectives.errors import RanksDisagree
from collectives.runtime import binding
from collectives.runtime.agreement import ChannelAllocator, MemoryVisibility, agree_on_memory
from collectives.runtime.binding import EagerBuffers
from collectives.runtime.call import Call, call_device
from collectives.runtime.communicator_transports import BLOCKING_CHANNEL, FIRST_NONBLOCKING, Transports
from collectives.runtime.compiled_calls import CompiledCallTable
from collectives.runtime.compiled_program import CompiledProgram, compile_program, load_compiler
from collectives.runtime.count_exchange import CountExchange, bind_count_exchange, needs_counts
from collectives.runtime.native_requests import ended_request, new_request
from collectives.runtime.operation import Operation
from collectives.runtime.program import Program
from collectives.runtime.program_builder import ProgramBuilder
from collectives.runtime.program_cache import MAX_PROGRAMS, UNCACHEABLE, CallKey, ProgramCache, key_fields
from collectives.runtime.program_table import DONE, REFUSED
from collectives.runtime.progress import active_requests, lone_requests, progress_lock, run_program
from collectives.runtime.requests import Request
from collectives.selection.timing_table import NATIVE, AlgorithmChoice
from collectives.transport.mailbox import NONBLOCKING


class Planner:
    """Runs the collective calls of one communicator over `comm`, a private duplicate of it that the planner owns.

    The duplicate is used for nothing else, so that its messages never match the user's. `transports` is created from
    the other arguments; `cache` holds the programs of blocking calls. With `async_progress`, programs of long messages
    within the node are begun and advanced by the progress thread; they are compiled at once, where that is possible.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        aware: bool | None,
        shared: bool,
        nodes: Sequence[int] | None,
        async_progress: bool = False,
    ) -> None:
        self.comm = comm
        if async_progress:
            load_compiler()
        self.transports = Transports(comm, aware, shared, nodes)
        self.node, self.nodes = self.transports.node, self.transports.nodes
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._builder = ProgramBuilder(comm, self.transports, async_progress)
        self.cache = ProgramCache(self.rank)
        self._orphans: list[object] = []  # aborted requests: keep alive the memory that late messages are written to
        self._programs: dict[Hashable, Program] = {}  # of non-blocking calls
        self._compiled = [dict[Hashable, CompiledProgram]() for _ in range(NONBLOCKING)]  # by channel and arguments
        self._calls = [CompiledCallTable() for _ in range(NONBLOCKING)]  # the same programs, searched first
        self._latest: list[Request | None] = [None] * NONBLOCKING  # the last non-blocking call on each channel
        self._broken: str | None = None
        self._count_exchanges: dict[Hashable, CountExchange] = {}
        self._persistent: weakref.WeakSet[Request] = weakref.WeakSet()
        # Appended by finalizers at any moment.
        self._finalized: deque[tuple[Program | CompiledProgram, int | None]] = deque()
        self._channels = ChannelAllocator(comm)

    def visibility(self, call: Call) -> MemoryVisibility:
        """Raise if this rank's buffers overlap; else return the call's memory properties on all ranks. Collective."""
        binding.check_no_overlap(call)
        return agree_on_memory(self.comm, self.node, call)

    # -------------------------------------------------------------------------------- the three forms

    def run(
        self,
        call: Call,
        choice: AlgorithmChoice,
        cache_key: CallKey = UNCACHEABLE,
    ) -> None:
        """Run a blocking call and cache its program, unless data is staged; later calls can find it by `cache_key`."""
        self.cache.check_in_step()
        binding.check_no_overlap(call)
        if needs_counts(call, choice):
            call, cache_key = self._exchange_counts(call, choice), UNCACHEABLE
        call, device = self._builder.on_device(call, choice)
        if device is None and binding.needs_staging(call):  # anew in every call
            program = self._builder.bind(call, choice, "blocking")
            self._run_or_poison(program, call)
            program.free()
            return
        small = device is None and binding.fits_eager_buffers(call)
        key = binding.program_key(call, choice, not small, device)
        entry = self.cache.bound.get(key)
        if entry is None:
            entry = (
                self._builder.bind_eager(call, choice)
                if small
                else self._builder.bind(call, choice, "blocking", device)
            )
            self.cache.add(key, entry)
        else:
            self.cache.count_repeat()
        if isinstance(entry, Program) and entry.stream is not None:
            entry.stream.follow(*(buffer.owner for buffer in call.buffers))
        try:
            if isinstance(entry, EagerBuffers):
                entry.run(call)
            else:
                run_program(entry)
        except BaseException as error:
            self.cache.poison(error, self.cache.evict(key), call)
            raise
        self.cache.store(cache_key, key, call)

    def _run_or_poison(self, program: Program, call: Call) -> None:
        try:
            run_program(program)
        except BaseException as error:
            self.cache.poison(error, program, call)
            raise

    def start_cached(
        self, name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
    ) -> Request | CallKey:
        """Start a non-blocking call and return its request if it is in the cache; else return its key for `begin`."""
        turn = self.transports.nonblocking_calls % NONBLOCKING
        before, calls = self._latest[turn], self._calls[turn]
        may_start = (before is None or not before.holds_program) and not self._broken
        result = calls.run[name](sendbuf, recvbuf, op, root, algorithm, segments) if may_start else REFUSED
        if result != REFUSED:
            program, result = calls.started(name, result)
        else:
            try:
                arguments, s, r = key_fields(name, sendbuf, recvbuf, op, root, algorithm, segments)
                known = self._compiled[turn].get(arguments)
            except TypeError:  # arguments that are not hashable, or buffers of other kinds
                return UNCACHEABLE
            if known is None or not may_start:
                return CallKey(arguments, s, r, (sendbuf, recvbuf, op, root, algorithm, segments))
            program, result = known, known.start_on(s, r)
            if result == REFUSED:
                return UNCACHEABLE
        if result > REFUSED:
            self._fail(name, program, result)
        self.transports.nonblocking_calls += 1
        if result == DONE:
            return ended_request(name, program, self)
        request = self._latest[turn] = new_request(name, program, self, (sendbuf, recvbuf))
        request.resume(program)
        return request

    def _fail(self, name: str, program: CompiledProgram, result: int) -> None:
        """Raise the error of a non-blocking call that its start has met."""
        program.broken = True
        self._break_off(name, program)
        program.note(result)

    def begin(
        self, call: Call, choice: AlgorithmChoice, gate: Callable[[], bool] | None, cache_key: CallKey = UNCACHEABLE
    ) -> Request:
        """Start a non-blocking call and return its request; no message leaves before `gate`, if given, returns True.

        Calls take the mailbox channels in turn. A call waits for the one before on its channel to end.
        """
        with progress_lock:  # a thread that progresses active requests may change programs at any moment
            self._free_finalized()
            if self._broken:
                raise RanksDisagree(MPI.ERR_OTHER, f"{self._broken}: go on with a new Communicator")
            call, device = self._builder.on_device(call, choice)
            reusable = not needs_counts(call, choice) and (device is not None or not binding.needs_staging(call))
            turn = self.transports.nonblocking_calls % NONBLOCKING
            key = (binding.program_key(call, choice, True, device), turn) if reusable else None
            program = self._programs.get(key)
            if program is None:
                binding.check_no_overlap(call)
                program = self._builder.bind(call, choice, "nonblocking", device, channel=FIRST_NONBLOCKING + turn)
                self._add_program(key, program)
            else:
                self._compile(program, cache_key, turn, call)
            if program.stream is not None:
                program.stream.follow(*(buffer.owner for buffer in call.buffers))
            tag = self.transports.consume_tag()  # after validation only: tags are numbered alike on all ranks
            request = new_request(call.collective, self._in_portions(program, key, turn), self, call)
            request.owns_program, request.device = not reusable, call_device(call)
            if program.wire.node is not None:
                before, self._latest[turn] = self._latest[turn], request
                if before is not None and before.holds_program:
                    gate = _after(before, gate)
            request.tag = tag
            request.begin(gate)
            return request

    def init(self, call: Call, choice: AlgorithmChoice, shared: bool = False) -> Request:
        """Create the persistent request of a call; `shared`: all ranks send from shared memory. Collective."""
        binding.check_no_overlap(call)
        self.transports.consume_persistent_tag()
        call, device = self._builder.on_device(call, choice)
        first = [] if device is None else [partial(device.follow, *(buffer.owner for buffer in call.buffers))]
        channel = None
        if self.node is not None and choice.algorithm != NATIVE:
            self._free_finalized()
            channel = self._channels.take()
        bound = self._builder.bind(call, choice, "persistent", device, first, channel, shared)
        program = (compile_program(bound) or bound) if bound.deferred else bound
        request = Request(call.collective, program, self, call, persistent=True)
        request.channel, request.device = channel, call_device(call)
        request.finalizer = weakref.finalize(request, self._finalized.append, (program, channel))
        request.finalizer.atexit = False
        with progress_lock:
            self._persistent.add(request)
        return request

    def _free_finalized(self) -> None:
        """Free the programs of requests that were garbage-collected without `Free`."""
        while self._finalized:
            self._free_program(*self._finalized.popleft())

    def _free_program(self, program: Program | CompiledProgram, channel: int | None) -> None:
        program.free()
        if program.broken:
            self._orphans.append(program)
        elif channel is not None:
            self._channels.give_back(channel)

    def close(self, free: Callable[[], object]) -> None:
        """Call `free` once no request is active: now, or at the end of the last one."""

        def ended() -> None:
            if not self.active:
                free()

        with progress_lock:
            for request in self._active():
                request.take_back()
                request.on_end = ended
            ended()

    def free(self) -> None:
        """Free programs, idle requests, shared memory and, if no call was aborted, `comm`; wait for no other rank."""
        self.cache.free()
        for program in self._programs.values():
            program.free()
        self._programs.clear()
        for compiled, calls in zip(self._compiled, self._calls):
            compiled.clear()
            calls.clear()
        for exchange in self._count_exchanges.values():
            exchange.program.free()
        with progress_lock:
            idle = [request for request in self._persistent if not request.active]
        for request in idle:
            request.lapse()
        self._free_finalized()
        self._count_exchanges.clear()
        self._persistent.clear()
        self.transports.free()
        # MPI may reuse a freed context id: the next owner would match orphaned messages.
        if not (self._orphans or self.cache.broken):
            self.comm.Free()

    @property
    def active(self) -> int:
        with progress_lock:
            return len(self._active())

    def _active(self) -> list[Operation]:
        return [request for request in (*active_requests, *lone_requests) if request.owner is self]

    # -------------------------------------------------------------------------------- binding and recycling

    def _exchange_counts(self, call: Call, choice: AlgorithmChoice) -> Call:
        """Exchange the block lengths of a blocking call; return it with those of the blocks it handles. Collective."""
        key = call.collective, choice.algorithm, call.root
        exchange = self._count_exchanges.pop(key, None)  # put back after success only: messages may be active
        if exchange is None:
            wire = self._builder.wire(call, choice._replace(segments=1), "blocking", BLOCKING_CHANNEL)
            exchange = bind_count_exchange(call, choice, self.rank, self.size, wire, self.nodes)
        exchange.load(call)
        self._run_or_poison(exchange.program, call)
        self._count_exchanges[key] = exchange
        if len(self._count_exchanges) > MAX_PROGRAMS:
            self._count_exchanges.pop(next(iter(self._count_exchanges))).program.free()
        return exchange.with_counts(call)

    def _add_program(self, key: Hashable, program: Program) -> None:
        """Keep a program of non-blocking calls for those with the same key."""
        if key is not None:
            self._programs[key] = program
            if len(self._programs) > MAX_PROGRAMS:
                self._free_surplus(program)

    def _free_surplus(self, needed: Program | CompiledProgram) -> None:
        """Free the oldest programs of non-blocking calls beyond `MAX_PROGRAMS`, but not `needed` and those active."""
        surplus = max(0, len(self._programs) - MAX_PROGRAMS)
        running = [needed, *(request.program for request in self._active())]
        busy = {id(one.program if isinstance(one, CompiledProgram) else one) for one in running}
        for old in list(islice((old for old, program in self._programs.items() if id(program) not in busy), surplus)):
            freed = self._programs.pop(old)
            for turn, compiled in enumerate(self._compiled):
                self._compiled[turn] = {known: one for known, one in compiled.items() if one.program is not freed}
                self._calls[turn].discard(freed)
            freed.free()

    def _in_portions(self, program: Program, key: Hashable, turn: int) -> Program | CompiledProgram:
        """The compiled form of a `deferred` program with this key, which the progress thread runs; else `program`."""
        if not program.deferred or key is None:
            return program
        compiled = self._compiled[turn].get(key) or compile_program(program)
        if compiled is not None:
            self._compiled[turn][key] = compiled
        return compiled or program

    def _compile(self, program: Program, key: CallKey, turn: int, call: Call) -> None:
        """Compile a repeated non-blocking call if calls are frequent, for `start_cached`."""
        self.cache.count_repeat()
        if key is not UNCACHEABLE and len(self._compiled[turn]) < MAX_PROGRAMS and key.is_lasting:
            compiled = self.cache.compile(program, key, call)
            if compiled is not None:
                self._compiled[turn][key.arguments] = compiled
                self._calls[turn].add(key.arguments[0], compiled, key.given, compiled.start_spins)

    def release(self, request: Request) -> None:
        """Take back the program of a non-blocking request that has ended, or a persistent one that is freed."""
        program, request.holds_program = request.program, False
        if request.persistent:
            with progress_lock:
                self._persistent.discard(request)
            self._free_program(program, request.channel)
        elif program.broken:
            self._break_off(request.name, request)
        elif request.owns_program:
            program.free()
        elif len(self._programs) > MAX_PROGRAMS:
            self._free_surplus(program)

    def _break_off(self, name: str, kept: object) -> None:
        """Refuse later non-blocking calls; `kept` holds the memory of an aborted one."""
        self._orphans.append(kept)
        self._broken = f"a non-blocking {name.lower()} was broken off on rank {self.rank}"


def _after(before: Request, gate: Callable[[], bool] | None) -> Callable[[], bool]:
    """Gate that opens once a request has given back its program, and `gate`, if any, is open."""
    return lambda: not before.holds_program and (gate is None or gate())
