"""Exchange of block lengths that only some ranks know, by the schedule of the blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.algorithms.catalog import build, find
from collectives.runtime.binder import bind
from collectives.runtime.call import Call
from collectives.runtime.program import TARGET, ElementArray, Program, Task
from collectives.schedule.chunks import MemorySpan
from collectives.schedule.topology import Nodes
from collectives.selection.timing_table import NATIVE, AlgorithmChoice
from collectives.transport.wire import Wire


class CountExchange(NamedTuple):
    """Program that sends block lengths along the paths of the blocks, for ranks that forward blocks.

    `known`: units in every block that this rank sends, forwards or receives.
    """

    known: np.ndarray
    program: Program

    def load(self, call: Call) -> None:
        """Set the lengths of the blocks that the rank sends."""
        for block in call.send_blocks:
            self.known[block] = call.lengths[block]

    def with_counts(self, call: Call) -> Call:
        """The call with the exchanged lengths; those of received blocks are known from the call."""
        lengths = self.known.tolist()
        for block in call.recv_blocks:
            lengths[block] = call.lengths[block]
        return call._replace(lengths=tuple(lengths), local_counts=False)


def needs_counts(call: Call, choice: AlgorithmChoice) -> bool:
    """True if ranks forward blocks whose lengths they do not know."""
    if not call.local_counts or choice.algorithm == NATIVE:
        return False
    return not find(call.collective, choice.algorithm).private


def bind_count_exchange(
    call: Call, choice: AlgorithmChoice, rank: int, size: int, wire: Wire, nodes: Nodes | None
) -> CountExchange:
    """Exchange of the call's block lengths: one number per block."""
    count = len(call.lengths)
    schedule = build(call.collective, choice.algorithm, rank, size, call.root, 1, nodes)
    places = {block: MemorySpan(TARGET, block, block + 1) for block in range(count)}
    sent = {block: places[block] for block in call.send_blocks}
    known = np.zeros(count, np.int64)
    memory = ElementArray(known, MPI.Get_address(known))
    task = Task(schedule, (1,) * count, sent, places, known.itemsize)
    return CountExchange(known, bind(task, memory, memory, wire))
