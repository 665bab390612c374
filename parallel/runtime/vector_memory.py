"""Allocator of vectors (private, shared or on a GPU) that counts bytes by kind. Settings of malloc and CuPy's pool."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Sequence
from copy import copy
from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.engine.instructions import LINE

SHARE = 0.95
"""Part of the free memory that the pools of all ranks may take."""


class PoolLimit:
    """Limit of this rank's pool: the memory that it holds, and an equal part of the free memory.

    Creation is collective.

    For ranks that share a GPU, from the creation until `remove`. None on the host, or if the pool has a limit already.
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
        """Return the pool's unused memory to the GPU: other ranks that share it may have run out of memory."""
        if self._pool is not None:
            self._pool.free_all_blocks()

    def remove(self) -> None:
        if self._is_set:
            self._pool.set_limit(size=0)
            self._is_set = False


def namespace(device: str) -> ModuleType:
    if device == "cpu":
        return np
    if device != "cuda":
        raise ValueError(f'device: expected "cpu" or "cuda", found {device!r}')
    try:
        import cupy
    except ImportError as error:
        raise ValueError(f'device: "cuda" needs CuPy, which is not installed ({error})') from error
    module: ModuleType = cupy
    return module


class VectorAllocator:
    """Allocator of zero-filled vectors on a device ("cpu" or "cuda"). `allocated` has bytes by kind, freed or not."""

    def __init__(self, comm: Communicator, device: str = "cpu"):
        self.comm, self.xp = comm, namespace(device)
        self.allocated: Counter[str] = Counter()

    def with_comm(self, comm: Communicator) -> VectorAllocator:
        """Copy of this allocator whose `shared` uses `comm`. Both add to the same byte counts."""
        other = copy(self)
        other.comm = comm
        return other

    def private(self, kind: str, size: int, dtype: Any) -> Any:
        return self._count(kind, self.xp.zeros(size, dtype))

    def shared(self, kind: str, size: int, dtype: Any) -> Any:
        """Allocate a vector of this rank, in memory that the ranks of the node, or of the GPU, can read. Collective.

        `OutOfMemory` on all ranks if one cannot allocate.
        """
        if self.xp is not np:
            vector = self.comm.empty(size, dtype, like=self.xp)
            vector[...] = 0
            return self._count(kind, vector)
        return self._count(kind, self.comm.zeros(size, dtype))

    def reserve(self, sizes: Sequence[int], dtypes: Sequence[Any]) -> None:
        """Grow the shared heap once for several later `shared` vectors, to avoid gaps. Collective."""
        if self.xp is np:
            nbytes = (size * np.dtype(dtype).itemsize for size, dtype in zip(sizes, dtypes, strict=True))
            self.comm.empty(sum(-(-length // LINE) * LINE for length in nbytes), np.uint8)  # freed at once

    def leave(self) -> None:
        """Leave windows of MPI that a failed rank cannot free alone. No-op without any. Not collective."""

    def on_host(self, kind: str, size: int, dtype: Any) -> np.ndarray:
        vector: np.ndarray = self._count(kind, np.zeros(size, dtype))
        return vector

    def record_peak(self, kind: str, nbytes: int) -> None:
        self.allocated[kind] = max(self.allocated[kind], nbytes)

    def _count(self, kind: str, vector: Any) -> Any:
        self.allocated[kind] += vector.nbytes
        return vector


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else sys.modules["cupy"].asnumpy(array)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of glibc's malloc.h
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for reuse in this process. Return True if supported (glibc's mallopt(3)).

    Otherwise large arrays are mapped again each time, at the cost of a fault per page: a product of 1024 x 256 and 256
    x 1024 elements takes a quarter longer. A training step allocates the same arrays repeatedly, so the peak of a step
    is kept. For programs, once before training.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(what, _LARGE) == 1 for what in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
