"""Measure the bandwidth of allreduce and broadcast with CuPy arrays.

    mpiexec -n 2 python scripts/gpu_bandwidth.py [--sizes 64K:64M] [--direct]

Each size is measured for NumPy arrays, for CuPy arrays staged in host memory, moved through
pinned shared memory where that is possible, and, if the MPI is CUDA-aware or with
--direct, for CuPy arrays passed to MPI. Times are medians of the slowest rank; results are checked once.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.size_arguments import parse_sizes
from collectives.cli.launcher import ProgramParser, say
from collectives.transport.device import cuda_aware

BUDGET, MOST = 0.5, 100
"""Seconds and calls of a measurement."""


def seconds(world: MPI.Intracomm, call: Callable[[], object]) -> float:
    """Median seconds of a call on the slowest rank; all ranks make equally many calls."""

    def once() -> float:
        world.Barrier()
        start = time.perf_counter()
        call()
        return float(world.allreduce(time.perf_counter() - start, MPI.MAX))

    first = max(once(), once(), 1e-6)
    return statistics.median(once() for _ in range(max(3, min(MOST, int(BUDGET / first)))))


def main() -> int:
    """Measure and print the table; return 1 if a result was wrong, else 0."""
    parser = ProgramParser(__doc__)
    parser.add_argument("--sizes", type=parse_sizes, default="64K:64M:4", help="bytes, as in bench_collectives.py")
    parser.add_argument("--direct", action="store_true", help="hand device memory over whatever the MPI says")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    rank, size, cupy = world.Get_rank(), world.Get_size(), import_module("cupy")
    ways: dict[str, tuple[Communicator, Any]] = {
        "NumPy": (Communicator(world), np),
        "CuPy, staged": (Communicator(world, cuda_aware=False, gpu="staged"), cupy),
    }
    pinned = Communicator(world, cuda_aware=False, gpu="pinned")
    if pinned.device_transfer.startswith("pinned"):
        ways["CuPy, pinned"] = pinned, cupy
    if args.direct or cuda_aware():
        ways["CuPy, direct"] = (Communicator(world, cuda_aware=True), cupy)
    wrong = 0
    say(f"\n# float32, {size} ranks; algbw = size / time in 1e9 bytes a second")
    say(f"{'Size':>12} {'arrays':14} {'allreduce(us)':>14} {'algbw':>8} {'broadcast(us)':>14} {'algbw':>8}")
    for nbytes in args.sizes:
        for name, (comm, xp) in ways.items():
            n = max(1, nbytes // 4)
            x, y = xp.full(n, rank + 1, "f4"), xp.zeros(n, "f4")
            comm.Allreduce(x, y)
            wrong += not world.allreduce(bool((y == sum(range(1, size + 1))).all()), MPI.LAND)
            times = seconds(world, partial(comm.Allreduce, x, y)), seconds(world, partial(comm.Bcast, y))
            cells = (f"{spent * 1e6:14.1f} {nbytes / spent / 1e9:8.2f}" for spent in times)
            say(f"{nbytes:12} {name:14} {' '.join(cells)}")
    if wrong:
        say(f"{wrong} results were wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
