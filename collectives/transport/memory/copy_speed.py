"""Speed of messages between the ranks of a node: of flags, and of copies through shared memory or cross-memory reads.

Between cores that share a cache, a copy through shared memory is often faster: it needs no system call. Between other
cores every store must first invalidate the cache line that the receiver has read. From a few KiB on, such a copy is no
faster than a read of the sender's memory. A virtual machine may be moved between such cores. Non-temporal stores
(compiled code on x86) do not wait. A measurement decides when the ranks first share memory.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.cross_memory import CrossMemoryAttach
from collectives.engine.extension import available
from collectives.engine.fence import memory_fence
from collectives.transport.mpi.reduced import gathered

NBYTES = SCRATCH = 1 << 18
"""Bytes of a copy: enough to hide the start of a system call. And bytes of shared memory that this takes."""

REPEATS = 7
"""Copies of each kind. Their median decides what is slow. The fastest counts as the speed of the machine."""

SLOW_RATIO = 1.6
"""A copy into shared memory is slow if it takes this many times as long as the read of the sender's memory."""

PARTS_RATIO = 1.15
"""Least ratio of two copies through bounce buffers to the copies alone: each part has a flag to wait for."""

TURNS = 300
"""Round trips of a flag. The fastest counts."""

FLAG_SECONDS = 5e-3
"""Limit of the time for all round trips. It is reached only if the two ranks do not run at once."""


class MessageSpeed(NamedTuple):
    """Seconds of the parts of a message within a node. 0 if not measured, infinite if not possible."""

    round_trip: float = 0.0  #: of a flag between two ranks
    write: float = 0.0  #: of a byte into a bounce buffer in shared memory
    read: float = 0.0  #: of a byte out of a bounce buffer
    by_address: float = 0.0  #: of a byte out of the sender's process
    late: float = 0.0  #: from rank 0's exit from an MPI barrier to the exit of the node's slowest rank (median)

    @property
    def one_copy_pays(self) -> bool:
        """True if a cross-memory read takes less time than two copies through bounce buffers, in parts."""
        return 0 < self.by_address <= PARTS_RATIO * (self.write + self.read)

    def slowest(self, comm: MPI.Intracomm) -> MessageSpeed:
        """Largest values over all ranks, the same on all of them. Collective."""
        largest = np.empty(len(self))
        comm.Allreduce(np.array(self), largest, MPI.MAX)
        return MessageSpeed(*largest.tolist())


IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def copies_past_caches() -> bool:
    """True if the engine copies into shared memory by non-temporal stores."""
    return IS_X86 and available()


def measure(
    comm: MPI.Intracomm, memory: Sequence[np.ndarray], readers: Sequence[CrossMemoryAttach] | None
) -> tuple[bool, MessageSpeed]:
    """Return (True if copying into shared memory is slow, speed) of the ranks of a node. Collective.

    All ranks copy at once, like in a collective. The speed is this rank's. `memory`: `SCRATCH` bytes of each rank,
    mapped by all. `readers`: access to the memory of the ranks' processes, None if that is not permitted.
    """
    place = comm.Get_rank()
    left = place - 1  # -1, the last rank, for rank 0
    round_trip = _flag_round_trip(comm, [each[:8].view(np.int64).data for each in memory])
    source, target = np.ones(NBYTES, np.uint8), np.empty(NBYTES, np.uint8)
    origin = gathered(comm, MPI.Get_address(source))[left]
    steps: list[Callable[[], object]] = [
        partial(np.copyto, memory[place][:NBYTES], source),
        partial(np.copyto, target, memory[left][:NBYTES]),  # as a receiver does
    ]
    if readers is not None:
        steps.append(partial(readers[left].read, MPI.Get_address(target), origin, NBYTES))
    times, left_barrier = np.full((REPEATS, 3), np.inf), np.zeros((REPEATS, 3))
    for turn in range(REPEATS):
        for number, step in enumerate(steps):
            comm.Barrier()  # the neighbour has read `source`
            source.fill(turn)  # into this core's cache, as the data of a message mostly is
            comm.Barrier()
            left_barrier[turn, number] = start = time.perf_counter_ns()
            step()
            times[turn, number] = time.perf_counter_ns() - start
    first = comm.allgather(left_barrier)[0]  # this also waits for the peer that reads `source`
    late = np.median((left_barrier - first)[:, : len(steps)])
    write, read, by_address = (times.min(axis=0) / NBYTES * 1e-9).tolist()
    speed = MessageSpeed(round_trip, write, read, by_address, max(0.0, float(late) * 1e-9))
    if readers is None:
        return False, speed
    copied, _, taken = np.median(times, axis=0)
    return bool(copied > SLOW_RATIO * taken), speed


def _flag_round_trip(comm: MPI.Intracomm, flags: Sequence[memoryview]) -> float:
    """Least seconds in which a rank's flag goes to a neighbour, and the neighbour's back. 0 without one.

    Collective.
    """
    place, fence = comm.Get_rank(), memory_fence()
    peer, mine = place ^ 1, flags[place]
    mine[0] = 0
    comm.Barrier()
    if peer >= len(flags):
        return 0.0
    theirs, first = flags[peer], peer > place
    least, start = float("inf"), time.perf_counter()
    end = start + FLAG_SECONDS
    for turn in range(1, TURNS):
        if first:
            mine[0] = turn
        while theirs[0] != turn:  # the peer may have reached its limit
            fence()
            if time.perf_counter() > end:
                return least
        if not first:
            mine[0] = turn
        now = time.perf_counter()
        least, start = min(least, now - start), now
    return least
