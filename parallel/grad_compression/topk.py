"""Top-k gradient compression: send the largest elements with their indices; the residual keeps the others.

Lin et al., "Deep Gradient Compression", ICLR 2018; without its momentum correction, as momentum is the optimizer's.
"""

import math

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.compressed import Motion


class TopK:
    """Compressor that sums each rank's k = `share` * `count` elements of largest magnitude: allgather of 8 k bytes."""

    feedback = True

    def __init__(self, comm: Communicator, count: int, share: float):
        self._comm, self._k = comm, min(count, max(1, math.ceil(share * count)))
        self._gathered = comm.empty((comm.Get_size(), 2, self._k), np.int32)  # indices, then the bits of the values

    def exchange(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray, step: int) -> Motion:
        """As `Compressor.exchange`; NaN and infinite elements count as the largest, so up to k of them are sent."""
        mine = self._gathered[self._comm.Get_rank()]
        chosen = np.argpartition(np.abs(x), len(x) - self._k)[len(x) - self._k :] if self._k else mine[0]
        chosen.sort()
        mine[0], mine[1].view(np.float32)[...] = chosen, x[chosen]
        np.copyto(lost, x)
        lost[chosen] = 0
        yield [self._comm.Iallgather(MPI.IN_PLACE, self._gathered)]
        out[...] = 0
        for indices, values in self._gathered:
            out[indices] += values.view(np.float32)

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def close(self) -> None: ...
