"""Placements: how a value and its gradient lie over the ranks of one mesh axis. Imports no arrays and no MPI.

Along an axis, a value is one of these; its gradient then has the placement on the right:

    =================================  ===================================  ==================================
    placement                          value on each rank                   gradient on each rank
    =================================  ===================================  ==================================
    ``Replicate()``                    the whole                            the whole
    ``Replicate(partial=True)``        the whole, for this rank's shards    a term of the sum over the ranks
    ``Partial()``                      a term of the sum over the ranks     the whole
    ``Shard(dim)``                     a part, cut along one dimension      the same part
    ``Copies(dim, ranks)``             a part that these ranks have         the same part
    ``Copies(..., partial=True)``      a part that these ranks have         a term of the sum over these ranks
    =================================  ===================================  ==================================

(Names as in PyTorch's DTensor.) An operator maps the placement of its input to that of its result (`Operator.place`),
and raises `PlacementError` if it cannot take it. `parallel.sharding.tensor.check` walks a model with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from collectives.schedule.chunks import even


class PlacementError(ValueError):
    """Raised before anything runs if an operator cannot take a value with the placement that it would get."""


@dataclass(frozen=True)
class Placement:
    """Base class of placements of a value along one mesh axis."""


@dataclass(frozen=True)
class Replicate(Placement):
    """Equal copies of the value; the gradients are equal copies too, or, if `partial`, terms of a sum."""

    partial: bool = False

    def __str__(self) -> str:
        return "a replicated value whose gradient is a partial sum" if self.partial else "a replicated value"


@dataclass(frozen=True)
class Partial(Placement):
    """Terms of a sum over the ranks; the gradients are equal copies."""

    def __str__(self) -> str:
        return "a partial sum"


@dataclass(frozen=True)
class Shard(Placement):
    """Parts of the value, cut along dimension `dim`: 0 the batch, 1 the sequence, -1 the features.

    `units` are the numbers of units (columns, heads) of each logical shard, where features are cut in whole units.
    """

    dim: int
    units: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"a value sharded along dimension {self.dim}" + (f" in {self.units} units" if self.units else "")


@dataclass(frozen=True)
class Copies(Placement):
    """Equal copies of a part, cut along dimension `dim`, on some neighbouring `ranks`; other ranks have other parts.

    Gradients are equal copies too, or, if `partial`, terms of a sum over these ranks.
    """

    dim: int
    ranks: range
    partial: bool = False

    def __str__(self) -> str:
        end = ", whose gradient is a partial sum over them" if self.partial else ""
        return f"a part of dimension {self.dim} on ranks {self.ranks[0]} to {self.ranks[-1]}{end}"


class Features(NamedTuple):
    """Structure of the features of a linear layer: sections one after another, each of the same number of units.

    A feature axis is cut in whole units. Queries, keys and values of 4 heads of width 16, side by side, have 4 units of
    the widths (16, 16, 16); plain columns have width 1. If there are more shards than units, the first section of a
    unit is cut into its `pieces`, and the shards of the unit share its other sections: 4 query heads with 2 key/value
    heads have 2 units of 2 pieces and the widths (32, 16, 16). The first section begins at index `first`.

    >>> Features(4, (16, 16, 16)).ranges(0, 1)
    ((0, 16), (64, 80), (128, 144))
    """

    units: int
    widths: tuple[int, ...] = (1,)
    pieces: int = 1
    first: int = 0

    def ranges(self, start: int, stop: int) -> Ranges:
        """Index ranges of the units from `start` to `stop`, one in each section."""
        sections = accumulate((self.units * width for width in self.widths[:-1]), initial=self.first)
        return tuple((at + start * width, at + stop * width) for at, width in zip(sections, self.widths))

    def before(self, start: int) -> int:
        """Length of the features before this unit, if shards follow each other: of earlier units and sections."""
        return self.first + start * sum(self.widths)

    def divided(self, shards: int) -> DividedFeatures:
        """Division into logical shards, as equal as possible.

        >>> division = Features(2, (32, 16, 16), 2).divided(3)
        >>> division.own, division.bounds
        (Features(units=4, widths=(16,), pieces=1, first=0), ((0, 1), (1, 2), (2, 4)))
        >>> division.shared, division.sharers
        (Features(units=2, widths=(16, 16), pieces=1, first=64), (range(0, 2), range(2, 3)))
        """
        if shards <= self.units or self.pieces == 1:
            return DividedFeatures(self, tuple(unit_bounds(self.units, shards)))
        width, *others = self.widths
        own = Features(self.units * self.pieces, (width // self.pieces,), 1, self.first)
        bounds, sharers = [], []
        for unit, (start, stop) in enumerate(unit_bounds(shards, self.units)):
            pieces, at = unit_bounds(self.pieces, stop - start), unit * self.pieces
            bounds += [(at + low, at + high) for low, high in pieces]
            sharers.append(range(start, min(stop, start + self.pieces)))
        if not others:
            return DividedFeatures(own, tuple(bounds))
        shared = Features(self.units, tuple(others), 1, self.first + self.units * width)
        return DividedFeatures(own, tuple(bounds), shared, tuple(sharers))


class DividedFeatures(NamedTuple):
    """Features divided into logical shards.

    Attributes
    ----------
    own : Features
        Of which every shard has units of its own.
    bounds : tuple of (int, int)
        First unit of each shard, and the one after its last.
    shared : Features or None
        Of which several shards have the same unit.
    sharers : tuple of range
        Shards that have each unit of `shared`.
    """

    own: Features
    bounds: tuple[tuple[int, int], ...]
    shared: Features | None = None
    sharers: tuple[range, ...] = ()

    @property
    def placement(self) -> Shard:
        """Placement of features that are divided so: units, or widths without their common divisor, by shard."""
        lengths = [stop - start for start, stop in self.bounds]
        if self.shared is not None:
            each, width = self.own.widths[0], sum(self.shared.widths)
            divisor = math.gcd(each, *self.shared.widths)
            lengths = [(length * each + width * (length > 0)) // divisor for length in lengths]
        return Shard(-1, tuple(lengths))


Ranges = tuple[tuple[int, int], ...]
"""Ranges of indices, start and stop."""


class TensorCut(NamedTuple):
    """Part of a logical tensor that a parameter holds: some `ranges` of dimension `dim` of a tensor of `shape`.

    `before` is the length, along `dim`, of the parts of earlier shards; `holders` are the ranks that have the part:
    several have copies, and checkpoints take it from the first.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: Ranges
    before: int
    holders: range = range(1)

    @classmethod
    def whole(cls, shape: tuple[int, ...], holders: range) -> TensorCut:
        """All of a tensor that only some ranks have."""
        return cls(shape, 0, ((0, shape[0]),), 0, holders)

    @property
    def placement(self) -> Shard | Copies:
        return Shard(self.dim) if len(self.holders) == 1 else Copies(self.dim, self.holders)

    @property
    def local_shape(self) -> tuple[int, ...]:
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def offset(self) -> int:
        """Number of elements of the parts of earlier shards."""
        return self.before * math.prod(self.shape) // max(self.shape[self.dim], 1)

    def take(self, values: Any) -> Any:
        """The part of an array of the logical shape, a copy."""
        return values.take(self._indices(), self.dim)

    def put(self, part: Any, values: Any) -> None:
        """Write the part into an array of the logical shape."""
        for here, there in self._places():
            values[there] = part[here]

    def get(self, values: Any, part: Any) -> None:
        """Write the part of an array of the logical shape into the array `part`."""
        for here, there in self._places():
            part[here] = values[there]

    def _indices(self) -> list[int]:
        return [index for start, stop in self.ranges for index in range(start, stop)]

    def _places(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield indices of each range, in an array of the part and in one of the logical shape."""
        before, at = (slice(None),) * self.dim, 0
        for start, stop in self.ranges:
            yield (*before, slice(at, at + stop - start)), (*before, slice(start, stop))
            at += stop - start


def unit_bounds(units: int, shards: int) -> list[tuple[int, int]]:
    """First unit, and the one after the last, of each of `shards` logical shards, as equal as possible.

    >>> unit_bounds(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    return list(pairwise(accumulate(even(units, shards), initial=0)))
