"""Limit of CuPy's memory pool on ranks that share a GPU, whose pools would otherwise take memory from each other."""

from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI

SHARE = 0.95
"""Part of the free memory that the pools of all ranks may take."""


class PoolLimit:
    """Limit of this rank's pool: what it has, and an equal part of what is free. Creation is collective.

    For ranks that share a GPU, from the creation until `remove`; none on the host, or if the pool has a limit already.
    """

    def __init__(self, comm: MPI.Intracomm, xp: ModuleType) -> None:
        self._pool: Any = None if xp is np else xp.get_default_memory_pool()
        self._is_set = False
        here: tuple[Any, ...] | None = None
        if self._pool is not None:
            bus = str(xp.cuda.runtime.deviceGetPCIBusId(xp.cuda.Device().id))
            here = MPI.Get_processor_name(), bus
        everyone = comm.allgather(here)  # also a barrier: all have allocated their vectors
        if not any(everyone):
            return
        free = 0 if self._pool is None else xp.cuda.runtime.memGetInfo()[0]
        offers = comm.allgather(free)
        sharing = [offer for offer, place in zip(offers, everyone) if place == here]
        if self._pool is not None and len(sharing) > 1 and not self._pool.get_limit():
            self._pool.set_limit(size=self._pool.total_bytes() + int(SHARE * min(sharing)) // len(sharing))
            self._is_set = True

    def free_unused(self) -> None:
        """Return the pool's unused memory to the GPU, after an error that another rank's need may have caused."""
        if self._pool is not None:
            self._pool.free_all_blocks()

    def remove(self) -> None:
        if self._is_set:
            self._pool.set_limit(size=0)
            self._is_set = False
