"""Mesh of ranks with named axes, one for each kind of parallelism, such as ``dp=2,pp=4``.

>>> mesh = Mesh.parse("pp=2,dp=3")
>>> mesh.coordinates(4)
{'pp': 1, 'dp': 1}
>>> mesh.lines("dp")
[[0, 1, 2], [3, 4, 5]]

The last axis varies fastest, as in an array: its ranks are neighbours, and share a node where nodes have enough ranks.
The axis with most traffic should come last; in a pipeline that is as a rule the sum of gradients over its replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Mesh:
    """Mesh of ranks: the number of ranks along each named axis; the last axis varies fastest, as in an array."""

    sizes: dict[str, int]

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a mesh from text such as ``"dp=2,pp=4"``; ValueError if it is malformed."""
        sizes: dict[str, int] = {}
        for word in text.split(","):
            name, _, size = (part.strip() for part in word.partition("="))
            if not (name and size.isdecimal()):
                raise ValueError(f"mesh: expected axes as in dp=2,pp=4, found {text!r}")
            if name in sizes:
                raise ValueError(f"mesh: expected every axis once, found {text}")
            if not int(size):
                raise ValueError(f"mesh: expected at least one rank along {name}, found {text}")
            sizes[name] = int(size)
        return cls(sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank by axis name; ValueError if the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank: expected 0 to {self.size - 1}, found {rank}")
        return dict(zip(self.sizes, map(int, np.unravel_index(rank, tuple(self.sizes.values())))))

    def lines(self, name: str) -> list[list[int]]:
        """Groups of ranks that differ only in their coordinate on axis `name`; each group is ordered by that."""
        ranks = np.arange(self.size).reshape(*self.sizes.values())
        last = np.moveaxis(ranks, list(self.sizes).index(name), -1)
        lines: list[list[int]] = last.reshape(-1, self.sizes[name]).tolist()
        return lines
