"""Symmetry of a schedule: the steps of a few ranks, moved, are those of all ranks.

Many schedules look the same from every rank, but for a rotation of the ranks (circulant graphs) or an exclusive or with
their number (recursive doubling). The steps of all of 65,536 ranks are then arrays, made from those of rank 0. With
several ranks on a node, the nodes are moved, each with its ranks.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

MOVES: dict[str, Callable[[int, Integers, int], Integers]] = {
    "rotation": lambda number, shifts, count: (number + shifts) % count,
    "exclusive or": lambda number, shifts, count: number ^ shifts,
}
"""Numbers to which `number` is moved by each of the shifts 0 .. `count` - 1; for an exclusive or a power of two."""


class RankSymmetry(NamedTuple):
    """Symmetry of a schedule of `groups` nodes of `per_node` consecutive ranks under a move of the nodes.

    Attributes
    ----------
    move : str
        A key of `MOVES`.
    chunks_move : bool
        True if chunk c of each `groups` consecutive ones belongs to node c and moves with it; else all stay.
    """

    move: str
    groups: int
    per_node: int
    chunks_move: bool

    @property
    def size(self) -> int:
        return self.groups * self.per_node

    def _moved(self, number: int) -> Integers:
        return MOVES[self.move](number, np.arange(self.groups), self.groups)

    def ranks(self, rank: int) -> Integers:
        """Ranks to which a rank is moved, by shift."""
        group, place = divmod(rank, self.per_node)
        return self._moved(group) * self.per_node + place

    def chunks(self, part: range) -> Iterator[tuple[Integers, Integers]]:
        """Yield, for each of one or two ranges to which a range of chunks is moved, its (starts, stops) by shift."""
        first, count = part.start // self.groups * self.groups, len(part)
        if not self.chunks_move or (part.start == first and count % self.groups == 0):
            yield np.full(self.groups, part.start), np.full(self.groups, part.stop)
            return
        if part.stop > first + self.groups:
            raise ValueError(f"chunks {part.start} to {part.stop - 1} are of several laps of {self.groups}")
        if self.move == "exclusive or":
            if count & (count - 1) or part.start % count:
                raise ValueError(f"chunks {part.start} to {part.stop - 1} stay no range under an exclusive or")
            starts = first + self._moved(part.start - first) // count * count
            yield starts, starts + count
            return
        starts = self._moved(part.start - first)
        stops = starts + count
        yield first + starts, first + np.minimum(stops, self.groups)
        yield np.full(self.groups, first), first + np.maximum(stops - self.groups, 0)
