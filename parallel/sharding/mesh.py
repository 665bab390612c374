"""Mesh of ranks with named axes, one for each kind of parallelism, such as ``pp=2,dp=4,tp=2``.

>>> mesh = Mesh.parse("pp=2,dp=3")
>>> mesh.coordinates(4)
{'pp': 1, 'dp': 1}
>>> mesh.lines("dp")
[[0, 1, 2], [3, 4, 5]]

The last axis varies fastest, like in an array. Its ranks are neighbours, and share a node where nodes have enough
ranks. The axis with most traffic comes last. In the usual order (Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 3) these are ``pp,dp,cp,tp``.

The axis ``ep`` is no factor of the number of ranks: `ep` ranks share the experts of a mixture, and hold the rest of
the model by the other axes. It is folded over ``tp``, and then over the replicas and the ranks along ``cp`` (they have
different tokens). ``etp`` is the number of ranks along ``tp`` with parts of the same experts.

>>> mesh = Mesh.parse("dp=4,tp=2,ep=4")
>>> mesh.size, mesh.expert_shards, mesh.expert_replicas
(8, 2, 2)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parallel.sharding.axes import AXES, axis_of
from parallel.sharding.axis import REPLICAS, Axis
from parallel.sharding.expert.expert_axis import EXPERTS
from parallel.sharding.tensor.tensor_axis import EXPERT_TENSOR, TENSOR

EXPERT_REPLICAS = "edp"
"""Ranks with different tokens and the same experts."""

OF_EXPERTS = EXPERTS.name, EXPERT_REPLICAS
"""Names of `Mesh.expert_groups`. They are no factors of the number of ranks."""


@dataclass(frozen=True)
class Mesh:
    """Mesh of ranks: the number of ranks along each named axis. The last axis varies fastest.

    Attributes
    ----------
    sizes : dict of str to int
    ep : int
        Ranks with different experts: folded over ``tp``, and then over the replicas and ``cp``.
    etp : int
        Ranks along ``tp`` with parts of the same experts.
    """

    sizes: dict[str, int]
    ep: int = 1
    etp: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a mesh from text such as ``"dp=2,pp=4"``. ValueError if it is malformed."""
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
        ep, etp = sizes.pop(EXPERTS.name, 1), sizes.pop(EXPERT_TENSOR.name, 1)  # folded over the axes, none themselves
        return cls(sizes or {REPLICAS.name: 1}, ep, etp)

    @property
    def _folded(self) -> dict[str, int]:
        """Axes that are no factors of the number of ranks, if they have more than one."""
        return {name: size for name, size in ((EXPERTS.name, self.ep), (EXPERT_TENSOR.name, self.etp)) if size > 1}

    def __str__(self) -> str:
        folded = self._folded
        return ",".join(f"{name}={size}" for name, size in (self.sizes | folded).items())

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.sizes.values())

    def _where(self, wanted: Callable[[Axis], bool]) -> Mesh:
        """Mesh of some axes, in the same order: of ranks with equal coordinates on the others."""
        return Mesh({name: size for name, size in self.sizes.items() if wanted(axis_of(name))})

    @property
    def samples(self) -> Mesh:
        """Mesh of the axes along which ranks have micro-batches of their own."""
        return self._where(lambda axis: axis.own_samples)

    @property
    def summed(self) -> Mesh:
        """Mesh of the axes along which gradients are summed, as ranks have equal parameters."""
        return self._where(lambda axis: axis.sums_gradients)

    @property
    def alike(self) -> Mesh:
        """Mesh of the axes along which ranks have the same shards of all operators.

        >>> mesh = Mesh.parse("pp=2,dp=2,cp=2,tp=2")
        >>> str(mesh.samples), str(mesh.summed), str(mesh.alike)
        ('dp=2', 'dp=2,cp=2', 'pp=2,dp=2,cp=2')
        """
        return self._where(lambda axis: not axis.cuts_operators)

    @property
    def teams(self) -> list[list[int]]:
        """Groups of ranks that have the same micro-batches."""
        return self.groups(self._where(lambda axis: not axis.own_samples).sizes)

    @property
    def replicas(self) -> str:
        """Name of the axis of replicas: ``"dp"``, or in pipelines the layout of their gradients, as ``"zero1"``."""
        return next((name for name in self.sizes if axis_of(name) is REPLICAS), REPLICAS.name)

    @property
    def expert_shards(self) -> int:
        """Ranks along ``tp`` with different experts. 1 also if every rank along ``tp`` has all of its replica's."""
        return self.sizes.get(TENSOR.name, 1) // self.etp if self._folded else 1

    @property
    def expert_replicas(self) -> int:
        """Neighbouring ranks with different tokens that share the experts."""
        return self.ep // self.expert_shards

    def expert_groups(self, name: str) -> list[list[int]]:
        """Groups of ranks along ``ep``, with different tokens and experts, or ``edp``, with different tokens only.

        >>> mesh = Mesh.parse("dp=4,tp=2,ep=4")
        >>> mesh.expert_groups("ep")
        [[0, 2], [4, 6], [1, 3], [5, 7]]
        >>> mesh.expert_groups("edp")
        [[0, 4], [2, 6], [1, 5], [3, 7]]
        """
        share, found = self.expert_replicas, list[list[int]]()
        for line in self.groups(self.summed.sizes):
            starts = range(0, len(line), share)
            every = [line[start : start + share] for start in starts]
            found += every if name == EXPERTS.name else [list(some) for some in zip(*every)]
        return found

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank by axis name. ValueError if the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank: expected 0 to {self.size - 1}, found {rank}")
        return dict(zip(self.sizes, map(int, np.unravel_index(rank, tuple(self.sizes.values())))))

    def groups(self, axes: Collection[str]) -> list[list[int]]:
        """Groups of ranks that differ only in their coordinates on `axes`, each ascending. Axes it lacks have size 1.

        One of `OF_EXPERTS` stands alone: its groups are `expert_groups`.

        >>> Mesh.parse("pp=2,dp=2,tp=2").groups(["pp", "tp"])
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        for name in axes:
            if name in OF_EXPERTS:
                return self.expert_groups(name)
        inner = [number for number, name in enumerate(self.sizes) if name in axes]
        length = math.prod(self.sizes[name] for name in self.sizes if name in axes)
        ranks = np.arange(self.size).reshape(tuple(self.sizes.values()))
        last = np.moveaxis(ranks, inner, range(-len(inner), 0))
        groups: list[list[int]] = last.reshape(-1, length).tolist()
        return groups

    def lines(self, name: str) -> list[list[int]]:
        """Groups of ranks that differ only in their coordinate on axis `name`.

        Each group is ordered by that coordinate.
        """
        return self.groups([name])

    def nodes_of(self, axis: str, nodes: Sequence[int]) -> int:
        """Most nodes that one group of an axis is spread over. `nodes` has the node of every rank."""
        return max(len({nodes[rank] for rank in line}) for line in self.lines(axis))

    def spread(self, nodes: Sequence[int]) -> str:
        """Sentence on the nodes of each axis, with advice if the innermost one (the busiest) leaves a node.

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

    def expect(self, ranks: int, known: Collection[str] = AXES) -> None:
        """Raise ValueError, with the meshes that would fit, unless all axes are `known` and the mesh has `ranks` ranks.

        >>> Mesh.parse("dp=2,tp=2").expect(6)
        Traceback (most recent call last):
        ValueError: mesh: dp=2,tp=2 is for 4 ranks, found 6; dp=3,tp=2 or dp=2,tp=3 would fit
        """
        for name in (*self.sizes, *self._folded):
            if name not in known:
                raise ValueError(f"mesh: expected axes of {', '.join(known)}, found {name} in {self}")
        if self.size != ranks:
            fits = " or ".join(map(str, self._fitting(ranks))) or f"axes with a product of {ranks}"
            folded = f" without {' and '.join(self._folded)}" if self._folded else ""
            raise ValueError(f"mesh: {self} is for {self.size} ranks{folded}, found {ranks}; {fits} would fit")
        self._expect_experts()

    def _expect_experts(self) -> None:
        """Raise ValueError unless ``ep`` and ``etp`` can be folded over the other axes."""
        shards, fits, tensor = self.sizes.get(TENSOR.name, 1), self._foldable, TENSOR.name
        if shards % self.etp:
            expected = f"a divisor of the {shards} ranks along {tensor}"
            raise ValueError(f"mesh: expected {EXPERT_TENSOR.name} to be {expected}, found {self}")
        if self.ep in fits:
            return
        # the message names axes that the user wrote, and numbers that would fit
        over = [name for name in (*self.summed.sizes, tensor) if self.sizes.get(name, 1) > 1] or [self.replicas]
        expected = f"a divisor of the {max(fits)} ranks along {' and '.join(over)}"
        if self.expert_shards > 1:
            expected += f", and a multiple of the {self.expert_shards} along {tensor} with different experts"
        sizes = [f"{EXPERTS.name}={size}" for size in fits if size > 1]
        if self.etp == 1 < self.ep < shards and shards % self.ep == 0:
            sizes.append(f"{EXPERTS.name}={self.ep},{EXPERT_TENSOR.name}={shards // self.ep}")
        others = " or ".join(sizes) or f"{self.replicas}={self.ep},{EXPERTS.name}={self.ep}"
        raise ValueError(f"mesh: expected {EXPERTS.name} to be {expected}, found {self}; {others} would fit")

    @property
    def _foldable(self) -> list[int]:
        """Sizes that ``ep`` may have."""
        replicas = self.summed.size
        return [self.expert_shards * share for share in range(1, replicas + 1) if replicas % share == 0]

    def _fitting(self, ranks: int) -> list[Mesh]:
        """Meshes of `ranks` ranks that differ from this one in one axis, perhaps the replicas that it lacks."""
        fits = []
        for name in dict.fromkeys([*self.sizes, self.replicas]):
            sizes = self.sizes if name in self.sizes else {name: 1, **self.sizes}
            count, remainder = divmod(ranks, self.size // sizes[name])
            if not remainder:
                fits.append(replace(self, sizes={**sizes, name: count}))
        return [mesh for mesh in fits if mesh.ep in mesh._foldable]
