"""Planner: chooses the algorithm of a call, binds it to a program and runs it, for calls of all forms.

Small blocking calls are copied through eager buffers; larger ones are bound to the user's memory without extra copies.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from mpi4py import MPI

from collectives.engine.instructions import DONE, HELD, REFUSED, STARTED
from collectives.errors import Mismatch, OutOfMemory
from collectives.runtime import binding
from collectives.runtime.agreement import ChannelAllocator, MemoryVisibility, agree_on_memory, common, gather_or_raise
from collectives.runtime.algorithm_chooser import AlgorithmChooser
from collectives.runtime.argument_keys import UNCACHEABLE, CallKey
from collectives.runtime.binding import EagerBuffers
from collectives.runtime.call import Call, call_device
from collectives.runtime.communicator_transports import BLOCKING_CHANNEL, FIRST_NONBLOCKING, Transports
from collectives.runtime.compiled_program import CompiledProgram, compile_program
from collectives.runtime.count_exchange import CountExchange, bind_count_exchange, needs_counts
from collectives.runtime.desync_check import DesyncChecker
from collectives.runtime.gpu_program_builder import GpuProgramBuilder
from collectives.runtime.native_requests import ended_request, new_request
from collectives.runtime.operation import Operation
from collectives.runtime.program import Program
from collectives.runtime.program_builder import ProgramBuilder
from collectives.runtime.program_cache import MAX_PROGRAMS, ProgramCache
from collectives.runtime.progress import (
    active_requests,
    lone_requests,
    progress_lock,
    progress_until,
    run_program,
)
from collectives.runtime.requests import Request, after
from collectives.selection.timing_table import NATIVE, AlgorithmChoice
from collectives.transport.mailbox import NONBLOCKING


class Planner:
    """Runs the collective calls of one communicator over `transports`, which it owns, and their private communicator.

    That is used for nothing else, so that its messages never match the user's. `cache` holds the programs of blocking
    calls, `nonblocking` those of non-blocking ones. In debug mode `checker` compares the calls of all ranks. With
    `async_progress`, programs of long messages within the node are begun and advanced by the progress thread; they are
    compiled at once, where that is possible.
    """

    def __init__(
        self,
        transports: Transports,
        chooser: AlgorithmChooser,
        checker: DesyncChecker | None = None,
        async_progress: bool = False,
    ) -> None:
        self.transports, self.chooser, self._checker = transports, chooser, checker
        self.comm, self.node, self.nodes = transports.comm, transports.node, transports.nodes
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        builder = ProgramBuilder if transports.sharing.gpu is None else GpuProgramBuilder
        self._builder = builder(transports, async_progress)
        self.cache = ProgramCache(self.rank)
        self._is_broken = False  # a persistent request was aborted
        self.nonblocking = ProgramCache(self.rank, transports.nonblocking)
        self._turns = transports.nonblocking.data  # the same memory, which Python reads faster
        self._latest: list[Request | None] = [None] * NONBLOCKING  # the last non-blocking call on each channel
        self._count_exchanges: dict[Hashable, CountExchange] = {}
        self._persistent: weakref.WeakSet[Request] = weakref.WeakSet()
        self._finalized: deque[tuple[Program | CompiledProgram, int | None]] = deque()  # finalizers append at any time
        self._channels = ChannelAllocator(self.comm)

    def visibility(self, call: Call) -> MemoryVisibility:
        """Raise if this rank's buffers overlap; else return the call's memory properties on all ranks. Collective."""
        binding.check_no_overlap(call)
        return agree_on_memory(self.comm, self.node, call)

    # -------------------------------------------------------------------------------- the three forms

    def _compare(self, form: str, call: Call, choice: AlgorithmChoice) -> None:
        """Wait, in debug mode, until all ranks have made this call; raise if they differ."""
        if self._checker is not None:
            agreed = self._checker.check(form, call, choice)
            self.transports.consume_tag()
            progress_until(agreed)
            self._checker.start_native()

    def run(self, call: Call, algorithm: Any, segments: Any, cache_key: CallKey = UNCACHEABLE) -> None:
        """Run a blocking call and cache its program, unless data is staged; later calls can find it by `cache_key`."""
        self.cache.check_in_step()
        choice = self.chooser.choose(call, algorithm, segments, "blocking")
        self._compare("blocking", call, choice)
        binding.check_no_overlap(call)
        if needs_counts(call, choice):
            call, cache_key = self._exchange_counts(call, choice), UNCACHEABLE
        call, device = self._builder.on_device(call, choice, any_algorithm=algorithm == "auto")
        if device is None and binding.needs_staging(call):  # anew in every call
            program = self._builder.bind(call, choice, "blocking")
            with self.cache.poisoning(call, program):
                run_program(program)
            program.free()
            return
        small = device is None and binding.fits_eager_buffers(call)
        key = binding.program_key(call, choice, not small, device)
        build, entry = self._builder, self.cache.bound.get(key)
        if entry is None:
            entry = build.bind_eager(call, choice) if small else build.bind(call, choice, "blocking", device)
            self.cache.add(key, entry)
        if isinstance(entry, Program) and entry.stream is not None:
            entry.stream.follow(*(buffer.owner for buffer in call.buffers))
        run = entry.on_call(call) if isinstance(entry, EagerBuffers) else partial(run_program, entry.program)
        with self.cache.poisoning(call, entry.program):
            run()
        self.cache.store(cache_key, key, call)

    def start_cached(self, found: int, name: str, sendbuf: Any, recvbuf: Any, *others: Any) -> Request | CallKey:
        """Start a non-blocking call and return its request if it is in the cache; else return its key for `begin`.

        `found` is the result of ``nonblocking.compiled_calls.run[name]`` for this call.
        """
        if found != REFUSED:
            program, turn, result = self.nonblocking.compiled_calls.started(name, found)
            return ended_request() if result == DONE else self._request(name, program, turn, sendbuf, recvbuf)
        with self.nonblocking.beginning():
            return self._start_found(name, sendbuf, recvbuf, *others)

    def _start_found(self, name: str, sendbuf: Any, recvbuf: Any, *others: Any) -> Request | CallKey:
        turn = self._turn
        if self._turns[HELD + turn]:
            return UNCACHEABLE
        cached = self.nonblocking.find(turn, name, sendbuf, recvbuf, *others)
        if isinstance(cached, CallKey):
            return cached
        self._turns[STARTED] += 1
        with progress_lock:
            program, result = cached[0].program, self.nonblocking.run(name, *cached)
        if result == REFUSED:
            self._turns[STARTED] -= 1
            return UNCACHEABLE
        return ended_request() if result == DONE else self._request(name, program, turn, sendbuf, recvbuf)

    def _request(self, name: str, program: Program | CompiledProgram, turn: int, sendbuf: Any, recvbuf: Any) -> Request:
        """Create the request of a call that has started."""
        try:  # in a list, the user may replace the array
            sent = sendbuf[0] if type(sendbuf) is list else sendbuf
            received = recvbuf[0] if type(recvbuf) is list else recvbuf
            with progress_lock, self.nonblocking.beginning():  # `after` must not take it for one that has ended
                request = new_request(name, program, self, (sent, received))
                self._hold_channel(request, turn)
                request.resume(program)
        except BaseException as error:
            self.nonblocking.poison(name, error, program, sendbuf, recvbuf)
            raise
        return request

    @property
    def _turn(self) -> int:
        """Channel of the next non-blocking call, among those for such calls."""
        return self._turns[STARTED] % NONBLOCKING

    def _hold_channel(self, request: Request, turn: int) -> None:
        """Let no other call start on a channel until `release` of this request."""
        request.channel, self._latest[turn] = turn, request
        self._turns[HELD + turn] += 1

    def begin(self, call: Call, algorithm: Any, segments: Any, cache_key: CallKey = UNCACHEABLE) -> Request:
        """Start a non-blocking call and return its request.

        Calls take the mailbox channels in turn. A call waits for the one before on its channel to end, and in debug
        mode until all ranks have made it, before its first message leaves.
        """
        choice = self.chooser.choose(call, algorithm, segments, "nonblocking")
        with (
            progress_lock,
            self.nonblocking.beginning(),
        ):  # a thread that progresses active requests may change programs
            self._free_finalized()
            self.nonblocking.check_in_step()  # before the other ranks are told of this call
            gate = None if self._checker is None else self._checker.check("non-blocking", call, choice)
            turn = self._turn
            call, device = self._builder.on_device(call, choice, FIRST_NONBLOCKING + turn, algorithm == "auto")
            reusable = not needs_counts(call, choice) and (device is not None or not binding.needs_staging(call))
            key = (binding.program_key(call, choice, True, device), turn) if reusable else None
            if self.nonblocking.is_busy(key, self._active):
                key, reusable = None, False
            program = self.nonblocking.bound.get(key)
            if program is None:
                binding.check_no_overlap(call)
                program = self._builder.bind(call, choice, "nonblocking", device, channel=FIRST_NONBLOCKING + turn)
                if reusable:
                    program = (compile_program(program) or program) if program.deferred else program
                    self.nonblocking.add(key, program, self._active())
            if reusable:
                self.nonblocking.store(cache_key, key, call, turn)
            bound = program.program
            if bound.stream is not None:
                bound.stream.follow(*(buffer.owner for buffer in call.buffers))
            request = new_request(call.collective, program, self, call)
            request.owns_program, request.device = not reusable, call_device(call)
            try:
                if bound.wire.in_mailboxes:
                    before = self._latest[turn]
                    self._hold_channel(request, turn)
                    if before is not None and before.holds_program:
                        gate = after(before, gate)
                if self._checker is not None and choice.algorithm == NATIVE:
                    gate = self._checker.in_order(request, gate)
                request.tag = self.transports.consume_tag()  # after validation: tags are numbered alike on all ranks
                request.begin(gate)
            except BaseException as error:
                if request.holds_program and not request.active:  # not even begun
                    self.nonblocking.poison(call.collective, error, request.program, call)
                raise
            return request

    def init(self, call: Call, algorithm: Any, segments: Any) -> Request:
        """Create the persistent request of a call. Collective."""
        choice = self.chooser.choose(call, algorithm, segments, "persistent")
        self._compare("persistent", call, choice)
        memory = self.visibility(call)
        if memory.shared:
            choice = self.chooser.choose(call, algorithm, segments, "persistent", memory)
        self.transports.consume_persistent_tag()
        channel = None
        if self.node is not None and choice.algorithm != NATIVE:
            self._free_finalized()
            channel = self._channels.take()
        call, device = self._builder.on_device(call, choice, channel, algorithm == "auto")
        first = [] if device is None else [partial(device.follow, *(buffer.owner for buffer in call.buffers))]
        bound: Program | OutOfMemory
        try:
            bound = self._builder.bind(call, choice, "persistent", device, first, channel, memory.shared)
        except MPI.Exception:  # of arguments
            raise
        except (MemoryError, RuntimeError) as refused:  # CUDA's errors are of the second class
            bound = OutOfMemory(MPI.ERR_NO_MEM, f"{call.collective}: no memory for the request ({refused})")
        if not common(self.comm, int(isinstance(bound, Program))):
            if channel is not None:
                self._channels.give_back(channel)
            gather_or_raise(self.comm, None if isinstance(bound, Program) else bound)
        assert isinstance(bound, Program), "no rank lacks memory"
        program = compile_program(bound) or bound
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
        if program.broken:  # its messages may still be active
            self._is_broken = True
            return
        program.free()
        if channel is not None:
            self._channels.give_back(channel)

    def close(self, free: Callable[[], object]) -> None:
        """Call `free` once no request is active: now, or at the end of the last one."""

        def ended() -> None:
            if not self.active:
                free()

        with progress_lock:
            self._lapse_idle()
            for request in self._active():
                request.take_back()
                request.on_end = ended
            ended()

    def _lapse_idle(self) -> None:
        for request in [request for request in self._persistent if not request.active]:
            request.lapse()

    def free(self) -> Mismatch | None:
        """Free programs, idle requests, shared memory and, if no call was aborted, `comm`; wait for no other rank.

        Returns the error of a message that a call has left unread.
        """
        is_broken = self._is_broken or self.cache.broken or self.nonblocking.broken
        unread = None if is_broken else self.transports.leave()
        self.cache.free()
        self.nonblocking.free()
        while self._count_exchanges:
            self._count_exchanges.popitem()[1].program.free()
        self._lapse_idle()
        self._free_finalized()
        self._persistent.clear()
        self.transports.free()
        # MPI may reuse a freed context id: the next owner would match orphaned messages.
        if not (unread or self._is_broken or self.cache.broken or self.nonblocking.broken):
            self.comm.Free()
        return unread

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
        with self.cache.poisoning(call, exchange.program):
            run_program(exchange.program)
        self._count_exchanges[key] = exchange
        if len(self._count_exchanges) > MAX_PROGRAMS:
            self._count_exchanges.pop(next(iter(self._count_exchanges))).program.free()
        return exchange.with_counts(call)

    def release(self, request: Request) -> None:
        """Take back the program of a non-blocking request that has ended, or a persistent one that is freed."""
        program, request.holds_program = request.program, False
        if request.persistent:
            with progress_lock:
                self._persistent.discard(request)
            self._free_program(program, request.channel)
            return
        if request.channel is not None:
            with progress_lock:
                self._turns[HELD + request.channel] -= 1
        if program.broken:
            self.nonblocking.poison(request.name, request.error, program)
        elif request.owns_program:
            program.free()
        elif self.nonblocking.has_surplus and not self.nonblocking.begins:
            with progress_lock:
                self.nonblocking.free_surplus(self._active(), program)
