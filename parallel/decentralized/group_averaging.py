"""Group averaging: in every step small groups of replicas become their mean, and other groups in the next.

The ranks are laid on a grid of up to S places along each axis, and step t averages along axis t mod k: so after k
steps everyone has the mean of all, as long as nobody learns in between. Every `tau` steps all of them meet. This is the
mixing of wait-avoiding group averaging (Li et al., "Breaking (Global) Barriers in Parallel Stochastic Optimization with
Wait-Avoiding Group Averaging", TPDS 2021): who is late keeps its group waiting, and not all. In that paper a late rank
does not even do that, as an old copy of its weights takes its place; here its group waits.

A grid of S^k places, or d S^k, takes as many ranks. With any other number of ranks some places are shared by two ranks
(*twins*), who belong to the same groups; then masses instead of plain means (`parallel.decentralized.push_sum`) see to it that
every rank's step counts as much as any other's: places have equal shares of their group's mass, and twins have halves.
"""

from __future__ import annotations

from math import prod

from mpi4py import MPI

from parallel.data_parallel.run_context import Context
from parallel.nn.operator import Array
from parallel.decentralized.push_sum import Mass
from parallel.replicas.style import Seen, Style

TAU = 10


def usual(size: int) -> int:
    """The groups' size if nobody says one: the root of the number of ranks, as in the paper, but no less than 2.

    >>> [usual(size) for size in (1, 4, 7, 16, 64)]
    [2, 2, 3, 4, 8]
    """
    return max(2, round(size**0.5))


def grid(size: int, most: int) -> tuple[int, ...]:
    """Places along each axis: `most` of them as often as that goes, then what is left; the product is over size / 2.

    >>> grid(8, 2), grid(12, 4), grid(7, 2)
    ((2, 2, 2), (4, 3), (2, 2))
    """
    axes = []
    while size >= most:
        axes.append(most)
        size //= most
    return (*axes, size) if size > 1 else tuple(axes)


def group(rank: int, size: int, most: int, step: int) -> tuple[int, ...]:
    """The ranks that this one averages with in a step, itself among them, ascending.

    Every axis has its turn in k successive steps, whichever is the first of them.

    >>> [group(5, 8, 2, step) for step in range(3)], [group(0, 5, 2, step) for step in range(2)]
    ([(4, 5), (5, 7), (1, 5)], [(0, 1, 4), (0, 2, 4)])
    """
    axes = grid(size, most)
    if not axes:
        return (rank,)
    axis, places = step % len(axes), prod(axes)
    stride = prod(axes[:axis])

    def line(other: int) -> int:
        """The place where a rank's line along the axis begins."""
        place = other % places
        return place - place // stride % axes[axis] * stride

    return tuple(other for other in range(size) if line(other) == line(rank))


def share(rank: int, size: int, most: int, step: int) -> float:
    """What of its group's mass a rank has after a step.

    >>> [share(rank, 5, 2, 0) for rank in range(5)]
    [0.25, 0.5, 0.5, 0.5, 0.25]
    """
    axes = grid(size, most)
    if not axes:
        return 1.0
    places = prod(axes)
    twins = sum(other % places == rank % places for other in range(size))
    return 1 / (axes[step % len(axes)] * twins)


class Groups(Style):
    """One allreduce in a group a step: about 2 (S-1)/S n bytes a rank.

    Parameters
    ----------
    context, vector
        As of `Style`.
    most : int
        S, 2 or more.
    tau : int
        Steps from one meeting of all to the next.
    """

    def __init__(self, context: Context, vector: Array, most: int, tau: int = TAU):
        super().__init__(context, vector)
        self._most, self._tau = most, tau
        self._mass = Mass(vector, self.memory.seen("buffers", vector.size, vector.dtype))
        self.part = self._mass.x
        turns = range(len(grid(self.size, most)))
        self._circles = [self.comm.Split(group(self.rank, self.size, most, turn)[0], self.rank) for turn in turns]

    def reach(self, step: int) -> int:
        return min(max(0, len(self._circles) - 1), self._tau - 1 - step % self._tau)

    def mix(self, step: int, seen: Seen) -> Seen:
        self._mass.moved()
        if (step + 1) % self._tau == 0:
            return self.meet(seen)
        if self._circles:
            circle = self._circles[step % len(self._circles)]
            weight, seen = self.tell(circle, seen, self._mass.w)
            circle.Allreduce(MPI.IN_PLACE, self._mass.x)
            self._mass.w = weight
            self._mass.keep(share(self.rank, self.size, self._most, step))
        self._mass.settle()
        return seen

    def begin(self) -> None:
        self._mass.begin()

    def close(self) -> None:
        for circle in self._circles:
            circle.Free()
        self._circles = []
