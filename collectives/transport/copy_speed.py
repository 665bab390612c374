"""Speed of copies between the ranks of a node: through shared memory, or out of the sender's process.

Between cores that share a cache, a copy through shared memory is faster, as it needs no system call. Between other
cores every store must first invalidate the cache line that the receiver has read; from a few KiB on, such a copy is no
faster than a read of the sender's memory. A virtual machine may be moved between such cores. The limit is therefore set
by a measurement at the creation of a communicator, and compiled code updates it by timing its copies.
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

REPEATS = 7
"""Copies of each kind, of which the median counts."""

SLOW_RATIO = 1.6
"""A copy into shared memory is slow if it takes this many times as long as the read of the sender's memory."""

NO_LIMIT = 1 << 40
"""More nanoseconds than any copy takes."""


def measure_copy(node: NodeMemory) -> tuple[int, bool]:
    """Return (nanoseconds from which copying `NBYTES` into a cell is slow, True if it is now). Collective."""
    left = node.place - 1  # -1, the last rank, for rank 0
    nbytes = min(NBYTES, node.cells[0])
    cell = node.offsets[0] + node.size * node.box  # the first one, unused until the first message
    mine, source, target = node.bytes[node.place], np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    origin = node.comm.allgather(MPI.Get_address(source))[left]
    steps: list[Callable[[], object]] = [
        partial(np.copyto, mine[cell : cell + nbytes], source),
        partial(np.copyto, target, node.bytes[left][cell : cell + nbytes]),  # as a receiver does
        partial(node.readers[left].read, MPI.Get_address(target), origin, nbytes),
    ]
    times = np.zeros((REPEATS, len(steps)))
    for turn in range(REPEATS):
        for number, step in enumerate(steps):
            node.comm.Barrier()
            start = time.perf_counter_ns()
            step()
            times[turn, number] = time.perf_counter_ns() - start
    write, _, read = np.median(times, axis=0)
    return int(SLOW_RATIO * read * NBYTES / nbytes), bool(write > SLOW_RATIO * read)
