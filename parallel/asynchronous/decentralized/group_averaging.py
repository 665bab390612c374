"""Group averaging: replicas average in small groups that change with every step.

The ranks lie on a grid of up to S places per axis, and step t averages along axis t mod k, so k steps without updates
yield the global mean. Every `tau` steps all ranks average. This is the mixing of Li et al., "Breaking (Global)
Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging", TPDS 2021: a late rank delays its
group only. (In the paper an old copy of its weights replaces a late rank. In this implementation its group waits.)

A grid of S^k or d S^k places holds as many ranks. For other numbers some places are shared by two ranks (*twins*) of
the same groups. Then push-sum masses (`push_sum`) give every rank's step equal weight: places have equal shares of
their group's mass, and twins have halves.
"""

from math import prod, sqrt

from mpi4py import MPI

from parallel.asynchronous.decentralized.averaging_style import AveragingStyle, ReplicaSums
from parallel.asynchronous.decentralized.push_sum import PushSumMass
from parallel.engine.data_parallel.run_context import RunContext
from quant.types import Array


def default_size(size: int) -> int:
    """Default group size for `size` ranks: their square root (the paper's choice), but at least 2.

    >>> [default_size(size) for size in (1, 4, 7, 16, 64)]
    [2, 2, 3, 4, 8]
    """
    return max(2, round(sqrt(size)))


def grid(size: int, most: int) -> tuple[int, ...]:
    """Shape of the grid of ranks: axes of `most` places, the last perhaps shorter. More than size / 2 places in all.

    >>> grid(8, 2), grid(12, 4), grid(7, 2)
    ((2, 2, 2), (4, 3), (2, 2))
    """
    axes = []
    while size >= most:
        axes.append(most)
        size //= most
    return (*axes, size) if size > 1 else tuple(axes)


def group(rank: int, size: int, most: int, step: int) -> tuple[int, ...]:
    """Ranks that this rank averages with in a step, itself included, ascending.

    Any k successive steps use every axis once.

    >>> [group(5, 8, 2, step) for step in range(3)], [group(0, 5, 2, step) for step in range(2)]
    ([(4, 5), (5, 7), (1, 5)], [(0, 1, 4), (0, 2, 4)])
    """
    axes = grid(size, most)
    if not axes:
        return (rank,)
    axis, places = step % len(axes), prod(axes)
    stride = prod(axes[:axis])

    def line(other: int) -> int:
        """First place of the grid line, along the step's axis, that contains the rank `other`."""
        place = other % places
        return place - place // stride % axes[axis] * stride

    return tuple(other for other in range(size) if line(other) == line(rank))


def share(rank: int, size: int, most: int, step: int) -> float:
    """Share of its group's push-sum mass that a rank keeps after averaging in a step.

    >>> [share(rank, 5, 2, 0) for rank in range(5)]
    [0.25, 0.5, 0.5, 0.5, 0.25]
    """
    axes = grid(size, most)
    if not axes:
        return 1.0
    twins = len(range(rank % prod(axes), size, prod(axes)))
    return 1 / (axes[step % len(axes)] * twins)


class GroupAveraging(AveragingStyle):
    """Averaging of weights after each step: over all ranks every `tau` steps, else in groups of up to `most` places.

    A place has one or two ranks. A group of S ranks moves about 2 (S-1)/S n bytes per rank, for n bytes of weights.
    """

    def __init__(self, context: RunContext, vector: Array, most: int, tau: int):
        super().__init__(context, vector)
        self._most, self._tau = most, tau
        self._mass = PushSumMass(vector, self.memory.shared("buffers", vector.size, vector.dtype))
        self.part = self._mass.x
        self._groups_by_axis = [
            self.comm.Split(group(self.rank, self.size, most, axis)[0], self.rank)
            for axis in range(len(grid(self.size, most)))
        ]

    def reach(self, step: int) -> int:
        return min(max(0, len(self._groups_by_axis) - 1), self._tau - 1 - step % self._tau)

    def take_changes(self) -> None:
        self._mass.take_changes()

    def mix(self, step: int, sums: ReplicaSums) -> ReplicaSums:
        self._mass.absorb_update()
        if (step + 1) % self._tau == 0:
            return self.average_all(sums)
        if self._groups_by_axis:
            members = self._groups_by_axis[step % len(self._groups_by_axis)]
            weight, sums = self.exchange_status(members, sums, self._mass.w)
            members.Allreduce(MPI.IN_PLACE, self._mass.x)
            self._mass.w = weight
            self._mass.keep(share(self.rank, self.size, self._most, step))
        self._mass.update_estimate()
        return sums

    def begin(self) -> None:
        self._mass.begin()

    def close(self) -> None:
        for members in self._groups_by_axis:
            members.Free()
        self._groups_by_axis = []

    abandon = close  # no rank waits in it
