"""Base class of decentralised averaging algorithms ("styles"), and local SGD."""

import math
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from parallel.engine.data_parallel.run_context import RunContext
from parallel.runtime.meeting_point import MeetingPoint
from quant.types import Array


class ReplicaSums(NamedTuple):
    """Sum of losses and number of targets of a step, over the ranks that averaged together, or of this rank only."""

    loss: float
    targets: float


class AveragingStyle:
    """Decentralised averaging algorithm (base class). Changes this rank's weights `vector`. Construction is collective.

    The number of the `last` step, requested by a rank that wants to end or has failed, is sent with the exchanged
    replicas. It is set far enough ahead to be known to all ranks in time (`reach`), and inf before. `part` is the
    rank's contribution to a sum: the number of ranks times the mean. `point` waits for other ranks. A wait ends if one
    of them has left.
    """

    def __init__(self, context: RunContext, vector: Array):
        self.comm, self.memory, self.vector = context.comm, context.memory, vector
        self.point = MeetingPoint(context.comm)
        self.rank, self.size = context.comm.Get_rank(), context.comm.Get_size()
        self.part = vector
        self.last = math.inf

    def reach(self, step: int) -> int:
        """Number of steps after `step` until all ranks know a value that one rank sends with the exchange of `step`."""
        raise NotImplementedError

    def request_stop(self, step: int) -> None:
        self.last = min(self.last, step + self.reach(step))

    def begin_step(self) -> None:
        """Begin a step of all ranks. RankLeft if one of them has left before it."""
        self.point.order.begin("step")
        self.point.expect_begun()

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        """Exchange weights, if due, after an update. Returns `sums`, or with an allreduce the total of its ranks."""
        raise NotImplementedError

    def take_changes(self) -> None:
        """Apply changes of the weights that a user has made since the last `mix` to the exchanged state."""

    def drain(self) -> None:
        """Complete all messages in flight. Collective, as are `mean`, `begin`, `finish` and `average_all`."""

    def mean(self, out: Array) -> None:
        """Write the mean of all replicas to `out`. The replicas are unchanged. Requires `drain`."""
        out[...] = self.part
        self.comm.Allreduce(MPI.IN_PLACE, out)
        out /= self.size

    def show_mean(self, of: Array) -> None:
        """Write the mean over ranks of the vectors `of` to the weights. Waits for all ranks that share the weights."""
        mean = of.copy()
        self.comm.Allreduce(MPI.IN_PLACE, mean)
        self.vector[...] = mean / self.size

    def begin(self) -> None:
        """Reset internal state when all replicas are equal: at the start, and after global averages."""

    def finish(self) -> None:
        """Reset the stop request after the last step, so that training may continue."""
        self.last = math.inf

    def close(self) -> None:
        """Free MPI resources. Memory is freed by its allocator."""

    def abandon(self) -> None:
        """Cancel receives after a failure, instead of `close`. Not collective."""

    def average_all(self, sums: ReplicaSums) -> ReplicaSums:
        self.drain()
        _, sums = self.exchange_status(self.comm, sums)
        self.mean(self.vector)
        self.begin()
        return sums

    def exchange_status(self, comm: MPI.Intracomm, sums: ReplicaSums, weight: float = 1.0) -> tuple[float, ReplicaSums]:
        """All-gather over `comm`. Returns the totals of `weight` and `sums`, and sets `last` to the ranks' minimum."""
        if comm is self.comm:
            rows = self.point.gather(weight=weight, last=self.last, loss=sums.loss, targets=sums.targets)
            gathered = np.stack([rows[name] for name in ("weight", "last", "loss", "targets")], axis=1)
        else:
            gathered = np.empty((comm.Get_size(), 4))
            plain: Any = MPI.Intracomm(comm) or comm  # threads as ranks have no MPI communicator
            others = set(range(comm.Get_size())) - {comm.Get_rank()}
            self.point.wait(plain.Iallgather(np.array([weight, self.last, *sums]), gathered).Test, others, comm)
        self.last = float(gathered[:, 1].min())
        return float(gathered[:, 0].sum()), ReplicaSums(float(gathered[:, 2].sum()), float(gathered[:, 3].sum()))


class LocalSGD(AveragingStyle):
    """Local SGD: the weights are averaged over all ranks by an allreduce every `tau` steps.

    For n bytes of weights on p ranks, 2 (p-1)/p n / tau bytes per step and rank. (Stich, "Local SGD Converges Fast and
    Communicates Little", ICLR 2019. McMahan et al., AISTATS 2017.)
    """

    def __init__(self, context: RunContext, vector: Array, tau: int):
        super().__init__(context, vector)
        self._tau = tau

    def reach(self, step: int) -> int:
        return self._tau - 1 - step % self._tau

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        return sums if self.reach(step) else self.average_all(sums)
