"""Speed of copies between the ranks of a node: through shared memory, or out of the sender's process.

Between cores that share a cache, a copy through shared memory is the faster one, as it needs no system call. Between
other cores every store to a line that the receiver has read waits until that core has given it up, and both cost the
same at a few KiB already. A virtual machine may move from one state to the other. So the first messages go by what was
measured at the creation of a communicator, and compiled code measures the later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

if TYPE_CHECKING:
    from collectives.transport.mailbox import NodeMemory

NBYTES = 1 << 16
"""Bytes of a copy."""

TURNS = 7
"""Copies of each kind, of which the median counts."""

SLOW = 1.6
"""A copy into shared memory is slow if it takes this many times as long as the read of the sender's memory."""

NEVER = 1 << 40
"""More nanoseconds than any copy takes."""


def measure(node: NodeMemory) -> tuple[int, bool]:
    """Return the nanoseconds from which copying `NBYTES` into a cell is slow, and whether it is. Collective."""
    left = node.place - 1
    nbytes = min(NBYTES, node.cells[0])
    cell = node.offsets[0] + node.size * node.box  # the first one; its owner's messages have not begun
    mine, source, target = node.bytes[node.place], np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    origin = node.comm.allgather(MPI.Get_address(source))[left]
    steps: list[Callable[[], object]] = [
        partial(np.copyto, mine[cell : cell + nbytes], source),
        partial(np.copyto, target, node.bytes[left][cell : cell + nbytes]),  # so that the next copy finds lines read
        partial(node.readers[left].read, MPI.Get_address(target), origin, nbytes),
    ]
    times = np.zeros((TURNS, len(steps)))
    for turn in range(TURNS):
        for number, step in enumerate(steps):
            node.comm.Barrier()
            start = time.perf_counter_ns()
            step()
            times[turn, number] = time.perf_counter_ns() - start
    write, _, read = np.median(times, axis=0)
    return int(SLOW * read * NBYTES / nbytes), bool(write > SLOW * read)
