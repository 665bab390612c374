"""Mesh of ranks with named axes, one for each kind of parallelism, such as ``pp=2,dp=4,tp=2``. Imports no MPI.

>>> mesh = Mesh.parse("pp=2,dp=3")
>>> mesh.coordinates(4)
{'pp': 1, 'dp': 1}
>>> mesh.lines("dp")
[[0, 1, 2], [3, 4, 5]]

The last axis varies fastest, as in an array: its ranks are neighbours, and share a node where nodes have enough ranks.
The axis with most traffic comes last. In the usual order (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021, section 3) these are ``pp,dp,cp,tp``.

The axis ``ep`` is no factor of the number of ranks: neighbouring replicas share the experts of a mixture, and hold the
rest of the model each.

>>> Mesh.parse("dp=4,ep=2").size
4
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

AXES = {"pp": "pipeline stages", "dp": "replicas", "cp": "parts of the sequence", "tp": "shards of the operators"}
"""Usual axes, and what their ranks hold; from the least to the most traffic."""

EXPERTS, EXPERT_REPLICAS = "ep", "edp"
"""Axes of `Mesh.for_experts`: ranks with different experts, and ranks with the same."""


@dataclass(frozen=True)
class Mesh:
    """Mesh of ranks: the number of ranks along each named axis; the last axis varies fastest, as in an array.

    Attributes
    ----------
    sizes : dict of str to int
    ep : int
        Replicas that share the experts: ranks along ``ep``, which is folded over the axis of the replicas.
    """

    sizes: dict[str, int]
    ep: int = 1

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
        ep = sizes.pop(EXPERTS, 1)
        return cls(sizes or {"dp": 1}, ep)

    def __str__(self) -> str:
        folded = {EXPERTS: self.ep} if self.ep > 1 else {}
        return ",".join(f"{name}={size}" for name, size in (self.sizes | folded).items())

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.sizes.values())

    def without(self, *names: str) -> Mesh:
        """Mesh of the other axes, in the same order: that of ranks with equal coordinates on axes `names`.

        >>> str(Mesh.parse("pp=2,dp=3,tp=2").without("tp"))
        'pp=2,dp=3'
        """
        return Mesh({name: size for name, size in self.sizes.items() if name not in names}, self.ep)

    @property
    def replicas(self) -> str:
        """Name of the axis of replicas: ``"dp"``, or in pipelines the layout of their gradients, as ``"zero1"``."""
        return next((name for name in self.sizes if name == "dp" or name not in AXES), "dp")

    def for_experts(self) -> Mesh:
        """Mesh of the same ranks by their experts: the axis of replicas is cut into ``edp`` and ``ep``.

        >>> Mesh.parse("dp=4,tp=2,ep=2").for_experts().sizes
        {'edp': 2, 'ep': 2, 'tp': 2}
        """
        sizes: dict[str, int] = {}
        for name, size in self.sizes.items():
            sizes |= {EXPERT_REPLICAS: size // self.ep, EXPERTS: self.ep} if name == self.replicas else {name: size}
        return Mesh(sizes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank by axis name; ValueError if the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank: expected 0 to {self.size - 1}, found {rank}")
        return dict(zip(self.sizes, map(int, np.unravel_index(rank, tuple(self.sizes.values())))))

    def groups(self, axes: Collection[str]) -> list[list[int]]:
        """Groups of ranks that differ only in their coordinates on `axes`, each ascending; axes it lacks have size 1.

        >>> Mesh.parse("pp=2,dp=2,tp=2").groups(["pp", "tp"])
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        inner = [number for number, name in enumerate(self.sizes) if name in axes]
        length = math.prod(self.sizes[name] for name in self.sizes if name in axes)
        ranks = np.arange(self.size).reshape(tuple(self.sizes.values()))
        last = np.moveaxis(ranks, inner, range(-len(inner), 0))
        groups: list[list[int]] = last.reshape(-1, length).tolist()
        return groups

    def lines(self, name: str) -> list[list[int]]:
        """Groups of ranks that differ only in their coordinate on axis `name`; each group is ordered by that."""
        return self.groups([name])

    def nodes_of(self, axis: str, nodes: Sequence[int]) -> int:
        """Most nodes that one group of an axis is spread over; `nodes` has the node of every rank."""
        return max(len({nodes[rank] for rank in line}) for line in self.lines(axis))

    def spread(self, nodes: Sequence[int]) -> str:
        """Sentence on the nodes of each axis, with advice if the innermost one, which exchanges most, leaves a node.

        >>> Mesh.parse("dp=2,tp=2").spread([0, 0, 1, 1])
        'mesh dp=2,tp=2: dp over 2 nodes, tp within a node'
        >>> Mesh.parse("dp=1,tp=4").spread([0, 0, 1, 1])
        'mesh dp=1,tp=4: dp within a node, tp over 2 nodes; at most tp=2 stays within a node'
        """
        over = {name: self.nodes_of(name, nodes) for name in self.sizes}
        parts = [f"{name} over {count} nodes" if count > 1 else f"{name} within a node" for name, count in over.items()]
        last, fewest = list(self.sizes)[-1], min(Counter(nodes).values())
        advice = f"; at most {last}={fewest} stays within a node" if over[last] > 1 else ""
        return f"mesh {self}: {', '.join(parts)}{advice}"

    def expect(self, ranks: int, known: Collection[str] = (*AXES, EXPERTS)) -> None:
        """Raise ValueError, with the meshes that would fit, unless all axes are `known` and the mesh has `ranks` ranks.

        >>> Mesh.parse("dp=2,tp=2").expect(6)
        Traceback (most recent call last):
        ValueError: mesh: dp=2,tp=2 is for 4 ranks, found 6; dp=3,tp=2 or dp=2,tp=3 would fit
        """
        names = [*self.sizes, *([EXPERTS] if self.ep > 1 else [])]
        for name in names:
            if name not in known:
                raise ValueError(f"mesh: expected axes of {', '.join(known)}, found {name} in {self}")
        if self.size != ranks:
            fits = " or ".join(map(str, self._fitting(ranks))) or f"a product of {ranks}"
            raise ValueError(f"mesh: {self} is for {self.size} ranks, found {ranks}; {fits} would fit")
        replicas = self.sizes.get(self.replicas, 1)
        if replicas % self.ep:
            divisors = [f"{EXPERTS}={size}" for size in range(2, replicas + 1) if replicas % size == 0]
            fits = " or ".join(divisors) or f"{self.replicas}={self.ep},{EXPERTS}={self.ep}"
            expected = f"a divisor of the {replicas} replicas along {self.replicas}"
            raise ValueError(f"mesh: expected {EXPERTS} to be {expected}, found {self}; {fits} would fit")

    def _fitting(self, ranks: int) -> list[Mesh]:
        """Meshes of `ranks` ranks that differ from this one in the size of one axis."""
        others = {name: self.size // size for name, size in self.sizes.items()}
        fits = [
            Mesh({**self.sizes, name: ranks // rest}, self.ep) for name, rest in others.items() if ranks % rest == 0
        ]
        return [mesh for mesh in fits if mesh.sizes.get(mesh.replicas, 1) % mesh.ep == 0]
