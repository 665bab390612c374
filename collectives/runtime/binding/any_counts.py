"""Programs for any counts: one program runs all calls of a v-form that differ only in counts and displacements.

Such a program is bound with blocks of one element that do not touch, so that each operand is a block. The engine takes
their places and bytes from the arguments of each call (`counts.c`, `scale.c`). The messages are those of a program that
was bound for the counts, so that ranks with either work together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np

from collectives.algorithms.catalog import find
from collectives.engine.assembly import flat
from collectives.engine.extension import available
from collectives.engine.instructions import SCRATCH
from collectives.runtime.arguments.call import Blocks, Call
from collectives.runtime.binding import call_binding
from collectives.runtime.binding.any_length import MOST_BYTES, most_bytes, packing_in, scales
from collectives.runtime.binding.binder import build
from collectives.runtime.binding.chunk_locations import ChunkLocations
from collectives.runtime.binding.local_work import LocalWork
from collectives.runtime.execution.program import Placement, Program
from collectives.runtime.execution.program_memory import ElementArray, Scale, ScratchMemory
from collectives.schedule.topology import Nodes
from collectives.selection.timing_table import NATIVE, AlgorithmChoice
from collectives.transport.wire import Wire

SPACING = 2
"""Distance of blocks of one element: `BLOCK_SPACING` of the engine."""

LENGTHS_KNOWN = "allgather", "reduce_scatter"
"""Collectives in whose v-forms every rank knows the lengths of all blocks."""

MOST_TOTAL = 1 << 31
"""Most bytes of a call."""


def sides(call: Call) -> tuple[list[int], list[int]]:
    """Blocks in the source and in the target of a call. In place, the target has both."""
    return [] if call.source is call.target else list(call.send_blocks), list(call.recv_blocks)


def key_of_counts(call: Call, choice: AlgorithmChoice) -> Hashable | None:
    """Key of programs for any counts that could run a call. None if there are none."""
    if not available() or choice.algorithm == NATIVE or choice.segments > 1:
        return None
    if call.neighbors is not None or call.typed or call.copy_input or call.separate_output:
        return None
    if not all(buffer.contiguous and buffer.itemsize and not buffer.device for buffer in call.buffers):
        return None
    if call.collective in LENGTHS_KNOWN:
        if call.combine is not None and call.combine.function is None:
            return None
    elif not find(call.collective, choice.algorithm).private:
        return None
    if call.source is call.target and not call.send_blocks.keys() <= call.recv_blocks.keys():
        return None
    blocks = tuple(map(tuple, sides(call)))
    return "any counts", call.collective, choice, call.unit, call.root, call.op, blocks, call.source is call.target


def fits(scale: Scale, call: Call) -> bool:
    """True if a program for any length or counts can run a call."""
    itemsize = call.unit.itemsize
    if scale.blocks is None:
        return scale.least <= call.lengths[0] <= scale.most
    return max(call.lengths) * itemsize <= scale.most and call.nbytes <= scale.total


def placement_of(program: Program, call: Call) -> Placement:
    """Arguments of `Program.place` for a call: also the places of all blocks in source and target, then their sizes."""
    memories = call_binding.memories(call)
    if program.scale is None or program.scale.blocks is None:
        return memories, call.lengths[0]
    sources, targets = sides(call)
    places = [*(call.send_blocks[one] for one in sources), *(call.recv_blocks[one] for one in targets)]
    sizes = [call.lengths[one] for one in (*sources, *targets)]
    return memories, np.array([*places, *sizes], np.int64) * call.unit.itemsize


def bind_any_counts(
    call: Call,
    choice: AlgorithmChoice,
    rank: int,
    size: int,
    wire: Wire,
    nodes: Nodes | None,
    scratch: ScratchMemory | None,
    short: bool,
) -> Program | None:
    """Build the program of a call for any counts. None if impossible. `short`: only for blocks in a bounce buffer."""
    sources, targets = sides(call)
    held_blocks = [sources, targets]
    wire.vary(short, packing_in(held_blocks, SPACING))
    ends = {block: SPACING * at for at, block in enumerate(targets)}
    starts = {block: SPACING * at for at, block in enumerate(sources)}

    def held(blocks: Blocks) -> Blocks:
        return {block: starts[block] if sources else ends[block] for block in blocks}

    spaced = call._replace(lengths=(1,) * len(call.lengths), send_blocks=held(call.send_blocks), recv_blocks=ends)
    task = call_binding.call_task(spaced, choice, rank, size, nodes)._replace(itemsize=1)
    work = LocalWork([ElementArray(np.empty(0, call.unit), 0)] * 4, 1, call.combine, None)
    chunks = ChunkLocations(task, wire, lands=work.lands)
    if work.lands:
        return None
    held_blocks += chunks.scratch_chunks, chunks.landing_chunks
    program = build(task.schedule, chunks, wire, work)
    passing = [block for blocks in held_blocks[SCRATCH:] for block in blocks]
    if not set(passing) <= {*sources, *targets}:
        return None
    if not all(scales(one, short) for one in flat(program.rounds)):
        return None
    work.allocate([MOST_BYTES // call.unit.itemsize if one else 0 for one in held_blocks[SCRATCH:]], scratch)
    program.hold(work.memories, work.nbytes * call.unit.itemsize)
    program.relocatable = True
    is_long = call.combine is None and not passing
    total = MOST_TOTAL if is_long else MOST_BYTES // max(Counter(passing).values(), default=1)
    most = min(most_bytes(program.rounds, wire, short), default=MOST_TOTAL)
    own = set(sources) & set(targets)
    record = Scale.record_of(
        wire,
        held_blocks,
        itemsize=1,
        mark=call_binding.mark_without_length(call, choice),
        mark_bytes=call.collective in LENGTHS_KNOWN,
        call_bytes=1,
        most=most,
        blocks=sum(map(len, held_blocks)),
        own=[-1, -1] if not own else [sources.index(min(own)), len(sources) + targets.index(min(own))],
        room=MOST_BYTES if passing else 0,
    )
    order = [*range(len(sources) + len(targets)), *map([*sources, *targets].index, passing)]
    program.scale = Scale(0, most, record, np.array(order, np.int64), (len(sources), len(targets)), total)
    return program
