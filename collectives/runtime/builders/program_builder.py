"""Builds the programs of collective calls on one communicator: over its transports, or of the MPI's own collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.buffers.device_memory import DeviceMemory
from collectives.engine.instructions import CALL_RECORD
from collectives.runtime.arguments.call import Call
from collectives.runtime.arguments.ops import OP_NAMES
from collectives.runtime.binding import call_binding
from collectives.runtime.binding.any_counts import bind_any_counts
from collectives.runtime.binding.any_length import bind_any_length
from collectives.runtime.binding.count_exchange import bind_after_exchange, bind_count_exchange, needs_counts
from collectives.runtime.builders import native
from collectives.runtime.builders.communicator_transports import BLOCKING_CHANNEL, Transports
from collectives.runtime.execution.local_steps import call_rounds
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.program_memory import ScratchMemory
from collectives.schedule.semantics import MEANINGS
from collectives.selection.timing_table import BLOCKING, NATIVE, AlgorithmChoice, Form
from collectives.transport.memory.shared_heap import MOST
from collectives.transport.node.shm import NodeAwareTransport
from collectives.transport.wire import Wire

NO_CHANNEL = -1
"""`channel` of calls without mailboxes."""

FORMS: tuple[Form, ...] = ("blocking", "nonblocking", "persistent")
"""Forms of calls, by their number in an entry."""


def call_entry(call: Call, choice: AlgorithmChoice, form: Form, channel: int, communicator: int) -> np.ndarray:
    """Entry of a call's program: an array of shape (1,) of the dtype `CALL_RECORD`."""
    entry = np.zeros(1, CALL_RECORD)
    meaning = MEANINGS.get(call.collective)
    root = call.root if meaning is not None and meaning.rooted else -1
    reduces = call.combine is not None
    entry["nbytes"], entry["communicator"], entry["channel"], entry["root"] = call.nbytes, communicator, channel, root
    entry["round"] = entry["peer"] = -1
    entry["form"], entry["collective"], entry["algorithm"] = FORMS.index(form), call.collective, str(choice)
    entry["dtype"] = call.unit.name if reduces else ""
    entry["op"] = OP_NAMES.get((call.operation or MPI.SUM).handle, "user") if reduces else ""
    return entry


DEFERRED_BYTES = 1 << 17
"""Bytes from which a message is copied by the progress thread with the option `async_progress`."""


class ProgramBuilder:
    """Builds the programs of calls over `transports`. With `async_progress`, those of long messages are `deferred`."""

    def __init__(self, transports: Transports, async_progress: bool) -> None:
        self._comm, self._transports, self._async_progress = transports.comm, transports, async_progress
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        self._scratch = ScratchMemory()  # of blocking calls
        self._turns: dict[int, np.ndarray] = {}
        """Number of calls so far, by channel."""

    def on_device(
        self, call: Call, choice: AlgorithmChoice, channel: int | None = BLOCKING_CHANNEL, any_algorithm: bool = False
    ) -> tuple[Call, DeviceMemory | None]:
        """(call to bind, its device). The device is None if the data is on the host or must be staged there.

        With `any_algorithm` the kernels of a GPU that all ranks share, or the copies of a rank that is alone, may take
        the place of the chosen one.
        """
        if call.neighbors is not None or call.typed:
            return call, None
        if self._size == 1:  # "native" by name remains a call of the MPI
            return self._alone_on_device(call) if any_algorithm or choice.algorithm != NATIVE else (call, None)
        in_cells = self._transports.fits_cells(channel, call.unit.itemsize) and not needs_counts(call, choice)
        takes_device = (self._transports.aware or in_cells) and choice.algorithm != NATIVE
        return (call_binding.as_device_call(call) if takes_device else None) or (call, None)

    @staticmethod
    def _alone_on_device(call: Call) -> tuple[Call, DeviceMemory | None]:
        """As `on_device` for a rank that is alone: it reduces nothing, so that any operation will do."""
        return call_binding.as_device_call(call._replace(combine=None)) or (call, None)

    def wire(
        self,
        call: Call,
        choice: AlgorithmChoice,
        form: Form,
        channel: int | None,
        shared: bool = False,
        device: DeviceMemory | None = None,
    ) -> Wire:
        """Create the transport of a call's program. See `Transports.wire`.

        Messages are not cut if they are read from `shared` memory, or copied by the progress thread: a wait for each
        part takes it long.
        """
        node, streamed = self._transports.node, 0
        if node is not None and not shared and not (self._async_progress and form != BLOCKING):
            streamed = node.streamed if MEANINGS[call.collective].rooted else node.streamed_both_ways
            if call.typed:  # through bounce buffers, from and to the rows of the datatypes
                streamed = MOST - 1
            if call.combine is not None and (call.collective != "exscan" or self._size > 2):  # that only copies
                streamed = node.streamed_reduced
        mark = call_binding.call_mark(call, choice)
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
        """Build the program of a call on its own memory. `first` runs before all else."""
        program = self._bind(call, choice, form, device, first, channel, shared)
        return self.described(program, call, choice, form, channel)

    def described(
        self, program: Program, call: Call, choice: AlgorithmChoice, form: Form, channel: int | None
    ) -> Program:
        """Program with its label, and the entry of its calls in the record."""
        number = NO_CHANNEL if channel is None else channel
        turns = self._turns.setdefault(number, np.zeros(1, np.int64))
        program.label, program.world_ranks = f"{call.collective} ({choice.algorithm})", self._transports.world_ranks
        program.recorded = call_entry(call, choice, form, number, self._transports.number), turns
        return program

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
        """As `bind`, without a description."""
        if device is not None and self._size == 1:
            return _own_blocks_program(call, device, self._transports.wire(form, 0, None), first)
        if choice.algorithm == NATIVE:
            ends = call_binding.buffer_ends(call, None, relocates=False)
            arrays = ends.source.array, ends.target.array
            return native.program(self._comm, call, form, *arrays, [*first, *ends.first], ends.last)
        exchanges = needs_counts(call, choice)
        wire, nodes = self.wire(call, choice, form, channel, shared and not exchanges, device), self._transports.nodes
        rank, size = self._rank, self._size
        place = device or (self._scratch if form == BLOCKING else None)  # non-blocking ones overlap
        bind_known = partial(
            call_binding.bind_call,
            choice=choice,
            rank=rank,
            size=size,
            wire=wire,
            place=place,
            first=first,
            nodes=nodes,
        )
        if not exchanges:
            program = bind_known(call)
            self._guard(program, call)
            is_long = call.nbytes >= DEFERRED_BYTES and form != BLOCKING
            program.deferred = self._async_progress and is_long and program.needs_no_mpi
            return program
        return bind_after_exchange(call, bind_count_exchange(call, choice, rank, size, wire, nodes), bind_known, device)

    def bind_any_length(
        self, call: Call, choice: AlgorithmChoice, form: Form, channel: int | None, short: bool
    ) -> Program | None:
        """Build the program of a call for any length or counts, or any `short` ones. None if there is none."""
        pins = self._transports.pinning.mailboxes is not None
        if pins or self._async_progress:  # `deferred` depends on length
            return None
        wire = self.wire(call, choice, form, channel)
        if wire.node is None and short:
            return None
        scratch, nodes = self._scratch if form == BLOCKING else None, self._transports.nodes
        bind = bind_any_counts if call.v_form else bind_any_length
        program = bind(call, choice, self._rank, self._size, wire, nodes, scratch, short)
        if program is not None:
            self._guard(self.described(program, call, choice, form, channel), call)
        return program

    def _guard(self, program: Program, call: Call) -> None:
        """Let the root of a call that has data for every rank look for messages that earlier calls have left."""
        is_root = call.collective in ("broadcast", "scatter") and call.root == self._rank
        has_all = all(call.lengths) or program.scale is not None  # whose engine looks only if there is data for all
        if is_root and has_all and isinstance(program.wire, NodeAwareTransport) and program.rounds:  # none if alone
            program.rounds[0] = [*program.wire.guard_root(), *program.rounds[0]]


def _own_blocks_program(call: Call, device: DeviceMemory, wire: Wire, first: Iterable[Callable[[], object]]) -> Program:
    """Build the program of a call of one rank with its buffers on `device`: copies in the order of their streams.

    The host waits for nothing. `first` runs before copies, if there are any. No message uses `wire`.
    """
    copies = list(_copies(call, device))
    if not copies:
        return Program([], wire)
    return Program(call_rounds([*first, *copies, device.join]), wire, stream=device)


def _copies(call: Call, device: DeviceMemory) -> Iterable[Callable[[], object]]:
    """Copies of the blocks that the call sends to where it receives them, but not of a block to itself."""
    source, target = call.source, call.target
    if source is None or target is None:  # one buffer for input and result, as in a broadcast
        return
    for block, end in call.recv_blocks.items():
        begin, size = call.send_blocks[block], call.unit.itemsize
        here, there = source.address + begin * size, target.address + end * size
        if here != there and call.lengths[block]:
            yield partial(device.copy, there, here, call.lengths[block] * size)
