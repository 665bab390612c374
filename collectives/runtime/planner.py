"""Planner: binds collective calls to programs and runs them, for blocking, non-blocking and persistent calls.

Small blocking calls are copied through eager buffers; larger ones are bound to the user's memory without extra copies.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.algorithms.catalog import build
from collectives.buffers.staging import DeviceMemory
from collectives.runtime import binding, native
from collectives.runtime.agreement import ChannelAllocator, MemoryVisibility, agree_on_memory
from collectives.runtime.binder import bind
from collectives.runtime.binding import EagerBuffers
from collectives.runtime.call import Call
from collectives.runtime.communicator_transports import BLOCKING_CHANNEL, Transports
from collectives.runtime.count_exchange import CountExchange, bind_after_exchange, bind_count_exchange, needs_counts
from collectives.runtime.native_requests import new_request
from collectives.runtime.program import ElementArray, Program
from collectives.runtime.program_cache import MAX_PROGRAMS, UNCACHEABLE, CallKey, ProgramCache
from collectives.runtime.progress import progress_lock, run_program
from collectives.runtime.requests import Request
from collectives.runtime.single_exchange import as_single_exchange, compile_exchange, single_messages
from collectives.selection.timing_table import NATIVE, AlgorithmChoice, Form
from collectives.transport.fused_exchange import CompiledExchange
from collectives.transport.mpi_transport import ImmediateTransport
from collectives.transport.wire import Wire


class IdlePrograms:
    """Pool of the programs of completed non-blocking calls, for reuse by calls with the same key; limited in number."""

    def __init__(self) -> None:
        self._count = 0
        self._by_key: dict[Hashable, list[Program]] = {}

    def __len__(self) -> int:
        return self._count

    def take(self, key: Hashable) -> Program | None:
        programs = self._by_key.get(key)
        if programs is None:
            return None
        program = programs.pop()
        self._count -= 1
        if not programs:
            del self._by_key[key]
        return program

    def add(self, key: Hashable, program: Program) -> None:
        self._by_key.setdefault(key, []).append(program)
        self._count += 1
        self.free(MAX_PROGRAMS)

    def free(self, left: int = 0) -> None:
        """Free programs, those of the oldest keys first, until at most `left` remain."""
        while self._count > left and (program := self.take(next(iter(self._by_key)))):
            program.free()


class Planner:
    """Runs the collective calls of one communicator over `comm`, a private duplicate of it that the planner owns.

    The duplicate is used for nothing else, so that its messages never match the user's. `transports` is created from
    the other arguments; `cache` holds the programs of blocking calls.
    """

    def __init__(self, comm: MPI.Intracomm, aware: bool | None, shared: bool, nodes: Sequence[int] | None) -> None:
        self.comm = comm
        self.transports = Transports(comm, aware, shared, nodes)
        self.node, self.nodes = self.transports.node, self.transports.nodes
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.cache = ProgramCache(self.rank)
        self._orphans: list[object] = []  # aborted requests: keep alive the memory that late messages are written to
        self._idle = IdlePrograms()
        self._count_exchanges: dict[Hashable, CountExchange] = {}
        self._live: weakref.WeakSet[Request] = weakref.WeakSet()  # `progress.active_requests` holds the active ones
        self._finalized: deque[tuple[Program, int | None]] = deque()  # appended by finalizers at any moment
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
        sendbuf: Any = None,
        recvbuf: Any = None,
        op: MPI.Op = MPI.SUM,
    ) -> None:
        """Run a blocking call and cache its program, unless data is staged; later calls can find it by `cache_key`."""
        self.cache.check_in_step()
        binding.check_no_overlap(call)
        if needs_counts(call, choice):
            call, cache_key = self._exchange_counts(call, choice), UNCACHEABLE
        call, device = self._on_device(call, choice)
        if device is None and binding.needs_staging(call):  # anew in every call
            program = self._bind(call, choice, "blocking")
            self._run_or_poison(program)
            program.free()
            return
        small = device is None and self._is_eager(call, choice)
        key = binding.program_key(call, choice, not small, device)
        entry = self.cache.bound.get(key)
        if entry is None:
            entry = self._bind_eager(call, choice) if small else self._bind(call, choice, "blocking", device)
            self.cache.add(key, entry)
        if isinstance(entry, Program) and entry.stream is not None:
            entry.stream.follow(*(buffer.owner for buffer in call.buffers))
        try:
            if isinstance(entry, EagerBuffers):
                entry.run(call)
            else:
                run_program(entry)
        except BaseException as error:
            self.cache.evict(key)  # its messages may still be active: never start them again
            self.cache.poison(error)
            raise
        self.cache.store(cache_key, sendbuf, recvbuf, op, key, partial(self._compile_call, call, choice))

    def _compile_call(
        self, call: Call, choice: AlgorithmChoice, s: np.ndarray, r: np.ndarray, program: Program
    ) -> CompiledExchange | None:
        """Compile a call to one function if it is a supported exchange with one peer alone; None for all others."""
        if choice.algorithm == NATIVE:
            return None
        exchange = as_single_exchange(binding.call_task(call, choice, self.rank, self.size, self.nodes))
        if exchange is None:
            return None
        edge = self.transports.edges[BLOCKING_CHANNEL].get(exchange.peer)
        return compile_exchange(exchange, call, s, r, program, edge)

    def _run_or_poison(self, program: Program) -> None:
        try:
            run_program(program)
        except BaseException as error:
            self.cache.poison(error)
            raise

    def _on_device(self, call: Call, choice: AlgorithmChoice) -> tuple[Call, DeviceMemory | None]:
        """(call to bind, its device); the device is None if the data is on the host or must be staged there."""
        aware = self.transports.aware and choice.algorithm != NATIVE
        return (binding.as_device_call(call) if aware else None) or (call, None)

    def begin(self, call: Call, choice: AlgorithmChoice, gate: Callable[[], bool] | None) -> Request:
        """Start a non-blocking call and return its request; no message leaves before `gate`, if given, returns True."""
        with progress_lock:  # a thread that progresses active requests may recycle programs at any moment
            self._free_finalized()
            call, device = self._on_device(call, choice)
            reusable = not needs_counts(call, choice) and (device is not None or not binding.needs_staging(call))
            key = binding.program_key(call, choice, True, device) if reusable else None
            program = None if key is None else self._idle.take(key)
            if program is None:
                binding.check_no_overlap(call)
                program = self._bind(call, choice, "nonblocking", device)
            if program.stream is not None:
                program.stream.follow(*(buffer.owner for buffer in call.buffers))
            tag = self.transports.consume_tag()  # after validation only: tags are numbered alike on all ranks
            if isinstance(program.wire, ImmediateTransport):
                program.wire.tag = tag
            request = new_request(call.collective, program, partial(self._recycle, key), call)
            self._live.add(request)
            request.begin(gate)
            return request

    def init(self, call: Call, choice: AlgorithmChoice, shared: bool = False) -> Request:
        """Create the persistent request of a call; `shared`: all ranks send from shared memory. Collective."""
        binding.check_no_overlap(call)
        self.transports.consume_persistent_tag()
        call, device = self._on_device(call, choice)
        first = [] if device is None else [partial(device.follow, *(buffer.owner for buffer in call.buffers))]
        channel = None
        if self.node is not None and choice.algorithm != NATIVE:
            self._free_finalized()
            channel = self._channels.take()
        program = self._bind(call, choice, "persistent", device, first, channel, shared)
        request = Request(call.collective, program, partial(self._release, channel), call, persistent=True)
        request.finalizer = weakref.finalize(request, self._finalized.append, (program, channel))
        request.finalizer.atexit = False
        with progress_lock:
            self._live.add(request)
        return request

    def _free_finalized(self) -> None:
        """Free the programs of requests that were garbage-collected without `Free`."""
        while self._finalized:
            self._free_program(*self._finalized.popleft())

    def _free_program(self, program: Program, channel: int | None) -> None:
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
            for request in [request for request in self._live if request.active]:
                request.on_end = ended
            ended()

    def free(self) -> None:
        """Free programs, idle requests, shared memory and, if no call was aborted, `comm`; wait for no other rank."""
        self.cache.free()
        self._idle.free()
        for exchange in self._count_exchanges.values():
            exchange.program.free()
        with progress_lock:
            idle = [request for request in self._live if not request.active]
        for request in idle:
            request.lapse()
        self._free_finalized()
        self._count_exchanges.clear()
        self._live.clear()
        self.transports.free()
        # MPI may reuse a freed context id: the next owner would match orphaned messages.
        if not (self._orphans or self.cache.broken):
            self.comm.Free()

    @property
    def active(self) -> int:
        with progress_lock:
            return sum(request.active for request in self._live)

    # -------------------------------------------------------------------------------- binding and recycling

    def _wire(self, call: Call, choice: AlgorithmChoice, form: Form, channel: int | None, shared: bool = False) -> Wire:
        mark, compiles = binding.call_mark(call, choice), form == "persistent" or self.cache.compiles
        return self.transports.wire(form, mark, channel, call.unit.itemsize, shared, compiles)

    def _bind(
        self,
        call: Call,
        choice: AlgorithmChoice,
        form: Form,
        device: DeviceMemory | None = None,
        first: Sequence[Callable[[], object]] = (),
        channel: int | None = BLOCKING_CHANNEL,
        shared: bool = False,
    ) -> Program:
        if choice.algorithm == NATIVE:
            source, target, loading, storing = binding.buffer_ends(call, None)
            return native.program(self.comm, call, form, source.array, target.array, [*first, *loading], storing)
        exchanges = needs_counts(call, choice)
        place = choice, self.rank, self.size, self._wire(call, choice, form, channel, shared and not exchanges)

        def bind_known(call: Call) -> Program:
            return binding.bind_call(call, *place, device, first, self.nodes)

        if not exchanges:
            return bind_known(call)
        return bind_after_exchange(call, bind_count_exchange(call, *place, self.nodes), bind_known, device)

    def _exchange_counts(self, call: Call, choice: AlgorithmChoice) -> Call:
        """Exchange the block lengths of a blocking call; return it with those of the blocks it handles. Collective."""
        key = call.collective, choice.algorithm, call.root
        exchange = self._count_exchanges.pop(key, None)  # put back after success only: messages may be active
        if exchange is None:
            wire = self._wire(call, choice._replace(segments=1), "blocking", BLOCKING_CHANNEL)
            exchange = bind_count_exchange(call, choice, self.rank, self.size, wire, self.nodes)
        exchange.load(call)
        self._run_or_poison(exchange.program)
        self._count_exchanges[key] = exchange
        if len(self._count_exchanges) > MAX_PROGRAMS:
            self._count_exchanges.pop(next(iter(self._count_exchanges))).program.free()
        return exchange.with_counts(call)

    def _is_eager(self, call: Call, choice: AlgorithmChoice) -> bool:
        """True if the call runs on eager buffers: it fits them, and is short or a single exchange."""
        nbytes = max(binding.buffer_spans(call)) * call.unit.itemsize
        short = nbytes <= binding.longest()
        return binding.fits_eager_buffers(call) and (short or self._is_single_exchange(call, choice, nbytes))

    def _is_single_exchange(self, call: Call, choice: AlgorithmChoice, nbytes: int) -> bool:
        """True if this rank has at most one message each way, within the node, and two buffers of at most a cell."""
        if call.source is None or call.target is None or call.source is call.target:
            return False
        if self.node is None or choice.algorithm == NATIVE or nbytes > self.node.cells[BLOCKING_CHANNEL]:
            return False
        algorithm, segments = choice
        rounds = build(call.collective, algorithm, self.rank, self.size, call.root, segments, self.nodes)
        messages = single_messages(rounds)
        return messages is not None and all(self.node.reaches(step.peer) for step in messages)

    def _bind_eager(self, call: Call, choice: AlgorithmChoice) -> EagerBuffers:
        spans = binding.buffer_spans(call)
        source = ElementArray.allocate(spans[0], call.unit)
        target = source if call.source is call.target else ElementArray.allocate(spans[1], call.unit)
        if choice.algorithm == NATIVE:
            program = native.program(self.comm, call, "blocking", source.array, target.array)
        else:
            task = binding.call_task(call, choice, self.rank, self.size, self.nodes)
            wire = self._wire(call, choice, "blocking", BLOCKING_CHANNEL)
            program = bind(task, source, target, wire, binding.reduce_kernel(call))
        return EagerBuffers(program, source.array, target.array, bool(call.send_blocks), binding.changes_target(call))

    def _recycle(self, key: Hashable, request: Request, program: Program) -> None:
        """End a non-blocking call: keep its program for calls with the same `key`; free it if that is None."""
        self._live.discard(request)
        if program.broken:
            self._orphans.append(request)
        elif key is None:
            program.free()
        else:
            self._idle.add(key, program)

    def _release(self, channel: int | None, request: Request, program: Program) -> None:
        with progress_lock:
            self._live.discard(request)
        self._free_program(program, channel)
