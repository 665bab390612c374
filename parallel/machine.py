"""What a rank may use of its machine: how many BLAS threads, and how fast these could be at best."""

from __future__ import annotations

import os
import time

import numpy as np
from mpi4py import MPI

from parallel.memory import namespace

SECONDS = 0.2
SIZE = {"cpu": 512, "cuda": 4096}


def cores_per_rank(comm: MPI.Intracomm) -> int:
    """Cores of the node, shared out evenly to its ranks; at least 1, no more than this rank may run on. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        everyone = node.allgather(frozenset(mine))
        return max(1, min(len(everyone[node.Get_rank()]), len(frozenset().union(*everyone)) // len(everyone)))
    finally:
        node.Free()


def limit_threads(threads: int) -> None:
    """Let the BLAS of this process use so many threads from now on; raises ImportError without threadpoolctl."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ImportError("BLAS threads are set with threadpoolctl: pip install 'chorus-mpi[train]'") from error
    threadpool_limits(threads)


def peak(comm: MPI.Intracomm, device: str = "cpu", seconds: float = SECONDS) -> float:
    """Multiplications and additions a second of all ranks together, in products of float32 matrices. Collective.

    All ranks multiply at once, each for `seconds`; the fastest product of each counts.
    """
    xp = namespace(device)
    n = SIZE[device]
    a, b = xp.ones((n, n), np.float32), xp.full((n, n), 0.5, np.float32)
    out = a @ b
    comm.Barrier()
    best, end = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        xp.matmul(a, b, out=out)
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()
        best = min(best, time.perf_counter() - began)
    return float(comm.allreduce(2 * n**3 / best))
