"""Symmetry of a schedule: the steps of all ranks follow from the steps of a few.

Many schedules look the same from every rank, but for a rotation of the ranks (circulant graphs) or an exclusive or
with their number (recursive doubling). Trees and prefix sums look the same from every rank of a kind: in a binomial
tree, from ranks with the same lowest bit. The steps of all of 65,536 ranks are then arrays, made from one rank of each
kind. With several ranks on a node, the nodes are moved, each with its ranks.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]


def _rotation(number: int, origin: int, others: Integers, count: int) -> Integers:
    return (number - origin + others) % count


def _exclusive_or(number: int, origin: int, others: Integers, count: int) -> Integers:
    return number ^ origin ^ others


def _one_kind(numbers: Integers) -> Integers:
    return np.zeros_like(numbers)


def _lowest_bit(numbers: Integers) -> Integers:
    return numbers & -numbers


def _bits(numbers: Integers) -> Integers:
    return np.frexp(numbers)[1].astype(np.int64)


def _bits_from_both_ends(numbers: Integers) -> Integers:
    return 64 * _bits(numbers) + _bits(numbers[::-1])


def _near_prefixes(numbers: Integers) -> Integers:
    """Between which of c, c + 1, c + 2 a number lies, for the prefixes c of the last number in binary."""
    last = len(numbers) - 1
    prefixes = [last >> shift for shift in range(last.bit_length() + 1)]
    return np.searchsorted(np.unique(np.add.outer(prefixes, range(3))), numbers, "right")


class SymmetryRule(NamedTuple):
    """Move of the numbers 0 .. `count` - 1, and kinds of number among which it keeps a schedule.

    Attributes
    ----------
    move : callable
        Numbers to which `number` is moved where `origin` is moved to `others`.
    kinds : callable
        Kind of each of all numbers, ascending.
    powers : bool
        True if it holds for powers of two only.
    """

    move: Callable[[int, int, Integers, int], Integers]
    kinds: Callable[[Integers], Integers] = _one_kind
    powers: bool = False


SYMMETRIES: dict[str, SymmetryRule] = {
    "rotation": SymmetryRule(_rotation),
    "exclusive or": SymmetryRule(_exclusive_or, powers=True),
    "binomial tree": SymmetryRule(_rotation, _lowest_bit, powers=True),
    "butterfly to a tree": SymmetryRule(_exclusive_or, _lowest_bit, powers=True),
    "doubling tree": SymmetryRule(_rotation, _bits, powers=True),
    "prefix": SymmetryRule(_rotation, _bits_from_both_ends),
    "ordered census": SymmetryRule(_rotation, _near_prefixes),
}
"""Symmetries by name. The root of trees is rank 0, or on node 0."""


class RankSymmetry:
    """Symmetry of a schedule of `groups` nodes of `per_node` consecutive ranks, by the rule `SYMMETRIES[name]`.

    Of each `groups` * `chunks` chunks, the first `chunks` belong to node 0, the next to node 1 ..., and move with it.
    With 0, no chunk moves.
    """

    def __init__(self, name: str, groups: int, per_node: int, chunks: int) -> None:
        self.rule, self.groups, self.per_node, self.chunks = SYMMETRIES[name], groups, per_node, chunks

    @property
    def size(self) -> int:
        return self.groups * self.per_node

    @cached_property
    def classes(self) -> dict[int, Integers]:
        """Nodes of each kind, by the first of them."""
        kinds = self.rule.kinds(np.arange(self.groups))
        order = np.argsort(kinds, kind="stable")
        return {int(nodes[0]): nodes for nodes in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)}

    @property
    def ranks(self) -> list[int]:
        """Ranks whose steps generate the steps of all ranks: all ranks of the first node of each kind."""
        return [node * self.per_node + place for node in self.classes for place in range(self.per_node)]

    def _moved(self, number: int, origin: int, each: int = 1) -> Integers:
        """Numbers that one number is moved to. Every node has `each` numbers."""
        return self.rule.move(number, origin * each, self.classes[origin] * each, self.groups * each)

    def moved_rank(self, rank: int, origin: int) -> Integers:
        """Image of `rank` under each of the moves that take node `origin` to the nodes of its kind."""
        group, place = divmod(rank, self.per_node)
        return self._moved(group, origin) * self.per_node + place

    def moved_chunks(self, part: range, origin: int) -> Iterator[tuple[Integers, Integers]]:
        """Yield, for each of one or two ranges to which a range of chunks is moved, its (starts, stops)."""
        lap, count = self.groups * self.chunks, len(part)
        first = part.start // lap * lap if lap else part.start
        if not lap or (part.start == first and count % lap == 0):
            same = np.ones_like(self.classes[origin])
            yield part.start * same, part.stop * same
            return
        if part.stop > first + lap:
            raise ValueError(f"chunks {part.start} to {part.stop - 1} are of several laps of {lap}")
        starts = self._moved(part.start - first, origin, self.chunks)
        if self.rule.move is _exclusive_or:
            if count & (count - 1) or part.start % count:
                raise ValueError(f"chunks {part.start} to {part.stop - 1} stay no range under an exclusive or")
            starts = first + starts // count * count
            yield starts, starts + count
            return
        # a rotated range may wrap around the end of its lap, so it becomes two ranges
        stops = starts + count
        yield first + starts, first + np.minimum(stops, lap)
        yield np.full_like(starts, first), first + np.maximum(stops - lap, 0)
