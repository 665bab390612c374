"""Measure the bandwidth of allreduce and broadcast with CuPy arrays, and compare it with bounds.

    mpiexec -n 2 python scripts/gpu_bandwidth.py [--sizes 64K:256M] [--direct]

Each size is measured for NumPy arrays, and for CuPy arrays staged in host memory, moved through pinned shared memory,
moved by kernels among ranks that share a GPU (in memory of CuPy's pool and of `comm.empty`), by CuPy's NCCL, and, if
the MPI is CUDA-aware or with --direct, passed to MPI; whatever is possible. Times are medians of the slowest rank,
until the stream has ended; results are checked once. The bound of an allreduce on one GPU is 2pn bytes at the speed of
a copy on the device. Lines that begin with "below the goal" name what is slower than it should be.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.size_arguments import parse_sizes
from collectives.cli.launcher import ProgramParser, say
from collectives.transport.device import cuda_aware

BUDGET, MOST = 0.5, 100
"""Seconds and calls of a measurement."""

EXPORTED = "CuPy, exported"
"""Name of the arrays of `comm.empty`, which the goals are for."""

LONG, GOAL_OF_BOUND = 1 << 28, 0.7
"""Bytes from which an allreduce on one GPU should reach this share of the bound."""

SHORT, GOAL_SECONDS = 1 << 16, 40e-6
"""Bytes up to which an allreduce on one GPU should take at most this time."""


def seconds(world: MPI.Intracomm, call: Callable[[], object], end: Callable[[], object]) -> float:
    """Median seconds of `call` and `end` on the slowest rank; all ranks make equally many calls."""

    def once() -> float:
        world.Barrier()
        start = time.perf_counter()
        call()
        end()
        return float(world.allreduce(time.perf_counter() - start, MPI.MAX))

    first = max(once(), once(), 1e-6)
    return statistics.median(once() for _ in range(max(3, min(MOST, int(BUDGET / first)))))


class ArrayTransfer(NamedTuple):
    """A way to move arrays: ``allreduce(x, y)`` and ``broadcast(y)`` of arrays that ``empty(n, dtype)`` allocates."""

    allreduce: Callable[[Any, Any], object]
    broadcast: Callable[[Any], object]
    empty: Callable[[int, str], Any]


def contestants(world: MPI.Intracomm, cupy: Any, direct: bool) -> dict[str, ArrayTransfer]:
    """All ways that are possible here, by name. Collective."""
    found: dict[str, ArrayTransfer] = {}

    def add(name: str, comm: Communicator, empty: Callable[[int, str], Any]) -> None:
        found[name] = ArrayTransfer(comm.Allreduce, comm.Bcast, empty)

    add("NumPy", Communicator(world, gpu="staged"), np.empty)
    for transfer in ("staged", "pinned", "kernel"):
        comm = Communicator(world, cuda_aware=False, gpu=transfer)
        if comm.device_transfer.startswith(transfer):
            add(f"CuPy, {transfer}", comm, cupy.empty)
            if transfer == "kernel":
                add(EXPORTED, comm, partial(comm.empty, like=cupy))
    if direct:
        add("CuPy, direct", Communicator(world, cuda_aware=True), cupy.empty)
    if (nccl := _nccl(world, cupy)) is not None:
        found["NCCL"] = nccl
    return found


def _nccl(world: MPI.Intracomm, cupy: Any) -> ArrayTransfer | None:
    """NCCL through CuPy, or None on all ranks if it is not installed or refuses. Collective."""
    made = None
    try:
        nccl = import_module("cupy.cuda.nccl")
        name, error = nccl.get_unique_id(), ""
    except (ImportError, AttributeError, RuntimeError) as refused:
        name, error = None, str(refused)
    name = world.bcast(name)
    if world.allreduce(bool(error), MPI.LOR):
        return None
    try:
        made = nccl.NcclCommunicator(world.Get_size(), name, world.Get_rank())
    except RuntimeError as refused:
        error = str(refused)
    if world.allreduce(made is None, MPI.LOR) or made is None:
        say(f"NCCL refuses: {error or 'on another rank'}")
        return None

    def allreduce(x: Any, y: Any) -> None:
        made.allReduce(x.data.ptr, y.data.ptr, x.size, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, _stream(cupy))

    def broadcast(y: Any) -> None:
        made.bcast(y.data.ptr, y.size, nccl.NCCL_FLOAT32, 0, _stream(cupy))

    return ArrayTransfer(allreduce, broadcast, cupy.empty)


def _stream(cupy: Any) -> int:
    return int(cupy.cuda.get_current_stream().ptr)


def copy_rate(world: MPI.Intracomm, cupy: Any, nbytes: int) -> float:
    """Bytes a second that a copy on the device reads and writes, on one rank while the others wait."""
    x, y = cupy.zeros(nbytes, np.uint8), cupy.zeros(nbytes, np.uint8)
    stream, best = cupy.cuda.get_current_stream(), 1e9
    for _ in range(5 if world.Get_rank() == 0 else 0):
        stream.synchronize()
        start = time.perf_counter()
        y[...] = x
        stream.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * nbytes / float(world.bcast(best))


def main() -> int:
    """Measure and print the table; return 1 if a result was wrong, else 0."""
    parser = ProgramParser(__doc__)
    parser.add_argument("--sizes", type=parse_sizes, default="64K:256M:8", help="bytes, as in bench_collectives.py")
    parser.add_argument("--direct", action="store_true", help="hand device memory over whatever the MPI says")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    rank, size, cupy = world.Get_rank(), world.Get_size(), import_module("cupy")
    sides = contestants(world, cupy, args.direct or cuda_aware())
    rate, wrong, slow = copy_rate(world, cupy, max(args.sizes)), 0, list[str]()
    say(f"\n# float32, {size} ranks; algbw = size / time in 1e9 bytes a second; a copy on the device: {rate / 1e9:.0f}")
    heads = ("Size", 12), ("arrays", -14), ("allreduce(us)", 14), ("algbw", 8), ("of bound", 8), ("broadcast(us)", 14)
    say(" ".join(text.ljust(-width) if width < 0 else text.rjust(width) for text, width in (*heads, ("algbw", 8))))
    for nbytes in args.sizes:
        for name, side in sides.items():
            n = max(1, nbytes // 4)
            x, y = side.empty(n, "f4"), side.empty(n, "f4")
            x[...] = np.float32(rank + 1)
            end = cupy.cuda.get_current_stream().synchronize if name != "NumPy" else lambda: None
            side.allreduce(x, y)
            wrong += not world.allreduce(bool((y == sum(range(1, size + 1))).all()), MPI.LAND)
            first = seconds(world, partial(side.allreduce, x, y), end)
            second = seconds(world, partial(side.broadcast, y), end)
            share = 2 * size * nbytes / rate / first
            cells = f"{first * 1e6:14.1f} {nbytes / first / 1e9:8.2f} {share:8.2f}"
            say(f"{nbytes:12} {name:14} {cells} {second * 1e6:14.1f} {nbytes / second / 1e9:8.2f}")
            slow += goals_missed(nbytes, first, share) if name == EXPORTED else []
    for line in slow:
        say(f"below the goal: {line}")
    if wrong:
        say(f"{wrong} results were wrong")
    return 1 if wrong else 0


def goals_missed(nbytes: int, spent: float, share: float) -> list[str]:
    """Texts about an allreduce on one GPU that took `spent` seconds, and reached this share of the bound."""
    what = f"{EXPORTED}, allreduce of {nbytes} bytes"
    if nbytes >= LONG and share < GOAL_OF_BOUND:
        return [f"{what}: {share:.2f} of the bound, expected {GOAL_OF_BOUND}"]
    if nbytes <= SHORT and spent > GOAL_SECONDS:
        return [f"{what}: {spent * 1e6:.0f} us, expected {GOAL_SECONDS * 1e6:.0f}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
