"""Speed of messages between the ranks of a node: of flags, and of copies through shared memory or out of the sender.

Between cores that share a cache, a copy through shared memory is often faster: it needs no system call. Between other
cores every store must first invalidate the cache line that the receiver has read; from a few KiB on, such a copy is no
faster than a read of the sender's memory. A virtual machine may be moved between such cores. Stores past the caches,
which compiled code makes on x86, do not wait. A measurement at the creation of a communicator decides.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.extension import available

if TYPE_CHECKING:
    from collectives.transport.mailbox import NodeMemory

NBYTES = 1 << 18
"""Bytes of a copy: enough to hide the start of a system call."""

REPEATS = 7
"""Copies of each kind. Their median decides what is slow; the fastest counts as the speed of the machine."""

SLOW_RATIO = 1.6
"""A copy into shared memory is slow if it takes this many times as long as the read of the sender's memory."""

PARTS_RATIO = 1.15
"""Time of two copies through cells over that of the copies alone, at least: each part has a flag to wait for."""

TURNS = 300
"""Round trips of a flag, of which the fastest counts."""

FLAG_SECONDS = 5e-3
"""Limit of the time for all round trips; it is reached only if the two ranks do not run at once."""


class MessageSpeed(NamedTuple):
    """Seconds of the parts of a message within a node; 0 if not measured, infinite if not possible."""

    round_trip: float = 0.0  #: of a flag between two ranks
    write: float = 0.0  #: of a byte into a cell in shared memory
    read: float = 0.0  #: of a byte out of a cell
    by_address: float = 0.0  #: of a byte out of the sender's process
    late: float = 0.0  #: from rank 0's leaving of a barrier of MPI to that of the node's slowest rank (median)

    @property
    def one_copy_pays(self) -> bool:
        """True if a copy out of the sender takes less time than two copies through cells, in parts."""
        return 0 < self.by_address <= PARTS_RATIO * (self.write + self.read)

    def slowest(self, comm: MPI.Intracomm) -> MessageSpeed:
        """Largest values over all ranks, the same on all of them. Collective."""
        largest = np.empty(len(self))
        comm.Allreduce(np.array(self), largest, MPI.MAX)
        return MessageSpeed(*largest.tolist())


IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@cache
def copies_past_caches() -> bool:
    """True if the engine copies into shared memory by non-temporal stores."""
    return IS_X86 and available()


def measure(node: NodeMemory, room: int) -> tuple[bool, MessageSpeed]:
    """Return (True if copying into a cell is slow, speed). Collective.

    All ranks of the node copy at once, as in a collective. The speed is that of this rank. `room`: bytes of the cells.
    """
    left = node.place - 1  # -1, the last rank, for rank 0
    nbytes = min(NBYTES, room)
    cell = node.offsets[0] + node.size * node.box  # the first one, unused until the first message
    round_trip = _flag_round_trip(node, cell // 8)
    mine, source, target = node.bytes[node.place], np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    origin = node.comm.allgather(MPI.Get_address(source))[left]
    steps: list[Callable[[], object]] = [
        partial(np.copyto, mine[cell : cell + nbytes], source),
        partial(np.copyto, target, node.bytes[left][cell : cell + nbytes]),  # as a receiver does
    ]
    if node.reads:
        steps.append(partial(node.readers[left].read, MPI.Get_address(target), origin, nbytes))
    times, left_barrier = np.full((REPEATS, 3), np.inf), np.zeros((REPEATS, 3))
    for turn in range(REPEATS):
        for number, step in enumerate(steps):
            node.comm.Barrier()  # the neighbour has read `source`
            source.fill(turn)  # into this core's cache, as the data of a message mostly is
            node.comm.Barrier()
            left_barrier[turn, number] = start = time.perf_counter_ns()
            step()
            times[turn, number] = time.perf_counter_ns() - start
    first = node.comm.allgather(left_barrier)[0]  # this also waits for the peer that reads `source`
    late = np.median((left_barrier - first)[:, : len(steps)])
    write, read, by_address = (times.min(axis=0) / nbytes * 1e-9).tolist()
    speed = MessageSpeed(round_trip, write, read, by_address, max(0.0, float(late) * 1e-9))
    if not node.reads:
        return False, speed
    copied, _, taken = np.median(times, axis=0)
    return bool(copied > SLOW_RATIO * taken), speed


def _flag_round_trip(node: NodeMemory, word: int) -> float:
    """Least seconds in which a flag at `word` of the mailboxes goes to a neighbour and back; 0 without. Collective."""
    peer = node.place ^ 1
    mine = node.words[node.place]
    mine[word] = 0
    node.comm.Barrier()
    if peer >= node.size:
        return 0.0
    theirs, first, fence = node.words[peer], peer > node.place, node.fence or (lambda: None)
    least, start = float("inf"), time.perf_counter()
    end = start + FLAG_SECONDS
    for turn in range(1, TURNS):
        if first:
            mine[word] = turn
        while theirs[word] != turn:  # the peer may have reached its limit
            fence()
            if time.perf_counter() > end:
                return least
        if not first:
            mine[word] = turn
        now = time.perf_counter()
        least, start = min(least, now - start), now
    return least
