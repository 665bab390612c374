"""Top-k gradient compression: send the largest elements with their indices. The residual keeps the others.

Lin et al., "Deep Gradient Compression", ICLR 2018; without its momentum correction, as momentum is the optimizer's.
"""

import math
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.compressed import Motion
from quant.kernels import array_namespace
from quant.types import Array


class TopK:
    """Compressor that sums each rank's k = `share` * `count` elements of largest magnitude: allgather of 8 k bytes."""

    feedback = True

    def __init__(self, comm: Communicator, count: int, share: float, like: Any = None):
        self._comm, self._k = comm, min(count, max(1, math.ceil(share * count)))
        shape = comm.Get_size(), 2, self._k  # indices, then the bits of the values
        self._gathered = comm.empty(shape, np.int32, like)

    def exchange(self, x: Array, out: Array, lost: Array, step: int) -> Motion:
        """As `Compressor.exchange`. NaN and infinite elements count as the largest, so up to k of them are sent."""
        mine, least = self._gathered[self._comm.Get_rank()], len(x) - self._k
        lost[...] = x
        if self._k:
            chosen = array_namespace(x).argpartition(abs(x), least)[least:]
            chosen.sort()
            mine[0], mine[1].view(np.float32)[...] = chosen, x[chosen]
            lost[chosen] = 0
        yield [self._comm.Iallgather(MPI.IN_PLACE, self._gathered)]
        out[...] = 0
        for indices, values in self._gathered:
            out[indices] += values.view(np.float32)

    def state(self) -> dict[str, Array]:
        return {}

    def close(self) -> None: ...
