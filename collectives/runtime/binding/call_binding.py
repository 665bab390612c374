"""Binding of a collective call: its schedule, chunk locations in memory, staging copies, and the resulting program."""

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms.catalog import blocks, build
from collectives.algorithms.neighbors import exchange
from collectives.buffers.arguments import Buffer
from collectives.buffers.datatypes import Identity
from collectives.buffers.device_memory import DeviceMemory
from collectives.buffers.layouts import BufferRows
from collectives.buffers.memory import view
from collectives.buffers.staging import stage
from collectives.engine.assembly import Instruction, MemoryOperand, Place
from collectives.engine.instructions import SOURCE, TARGET, Kind
from collectives.errors import InvalidArgument
from collectives.runtime.arguments.call import Blocks, Call, staged
from collectives.runtime.arguments.ops import OP_NAMES, Combiner, on_device
from collectives.runtime.binding.binder import bind
from collectives.runtime.binding.local_work import copy_array
from collectives.runtime.binding.packing import Packing, needs_packing, rows_in_place
from collectives.runtime.execution.local_steps import Local
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.program_memory import NO_ROWS, ElementArray, ScratchMemory, Task
from collectives.schedule.chunks import ChunkLayout, MemorySpan, even
from collectives.schedule.semantics import MEANINGS
from collectives.schedule.steps import freeze
from collectives.schedule.topology import Nodes
from collectives.selection.timing_table import NATIVE, AlgorithmChoice
from collectives.transport.node.mailbox import MARKS, mark_of
from collectives.transport.wire import Wire

SEGMENT = 1 << 18
"""Bytes of a segment of a long message over a network: a few fit its queues, and the second-level cache."""

LINE = 64
"""Bytes. Chunks of a vector are multiples where it is long enough."""


def call_task(call: Call, choice: AlgorithmChoice, rank: int, size: int, nodes: Nodes | None = None) -> Task:
    """Task of this rank: schedule of the chosen algorithm, chunk lengths, and chunk locations in the call's buffers."""
    if call.neighbors is not None:
        schedule = freeze(exchange(rank, call.neighbors, len(call.send_blocks)))
    else:
        schedule = build(call.collective, choice.algorithm, rank, size, call.root, choice.segments, nodes)
    itemsize = call.unit.itemsize
    memory = TARGET if call.in_place else SOURCE
    sent, received, parts = call.send_blocks, call.recv_blocks, choice.segments
    if MEANINGS[call.collective].vector:
        count = blocks(call.collective, choice.algorithm, size) * choice.segments
        lengths = even(call.lengths[0], count, max(1, LINE // itemsize))
        starts = dict(enumerate(ChunkLayout.packed(lengths).offsets))
        sent, received, parts = starts if sent else {}, starts if received else {}, 1
    else:
        lengths = tuple(piece for length in call.lengths for piece in even(length, choice.segments))
    source, target = _places(memory, sent, lengths, parts), _places(TARGET, received, lengths, parts)
    return Task(schedule, lengths, source, target, itemsize, SEGMENT)


def _places(memory: int, blocks: Blocks, lengths: tuple[int, ...], parts: int) -> dict[int, MemorySpan]:
    places = {}
    for block, start in blocks.items():
        for chunk in range(block * parts, (block + 1) * parts):
            places[chunk] = MemorySpan(memory, start, start + lengths[chunk])
            start += lengths[chunk]
    return places


class BufferEnds(NamedTuple):
    """Source and target arrays of a program, and the copies to run before and after its rounds (staging)."""

    source: ElementArray
    target: ElementArray
    first: list[Local]
    last: list[Local]
    places: tuple[int, int] = (SOURCE, TARGET)
    rows: Mapping[int, BufferRows] = NO_ROWS


def span(call: Call, blocks: Blocks) -> int:
    """Length from the start of a buffer to the end of its last block, in the call's units (bytes or elements)."""
    return max((start + call.lengths[block] for block, start in blocks.items() if call.lengths[block]), default=0)


def buffer_spans(call: Call) -> tuple[int, int]:
    """Lengths of source and target buffer as of `span`. In place both are the longer one."""
    source, target = span(call, call.send_blocks), span(call, call.recv_blocks)
    return (max(source, target),) * 2 if call.in_place else (source, target)


def changes_target(call: Call) -> bool:
    """True if the call writes to its target buffer: it receives a block that is not there already."""
    if call.source is call.target and call.combine is None and call.recv_blocks.keys() <= call.send_blocks.keys():
        return False
    return bool(call.recv_blocks)


def separate_bytes(call: Call) -> tuple[int, int]:
    """Bytes of source and target, from their addresses on, that may not overlap.

    0 in place, if one is not used, or if one has gaps.
    """
    source, target = call.source, call.target
    if source is None or target is None or source is target or not (call.send_blocks and call.recv_blocks):
        return 0, 0
    if not (source.contiguous and target.contiguous):
        return 0, 0
    sent, received = buffer_spans(call)
    return sent * call.unit.itemsize, received * call.unit.itemsize


def spans_meet(call: Call) -> bool:
    """True if the spans of a send and a receive buffer without gaps have bytes in common, if not their blocks."""
    source, target = call.source, call.target
    if source is None or target is None or source.device != target.device:
        return False
    sent, received = separate_bytes(call)
    meet = source.address < target.address + received and target.address < source.address + sent
    return bool(sent and received) and meet


def check_no_overlap(call: Call) -> None:
    if spans_meet(call) and _blocks_overlap(call):
        raise InvalidArgument(MPI.ERR_BUFFER, "sendbuf and recvbuf overlap; to work in place pass MPI.IN_PLACE")


def _blocks_overlap(call: Call) -> bool:
    """True if a block that is sent and one that is received have bytes in common. One may lie in gaps of the other."""
    assert call.source is not None and call.target is not None, "their spans meet"
    unit, ranges = call.unit.itemsize, []
    sides = (call.source.address, call.send_blocks), (call.target.address, call.recv_blocks)
    for received, (address, starts) in enumerate(sides):
        for block, start in starts.items():
            if call.lengths[block]:
                begin = address + start * unit
                ranges.append((begin, begin + call.lengths[block] * unit, received))
    ends = [0, 0]  # of the blocks before, sent and received
    for begin, end, received in sorted(ranges):
        if begin < ends[1 - received]:
            return True
        ends[received] = max(ends[received], end)
    return False


def buffer_ends(call: Call, device: DeviceMemory | None, relocates: bool = True) -> BufferEnds:
    """Source and target arrays for the program: the user's memory if usable directly, else staging copies of it.

    If it `relocates`, copies of buffers on the host are packed by instructions, from any place.
    """
    packing, rows = Packing(), dict[int, BufferRows]()
    first, last = packing.first, packing.last

    def memory(buffer: Buffer | None, number: int, span: int, load: bool, store: bool) -> ElementArray:
        if buffer is None:
            return ElementArray((device or np).empty(0, call.unit), 0)
        if device is not None or not staged(buffer):
            return ElementArray((device.view if device else view)(buffer.address, span, call.unit), buffer.address)
        in_place = rows_in_place(call, buffer) if relocates and device is None else None
        if in_place is not None:
            rows[number] = in_place
            return ElementArray(np.empty(0, call.unit), buffer.address)  # found by its rows
        if relocates and needs_packing(buffer):
            host = packing.copy_of(buffer, number, load, store)
        else:
            staging = stage(buffer, load, store)
            first.extend(staging.loading)
            last.extend(staging.storing)
            host = staging.host
        return ElementArray(host.view(call.unit), MPI.Get_address(host))

    def copy(source: Any, target: Any, start: Place, end: Place) -> Instruction | Callable[[], object]:
        if device is not None:
            return partial(copy_array, target, source)
        return Instruction(Kind.LOCAL, [MemoryOperand(target.nbytes, start, out=end)])

    spans, stores = buffer_spans(call), changes_target(call)
    if call.separate_output:
        source = memory(call.target, SOURCE, spans[0], True, True)
        target = ElementArray.allocate(spans[1], call.unit, device or np)
        last.insert(0, copy(target.array, source.array[: spans[1]], Place(TARGET, 0), Place(SOURCE, 0)))
    elif call.source is call.target:
        source = target = memory(call.target, TARGET, spans[1], bool(call.send_blocks), stores)
        if packing.places[TARGET] != TARGET:
            packing.places[SOURCE] = packing.places[TARGET]
    elif call.copy_input:
        target = memory(call.target, TARGET, spans[1], True, stores)
        source = ElementArray.allocate(spans[0], call.unit, device or np)
        step = copy(target.array[: spans[0]], source.array, Place(TARGET, 0), Place(SOURCE, 0))
        first.append(step if isinstance(step, Instruction) or device is None else device.working(step))
    else:
        source = memory(call.source, SOURCE, spans[0], bool(call.send_blocks), False)
        keeps = call.neighbors is not None and -1 in call.neighbors.sources  # blocks that nobody sends
        target = memory(call.target, TARGET, spans[1], keeps, stores)
    return BufferEnds(source, target, first, last, (packing.places[0], packing.places[1]), rows)


def as_device_call(call: Call) -> tuple[Call, DeviceMemory] | None:
    """(call with the device's reduction, device). None unless one device holds all buffers, dense, and can reduce."""
    ends = call.buffers
    if not ends or not all(buffer.device and buffer.contiguous for buffer in ends):
        return None
    device = DeviceMemory(ends[0].owner)
    if not all(device.holds(buffer.owner) for buffer in ends[1:]):
        return None
    kernel = call.combine and on_device(call.combine, call.unit, device)
    return (call._replace(combine=kernel), device) if kernel or call.combine is None else None


def bind_call(
    call: Call,
    choice: AlgorithmChoice,
    rank: int,
    size: int,
    wire: Wire,
    place: DeviceMemory | ScratchMemory | None = None,
    first: Sequence[Callable[[], object]] = (),
    nodes: Nodes | None = None,
) -> Program:
    """Build the program of a call with the chosen algorithm, at a place as of `bind`. `first` runs before all else."""
    device = None if isinstance(place, ScratchMemory) else place
    ends = buffer_ends(call, device)
    program = bind(
        call_task(call, choice, rank, size, nodes)._replace(rows=ends.rows),
        ends.source,
        ends.target,
        wire,
        reduce_kernel(call),
        place=place,
        first=[*first, *ends.first],
        last=ends.last,
    )
    if call.separate_output or call.copy_input:
        program.nbytes += (ends.target if call.separate_output else ends.source).array.nbytes
    if ends.places != program.places:
        program.places = ends.places
        program.nbytes += sum(buffer.nbytes for buffer in call.buffers if needs_packing(buffer))
        program.place(memories(call))
    return program


def reduce_kernel(call: Call) -> Combiner | None:
    """Reduction kernel for the program's arrays, as raw bytes for derived datatypes. None without a reduction."""
    kernel = call.combine
    if kernel is None or call.unit.type is not np.void or call.unit.names is not None:  # bfloat16 is of kind V too
        return kernel
    bind = kernel.bind

    def bind_bytes(left: Any, right: Any, out: Any) -> Callable[[], object]:
        return bind(left.view(np.uint8), right.view(np.uint8), out.view(np.uint8))

    return Combiner(bind_bytes, kernel.commutative)


def is_bound_anew(call: Call, choice: AlgorithmChoice, most: float = inf) -> bool:
    """True if a program on the host is not kept for other calls.

    Staging copies of some buffers belong to the memory of one call, and packed ones may be longer than `most` bytes.
    """
    moves = choice.algorithm != NATIVE
    kept = [
        moves and (rows_in_place(call, buffer) is not None or (needs_packing(buffer) and buffer.nbytes <= most))
        for buffer in call.buffers
        if staged(buffer)
    ]
    return not all(kept)


def call_mark(call: Call, choice: AlgorithmChoice) -> int:
    """Checksum, below `MARKS`, of the arguments that must be equal on all ranks. Flags of mailbox messages have it.

    By it a receiver detects messages of another call.
    """
    unknown = call.collective in ("scatter", "gather", "alltoall") or call.neighbors is not None
    nbytes = 0 if call.v_form and unknown else call.nbytes
    return mark_of(mark_without_length(call, choice), nbytes)  # in v-forms ranks know their own lengths only


def mark_without_length(call: Call, choice: AlgorithmChoice) -> int:
    """Checksum, below `MARKS`, of all arguments that must be equal but the length. See `mark_of`."""
    facts: list[object] = [call.collective, call.root, choice.algorithm, choice.segments]
    if call.combine is not None:
        facts += [str(call.unit), OP_NAMES.get(call.op, "user-defined")]
    return zlib.crc32(repr(facts).encode()) % MARKS


def program_key(
    call: Call, choice: AlgorithmChoice, addresses: bool, device: DeviceMemory | None = None, offsets: Hashable = None
) -> Hashable:
    """Cache key of the program that a call can use. With `addresses` it contains those of the call's buffers.

    `offsets` are those of the memories in the arrays of calls that are found by their arguments.
    """
    source, target = call.source, call.target
    layouts = [(Identity(one.datatype), one.count, one.counts, one.displs) for one in call.buffers if staged(one)]
    return (
        (call.collective, call.v_form, choice, call.lengths, call.unit, call.root, call.op),
        (tuple(call.send_blocks.items()), tuple(call.recv_blocks.items())),
        (source is target, call.separate_output, call.copy_input),
        None if device is None else device.number,
        tuple(layouts),
        offsets,
        source.address if addresses and source is not None else None,
        target.address if addresses and target is not None else None,
    )


def overlaps(one: np.ndarray, other: np.ndarray) -> bool:
    """True if two dense arrays share memory."""
    owners = one.base is None and other.base is None and one is not other
    return not owners and np.may_share_memory(one, other)


def memories(call: Call) -> tuple[int | None, int | None]:
    """Addresses in the user's arrays of the source and target of the call's program. None for memory of its own."""
    source = call.target if call.separate_output else None if call.copy_input else call.source
    target = None if call.separate_output else call.target
    return (None if source is None else source.address), (None if target is None else target.address)
