"""Timing of implementations against each other, in turns. A call's latency is the slowest rank's time."""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.benchmark.cases import CaseBuffers

MODES = ("blocking", "nonblocking", "persistent")
CHECKS = 5  # timed calls of each contestant whose result is checked, first and last included
FEWEST = 5  # timed calls, however slow they are


@dataclass
class Contestant:
    """One implementation of a collective to time: its name, buffers and call, and the times measured so far."""

    name: str
    buffers: CaseBuffers
    call: Callable[[], Any]
    close: Callable[[], Any] = lambda: None
    nanoseconds: list[int] = field(default_factory=list)
    wrong: int = 0


class Timing(NamedTuple):
    """Summary of one contestant's timed calls: latencies in microseconds, and wrong elements over all ranks."""

    median: float
    p99: float  # a latency that occurred, never an interpolation
    low: float
    high: float
    iterations: int
    wrong: int


def summarise(microseconds: NDArray[np.float64], wrong: int = 0) -> Timing:
    low, median, high = map(float, np.quantile(microseconds, (0, 0.5, 1)))
    p99 = float(np.percentile(microseconds, 99, method="higher"))
    return Timing(median, p99, low, high, len(microseconds), wrong)


def make_call(
    comm: MPI.Intracomm, method: str, mode: str, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two functions: one that performs a complete collective in `mode`, and one that frees its request, if any."""
    if mode == "persistent":
        request = getattr(comm, method + "_init")(*args, **keywords)

        def restart() -> None:
            request.Start()
            request.Wait()

        return restart, request.Free
    if mode == "nonblocking":
        start = partial(getattr(comm, "I" + method.lower()), *args, **keywords)
        return lambda: start().Wait(), lambda: None
    return partial(getattr(comm, method), *args, **keywords), lambda: None


def checkpoints(iterations: int) -> set[int]:
    """Indices of the iterations whose results are checked: the first, the last, and some evenly between.

    >>> sorted(checkpoints(100))
    [0, 25, 50, 74, 99]
    """
    return {round(i * (iterations - 1) / (CHECKS - 1)) for i in range(CHECKS)}


def race(
    comm: MPI.Intracomm,
    contestants: list[Contestant],
    *,
    iterations: int = 1000,
    warmup: int = 10,
    seconds: float = 1.0,
) -> list[Timing]:
    """Time all contestants in turns. Return their timings in the order of `contestants`, equal on all ranks.

    The native barrier of `comm` precedes every call. `iterations` and `warmup` are timed and untimed calls of each
    contestant, at most. After `seconds` per contestant fewer timed calls are made, but never less than five.
    The contestants, at least one, are the same on all ranks.
    """
    order, turns = random.Random(1), list(contestants)
    budget = seconds * len(contestants)

    def turn_seconds(count: int, keep: bool = False) -> float:
        """Run `count` turns (every contestant once, in random order, on new data). Return mean seconds per turn."""
        checked, since = checkpoints(count), time.perf_counter()
        for iteration in range(count):
            order.shuffle(turns)
            for contestant in turns:
                contestant.buffers.advance()
                if iteration in checked:
                    contestant.buffers.poison()
                call, clock = contestant.call, time.perf_counter_ns
                comm.Barrier()
                begin = clock()
                call()
                elapsed = clock() - begin
                if keep:
                    contestant.nanoseconds.append(elapsed)
                if iteration in checked:
                    contestant.wrong += contestant.buffers.wrong()
        return float(comm.allreduce(time.perf_counter() - since, MPI.MAX)) / count

    turn_seconds(1)
    one = turn_seconds(1)
    if (more := min(warmup - 2, int(budget / 4 / one))) > 1:
        turn_seconds(more - more // 2)  # code may be loaded in these
        one = turn_seconds(more // 2)
    gc.collect()
    turn_seconds(min(iterations, max(FEWEST, int(budget / one))), keep=True)

    timings = []
    for contestant in contestants:
        slowest = np.array(contestant.nanoseconds, np.int64)
        comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        timings.append(summarise(slowest / 1e3, comm.allreduce(contestant.wrong)))
    return timings
