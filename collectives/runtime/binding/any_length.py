"""Programs for any length: one program runs all calls that differ only in the length of their data.

Such a program is bound with chunks of one element, so that its operands are ranges of chunks. The engine sets their
bytes for each length (`scale.c`). That is possible for dense host arrays, if the engine has the reduction. The messages
are those of a program that was bound for the length, so that ranks with either work together. A length whose messages
are cut between nodes has a program of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from collectives.algorithms.catalog import blocks
from collectives.engine.assembly import NOWHERE, Instruction, Place, Rounds, flat
from collectives.engine.instructions import ADDRESSES, CLASS_WORDS, LANDING, SCRATCH, TARGET, Kind
from collectives.runtime.arguments.call import Blocks, Call
from collectives.runtime.binding import call_binding
from collectives.runtime.binding.binder import build
from collectives.runtime.binding.chunk_locations import ChunkLocations
from collectives.runtime.binding.local_work import LocalWork
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.program_memory import ElementArray, Scale, ScratchMemory
from collectives.schedule.chunks import MemorySpan, even
from collectives.schedule.semantics import MEANINGS
from collectives.schedule.topology import Nodes
from collectives.selection.timing_table import AlgorithmChoice
from collectives.transport.wire import Packing, Piece, Wire

MOST_BYTES = 1 << 24
"""Bytes of the data of the longest calls. Longer ones take long enough for a program of their own."""


def class_number(nbytes: int) -> int:
    """Number of the size class of a call of `nbytes`: calls of a class share one choice.

    >>> [class_number(nbytes) for nbytes in (7, 8, 1000, 1024, MOST_BYTES)]
    [7, 8, 35, 36, 92]
    """
    shift = max(0, nbytes.bit_length() - 3)
    return 4 * shift + (nbytes >> shift)


ALL_CLASSES = (1 << 64 * CLASS_WORDS) - 1
"""Set of all size classes, with a bit for each."""


def key_of(call: Call, choice: AlgorithmChoice) -> Hashable | None:
    """Key of programs for any length that could run a call. None if there are none. The length is ``lengths[0]``."""
    length, vector = call.lengths[0], MEANINGS[call.collective].vector
    if not length or call.local_counts or call.v_form or call.separate_output or call.copy_input:
        return None
    if not vector and (call.lengths.count(length) < len(call.lengths) or not _divide(call, length)):
        return None
    # without `function` a reduction lands its operands first, see `LocalWork.lands`
    if (call.combine is not None and call.combine.function is None) or call.nbytes > MOST_BYTES:
        return None
    if not all(buffer.contiguous and not buffer.device for buffer in call.buffers):
        return None
    held = tuple(call.send_blocks), tuple(call.recv_blocks), call.source is call.target
    return "any length", call.collective, choice, call.unit, call.root, call.op, *held


def _divide(call: Call, length: int) -> bool:
    """True if all blocks begin at multiples of their length."""
    return all(start % length == 0 for side in (call.send_blocks, call.recv_blocks) for start in side.values())


def bind_any_length(
    call: Call,
    choice: AlgorithmChoice,
    rank: int,
    size: int,
    wire: Wire,
    nodes: Nodes | None,
    scratch: ScratchMemory | None,
    short: bool,
) -> Program | None:
    """Build the program of a call for any length, from the least to the most of `Program.scale`. None if impossible.

    `short`: only of lengths whose messages all fit a bounce buffer.
    """
    vector, itemsize, segments = MEANINGS[call.collective].vector, call.unit.itemsize, choice.segments
    task = call_binding.call_task(_with_unit_chunks(call, choice, size), choice, rank, size, nodes)
    task = task._replace(itemsize=1)  # operands count chunks: `scale.c` has their bytes
    orders = _orders(task.source, task.target)
    if orders is None:
        return None
    wire.vary(short, packing_in(orders))
    pieces = len(task.lengths) if vector else segments
    grain = max(1, call_binding.LINE // itemsize) if vector else 1
    work = LocalWork([ElementArray(np.empty(0, call.unit), 0)] * 4, 1, call.combine, None)
    chunks = ChunkLocations(task, wire, lands=work.lands)
    call_bytes = call.nbytes // call.lengths[0]
    most = max(1, MOST_BYTES // call_bytes)
    lengths = even(most, pieces, grain)
    if work.lands:
        return None
    orders += chunks.scratch_chunks, chunks.landing_chunks
    program = build(task.schedule, chunks, wire, work)
    if not all(scales(one, short) for one in flat(program.rounds)):
        return None
    for nbytes in most_bytes(program.rounds, wire, short):
        most = min(most, (nbytes // itemsize - grain) * pieces)
    work.allocate([sum(lengths[chunk % pieces] for chunk in one) for one in orders[SCRATCH:]], scratch)
    program.hold(work.memories, work.nbytes * itemsize)
    program.relocatable = True
    record = Scale.record_of(
        wire,
        orders,
        pieces=pieces,
        grain=grain,
        itemsize=itemsize,
        mark=call_binding.mark_without_length(call, choice),
        call_bytes=call_bytes,
        mark_bytes=call_bytes,
        least=pieces,
        most=most,
    )
    program.scale = Scale(pieces, most, record, np.array([chunk for one in orders for chunk in one], np.int64))
    return program


def _with_unit_chunks(call: Call, choice: AlgorithmChoice, size: int) -> Call:
    """The call with chunks of one element."""
    if MEANINGS[call.collective].vector:
        count = blocks(call.collective, choice.algorithm, size) * choice.segments
        return call._replace(lengths=(count,))
    length, segments = call.lengths[0], choice.segments

    def scaled(starts: Blocks) -> Blocks:
        return {block: start // length * segments for block, start in starts.items()}

    sent, received = scaled(call.send_blocks), scaled(call.recv_blocks)
    return call._replace(lengths=(segments,) * len(call.lengths), send_blocks=sent, recv_blocks=received)


def _orders(*places: Mapping[int, MemorySpan]) -> list[list[int]] | None:
    """Chunks of source and target in the order of their places. None if there are gaps, or chunks share a place."""
    found: list[dict[int, int]] = [{}, {}]
    for chunk, span in ((chunk, span) for side in places for chunk, span in side.items()):
        if found[span.memory].setdefault(span.start, chunk) != chunk:
            return None
    orders = [[at[place] for place in sorted(at)] for at in found]
    # `resize` adds up lengths in this order: a gap would shift all places behind it
    dense = all(sorted(at) == list(range(len(at))) for at in found)
    return orders if dense else None


def packing_in(held: list[list[int]], spacing: int = 1) -> Packing:
    """`Packing` in landing memory. `held`: chunks of each memory; in source and target `spacing` apart."""

    def pack(pieces: Sequence[Piece]) -> list[Place]:
        places = []
        for piece in pieces:
            memory, offset = piece.place
            at = offset // spacing if memory <= TARGET else offset
            places.append(Place(LANDING, len(held[LANDING])))
            held[LANDING] += held[memory][at : at + piece.nbytes]
        return places

    return pack


def most_bytes(rounds: Rounds, wire: Wire, short: bool) -> Iterator[int]:
    """Most bytes of a chunk, for which messages are not cut between nodes, and, if `short`, fit a bounce buffer."""
    limits = {Kind.NET_SEND: call_binding.SEGMENT, Kind.NET_RECV: call_binding.SEGMENT}
    if short:
        limits |= {Kind.SEND: wire.part_bytes, Kind.RECV: wire.part_bytes}
    for one in flat(rounds):
        if one.nbytes and one.kind in limits:
            yield limits[one.kind] // one.nbytes


def scales(one: Instruction, short: bool) -> bool:
    """True if the operands of an instruction are ranges of chunks, few enough to be sent by their addresses."""
    places = (place for operand in one.operands for place in operand[1:])
    fits = short or one.kind != Kind.SEND or len(one.operands) <= ADDRESSES
    # a CALL is bound to ranges of fixed bytes
    return fits and one.kind != Kind.CALL and all(place == NOWHERE or place.memory <= LANDING for place in places)
