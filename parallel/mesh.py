"""Mesh of ranks: axes with names, so that each kind of parallelism has its own neighbours.

>>> mesh = Mesh.parse("pp=2,dp=3")
>>> mesh.coordinates(4)
{'pp': 1, 'dp': 1}
>>> mesh.line(4, "pp"), mesh.line(4, "dp")
((1, 4), (3, 4, 5))

The last axis varies fastest, as in an array: its ranks are neighbours, and share a node where nodes have enough ranks.
The axis with most traffic should come last; in a pipeline that is as a rule the sum of gradients over its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class MeshAxis(NamedTuple):
    """Name and number of ranks of an axis."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Axes, the slowest first. ValueError if a name occurs twice or an axis has no rank."""

    axes: tuple[MeshAxis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise ValueError(f"mesh: expected every axis once, found {self}")
        for axis in self.axes:
            if axis.size < 1:
                raise ValueError(f"mesh: expected at least one rank along {axis.name}, found {self}")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Mesh that prints as `text`, as in ``"dp=2,pp=4"``; ValueError if there is none."""
        axes = []
        for word in text.split(","):
            name, equals, size = (part.strip() for part in word.partition("="))
            if not (name and equals and size.isdecimal()):
                raise ValueError(f"mesh: expected axes as in dp=2,pp=4, found {text!r}")
            axes.append(MeshAxis(name, int(size)))
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of ranks along each axis."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank: expected 0 to {self.size - 1} in the mesh {self}, found {rank}")
        found = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in self.sizes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Rank at coordinates; ValueError if they are not one for each axis, within its size."""
        if set(coordinates) != set(self.sizes):
            raise ValueError(f"coordinates: expected one for each axis of {self}, found {dict(coordinates)}")
        rank = 0
        for name, size in self.axes:
            if not 0 <= coordinates[name] < size:
                raise ValueError(f"coordinates: expected {name} from 0 to {size - 1}, found {coordinates[name]}")
            rank = rank * size + coordinates[name]
        return rank

    def line(self, rank: int, name: str) -> tuple[int, ...]:
        """Ranks that differ from this one along one axis at most, ordered by that coordinate."""
        here = self.coordinates(rank)
        return tuple(self.rank(here | {name: place}) for place in range(self.sizes[name]))

    def lines(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All lines along an axis."""
        return tuple(dict.fromkeys(self.line(rank, name) for rank in range(self.size)))
