"""Ranks that share cores: their number, and measurements that only as many ranks make at once as there are cores."""

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from mpi4py import MPI

from collectives.transport.node.machine import machine_name, usable_cores
from parallel.runtime.collective_errors import raise_on_all

T = TypeVar("T")

POLL = 1e-3
"""Seconds between two polls of a rank that waits without using its core."""


class CoreSharing(NamedTuple):
    """Ranks on the most crowded machine, and its cores. Emulated nodes share the cores of one machine."""

    ranks: int
    cores: int

    @property
    def crowd(self) -> float:
        """Ranks per core, at least 1."""
        return max(1.0, self.ranks / self.cores)


def core_sharing(comm: MPI.Intracomm) -> tuple[CoreSharing, bool]:
    """Sharing of cores, equal on all ranks, and True if this rank is among those that measure. Collective."""
    name = machine_name()
    machines = comm.allgather((name, frozenset(usable_cores())))
    groups: dict[str, list[int]] = {}
    for rank, (machine, _) in enumerate(machines):
        groups.setdefault(machine, []).append(rank)
    found = {
        machine: CoreSharing(len(ranks), len(frozenset().union(*(machines[rank][1] for rank in ranks))))
        for machine, ranks in groups.items()
    }
    place = groups[name].index(comm.Get_rank())
    return max(found.values(), key=lambda each: each.crowd), place < found[name].cores


def measured(comm: MPI.Intracomm, measures: bool, measure: Callable[[], T]) -> list[T]:
    """Results of `measure` on all ranks that measure, at the same time. Others sleep meanwhile. Collective.

    An error of a rank that measures is raised on all ranks.
    """
    comm.Barrier()
    found: list[T] = []
    problem: Exception | None = None
    if measures:
        try:
            found.append(measure())
        except (ValueError, TypeError) as error:
            problem = error
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(POLL)
    raise_on_all(comm, problem, "the model could not be measured")
    return [value for values in comm.allgather(found) for value in values]
