"""Measure the bandwidth of allreduce and broadcast with CuPy arrays, and compare it with bounds.

    mpiexec -n 2 python tests/studies/gpu_bandwidth.py [--sizes 64K:256M] [--direct]

Each size is measured for NumPy arrays, and for CuPy arrays staged in host memory, moved through pinned shared memory,
moved by kernels among ranks that share a GPU (in memory of CuPy's pool and of `comm.empty`), by CuPy's NCCL, and, if
the MPI is CUDA-aware or with --direct, passed to MPI; whatever is possible. Times are medians of the slowest rank,
until the stream has ended, in a loop of equal calls; results are checked once. Bounds are those of the memory: an
allreduce on one GPU moves 2pn bytes at the speed of a copy on the device; staging moves every byte over the host's link
at the speed of pinned copies.
Lines that begin with "below the goal" name what is slower than it should be.
"""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.size_arguments import parse_sizes
from collectives.cli import launcher
from collectives.cli.launcher import ProgramParser, say
from collectives.transport.mpi.cuda_support import cuda_aware

BUDGET, MOST = 0.5, 100
"""Seconds and calls of a measurement."""

STAGED, PINNED, KERNEL, EXPORTED = "CuPy, staged", "CuPy, pinned", "CuPy, kernel", "CuPy, exported"
"""Names of arrays and transfers; the goals are for arrays of `comm.empty`, and for pinned memory."""

LONG, GOAL_OF_BOUND, GOAL_OF_PINNED = 1 << 28, 0.7, 0.8
"""Bytes from which an allreduce on one GPU, and a broadcast by pinned memory, should reach such shares of bounds."""

SHORT, GOAL_SECONDS = 1 << 16, 40e-6
"""Bytes up to which an allreduce on one GPU should take at most this time."""

SHARES = ("algbw", 8), ("of bound", 8)
"""Columns after a time, and their widths."""


def seconds(world: MPI.Intracomm, call: Callable[[], object], end: Callable[[], object]) -> float:
    """Median seconds of `call` and `end`, of the slowest rank each time; all ranks make equally many calls."""

    def once() -> float:
        world.Barrier()
        start = time.perf_counter()
        call()
        end()
        return time.perf_counter() - start

    first = max(world.allgather(max(once(), once(), 1e-6)))
    spent = np.array([once() for _ in range(max(3, min(MOST, int(BUDGET / first))))])
    world.Allreduce(MPI.IN_PLACE, spent, MPI.MAX)
    return float(np.median(spent))


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
        say(f"NCCL is not installed: {error or 'on another rank'}")
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


class Bounds(NamedTuple):
    """Speeds of copies, which limit transfers.

    Attributes
    ----------
    size, sharing : int
        Ranks, and those of them that use the GPU of rank 0.
    copy : float
        Bytes a second that a copy on the device reads and writes.
    pinned : float
        Bytes a second between the device and pinned host memory, in the slower direction.
    """

    size: int
    sharing: int
    copy: float
    pinned: float

    def allreduce(self, name: str, nbytes: int) -> float:
        """Least seconds of an allreduce; 0 if nothing here limits it."""
        if name == STAGED:
            return self.sharing * nbytes / self.pinned
        if name == PINNED:  # by a ring
            return self.sharing * 2 * (self.size - 1) / self.size * nbytes / self.pinned
        on_one = name != "NumPy" and self.sharing == self.size
        return 2 * self.size * nbytes / self.copy if on_one else 0.0

    def broadcast(self, name: str, nbytes: int) -> float:
        """Least seconds of a broadcast; 0 if nothing here limits it."""
        if name in (STAGED, PINNED):
            return max(self.sharing - 1, 1) * nbytes / self.pinned
        on_one = name != "NumPy" and self.sharing == self.size
        return self.size * nbytes / self.copy if on_one else 0.0


def bounds(world: MPI.Intracomm, cupy: Any, nbytes: int) -> Bounds:
    """Measure the speed of long copies, on rank 0 while the others wait. Collective."""
    runtime = cupy.cuda.runtime
    buses = world.allgather(str(runtime.deviceGetPCIBusId(cupy.cuda.Device().id)))
    found = None
    if world.Get_rank() == 0:
        x, y = cupy.zeros(nbytes, np.uint8), cupy.zeros(nbytes, np.uint8)
        host = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        here, there, stream = MPI.Get_address(host), int(x.data.ptr), cupy.cuda.get_current_stream()
        down = partial(runtime.memcpyAsync, here, there, nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        up = partial(runtime.memcpyAsync, there, here, nbytes, runtime.memcpyHostToDevice, stream.ptr)
        spent = [_least_seconds(stream, call) for call in (partial(_copy, x, y), down, up)]
        found = 2 * nbytes / spent[0], nbytes / max(spent[1:])
    return Bounds(world.Get_size(), buses.count(buses[0]), *world.bcast(found))


def _copy(source: Any, target: Any) -> None:
    target[...] = source


def _least_seconds(stream: Any, call: Callable[[], object]) -> float:
    best = 1e9
    for _ in range(6):
        stream.synchronize()
        start = time.perf_counter()
        call()
        stream.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


class Row(NamedTuple):
    """Measurement of one transfer and length in bytes: seconds, and shares of the bounds (0: no bound)."""

    nbytes: int
    arrays: str
    allreduce: float
    allreduce_share: float
    broadcast: float
    broadcast_share: float

    @property
    def text(self) -> str:
        times = ((self.allreduce, self.allreduce_share), (self.broadcast, self.broadcast_share))
        cells = (f"{spent * 1e6:14.1f} {self.nbytes / spent / 1e9:8.2f} {share:8.2f}" for spent, share in times)
        return f"{self.nbytes:12} {self.arrays:14} " + " ".join(cells)

    @property
    def goals_missed(self) -> list[str]:
        """Texts about what is slower than it should be."""
        found = []
        if self.arrays == EXPORTED and self.nbytes >= LONG and self.allreduce_share < GOAL_OF_BOUND:
            found.append(f"allreduce: {self.allreduce_share:.2f} of the bound, expected {GOAL_OF_BOUND}")
        if self.arrays == EXPORTED and self.nbytes <= SHORT and self.allreduce > GOAL_SECONDS:
            found.append(f"allreduce: {self.allreduce * 1e6:.0f} us, expected {GOAL_SECONDS * 1e6:.0f}")
        if self.arrays == PINNED and self.nbytes >= LONG and self.broadcast_share < GOAL_OF_PINNED:
            found.append(f"broadcast: {self.broadcast_share:.2f} of pinned copies, expected {GOAL_OF_PINNED}")
        return [f"{self.arrays}, {self.nbytes} bytes, {text}" for text in found]


def measure(world: MPI.Intracomm, cupy: Any, name: str, side: ArrayTransfer, nbytes: int, limit: Bounds) -> Row | None:
    """Measure one transfer; None on all ranks if its results are wrong. Collective."""
    n, size = max(1, nbytes // 4), world.Get_size()
    x, y = side.empty(n, "f4"), side.empty(n, "f4")
    x[...] = np.float32(world.Get_rank() + 1)
    end = cupy.cuda.get_current_stream().synchronize if name != "NumPy" else lambda: None
    side.allreduce(x, y)
    if not world.allreduce(bool((y == sum(range(1, size + 1))).all()), MPI.LAND):
        return None
    first = seconds(world, partial(side.allreduce, x, y), end)
    second = seconds(world, partial(side.broadcast, y), end)
    shares = limit.allreduce(name, nbytes) / first, limit.broadcast(name, nbytes) / second
    return Row(nbytes, name, first, shares[0], second, shares[1])


def main() -> int:
    """Measure and print the table; return 1 if a result was wrong, else 0."""
    parser = ProgramParser(__doc__)
    parser.add_argument("--sizes", type=parse_sizes, default="64K:256M:8", help="bytes, as in bench_collectives.py")
    parser.add_argument("--direct", action="store_true", help="hand device memory over whatever the MPI says")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--limit", type=float, default=600, help="seconds until the last measurement (600)")
    args = parser.parse_args()
    began, world = time.monotonic(), MPI.COMM_WORLD
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # NCCL refuses ranks on one GPU without it
    cupy = import_module("cupy")
    sides = contestants(world, cupy, args.direct or cuda_aware())
    limit, slow, wrong, skipped, rows = bounds(world, cupy, max(args.sizes)), list[str](), list[str](), 0, list[Row]()
    if limit.sharing == world.Get_size() > 1 and EXPORTED not in sides:
        slow.append(f"the ranks share a GPU without kernels: {Communicator(world).device_transfer}")
    rates = f"a copy on the device: {limit.copy / 1e9:.1f}, pinned: {limit.pinned / 1e9:.1f}"
    say(f"\n# float32, {world.Get_size()} ranks; algbw = size / time in 1e9 bytes a second; {rates}")
    heads = [("Size", 12), ("arrays", -14)]
    heads += [(text, width) for call in ("allreduce(us)", "broadcast(us)") for text, width in ((call, 14), *SHARES)]
    say(" ".join(text.ljust(-width) if width < 0 else text.rjust(width) for text, width in heads))
    for nbytes in args.sizes:
        for name, side in sides.items():
            if world.bcast(time.monotonic() - began > args.limit):
                skipped += 1
                continue
            row = measure(world, cupy, name, side, nbytes, limit)
            if row is None:
                wrong.append(f"{name}, {nbytes} bytes")
                continue
            say(row.text)
            rows.append(row)
            slow += row.goals_missed
    for line in (*slow, *([f"{skipped} measurements were left out: no time"] if skipped else [])):
        say(f"below the goal: {line}")
    for line in wrong:
        say(f"Error: wrong result of an allreduce: {line}")
    if args.json and world.Get_rank() == 0:
        found = {"ranks": world.Get_size(), "bounds": limit._asdict(), "rows": [row._asdict() for row in rows]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    launcher.run(main)
