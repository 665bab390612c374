"""Allocator of vectors, with a count of bytes by kind."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from copy import copy
from types import ModuleType
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.transport.shared_heap import LINE


def namespace(device: str) -> ModuleType:
    """NumPy for "cpu", CuPy for "cuda"."""
    if device == "cpu":
        return np
    if device != "cuda":
        raise ValueError(f'device: expected "cpu" or "cuda", found {device!r}')
    try:
        import cupy
    except ImportError as error:
        raise ValueError(f'device: "cuda" needs CuPy, which is not installed ({error})') from error
    return cupy


class VectorAllocator:
    """Vectors of zeros, counted.

    Parameters
    ----------
    comm : Communicator
    device : "cpu" or "cuda"

    Attributes
    ----------
    xp : module
        NumPy or CuPy.
    allocated : Counter
        Bytes by kind, as the arrays themselves say.
    """

    def __init__(self, comm: Communicator, device: str = "cpu"):
        self.comm, self.xp = comm, namespace(device)
        self.allocated: Counter[str] = Counter()

    def with_comm(self, comm: Communicator) -> VectorAllocator:
        """Vectors that some other ranks see, on the same account."""
        other = copy(self)
        other.comm = comm
        return other

    def private(self, kind: str, size: int, dtype: Any) -> Any:
        """A vector of this rank's."""
        return self._count(kind, self.xp.zeros(size, dtype))

    def shared(self, kind: str, size: int, dtype: Any) -> Any:
        """A vector that the neighbours see, on the host. Collective."""
        if self.xp is not np:
            return self.private(kind, size, dtype)
        return self._count(kind, self.comm.zeros(size, dtype))

    def reserve(self, sizes: Sequence[int], dtypes: Sequence[Any]) -> None:
        """Have room for vectors that neighbours will see, in one piece: otherwise it grows, and with it what is left
        over of it. Collective.
        """
        if self.xp is np:
            nbytes = (size * np.dtype(dtype).itemsize for size, dtype in zip(sizes, dtypes, strict=True))
            self.comm.empty(sum(-(-length // LINE) * LINE for length in nbytes), np.uint8)  # given back at once

    def on_host(self, kind: str, size: int, dtype: Any) -> np.ndarray:
        """A vector of this rank's, on the host in any case."""
        return self._count(kind, np.zeros(size, dtype))

    def record_peak(self, kind: str, nbytes: int) -> None:
        """Count memory that comes and goes: the most there has been."""
        self.allocated[kind] = max(self.allocated[kind], nbytes)

    def _count(self, kind: str, vector: Any) -> Any:
        self.allocated[kind] += vector.nbytes
        return vector


def to_host(array: Any) -> np.ndarray:
    """The array itself, or a copy from the device."""
    return array if isinstance(array, np.ndarray) else sys.modules["cupy"].asnumpy(array)
