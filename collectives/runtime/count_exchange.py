"""Blocks whose lengths only some ranks know: the lengths go ahead, along the ways that the blocks will go."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.runtime.call import Call
from collectives.algorithms.catalog import build, find
from collectives.schedule.chunks import Place
from collectives.runtime.binder import TARGET, Memory, Program, Task, bind
from collectives.selection.timing_table import NATIVE, Choice
from collectives.schedule.topology import Nodes
from collectives.transport.wire import Wire


class Lengths(NamedTuple):
    """A program that sends the lengths of private blocks along the ways that the blocks will go.

    Whoever will pass a block on learns its length, so any schedule can do a call of which ranks know only their part.

    Attributes
    ----------
    known : numpy.ndarray of int64
        Units in every block, as far as this rank has to do with it.
    program : Program
        What makes it so, once `tell` has put in what the call says.
    """

    known: np.ndarray
    program: Program

    def tell(self, call: Call) -> None:
        """Put in the lengths of the blocks that the rank brings."""
        for block in call.brings:
            self.known[block] = call.lengths[block]

    def learned(self, call: Call) -> Call:
        """The call with all lengths that matter here; those of the blocks that it takes the call says itself."""
        lengths = self.known.tolist()
        for block in call.takes:
            lengths[block] = call.lengths[block]
        return call._replace(lengths=tuple(lengths), private=False)


def learns(call: Call, choice: Choice) -> bool:
    """Whether ranks must be told the lengths of blocks that they have to pass on."""
    if not call.private or choice.algorithm == NATIVE:
        return False
    return not find(call.collective, choice.algorithm).private


def asking(call: Call, choice: Choice, rank: int, size: int, wire: Wire, nodes: Nodes | None) -> Lengths:
    """The lengths of a call's blocks as a call of its own: a number for every block."""
    count = len(call.lengths)
    schedule = build(call.collective, choice.algorithm, rank, size, call.root, 1, nodes)
    places = {block: Place(TARGET, block, block + 1) for block in range(count)}
    brought = {block: places[block] for block in call.brings}
    known = np.zeros(count, np.int64)
    memory = Memory(known, MPI.Get_address(known))
    task = Task(schedule, (1,) * count, brought, places, known.itemsize)
    return Lengths(known, bind(task, memory, memory, wire))
