"""Hardware resources of a rank: cores, BLAS threads, memory and peak floating-point performance."""

import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.transport.memory.memory_limits import ControlGroup, control_groups
from collectives.units import format_bytes
from parallel.nn.kernels.storage import product_dtype
from parallel.runtime.collective_errors import raise_on_all
from parallel.runtime.vector_memory import namespace


@contextmanager
def _node(comm: MPI.Intracomm) -> Iterator[MPI.Comm]:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        yield node
    finally:
        node.Free()


def _cores(node: MPI.Comm) -> tuple[int, int]:
    """Return the number of cores that this rank may use, and that all ranks of `node` together may use. Collective."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len(mine), len(frozenset().union(*node.allgather(frozenset(mine))))


def cores_per_rank(comm: MPI.Intracomm, most: int | None = None) -> int:
    """Cores that `comm`'s ranks on this node may use together, per rank. At least 1, at most this rank's. Collective.

    `most` is the number that a scheduler has given to this node's ranks, if they are not bound to them.
    """
    with _node(comm) as node:
        mine, cores = _cores(node)
        return max(1, min(mine, min(cores, most or cores) // node.Get_size()))


def node_count(comm: MPI.Intracomm) -> int:
    """Number of nodes of `comm`'s ranks. Collective."""
    with _node(comm) as node:
        return int(comm.allreduce(int(node.Get_rank() == 0)))


def crowd(comm: MPI.Intracomm, threads: int) -> str | None:
    """Remark if the ranks of a node, of `threads` threads each, have more threads than cores, else None. Collective."""
    with _node(comm) as node:
        cores, ranks, total = _cores(node)[1], node.Get_size(), node.allreduce(threads)
    worst = max(comm.allgather((total / cores, total, ranks, cores)))
    if worst[0] <= 1:
        return None
    _, total, ranks, cores = worst
    have = f"{ranks} ranks of a node have {total} thread{'s' * (total > 1)} on {cores} core{'s' * (cores > 1)}"
    return f"{have}: they take turns, so speed and communication are not those of a core for each"


def limit_threads(threads: int) -> None:
    """Set the number of BLAS threads of this process. ImportError without threadpoolctl."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ImportError("BLAS threads are set with threadpoolctl: pip install 'chorus-mpi[train]'") from error
    threadpool_limits(threads)


def node_memory() -> int:
    """Bytes of physical memory of this node, not the limit of a container or job. 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def container_limits(groups: Iterable[ControlGroup]) -> dict[Hashable, int]:
    """Memory limits of control groups in bytes. The keys are the same in all processes of a group."""
    limits: dict[Hashable, int] = {}
    for group in groups:
        with suppress(OSError, ValueError):
            found = group.folder.stat()
            limits[found.st_dev, found.st_ino] = group.limit
    return limits


def check_memory(comm: MPI.Intracomm, kinds: Mapping[str, int]) -> None:
    """Raise ValueError on all ranks if a node or container lacks memory for its ranks, of bytes in `kinds`. Collective.

    Limits of control groups (containers, jobs) apply to the ranks of the same group.
    """
    mine, limits = sum(kinds.values()), {"node": node_memory() or math.inf} | container_limits(control_groups())
    with _node(comm) as node:
        ranks = node.allgather((mine, frozenset(limits)))
    problem = None
    for place, limit in sorted(limits.items(), key=lambda item: item[1]):
        inside = [needed for needed, places in ranks if place in places]
        if sum(inside) > limit:
            problem = _too_little(kinds, inside, "node" if place == "node" else "container", int(limit))
            break
    raise_on_all(comm, problem, "not enough memory")


def _too_little(kinds: Mapping[str, int], needed: list[int], place: str, limit: int) -> ValueError:
    largest = sorted(kinds, key=lambda name: -kinds[name])[:3]
    most = ", ".join(f"{name} {format_bytes(kinds[name])}" for name in largest)
    ranks = len(needed)
    several = f"{ranks} ranks of a {place} need {format_bytes(sum(needed))}, each" if ranks > 1 else "it needs"
    return ValueError(
        f"{several} {format_bytes(sum(kinds.values()))} ({most}), and the {place} has {format_bytes(limit)}; "
        "a smaller model, length or micro-batch may do, or recompute"
    )


MATRIX_SIZE = {"cpu": 512, "cuda": 4096}
WINDOWS = 4
"""Measurements of the peak. The highest counts."""


def peak_flops(
    comm: MPI.Intracomm, device: str = "cpu", *, dtype: Any = np.float32, trains: bool = True, seconds: float = 0.4
) -> float:
    """Measure peak FLOP/s (multiplications and additions) of all ranks that train, by matrix products. Collective.

    All multiply at once, in the dtype in which `parallel.nn` multiplies arrays of `dtype`, and their rates are added:
    ranks that share cores, execution units of a core, or a GPU have the peak of these together. Other programs on the
    machine lower it.
    """
    xp = namespace(device)
    n, kind = MATRIX_SIZE[device], product_dtype(np.dtype(dtype), xp)
    a, b = xp.ones((n, n), kind), xp.full((n, n), 0.5, kind)
    out, rates = a @ b, np.zeros(WINDOWS)

    def multiply() -> None:
        xp.matmul(a, b, out=out)
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()

    for window in range(WINDOWS):
        comm.Barrier()
        rates[window] = _calls_per_second(multiply, seconds / WINDOWS) if trains else 0.0
    return float(2 * n**3 * comm.allreduce(rates).max())


def _calls_per_second(call: Callable[[], None], seconds: float) -> float:
    """Number of calls per second, from those in `seconds`, at least one."""
    began, calls, elapsed = time.perf_counter(), 0, 0.0
    while not calls or elapsed < seconds:
        call()
        calls, elapsed = calls + 1, time.perf_counter() - began
    return calls / elapsed
