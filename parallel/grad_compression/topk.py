"""The largest elements only, with their places; the others wait until they have grown (Lin et al., "Deep Gradient
Compression", ICLR 2018; without its momentum correction: moments are the optimiser's)."""

from __future__ import annotations

import math

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.compressed import Motion


class TopK:
    """Sum of every rank's k largest elements: one allgather of 8 k bytes per rank.

    Parameters
    ----------
    comm : Communicator
    count : int
        Elements of the gradient.
    share : float
        k of `count`; at least one element.
    """

    feedback = True

    def __init__(self, comm: Communicator, count: int, share: float):
        self.comm, self.kept = comm, min(count, max(1, math.ceil(share * count)))
        self._everyone = comm.empty((comm.Get_size(), 2, self.kept), np.int32)  # places, then the bits of the values

    def exchange(self, x: np.ndarray, out: np.ndarray, lost: np.ndarray, step: int) -> Motion:
        """As `parallel.grad_compression.Compressor`. What is not finite counts as largest."""
        mine = self._everyone[self.comm.Get_rank()]
        chosen = np.argpartition(np.abs(x), len(x) - self.kept)[len(x) - self.kept :] if self.kept else mine[0]
        chosen.sort()
        mine[0], mine[1].view(np.float32)[...] = chosen, x[chosen]
        np.copyto(lost, x)
        lost[chosen] = 0
        yield [self.comm.Iallgather(MPI.IN_PLACE, self._everyone)]
        out[...] = 0
        for places, values in self._everyone:
            out[places] += values.view(np.float32)

    def state(self) -> dict[str, np.ndarray]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing is kept."""
