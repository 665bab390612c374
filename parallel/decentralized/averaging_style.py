"""Interface of averaging styles (exchange after every local step, and global averages), and local SGD."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from parallel.data_parallel.run_context import RunContext
from quant.types import Array


class ReplicaSums(NamedTuple):
    """Sums of losses and of targets over the ranks that have exchanged in a step."""

    loss: float
    targets: int


class AveragingStyle:
    """Base class of averaging styles of replicas `vector`, which change in place. Construction is collective.

    The number of the `last` step, requested by a rank that wants to end or has failed, is sent with the exchanged
    replicas. It is set far enough ahead to be known to all ranks in time (`reach`), and inf before. `part` is the
    contribution of the rank to the sum that is the number of ranks times the mean.
    """

    def __init__(self, context: RunContext, vector: Array):
        self.comm, self.memory, self.vector = context.comm, context.memory, vector
        self.rank, self.size = context.comm.Get_rank(), context.comm.Get_size()
        self.part = vector
        self.last = math.inf

    def reach(self, step: int) -> int:
        """Number of steps after which all ranks know a value that one rank has before the exchange of `step`."""
        raise NotImplementedError

    def request_stop(self, step: int) -> None:
        self.last = min(self.last, step + self.reach(step))

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        """Exchange after the rank's own update of a step; returns the sums over the ranks that exchanged."""
        raise NotImplementedError

    def drain(self) -> None:
        """Complete all messages in flight. Collective, as are `mean`, `begin`, `finish` and `average_all`."""

    def mean(self, out: Array) -> None:
        """Write the mean of all replicas, which are unchanged. Requires `drain`."""
        out[...] = self.part
        self.comm.Allreduce(MPI.IN_PLACE, out)
        out /= self.size

    def begin(self) -> None:
        """Continue from equal replicas."""

    def finish(self) -> None:
        """Reset after the last step, so that training may continue."""
        self.last = math.inf

    def close(self) -> None:
        """Free all resources except memory."""

    def abandon(self) -> None:
        """Free resources without synchronising. Not collective."""

    def average_all(self, sums: ReplicaSums) -> ReplicaSums:
        self.drain()
        _, sums = self.exchange_status(self.comm, sums)
        self.mean(self.vector)
        self.begin()
        return sums

    def exchange_status(self, comm: MPI.Intracomm, sums: ReplicaSums, weight: float = 1.0) -> tuple[float, ReplicaSums]:
        """Combine weight, last step and loss sums over the ranks of `comm`; returns the sums of weights and losses."""
        gathered = np.empty((comm.Get_size(), 4))
        comm.Allgather(np.array([weight, self.last, *sums]), gathered)
        self.last = float(gathered[:, 1].min())
        return float(gathered[:, 0].sum()), ReplicaSums(float(gathered[:, 2].sum()), int(gathered[:, 3].sum()))


class LocalSGD(AveragingStyle):
    """Local SGD: one allreduce of the weights in `tau` steps, 2 (p-1)/p n / tau bytes per step and rank.

    (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; McMahan et al., AISTATS 2017.)
    """

    def __init__(self, context: RunContext, vector: Array, tau: int):
        super().__init__(context, vector)
        self._tau = tau

    def reach(self, step: int) -> int:
        return self._tau - 1 - step % self._tau

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        return sums if self.reach(step) else self.average_all(sums)
