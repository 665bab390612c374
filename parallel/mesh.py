"""Ranks in rows and columns: axes with names, so that each kind of parallelism has its own neighbours.

>>> mesh = Mesh.parse("pp=2,dp=3")
>>> mesh.coordinates(4)
{'pp': 1, 'dp': 1}
>>> mesh.line(4, "pp"), mesh.line(4, "dp")
((1, 4), (3, 4, 5))

The last axis runs fastest, as in an array: its ranks are neighbours, and on one node where nodes have room for them. So
what moves most bytes should come last; in a pipeline that are, as a rule, the sums of gradients over its replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from mpi4py import MPI


class MeshAxis(NamedTuple):
    """A name, and how many ranks there are along it."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """Axes, the slowest first.

    Raises
    ------
    ValueError
        If two axes have one name, or one has no rank.
    """

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
        """The mesh that prints as `text`: ``"dp=2,pp=4"``.

        Raises
        ------
        ValueError
            If none does.
        """
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
        """Ranks along each axis, by its name."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """Ranks in all."""
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
        """Rank at these coordinates.

        Raises
        ------
        ValueError
            If the coordinates are not one for each axis, within its size.
        """
        if set(coordinates) != set(self.sizes):
            raise ValueError(f"coordinates: expected one for each axis of {self}, found {dict(coordinates)}")
        rank = 0
        for name, size in self.axes:
            if not 0 <= coordinates[name] < size:
                raise ValueError(f"coordinates: expected {name} from 0 to {size - 1}, found {coordinates[name]}")
            rank = rank * size + coordinates[name]
        return rank

    def line(self, rank: int, name: str) -> tuple[int, ...]:
        """The ranks that differ from this one along an axis at most, in order of their places on it."""
        here = self.coordinates(rank)
        return tuple(self.rank(here | {name: place}) for place in range(self.sizes[name]))

    def lines(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All lines along an axis."""
        return tuple(dict.fromkeys(self.line(rank, name) for rank in range(self.size)))

    def split(self, comm: MPI.Intracomm, name: str) -> MPI.Intracomm:
        """A communicator of this rank's line along an axis. Collective.

        Raises
        ------
        ValueError
            On all ranks, if the communicator has more or fewer ranks than the mesh.
        """
        if comm.Get_size() != self.size:
            raise ValueError(f"mesh: {self} has {self.size} ranks, the communicator has {comm.Get_size()}")
        line = self.line(comm.Get_rank(), name)
        return comm.Split(line[0], line.index(comm.Get_rank()))  # type: ignore[return-value]

    def crossings(self, nodes: Sequence[int] | None) -> dict[str, int]:
        """By axis: how many pairs of neighbours along it are on two nodes.

        Parameters
        ----------
        nodes : sequence of int, or None
            The node of every rank, as `Communicator.nodes` has them.

        >>> Mesh.parse("pp=2,dp=2").crossings([0, 0, 1, 1])
        {'pp': 2, 'dp': 0}
        """
        nodes = nodes or [0] * self.size
        return {
            name: sum(nodes[one] != nodes[other] for line in self.lines(name) for one, other in pairwise(line))
            for name in self.sizes
        }
