"""Builds the programs of collective calls on one communicator: over its transports, or of the MPI's own collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from collectives.buffers.device_memory import DeviceMemory
from collectives.runtime import binding, native
from collectives.runtime.binder import bind as bind_task
from collectives.runtime.binding import EagerBuffers
from collectives.runtime.call import Call
from collectives.runtime.communicator_transports import BLOCKING_CHANNEL, Transports
from collectives.runtime.count_exchange import bind_after_exchange, bind_count_exchange, needs_counts
from collectives.runtime.own_blocks import own_blocks_program
from collectives.runtime.program import ElementArray, Program, ScratchMemory
from collectives.schedule.semantics import MEANINGS
from collectives.selection.timing_table import BLOCKING, NATIVE, AlgorithmChoice, Form
from collectives.transport.exchange import Exchange
from collectives.transport.shm import NodeAwareTransport
from collectives.transport.wire import Wire
from collectives.types import Wait

DEFERRED_BYTES = 1 << 17
"""Bytes from which a message is copied by the progress thread with the option `async_progress`."""


class ProgramBuilder:
    """Builds the programs of calls over `transports`; with `async_progress`, those of long messages are `deferred`."""

    def __init__(self, transports: Transports, async_progress: bool) -> None:
        self._comm, self._transports, self._async_progress = transports.comm, transports, async_progress
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        self._scratch = ScratchMemory()  # of blocking calls

    def on_device(
        self, call: Call, choice: AlgorithmChoice, channel: int | None = BLOCKING_CHANNEL, any_algorithm: bool = False
    ) -> tuple[Call, DeviceMemory | None]:
        """(call to bind, its device); the device is None if the data is on the host or must be staged there.

        With `any_algorithm` the kernels of a GPU that all ranks share, or the copies of a rank that is alone, may take
        the place of the chosen one.
        """
        if self._size == 1:
            return self._alone_on_device(call) if any_algorithm or choice.algorithm != NATIVE else (call, None)
        in_cells = self._transports.fits_cells(channel, call.unit.itemsize) and not needs_counts(call, choice)
        takes_device = (self._transports.aware or in_cells) and choice.algorithm != NATIVE
        return (binding.as_device_call(call) if takes_device else None) or (call, None)

    @staticmethod
    def _alone_on_device(call: Call) -> tuple[Call, DeviceMemory | None]:
        """As `on_device` for a rank that is alone: it reduces nothing, so that any operation will do."""
        return binding.as_device_call(call._replace(combine=None)) or (call, None)

    def wire(
        self,
        call: Call,
        choice: AlgorithmChoice,
        form: Form,
        channel: int | None,
        shared: bool = False,
        device: DeviceMemory | None = None,
    ) -> Wire:
        """Create the transport of a call's program; see `Transports.wire`.

        Messages are not cut if they are read from `shared` memory, or copied by the progress thread: a wait for each
        part takes it long.
        """
        node, streamed = self._transports.node, 0
        if node is not None and not shared and not (self._async_progress and form != BLOCKING):
            streamed = node.streamed if MEANINGS[call.collective].rooted else node.streamed_both_ways
            if call.combine is not None and (call.collective != "exscan" or self._size > 2):  # that only copies
                streamed = node.streamed_reduced
        mark = binding.call_mark(call, choice)
        return self._transports.wire(form, mark, channel, call.unit.itemsize, streamed, device)

    def bind(
        self,
        call: Call,
        choice: AlgorithmChoice,
        form: Form,
        device: DeviceMemory | None = None,
        first: Sequence[Callable[[], object]] = (),
        channel: int | None = BLOCKING_CHANNEL,
        shared: bool = False,
    ) -> Program:
        """Build the program of a call on its own memory; `first` runs before all else."""
        if device is not None and self._size == 1:
            return own_blocks_program(call, device, self._transports.wire(form, 0, None), first)
        if choice.algorithm == NATIVE:
            source, target, loading, storing = binding.buffer_ends(call, None)
            return native.program(self._comm, call, form, source.array, target.array, [*first, *loading], storing)
        exchanges = needs_counts(call, choice)
        wire, nodes = self.wire(call, choice, form, channel, shared and not exchanges, device), self._transports.nodes
        rank, size = self._rank, self._size
        place = device or (self._scratch if form == BLOCKING else None)
        bind_known = partial(
            binding.bind_call, choice=choice, rank=rank, size=size, wire=wire, place=place, first=first, nodes=nodes
        )
        if not exchanges:
            program = bind_known(call)
            self._guard(program, call)
            is_long = call.nbytes >= DEFERRED_BYTES and form != BLOCKING
            program.deferred = self._async_progress and is_long and program.exchanges is not None
            return program
        return bind_after_exchange(call, bind_count_exchange(call, choice, rank, size, wire, nodes), bind_known, device)

    def _guard(self, program: Program, call: Call) -> None:
        """Let the root of a call that has data for every rank look for messages that earlier calls have left."""
        is_root = call.collective in ("broadcast", "scatter") and call.root == self._rank and all(call.lengths)
        first = program.steps[0] if program.steps else None  # a rank that is alone has no steps
        if is_root and isinstance(program.wire, NodeAwareTransport) and isinstance(first, Wait):
            for exchange in first.awaited:
                if isinstance(exchange, Exchange):
                    program.wire.guard_root(exchange)

    def bind_eager(self, call: Call, choice: AlgorithmChoice) -> EagerBuffers:
        """Build the program of a short blocking call, with buffers of its own."""
        spans = binding.buffer_spans(call)
        source = ElementArray.allocate(spans[0], call.unit)
        target = source if call.source is call.target else ElementArray.allocate(spans[1], call.unit)
        if choice.algorithm == NATIVE:
            program = native.program(self._comm, call, "blocking", source.array, target.array)
        else:
            task = binding.call_task(call, choice, self._rank, self._size, self._transports.nodes)
            wire = self.wire(call, choice, "blocking", BLOCKING_CHANNEL)
            program = bind_task(task, source, target, wire, binding.reduce_kernel(call), self._scratch)
            self._guard(program, call)
        return EagerBuffers(program, source.array, target.array, bool(call.send_blocks), binding.changes_target(call))
