"""What a style of meeting is: what replicas do after each of their own steps, and how they come to be one."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from parallel.data_parallel.run_context import Context
from parallel.nn.operator import Array


class Seen(NamedTuple):
    """What a step's loss was made of, on the ranks that have told each other: their sum of losses, and of targets."""

    loss: float
    targets: int


class Style:
    """What all styles share. Making one is collective.

    News travel with what replicas exchange anyway: the number of the last step, if some rank wants to end or has
    failed. It is named so far ahead that all have heard of it when they get there (`reach`).

    Parameters
    ----------
    context : Context
        Of the ranks that have the replicas.
    vector : array
        The rank's weights, float32 or float64: changed in place.

    Attributes
    ----------
    part : array
        What the rank brings to the mean: its part of the sum that is the number of ranks times the mean.
    last : float
        The number of the step that is the last one, as far as this rank has heard; inf if there is none.
    """

    def __init__(self, context: Context, vector: Array):
        self.comm, self.memory, self.vector = context.comm, context.memory, vector
        self.rank, self.size = context.comm.Get_rank(), context.comm.Get_size()
        self.part = vector
        self.last = math.inf

    def reach(self, step: int) -> int:
        """After so many steps all ranks have heard what one of them says before it meets others in `step`."""
        raise NotImplementedError

    def wish(self, step: int) -> None:
        """This rank wants to end: say so, from `step` on."""
        self.last = min(self.last, step + self.reach(step))

    def mix(self, step: int, seen: Seen) -> Seen:
        """After the rank's own update of a step: exchange with those whose turn it is."""
        raise NotImplementedError

    def drain(self) -> None:
        """Take in what is under way. Collective, and so are all below."""

    def mean(self, out: Array) -> None:
        """Write the mean of all replicas; they stay as they are. After `drain`."""
        out[...] = self.part
        self.comm.Allreduce(MPI.IN_PLACE, out)
        out /= self.size

    def begin(self) -> None:
        """All replicas are the same now."""

    def rest(self) -> None:
        """All ranks have come to the last step: it may go on from here."""
        self.last = math.inf

    def close(self) -> None:
        """Give back what is not memory."""

    def abandon(self) -> None:
        """Let go of it without the others, who may not come any more. Not collective."""

    def meet(self, seen: Seen) -> Seen:
        """Let all replicas become their mean, and tell the news to all."""
        self.drain()
        _, seen = self.tell(self.comm, seen)
        self.mean(self.vector)
        self.begin()
        return seen

    def tell(self, comm: MPI.Intracomm, seen: Seen, weight: float = 1.0) -> tuple[float, Seen]:
        """Exchange news among the ranks of `comm`; the sum of their weights, and what they have seen."""
        told = np.empty((comm.Get_size(), 4))
        comm.Allgather(np.array([weight, self.last, *seen]), told)
        self.last = float(told[:, 1].min())
        return float(told[:, 0].sum()), Seen(float(told[:, 2].sum()), int(told[:, 3].sum()))
