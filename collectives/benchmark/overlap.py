"""Share of a non-blocking collective's time that is hidden beside other work of the program."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.cases import CASES, DTYPES, CaseBuffers, elements
from collectives.benchmark.measure import enter
from collectives.benchmark.timing import MODES
from collectives.selection.timing_table import NATIVE

TURNS = 15
LENGTH = 256
"""Rows and columns of the matrices that are multiplied as work."""


def works(plain: MPI.Intracomm, milliseconds: float) -> dict[str, Callable[[], Any]]:
    """Work of this length by name: to sleep, which leaves the core to others, and matrix products. Collective."""
    left, out = np.ones((2, LENGTH, LENGTH))

    def multiply(count: int) -> None:
        for _ in range(count):
            np.matmul(left, left, out=out)

    multiply(10)
    least = min(slowest_ms(plain, partial(multiply, 10)) for _ in range(5)) / 10
    count = max(1, round(milliseconds / least))
    return {"sleep": partial(time.sleep, milliseconds / 1e3), "matmul": partial(multiply, count)}


def slowest_ms(plain: MPI.Intracomm, call: Callable[[], Any]) -> float:
    """Milliseconds of a call on the slowest rank; a barrier precedes it. Collective."""
    plain.Barrier()
    start = time.perf_counter()
    call()
    return float(plain.allreduce(time.perf_counter() - start, MPI.MAX)) * 1e3


def hidden_share(alone: float, work: float, both: float) -> float:
    """Share of a collective's time that both together do not take longer than the work, from 0 to 1."""
    return min(1.0, max(0.0, 1 - (both - work) / alone)) if alone else 0.0


def overlap_lines(plain: MPI.Intracomm, collective: str, nbytes: int, dtype: str, milliseconds: float) -> Iterator[str]:
    """Yield a line for each communicator and kind of work: medians in ms, and `hidden_share`. Collective.

    A communicator that refuses the call has a line with the reason.
    """
    case, kind = CASES[collective], DTYPES[dtype]
    ours = {"Chorus": False, "async_progress": True}
    comms: dict[str, Any] = {name: Communicator(plain, async_progress=value) for name, value in ours.items()}
    for name, comm in {"MPI": plain, **comms}.items():
        buffers = CaseBuffers(case, comm, elements(case, nbytes, kind.itemsize, plain.Get_size()), kind)
        entry = enter(plain, comm, NATIVE if comm is plain else name, {}, buffers, MODES[1])
        if isinstance(entry, str):
            yield f"{name:>14} refused: {entry}"
            continue
        start = partial(getattr(comm, f"I{case.method.lower()}"), *buffers.args)
        for label, work in works(plain, milliseconds).items():

            def both(start: Any = start, work: Any = work) -> None:
                request = start()
                work()
                request.Wait()

            calls = (lambda start=start: start().Wait(), work, both)
            times = [[slowest_ms(plain, call) for call in calls] for _ in range(TURNS)]
            alone, busy, joint = np.median(times[2:], axis=0)
            share = hidden_share(alone, busy, joint)
            yield f"{name:>14} {label:>7} {alone:8.2f} {busy:8.2f} {joint:8.2f} {share:7.0%}"
    for comm in comms.values():
        comm.close()
