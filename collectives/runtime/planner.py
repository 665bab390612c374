"""Planner: from a call to a running program, for blocking, non-blocking and persistent calls.

Small blocking calls are copied through eager buffers; larger ones are bound to the user's memory without extra copies.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms.catalog import build
from collectives.buffers.staging import DeviceMemory, lasting
from collectives.runtime import native
from collectives.runtime.binder import bind
from collectives.runtime.binding import (
    as_device_call,
    bind_call,
    buffer_ends,
    buffer_spans,
    call_task,
    changes_target,
    check_no_overlap,
    needs_staging,
    owners,
    reduce_kernel,
)
from collectives.runtime.call import Call
from collectives.runtime.call_marks import call_mark
from collectives.runtime.count_exchange import CountExchange, bind_count_exchange, needs_counts
from collectives.runtime.eager_buffers import EagerBuffers, fits_eager_buffers, longest
from collectives.runtime.native_requests import new_request
from collectives.runtime.persistent_agreement import ChannelAllocator, MemoryVisibility, agree_on_memory
from collectives.runtime.program import ElementArray, Program
from collectives.runtime.program_cache import MAX_PROGRAMS, UNCACHEABLE, CallKey, ProgramCache, compile_exchange
from collectives.runtime.requests import Request, progress_lock, run_program
from collectives.runtime.single_exchange import as_single_exchange
from collectives.schedule.steps import Recv, RecvReduce, Send
from collectives.schedule.topology import Nodes, numbered
from collectives.selection.timing_table import NATIVE, AlgorithmChoice, Form
from collectives.transport.device import cuda_aware
from collectives.transport.fused_exchange import CompiledExchange
from collectives.transport.mailbox import MailboxEdge, NodeMemory
from collectives.transport.mpi_transport import ImmediateTransport, PersistentTransport
from collectives.transport.reduced import reduced
from collectives.transport.shared_heap import SharedHeap
from collectives.transport.shm import NodeAwareTransport, SharedMemoryTransport
from collectives.transport.wire import Wire

BLOCKING_CHANNEL = 0
"""Channel of the node's mailboxes for blocking calls."""

BLOCKING_TAG = 0
"""Tag of blocking calls, of which a communicator runs one at a time; every other call has its own."""


def _neighbours(comm: MPI.Intracomm, nodes: Nodes | None) -> MPI.Intracomm:
    """Ranks that share memory with this one and are on the same node by `nodes`."""
    sharing = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    if nodes is None:
        return sharing
    together = MPI.Intracomm(sharing.Split(nodes[comm.Get_rank()]))
    sharing.Free()
    return together


class Planner:
    """Programs of one communicator, over a private duplicate of the MPI communicator.

    Parameters
    ----------
    comm : MPI.Intracomm
        Used for nothing else, so that its messages never match the user's. Freed by `free`.
    aware : bool or None
        True if messages may be in device memory; effective if set on all ranks. None queries the MPI.
    shared : bool
        Ranks of one node use shared memory. Not with device memory: no rank knows where its peers' messages are, and
        both ends of a message must use the same transport.
    nodes : sequence of int, optional
        Node of every rank, the same on all ranks; by default determined by MPI. Ranks on different nodes share no
        memory, even if they could.

    Attributes
    ----------
    nodes : tuple of int or None
        Node of every rank; None if all are on one.
    cache : ProgramCache
        Programs of blocking calls.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        aware: bool | None = None,
        shared: bool = True,
        nodes: Sequence[int] | None = None,
    ) -> None:
        self.comm = comm
        named = None if nodes is None else numbered(nodes)
        neighbours = _neighbours(comm, named)
        self.nodes = named if nodes is not None else numbered(comm.allgather(neighbours.bcast(comm.Get_rank())))
        self.aware = bool(reduced(comm, cuda_aware() if aware is None else aware, MPI.LAND))
        shares = shared and not self.aware
        self.heap = SharedHeap(comm, neighbours if shares else None)
        self.node = NodeMemory(neighbours, comm.Get_rank(), self.heap) if shares else None
        if self.node is None:
            neighbours.Free()
        self._edges: dict[int, dict[int, MailboxEdge]] = defaultdict(dict)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.cache = ProgramCache(self.rank)
        self._has_orphans = False  # aborted calls may leave unmatched messages
        self._orphans: list[Request] = []  # aborted requests: keep alive the memory that late messages are written to
        self._idle: dict[Hashable, list[Program]] = {}
        self._count_exchanges: dict[Hashable, CountExchange] = {}
        self._live: weakref.WeakSet[Request] = weakref.WeakSet()  # `requests.active_requests` holds the active ones
        self._finalized: deque[tuple[Program, int | None]] = deque()  # appended by finalizers at any moment
        self._channels = ChannelAllocator(comm)
        self._idle_count = self._calls = self._inits = 0
        most = comm.Get_attr(MPI.TAG_UB)
        self._tags = (32767 if most is None else int(most)) // 2

    def allocate(self, nbytes: int) -> np.ndarray:
        """Shared memory: see `SharedHeap.allocate`. Collective."""
        array = self.heap.allocate(nbytes)
        for edges in self._edges.values():
            for edge in edges.values():
                edge.look()
        return array

    def visibility(self, call: Call) -> MemoryVisibility:
        """Memory properties of a call to be bound, on all ranks. Collective."""
        check_no_overlap(call)
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
        """Run a blocking call; `cache_key` and the arguments are those of `ProgramCache.store`."""
        self.cache.check_in_step()
        if needs_counts(call, choice):
            call, cache_key = self._exchange_counts(call, choice), UNCACHEABLE
        if needs_staging(call):
            self._run_staged(call, choice)
            return
        small = self._is_eager(call, choice)
        key = program_key(call, choice, not small)
        entry = self.cache.bound.get(key)
        check_no_overlap(call)
        if entry is None:
            entry = self._bind_eager(call, choice) if small else self._bind(call, choice, "blocking")
            self.cache.add(key, entry)
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
        """Compile a call that is a single exchange; None for all others."""
        if choice.algorithm == NATIVE:
            return None
        short = as_single_exchange(call_task(call, choice, self.rank, self.size, self.nodes))
        if short is None:
            return None
        return compile_exchange(short, call, s, r, program, self._edges[BLOCKING_CHANNEL].get(short.peer))

    def _run_staged(self, call: Call, choice: AlgorithmChoice) -> None:
        """Run a blocking call on data that is not dense host memory."""
        check_no_overlap(call)
        call, device = self._on_device(call, choice)
        if device is None:
            program = self._bind(call, choice, "blocking")
            self._run_or_poison(program)
            program.free()
            return
        key = program_key(call, choice, True, device)
        entry = self.cache.bound.get(key)
        if entry is None:
            entry = self._bind(call, choice, "blocking", device)
            self.cache.add(key, entry)
        assert isinstance(entry, Program) and entry.stream is not None
        try:
            entry.stream.follow(*owners(call))
            self._run_or_poison(entry)
        except BaseException:
            self.cache.evict(key)
            raise

    def _run_or_poison(self, program: Program) -> None:
        try:
            run_program(program)
        except BaseException as error:
            self.cache.poison(error)
            raise

    def _on_device(self, call: Call, choice: AlgorithmChoice) -> tuple[Call, DeviceMemory | None]:
        """The call to bind, and its device if no staging is needed."""
        return (as_device_call(call) if self.aware and choice.algorithm != NATIVE else None) or (call, None)

    def begin(self, call: Call, choice: AlgorithmChoice, gate: Callable[[], bool] | None) -> Request:
        """Start a non-blocking call."""
        with progress_lock:  # a thread that progresses active requests may recycle programs at any moment
            return self._begin(call, choice, gate)

    def _begin(self, call: Call, choice: AlgorithmChoice, gate: Callable[[], bool] | None) -> Request:
        self._free_finalized()
        device = None
        if needs_staging(call):
            call, device = self._on_device(call, choice)
        unlike = needs_counts(call, choice) or (needs_staging(call) and device is None)
        key = None if unlike else program_key(call, choice, True, device)
        idle = self._idle.get(key)
        if idle:
            program = idle.pop()
            self._idle_count -= 1
            if not idle:
                del self._idle[key]
        else:
            check_no_overlap(call)
            program = self._bind(call, choice, "nonblocking", device)
        if program.stream is not None:
            program.stream.follow(*owners(call))
        self._calls += 1  # after validation only: tags are numbered alike on all ranks
        if isinstance(program.wire, ImmediateTransport):
            program.wire.tag = 1 + self._calls % (self._tags - 1)
        request = new_request(call.collective, program, partial(self._recycle, key), call)
        self._live.add(request)
        request.begin(gate)
        return request

    def consume_tag(self) -> None:
        """Consume the tag of a non-blocking call: another rank may have started one by mistake."""
        self._calls += 1

    def init(self, call: Call, choice: AlgorithmChoice, shared: bool = False) -> Request:
        """Create a persistent request; `shared`: all ranks have their buffers in shared memory."""
        check_no_overlap(call)
        self._inits += 1
        call, device = self._on_device(call, choice)
        first = [] if device is None else [partial(device.follow, *owners(call))]
        channel = None if self.node is None or choice.algorithm == NATIVE else self._take_channel()
        program = self._bind(call, choice, "persistent", device, first, channel, shared)
        request = Request(call.collective, program, partial(self._release, channel), call, persistent=True)
        request.finalizer = weakref.finalize(request, self._finalized.append, (program, channel))
        request.finalizer.atexit = False
        with progress_lock:
            self._live.add(request)
        return request

    def _take_channel(self) -> int | None:
        self._free_finalized()
        return self._channels.take()

    def _free_finalized(self) -> None:
        """Free the programs of requests that were garbage-collected without `Free`."""
        while self._finalized:
            self._free_program(*self._finalized.popleft())

    def _free_program(self, program: Program, channel: int | None) -> None:
        program.free()
        self._has_orphans |= program.broken
        if channel is not None and not program.broken:
            self._channels.give_back(channel)

    def close(self, free: Callable[[], object]) -> None:
        """Call `free` once no request is active: now, or at the end of the last one."""

        def ended() -> None:
            if not self.active:
                free()

        with progress_lock:
            for request in [request for request in self._live if request.active]:
                request.call_at_end(ended)
            ended()

    def free(self) -> None:
        """Free programs, idle requests, shared memory and the private communicator, without waiting for other ranks."""
        self.cache.free()
        for program in [program for programs in self._idle.values() for program in programs]:
            program.free()
        for lengths in self._count_exchanges.values():
            lengths.program.free()
        with progress_lock:
            lent = tuple(self._live)
        for request in lent:
            if not request.active:
                request.lapse()
        self._free_finalized()
        self._idle.clear()
        self._count_exchanges.clear()
        self._live.clear()
        self.heap.free()
        if self.node is not None:
            self.node.free()
        if not (
            self._has_orphans or self.cache.broken
        ):  # MPI may reuse its context id: the next owner would match orphaned messages
            self.comm.Free()

    @property
    def active(self) -> int:
        """Number of active requests."""
        with progress_lock:
            return sum(request.active for request in self._live)

    # -------------------------------------------------------------------------------- binding and recycling

    def _wire(
        self,
        form: Form,
        mark: int,
        channel: int | None = BLOCKING_CHANNEL,
        itemsize: int = 1,
        shared: bool = False,
    ) -> Wire:
        """Transport of one program: MPI with a tag, and a channel of the node's mailboxes for peers of the node.

        Messages are split between elements: an element larger than a cell needs reads from peer memory, or MPI.
        """
        if form == "nonblocking":
            return ImmediateTransport(self.comm)
        tag = self._tags + self._inits % self._tags if form == "persistent" else BLOCKING_TAG
        far = PersistentTransport(self.comm, tag)
        if self.node is None or channel is None or (itemsize > self.node.cells[channel] and not self.node.reads):
            return far
        compiles = form == "persistent" or self.cache.compiles
        return NodeAwareTransport(
            SharedMemoryTransport(self.node, channel, self._edges[channel], compiles, shared, mark), far
        )

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
        if needs_counts(call, choice):
            return self._bind_later(call, choice, self._wire(form, call_mark(call, choice), channel), device, first)
        if choice.algorithm != NATIVE:
            wire = self._wire(form, call_mark(call, choice), channel, call.unit.itemsize, shared)
            return bind_call(call, choice, self.rank, self.size, wire, device, first, self.nodes)
        ends = buffer_ends(call, None)
        steps = [*first, *ends.first], ends.last
        program = native.program(self.comm, call, form, ends.source.array, ends.target.array, *steps)
        program.keep(ends.keep)
        return program

    def _bind_later(
        self,
        call: Call,
        choice: AlgorithmChoice,
        wire: Wire,
        device: DeviceMemory | None,
        first: Sequence[Callable[[], object]],
    ) -> Program:
        """Program that exchanges counts at its first start and is bound once they are known."""
        source = lasting(call.source)  # the user may free the datatypes before binding
        target = source if call.target is call.source else lasting(call.target)
        call = call._replace(source=source, target=target)
        lengths = bind_count_exchange(call, choice, self.rank, self.size, wire, self.nodes)
        later: list[Program] = []

        def ask() -> None:
            if not later:
                lengths.load(call)
                lengths.program.start()

        def begin() -> None:
            if not later:
                now = lengths.with_counts(call)
                later.append(bind_call(now, choice, self.rank, self.size, wire, device, first, self.nodes))
            later[0].start()

        def await_lengths() -> None:
            if not later:
                lengths.program.finish()

        calls = ask, await_lengths, begin, lambda: later[0].finish()
        tests = None, lambda: bool(later) or lengths.program.advance(), None, lambda: later[0].advance()
        return Program(calls, tests, wire, lengths.known.nbytes, lengths, device)

    def _exchange_counts(self, call: Call, choice: AlgorithmChoice) -> Call:
        """Exchange the counts of a blocking call. Collective."""
        key = call.collective, choice.algorithm, call.root
        lengths = self._count_exchanges.pop(key, None)  # put back after success only: messages may be active
        if lengths is None:
            wire = self._wire("blocking", call_mark(call, choice._replace(segments=1)))
            lengths = bind_count_exchange(call, choice, self.rank, self.size, wire, self.nodes)
        lengths.load(call)
        self._run_or_poison(lengths.program)
        self._count_exchanges[key] = lengths
        if len(self._count_exchanges) > MAX_PROGRAMS:
            self._count_exchanges.pop(next(iter(self._count_exchanges))).program.free()
        return lengths.with_counts(call)

    def _is_eager(self, call: Call, choice: AlgorithmChoice) -> bool:
        """True if the call is small, or a single exchange, and can use eager buffers."""
        nbytes = max(buffer_spans(call)) * call.unit.itemsize
        return fits_eager_buffers(call) and (nbytes <= longest() or self._is_single_exchange(call, choice, nbytes))

    def _is_single_exchange(self, call: Call, choice: AlgorithmChoice, nbytes: int) -> bool:
        """True if this rank only sends one message and receives one: it then runs between the user's arrays."""
        if call.source is None or call.target is None or call.source is call.target:
            return False
        if self.node is None or choice.algorithm == NATIVE or nbytes > self.node.cells[BLOCKING_CHANNEL]:
            return False
        algorithm, segments = choice
        rounds = build(call.collective, algorithm, self.rank, self.size, call.root, segments, self.nodes)
        steps = [step for steps in rounds for step in steps]
        if sum(map(bool, rounds)) > 1:
            return False
        kinds = [isinstance(step, Send) for step in steps if isinstance(step, (Send, Recv, RecvReduce))]
        if not all(self.node.reaches(step.peer) for step in steps if isinstance(step, (Send, Recv, RecvReduce))):
            return False
        return len(kinds) == len(steps) and kinds.count(True) <= 1 and kinds.count(False) <= 1

    def _bind_eager(self, call: Call, choice: AlgorithmChoice) -> EagerBuffers:
        spans = buffer_spans(call)
        source = ElementArray.allocate(spans[0], call.unit)
        target = source if call.source is call.target else ElementArray.allocate(spans[1], call.unit)
        if choice.algorithm == NATIVE:
            program = native.program(self.comm, call, "blocking", source.array, target.array)
        else:
            schedule = call_task(call, choice, self.rank, self.size, self.nodes)
            wire = self._wire("blocking", call_mark(call, choice), itemsize=call.unit.itemsize)
            program = bind(schedule, source, target, wire, reduce_kernel(call))
        return EagerBuffers(program, source.array, target.array, bool(call.send_blocks), changes_target(call))

    def _recycle(self, key: Hashable, request: Request, program: Program) -> None:
        """End of a non-blocking call: keep its program for the next call with the same key."""
        self._live.discard(request)
        if program.broken:
            self._has_orphans = True
            self._orphans.append(request)
            return
        if key is None:
            program.free()
            return
        self._idle.setdefault(key, []).append(program)
        self._idle_count += 1
        if self._idle_count > MAX_PROGRAMS:
            oldest = next(iter(self._idle))
            self._idle[oldest].pop().free()
            self._idle_count -= 1
            if not self._idle[oldest]:
                del self._idle[oldest]

    def _release(self, channel: int | None, request: Request, program: Program) -> None:
        with progress_lock:
            self._live.discard(request)
        self._free_program(program, channel)


class ProgramKey(NamedTuple):
    """Properties that two calls must share to use one program; addresses are None for eager buffers."""

    collective: str
    v_form: bool
    choice: AlgorithmChoice
    lengths: tuple[int, ...]
    unit: np.dtype[Any]
    root: int
    op: Hashable
    separate_output: bool
    send_blocks: tuple[tuple[int, int], ...]
    recv_blocks: tuple[tuple[int, int], ...]
    same_buffer: bool
    device: int | None
    source: int | None
    target: int | None


def program_key(call: Call, choice: AlgorithmChoice, addresses: bool, device: DeviceMemory | None = None) -> ProgramKey:
    """Key of a call's program, with the addresses of its buffers if it is bound to them."""
    source, target = call.source, call.target
    return ProgramKey(
        call.collective,
        call.v_form,
        choice,
        call.lengths,
        call.unit,
        call.root,
        call.op,
        call.separate_output,
        tuple(call.send_blocks.items()),
        tuple(call.recv_blocks.items()),
        source is target,
        None if device is None else device.number,
        source.address if addresses and source is not None else None,
        target.address if addresses and target is not None else None,
    )
