"""Planner: chooses the algorithm of a call, binds it to a program and runs it, for calls of all forms."""

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from mpi4py import MPI

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.instructions import DONE, HELD, QUEUED, REFUSED, STARTED
from collectives.errors import Mismatch, OutOfMemory
from collectives.runtime.arguments.argument_keys import UNCACHEABLE, CallKey, held, key_fields
from collectives.runtime.arguments.call import Call, call_device
from collectives.runtime.binding.any_counts import fits, key_of_counts, placement_of
from collectives.runtime.binding.any_length import ALL_CLASSES, class_number, key_of
from collectives.runtime.binding.call_binding import check_no_overlap, is_bound_anew, memories, program_key
from collectives.runtime.binding.count_exchange import CountExchange, bind_count_exchange, needs_counts
from collectives.runtime.builders.communicator_transports import BLOCKING_CHANNEL, FIRST_NONBLOCKING, Transports
from collectives.runtime.builders.program_builder import ProgramBuilder
from collectives.runtime.execution.operation import Operation
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.progress import (
    active_requests,
    lone_requests,
    progress_lock,
    progress_until,
    run_program,
)
from collectives.runtime.gpu.gpu_program_builder import GpuProgramBuilder
from collectives.runtime.planning.agreement import (
    ChannelAllocator,
    MemoryVisibility,
    agree_on_memory,
    common,
    gather_or_raise,
)
from collectives.runtime.planning.algorithm_chooser import AlgorithmChooser
from collectives.runtime.planning.desync_check import DesyncChecker, others
from collectives.runtime.planning.program_cache import MAX_PROGRAMS, ProgramCache
from collectives.runtime.requests.channel_queue import ChannelQueue
from collectives.runtime.requests.native_requests import ended_request, new_request
from collectives.runtime.requests.request import Request
from collectives.selection.timing_table import NATIVE, AlgorithmChoice, Form
from collectives.transport.node.mailbox_layout import NONBLOCKING

MOST_PACKED = 1 << 18
"""Bytes of the longest packed copy that a non-blocking call's program keeps: each of `MAX_PROGRAMS` has its own."""


class Planner:
    """Runs the collective calls of one communicator over `transports`, which it owns, and their private communicator.

    That is used for nothing else, so that its messages never match the user's. `cache` holds the programs of blocking
    calls, `nonblocking` those of non-blocking ones. In debug mode `checker` compares the calls of all ranks. With
    `async_progress`, programs of long messages within the node are begun and advanced by the progress thread. `timeout`
    is the time limit of requests in seconds, if any.
    """

    def __init__(
        self,
        transports: Transports,
        chooser: AlgorithmChooser,
        checker: DesyncChecker | None = None,
        async_progress: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.timeout = timeout
        self.transports, self.chooser, self._checker = transports, chooser, checker
        self.comm, self.node, self.nodes = transports.comm, transports.node, transports.nodes
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        builder = ProgramBuilder if transports.sharing.gpu is None else GpuProgramBuilder
        self._builder = builder(transports, async_progress)
        self.cache = ProgramCache(self.rank)
        self._is_broken = False  # a persistent request was aborted
        self.nonblocking = ProgramCache(self.rank, transports.nonblocking)
        self._turns = transports.nonblocking.data  # the same memory, which Python reads faster
        self._channel_queues = [
            ChannelQueue(turn, self._turns, self.nonblocking.check_in_step) for turn in range(NONBLOCKING)
        ]
        self._count_exchanges: dict[Hashable, CountExchange] = {}
        self._persistent: weakref.WeakSet[Request] = weakref.WeakSet()
        self._finalized: deque[tuple[Program, int | None]] = deque()  # finalizers append at any time
        self._channels = ChannelAllocator(self.comm)

    def visibility(self, call: Call) -> MemoryVisibility:
        """Raise if this rank's buffers overlap. Else return the call's memory properties on all ranks. Collective."""
        check_no_overlap(call)
        return agree_on_memory(self.comm, self.node, call)

    # -------------------------------------------------------------------------------- the three forms

    def _compare(self, form: str, call: Call, choice: AlgorithmChoice) -> None:
        """Wait, in debug mode, until all ranks have made this call. Raise if they differ."""
        if self._checker is not None:
            agreed = self._checker.check(form, call, choice)
            self.transports.consume_tag()
            progress_until(agreed, others(call.collective))
            self._checker.start_native()

    def run(self, call: Call, algorithm: Any, segments: Any, cache_key: CallKey = UNCACHEABLE) -> None:
        """Run a blocking call and cache its program, unless data is staged. Later calls can find it by `cache_key`."""
        self.cache.check_in_step()
        choice = self.chooser.choose(call, algorithm, segments, "blocking")
        self._compare("blocking", call, choice)
        check_no_overlap(call)
        if needs_counts(call, choice):
            call, cache_key = self._exchange_counts(call, choice), UNCACHEABLE  # others' counts may change
        call, device = self._builder.on_device(call, choice, any_algorithm=algorithm == "auto")
        if device is None and is_bound_anew(call, choice):
            program = self._builder.bind(call, choice, "blocking")
            with self.cache.poisoning(call, program):
                run_program(program)
            program.free()
            return
        key, bound, classes = self._find(self.cache, call, choice, "blocking", algorithm, cache_key, device)
        if bound is None:
            bound = self._builder.bind(call, choice, "blocking", device)
            self.cache.add(key, bound)
        if bound.stream is not None:
            bound.stream.follow(*(buffer.owner for buffer in call.buffers))
        elif bound.relocatable:
            bound.place(*placement_of(bound, call))
        with self.cache.poisoning(call, bound):
            run_program(bound)
        self.cache.store(cache_key, key, call, classes=classes)

    def _find(
        self,
        cache: ProgramCache,
        call: Call,
        choice: AlgorithmChoice,
        form: Form,
        algorithm: Any,
        cache_key: CallKey,
        device: DeviceMemory | None,
        channel: int = BLOCKING_CHANNEL,
    ) -> tuple[tuple[Any, ...], Program | None, int]:
        """Key of a call's program, the program, and the size classes of calls that may use it, a set of bits.

        Binds a program for any length or counts.
        """
        fixed = device is not None or choice.algorithm == NATIVE
        varies = call.v_form or cache_key.suits_any_length(call.lengths[0])
        for short in (True, False) if not fixed and varies else ():
            found = key_of_counts(call, choice) if call.v_form else key_of(call, choice)
            if found is None or (key := (found, short, channel)) in cache.fixed:
                continue
            bound = cache.bound.get(key) or self._builder.bind_any_length(call, choice, form, channel, short)
            if bound is None or bound.scale is None:
                cache.fixed.add(key)
                continue
            if key not in cache.bound:
                cache.add(key, bound, self._active())
            # "auto" may choose another algorithm for another size class
            if fits(bound.scale, call):
                by_size = algorithm == "auto" and not call.local_counts
                return key, bound, 1 << class_number(call.nbytes) if by_size else ALL_CLASSES
        own = program_key(call, choice, fixed, device, cache_key.offsets(memories(call))), channel
        return own, cache.bound.get(own), 0

    def start_cached(self, found: int, name: str, sendbuf: Any, recvbuf: Any, *others: Any) -> Request | CallKey:
        """Start a non-blocking call and return its request if it is in the cache. Else return its key for `begin`.

        `found` is the result of ``nonblocking.compiled_calls.run[name]`` for this call.
        """
        if found != REFUSED:
            program, turn, result = self.nonblocking.compiled_calls.started(name, found)
            if result == DONE:
                return ended_request()
            return self._request(name, program, turn, result, sendbuf, recvbuf)
        with self.nonblocking.beginning():
            return self._start_found(name, sendbuf, recvbuf, *others)

    def _start_found(self, name: str, sendbuf: Any, recvbuf: Any, *others: Any) -> Request | CallKey:
        turn = self._turn
        cached = self.nonblocking.find(turn, name, sendbuf, recvbuf, *others)
        if isinstance(cached, CallKey):
            return cached
        call, s, r = cached
        program, is_held = call.program, self._turns[HELD + turn] > 0
        if is_held and not program.engine.accepts(s, r):
            return UNCACHEABLE
        self._turns[STARTED] += 1
        with progress_lock:
            result = QUEUED if is_held else self.nonblocking.run(name, *cached)
        if result == REFUSED:
            self._turns[STARTED] -= 1
            return UNCACHEABLE
        return ended_request() if result == DONE else self._request(name, program, turn, result, sendbuf, recvbuf)

    def _request(self, name: str, program: Program, turn: int, result: int, sendbuf: Any, recvbuf: Any) -> Request:
        """Create the request of a call that has started, or waits for its channel."""
        try:
            sent, received = held(sendbuf), held(recvbuf)
            with progress_lock, self.nonblocking.beginning():  # no other call may take the channel meanwhile
                arrays = key_fields(name, sent, received, MPI.SUM, 0, "", None)[1:] if result == QUEUED else ()
                if result == QUEUED and self._channel_queues[turn].catch_up():
                    result = program.start_on(*arrays)
                if result == DONE:
                    return ended_request()
                request = new_request(name, program, self, (sent, received))
                if result == QUEUED:
                    self._channel_queues[turn].add(request, partial(request.start_on, *arrays))
                else:
                    self._channel_queues[turn].hold(request)
                    request.resume(program)
        except BaseException as error:
            self.nonblocking.poison(name, error, program, sendbuf, recvbuf)
            raise
        return request

    @property
    def _turn(self) -> int:
        """Channel of the next non-blocking call, among those for such calls."""
        return self._turns[STARTED] % NONBLOCKING

    def begin(self, call: Call, algorithm: Any, segments: Any, cache_key: CallKey = UNCACHEABLE) -> Request:
        """Start a non-blocking call and return its request.

        Calls take the mailbox channels in turn, and wait in the queue of their channel. In debug mode a call also waits
        until all ranks have made it, before its first message leaves.
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
            anew = device is None and is_bound_anew(call, choice, MOST_PACKED)
            reusable = not (anew or needs_counts(call, choice))
            key: tuple[Any, ...] = ()
            program, classes, channel = None, 0, FIRST_NONBLOCKING + turn
            if reusable:
                key, program, classes = self._find(
                    self.nonblocking, call, choice, "nonblocking", algorithm, cache_key, device, channel
                )
            if self.nonblocking.is_busy(key, self._active):
                program, reusable = None, False
            check_no_overlap(call)
            if program is None:
                program = self._builder.bind(call, choice, "nonblocking", device, channel=channel)
                if reusable:
                    self.nonblocking.add(key, program, self._active())
            if reusable:
                self.nonblocking.store(cache_key, key, call, turn, classes)
            if program.stream is not None:
                program.stream.follow(*(buffer.owner for buffer in call.buffers))
            request = new_request(call.collective, program, self, call)
            request.owns_program, request.device = not reusable, call_device(call)
            if reusable and program.relocatable:
                request.placement = placement_of(program, call)
            try:
                if self._checker is not None and choice.algorithm == NATIVE:
                    gate = self._checker.in_order(request, gate)
                request.tag = self.transports.consume_tag()  # after validation: tags are numbered alike on all ranks
                if not program.wire.in_mailboxes:
                    request.begin(gate)
                else:
                    self._channel_queues[turn].add(request, partial(request.begin, gate))
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
            if channel is not None and not self.transports.reserve(channel):
                self._channels.give_back(channel)
                channel = None
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
        request = Request(call.collective, bound, self, call, persistent=True)
        request.channel, request.device = channel, call_device(call)
        request.finalizer = weakref.finalize(request, self._finalized.append, (bound, channel))
        request.finalizer.atexit = False
        with progress_lock:
            self._persistent.add(request)
        return request

    def _free_finalized(self) -> None:
        """Free the programs of requests that were garbage-collected without `Free`."""
        while self._finalized:
            self._free_program(*self._finalized.popleft())

    def _free_program(self, program: Program, channel: int | None) -> None:
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
        """Free programs, idle requests, shared memory and, if no call was aborted, `comm`. Wait for no other rank.

        Returns the error of a message that a call has left unread.
        """
        is_broken = bool(self._is_broken or self.cache.broken or self.nonblocking.broken)
        unread = None if is_broken else self.transports.leave()
        self.cache.free()
        self.nonblocking.free()
        while self._count_exchanges:
            self._count_exchanges.popitem()[1].program.free()
        self._lapse_idle()
        self._free_finalized()
        self._persistent.clear()
        self.transports.free(is_broken)
        # MPI may reuse a freed context id: the next owner would match orphaned messages.
        if not (unread or self._is_broken or self.cache.broken or self.nonblocking.broken):
            self.comm.Free()
        return unread

    @property
    def active(self) -> int:
        with progress_lock:
            return len(self._active())

    def _active(self) -> list[Operation]:
        queued = (request for queue in self._channel_queues for request, _ in queue.waiting)
        return [*(request for request in (*active_requests, *lone_requests) if request.owner is self), *queued]

    # -------------------------------------------------------------------------------- binding and recycling

    def _exchange_counts(self, call: Call, choice: AlgorithmChoice) -> Call:
        """Exchange the block lengths of a blocking call. Return it with those of the blocks it handles. Collective."""
        key = call.collective, choice.algorithm, call.root
        exchange = self._count_exchanges.pop(key, None)  # put back after success only: messages may be active
        if exchange is None:
            wire = self._builder.wire(call, choice._replace(segments=1), "blocking", BLOCKING_CHANNEL)
            exchange = bind_count_exchange(call, choice, self.rank, self.size, wire, self.nodes)
            lengths = choice._replace(algorithm="block lengths")
            self._builder.described(exchange.program, call, lengths, "blocking", BLOCKING_CHANNEL)
        exchange.load(call)
        with self.cache.poisoning(call, exchange.program):
            run_program(exchange.program)
        self._count_exchanges[key] = exchange
        if len(self._count_exchanges) > MAX_PROGRAMS:
            self._count_exchanges.pop(next(iter(self._count_exchanges))).program.free()
        return exchange.with_counts(call)

    def catch_up(self, request: Request) -> None:
        """Advance the requests that a non-blocking request is queued behind."""
        if request.channel is not None:
            with progress_lock:
                self._channel_queues[request.channel].catch_up()

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
                self._channel_queues[request.channel].release(request)
        if program.broken:
            self.nonblocking.poison(request.name, request.error, program)
        elif request.owns_program:
            program.free()
        elif self.nonblocking.has_surplus and not self.nonblocking.begins:
            with progress_lock:
                self.nonblocking.free_surplus(self._active(), program)
