"""The machine that a rank runs on, and the cores that it may use on it."""

import os
from pathlib import Path

from mpi4py import MPI

KERNEL = Path("/proc/sys/kernel/random/boot_id")
"""File with an identifier of the running kernel. It shows that nodes are emulated on one machine."""


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Ranks in MPI.COMM_WORLD of a communicator's, negative for those of another world."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    return list(ranks)


def machine_name() -> str:
    """Name of the running kernel, or of the host where the system has no such name."""
    return KERNEL.read_text().strip() if KERNEL.exists() else MPI.Get_processor_name()


def usable_cores() -> set[int]:
    """Cores that this process may use."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
