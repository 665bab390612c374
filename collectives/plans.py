"""From a call to a program that runs: bound once, kept while it is of use, bounded in number and memory.

Small calls pass through slots that the program owns, since copying a few bytes costs less than binding to every new
address; larger ones are bound to the user's own memory, and nothing is copied that the algorithm does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import buffers
from collectives.calls import Blocks, Call, staged
from collectives.catalog import build
from collectives.chunks import Layout, Place, even
from collectives.execute import SOURCE, TARGET, Memory, Program, Task, bind
from collectives.select import Choice
from collectives.semantics import MEANINGS
from collectives.staging import Staging, stage
from collectives.transport.mpi import Immediate, Persistent

SLOT = 4096
"""Bytes up to which a blocking call passes through slots."""

SEGMENT = 1 << 18
"""Bytes in which a long message that is to be combined travels: two fit the second-level cache."""

KEPT = 256
"""Programs that are kept for calls to come."""

KEPT_BYTES = 1 << 28
"""Scratch memory that kept programs may hold together."""

LINE = 64
"""Bytes to whose multiples a vector is cut where it is long enough."""

BLOCKING_TAG = 0
"""The tag of blocking calls, of which a communicator has one at a time; all others have one of their own."""


def task(call: Call, choice: Choice, rank: int, size: int) -> Task:
    """The schedule of the choice, laid over the call's memory."""
    schedule = build(call.collective, choice.algorithm, rank, size, call.root, choice.segments)
    itemsize = call.unit.itemsize
    memory = TARGET if call.source is call.target else SOURCE
    meaning = MEANINGS[call.collective]
    if meaning.vector:
        lengths = even(call.lengths[0], meaning.blocks(size) * choice.segments, max(1, LINE // itemsize))
        starts = dict(enumerate(Layout.packed(lengths).offsets))
        source = _places(memory, starts if call.brings else {}, lengths, 1)
        target = _places(TARGET, starts if call.takes else {}, lengths, 1)
    else:
        blocks = call.lengths * (meaning.blocks(size) // len(call.lengths))
        lengths = tuple(piece for length in blocks for piece in even(length, choice.segments))
        source = _places(memory, call.brings, lengths, choice.segments)
        target = _places(TARGET, call.takes, lengths, choice.segments)
    return Task(schedule, lengths, source, target, itemsize, SEGMENT if call.combine else 0)


def _places(memory: int, blocks: Blocks, lengths: tuple[int, ...], parts: int) -> dict[int, Place]:
    places = {}
    for block, start in blocks.items():
        for chunk in range(block * parts, (block + 1) * parts):
            places[chunk] = Place(memory, start, start + lengths[chunk])
            start += lengths[chunk]
    return places


class _Slots(NamedTuple):
    """A program on memory of its own, to copy into before it runs and out of after."""

    program: Program
    source: np.ndarray
    target: np.ndarray
    loads: bool
    stores: bool


class Plans:
    """The programs of one communicator, over one private communicator of the MPI underneath.

    Parameters
    ----------
    comm : MPI.Intracomm
        Used for nothing else, so that messages never meet the user's. Freed by `free`.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._bound: dict[Hashable, Program | _Slots] = {}
        self._idle: dict[Hashable, list[Program]] = {}
        self._foreign: set[Program] = set()
        self._held = 0
        self._calls = 0
        self._inits = 0
        self._tags = comm.Get_attr(MPI.TAG_UB)

    # -------------------------------------------------------------------------------- the three forms

    def run(self, call: Call, choice: Choice) -> None:
        """Do a blocking call."""
'''
open('collectives/plans.py','w').write(s) if False else None
