"""Timing of a race: contestants take turns in random order; a call's latency is the slowest rank's time."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.benchmark.cases import CaseBuffers

MODES = ("blocking", "nonblocking", "persistent")
CHECKS = 5  # timed calls of each contestant whose result is checked, first and last included
FEWEST = 5  # timed calls, however slow they are


@dataclass
class Contestant:
    """One way to perform the collective: a name, its buffers, and the call itself."""

    name: str
    buffers: CaseBuffers
    call: Callable[[], Any]
    close: Callable[[], Any] = lambda: None
    nanoseconds: list[int] = field(default_factory=list)
    wrong: int = 0


@dataclass(frozen=True)
class Timing:
    """Latencies in microseconds of one contestant's timed calls, and its wrong elements over all ranks."""

    median: float
    p99: float
    low: float
    high: float
    mean: float
    iterations: int
    wrong: int


def summarise(microseconds: NDArray[np.float64], wrong: int = 0) -> Timing:
    """The statistics that the table shows; p99 is a latency that occurred, never an interpolation."""
    return Timing(
        median=float(np.median(microseconds)),
        p99=float(np.percentile(microseconds, 99, method="higher")),
        low=float(np.min(microseconds)),
        high=float(np.max(microseconds)),
        mean=float(np.mean(microseconds)),
        iterations=len(microseconds),
        wrong=wrong,
    )


def make_call(
    comm: MPI.Intracomm, method: str, mode: str, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A function that performs one complete collective in `mode`, and one that frees what it holds."""
    if mode == "persistent":
        request = getattr(comm, method + "_init")(*args, **keywords)

        def restart() -> None:
            request.Start()
            request.Wait()

        return restart, request.Free
    if mode == "nonblocking":
        start = getattr(comm, "I" + method[0].lower() + method[1:])
        return lambda: start(*args, **keywords).Wait(), lambda: None
    bound = getattr(comm, method)
    return (lambda: bound(*args, **keywords)) if keywords else (lambda: bound(*args)), lambda: None


def checkpoints(iterations: int) -> set[int]:
    """The iterations whose results are checked: the first, the last, and some evenly between.

    >>> sorted(checkpoints(100))
    [0, 25, 50, 74, 99]
    """
    return {round(i * (iterations - 1) / (CHECKS - 1)) for i in range(CHECKS)}


def _passes(comm: MPI.Intracomm, contestants: list[Contestant], count: int, order: random.Random, keep: bool) -> None:
    """`count` times: every contestant once, in random order, each on new data after one neutral barrier."""
    checked = checkpoints(count)
    turns = list(contestants)
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


def _agreed_seconds(comm: MPI.Intracomm, since: float) -> float:
    seconds = np.array(time.perf_counter() - since)
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return float(seconds)


def race(
    comm: MPI.Intracomm,
    contestants: list[Contestant],
    *,
    iterations: int = 1000,
    warmup: int = 10,
    seconds: float = 1.0,
    seed: int = 1,
) -> list[Timing]:
    """Time all contestants against each other within one run; timings are in their order, equal on all ranks.

    Parameters
    ----------
    comm
        The plain communicator: its native barrier precedes every call, and ranks agree on iteration counts over it.
    contestants
        At least one; the same ones in the same order on all ranks.
    iterations, warmup
        Timed and untimed calls per contestant, at most.
    seconds
        Time per contestant after which fewer iterations are made (never fewer than five).
    seed
        Seed of the random order; equal on all ranks.
    """
    order = random.Random(seed)
    budget = seconds * len(contestants)
    _passes(comm, contestants, 1, order, keep=False)
    since = time.perf_counter()
    _passes(comm, contestants, 1, order, keep=False)
    one = _agreed_seconds(comm, since)
    more = max(0, min(warmup - 2, int(budget / 4 / one)))
    since = time.perf_counter()
    _passes(comm, contestants, more, order, keep=False)
    one = _agreed_seconds(comm, since) / more if more else one
    gc.collect()
    _passes(comm, contestants, min(iterations, max(FEWEST, int(budget / one))), order, keep=True)

    timings = []
    for contestant in contestants:
        slowest = np.array(contestant.nanoseconds, np.int64)
        comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        wrong = np.array(contestant.wrong, np.int64)
        comm.Allreduce(MPI.IN_PLACE, wrong, MPI.SUM)
        timings.append(summarise(slowest / 1e3, int(wrong)))
    return timings
