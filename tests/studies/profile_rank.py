"""Programs of profile_study.py, on one rank.

    python -m collectives --profile --profile-files PREFIX profile_rank.py planted LATE COLLECTIVE
    python profile_rank.py overhead SECONDS

The first one sleeps on one rank and calls one collective with a large array. The second one prints JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

CALLS: dict[str, Callable[[MPI.Intracomm, np.ndarray], None]] = {
    "broadcast": lambda comm, x: comm.Bcast(x),
    "allreduce": lambda comm, x: comm.Allreduce(x, np.empty_like(x)),
    "reduce": lambda comm, x: comm.Reduce(x, np.empty_like(x)),
    "allgather": lambda comm, x: comm.Allgather(x, np.empty(comm.size * len(x))),
    "alltoall": lambda comm, x: comm.Alltoall(x, np.empty_like(x)),
}
"""Collectives of an array whose length the number of ranks divides, by their names in a profile."""

ELEMENTS = {"small": 12, "large": 12 << 17}
"""Numbers of float64 values."""


def planted(late: int, slow: str) -> None:
    """Call all collectives in turns: one of them with 12 MiB, after a barrier for which one rank comes 0.1 s late."""
    comm, arrays = MPI.COMM_WORLD, {name: np.ones(count) for name, count in ELEMENTS.items()}
    for _ in range(12):
        time.sleep(0.1 if comm.rank == late else 0)
        comm.Barrier()  # waits for the late rank
        for name, call in CALLS.items():
            call(comm, arrays["large" if name == slow else "small"])
            comm.Barrier()


def plate(comm: MPI.Intracomm) -> Callable[[], None]:
    """Step of the heat equation: two exchanges of a row with neighbours, and the largest change of all ranks."""
    u, largest, ring = np.zeros((514, 514)), np.zeros(1), comm.Create_cart([comm.size], [True])
    rows, found = np.zeros((2, 514)), np.zeros((2, 514))

    def step() -> None:
        rows[0], rows[1] = u[1], u[-2]
        ring.Neighbor_alltoall(rows, found)
        u[0], u[-1] = found
        change = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1])
        u[1:-1, 1:-1] += change
        largest[0] = abs(change).max()
        comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)

    return step


def clusters(comm: MPI.Intracomm) -> Callable[[], None]:
    """Iteration of k-means: 10,000 points on each rank, 8 centres, and the sum of an array of 8 x 3."""
    points = np.random.default_rng(comm.rank).random((10_000, 2))
    centres = points[:8].copy()
    comm.Bcast(centres)

    def step() -> None:
        nearest = ((points[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        sums = np.zeros((8, 3))
        np.add.at(sums[:, :2], nearest, points)
        np.add.at(sums[:, 2], nearest, 1)
        comm.Allreduce(MPI.IN_PLACE, sums)
        centres[:] = sums[:, :2] / np.maximum(sums[:, 2:], 1)

    return step


def gradient(comm: MPI.Intracomm) -> Callable[[], None]:
    """Matrix product, and the sum of a gradient of 4 MiB."""
    a, total = np.ones((512, 512), np.float32), np.zeros(1 << 20, np.float32)

    def step() -> None:
        a @ a
        comm.Allreduce(MPI.IN_PLACE, total)

    return step


def objects(comm: MPI.Intracomm) -> Callable[[], None]:
    """Matrix product, and a dictionary of each rank on all of them."""
    a, results = np.ones((256, 256)), {f"name {i}": i / 8 for i in range(20)}

    def step() -> None:
        a @ a
        comm.allgather(results)

    return step


def calls(comm: MPI.Intracomm) -> Callable[[], None]:
    """Sum of one number, with nothing beside it: the time that a profile adds to a call."""
    total = np.zeros(1)
    return lambda: comm.Allreduce(MPI.IN_PLACE, total)


STEPS = {"plate": plate, "k-means": clusters, "gradient": gradient, "objects": objects, "calls": calls}
"""Programs whose steps are timed, by name."""

BLOCK = 0.1
"""Seconds of steps of one kind, after which those of the other one begin."""


class Switch:
    """Methods of communicators and requests without a profile, and those with one, of a profile that starts here."""

    def __init__(self) -> None:
        from collectives.cli.call_profile import CallProfile
        from collectives.communicator import Communicator
        from collectives.runtime.requests.request import Request
        from collectives.topologies import TopologyCommunicator

        self._owners = Communicator, TopologyCommunicator, Request
        without = [dict(vars(owner)) for owner in self._owners]
        self._profile, self._left = CallProfile(), time.perf_counter()
        self._methods = [
            {name: (before.get(name), method) for name, method in vars(owner).items() if before.get(name) is not method}
            for owner, before in zip(self._owners, without)
        ]
        self._set(False)

    def _set(self, is_profiled: bool) -> None:
        for owner, methods in zip(self._owners, self._methods):
            for name, pair in methods.items():
                if (method := pair[is_profiled]) is None:
                    delattr(owner, name)  # inherited
                else:
                    setattr(owner, name, method)

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Profile the calls of this block. Calls before it, and their time, are not of the profile."""
        off = time.perf_counter()
        self._profile._seen = self._profile._record.last
        self._profile._began += off - self._left
        self._set(True)
        try:
            yield
        finally:
            self._set(False)
            self._left = time.perf_counter()


def seconds_of(comm: MPI.Intracomm, step: Callable[[], None], times: int) -> float:
    """Seconds of some steps on the slowest rank."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(times):
        step()
    return float(comm.allreduce(time.perf_counter() - start, MPI.MAX))


def overhead(seconds: float) -> None:
    """Time blocks of steps with and without a profile in turns; print sums of seconds and numbers of steps by name."""
    from collectives import Communicator

    plain = MPI.COMM_WORLD
    switch, comm = Switch(), Communicator(plain)
    found: dict[str, Any] = {}
    for name, make in STEPS.items():
        step = make(comm)
        seconds_of(plain, step, 20)
        times = max(1, round(20 * BLOCK / seconds_of(plain, step, 20)))
        sums = [0.0, 0.0]
        for turn in range(max(2, round(seconds / BLOCK / 2))):
            for is_profiled in (False, True) if turn % 2 else (True, False):
                if is_profiled:
                    with switch.profiled():
                        sums[True] += seconds_of(plain, step, times)
                else:
                    sums[False] += seconds_of(plain, step, times)
        found[name] = {"steps": times * (turn + 1), "without": sums[False], "with": sums[True]}
    if plain.Get_rank() == 0:
        print(json.dumps(found), flush=True)


def main() -> None:
    """Run the program that the command line names."""
    if sys.argv[1] == "planted":
        planted(int(sys.argv[2]), sys.argv[3])
    else:
        overhead(float(sys.argv[2]))


if __name__ == "__main__":
    main()
