"""Cost of changing the placement of a value on a mesh of devices with one or two axes.

A value has a placement along each axis, written as R (replicated), P (a partial sum), or S with the dimension that is
cut. ``S0 S-1`` is cut along the batch on axis 0 and along the features on axis 1. Where both axes cut the same
dimension, axis 0 cuts it first and axis 1 cuts each part.

A change is made of collectives along one axis each. `resharding` finds the cheapest sequence (Dijkstra). Parts that
both axes cut can only be joined from the inner axis outwards.
"""

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from collectives.algorithms import catalog
from parallel.nn.placement import Partial, Placement, Replicate, Shard
from parallel.planning.analytic.machines import Link
from parallel.planning.analytic.step_time import message_seconds

COLLECTIVES: dict[tuple[type[Placement], type[Placement]], str] = {
    (Replicate, Replicate): "",
    (Replicate, Partial): "",  # one rank keeps the value, the others have zeros
    (Replicate, Shard): "",  # each rank keeps its part
    (Partial, Replicate): "allreduce",
    (Partial, Partial): "",
    (Partial, Shard): "reduce_scatter",
    (Shard, Replicate): "allgather",
    (Shard, Partial): "",  # zeros around each part
    (Shard, Shard): "alltoall",
}
"""Collective, by its name in the catalogue of `collectives`, from one placement to another. "" for none."""


def collective(source: Placement, target: Placement) -> str:
    """Collective that changes a value's placement. "" if no rank needs data of another.

    >>> collective(Partial(), Shard(1)), collective(Shard(0), Shard(-1)), collective(Shard(0), Shard(0))
    ('reduce_scatter', 'alltoall', '')
    """
    if isinstance(source, Shard) and isinstance(target, Shard) and source.dim == target.dim:
        return ""
    return COLLECTIVES[type(source), type(target)]


def gradient(placement: Placement) -> Placement:
    """Placement of the gradient of a value: see the table in `parallel.nn.placement`."""
    if isinstance(placement, Partial):
        return Replicate()
    return Partial() if placement == Replicate(partial=True) else placement


def exchanges(source: Placement, target: Placement) -> tuple[str, str]:
    """Collectives of the forward and the backward pass where a value is taken with another placement than it has.

    >>> exchanges(Replicate(), Replicate(partial=True)), exchanges(Partial(), Replicate())  # Megatron-LM's f and g
    (('', 'allreduce'), ('allreduce', ''))
    >>> exchanges(Shard(1), Replicate(partial=True)), exchanges(Partial(), Shard(1))  # with sequence parallelism
    (('allgather', 'reduce_scatter'), ('reduce_scatter', 'allgather'))
    """
    return collective(source, target), collective(gradient(target), gradient(source))


MeshPlacement: TypeAlias = tuple[Placement, ...]
"""Placement of a value along every axis of a mesh, the outer axis first."""

ALGORITHMS = {"allreduce": "ring", "reduce_scatter": "ring", "allgather": "ring", "alltoall": "pairwise"}
"""Algorithms whose cost formulas price the collectives."""


class PlacementMesh(NamedTuple):
    """Sizes of the axes of a mesh and the links that limit them, the outer axis first. Neighbours are on the last."""

    sizes: tuple[int, ...]
    links: tuple[Link, ...]

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    def parts(self, placement: MeshPlacement) -> int:
        """Number of parts into which a value is cut."""
        return prod(size for size, along in zip(self.sizes, placement) if isinstance(along, Shard))


class PlacementChange(NamedTuple):
    """One collective along an axis: bytes that each device sends, and seconds. Without a collective both are 0."""

    collective: str
    axis: int
    nbytes: float
    seconds: float
    result: MeshPlacement


class Resharding(NamedTuple):
    """Cheapest sequence of exchanges from one placement to another."""

    exchanges: tuple[PlacementChange, ...]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.exchanges)

    @property
    def nbytes(self) -> float:
        """Bytes sent by each device."""
        return sum(each.nbytes for each in self.exchanges)

    def __str__(self) -> str:
        names = [f"{each.collective}({each.axis})" for each in self.exchanges if each.collective]
        return " + ".join(names) or "-"


def short_name(placement: MeshPlacement) -> str:
    """Placement as text.

    >>> short_name((Replicate(), Shard(-1))), short_name((Partial(),))
    ('R S-1', 'P')
    """
    return " ".join(f"S{each.dim}" if isinstance(each, Shard) else type(each).__name__[0] for each in placement)


def value_placements(dims: tuple[int, ...], axes: int) -> list[MeshPlacement]:
    """All placements of a value whose dimensions `dims` can be cut, on a mesh with a number of axes."""
    return list(product((Replicate(), *map(Shard, dims), Partial()), repeat=axes))


def _neighbours(
    here: MeshPlacement, choices: tuple[Placement, ...], nbytes: float, mesh: PlacementMesh
) -> Iterator[PlacementChange]:
    """Yield the changes of a value of `nbytes` by one collective along one axis, or by none."""
    for axis, old in enumerate(here):
        inner = {each.dim for each in here[axis + 1 :] if isinstance(each, Shard)}
        for new in choices:
            if new == old or any(isinstance(each, Shard) and each.dim in inner for each in (old, new)):
                continue
            result = (*here[:axis], new, *here[axis + 1 :])
            name, size = collective(old, new), mesh.sizes[axis]
            if not name or size == 1:
                yield PlacementChange("", axis, 0.0, 0.0, result)
                continue
            # The n of the formulas: all data gathered, summed or scattered along the axis.
            n = nbytes / mesh.parts(result if name == "allgather" else here)
            volume = catalog.evaluate(catalog.find(name, ALGORITHMS[name]).volume, size)
            seconds = message_seconds(name, ALGORITHMS[name], size, n, mesh.links[axis])
            yield PlacementChange(name, axis, float(volume) * n, seconds, result)


def _as_value(placement: MeshPlacement) -> MeshPlacement:
    """Placement without regard to the gradient."""
    return tuple(Replicate() if isinstance(each, Replicate) else each for each in placement)


@lru_cache(maxsize=1 << 16)
def resharding(
    source: MeshPlacement, target: MeshPlacement, nbytes: float, mesh: PlacementMesh, dims: tuple[int, ...] = ()
) -> Resharding:
    """Cheapest way to change the placement of a value of `nbytes` (all of it): least seconds, then least bytes.

    `dims` are other dimensions that may be cut on the way: to cut a dimension first on the outer axis, two alltoalls
    are cheaper than an allgather.
    """
    source, target = _as_value(source), _as_value(target)
    cut = {each.dim for each in (*source, *target) if isinstance(each, Shard)} | set(dims)
    choices = (Replicate(), *map(Shard, sorted(cut)), *([Partial()] if Partial() in target else []))
    queue: list[tuple[float, float, int, int, MeshPlacement, tuple[PlacementChange, ...]]] = [
        (0.0, 0.0, 0, 0, source, ())
    ]
    done: set[MeshPlacement] = set()
    count = 0
    while queue:
        seconds, moved, steps, _, here, path = heappop(queue)
        if here == target:
            return Resharding(path)
        if here in done:
            continue
        done.add(here)
        for each in _neighbours(here, choices, nbytes, mesh):
            count += 1
            cost = (seconds + each.seconds, moved + each.nbytes, steps + 1, count)
            heappush(queue, (*cost, each.result, (*path, each)))
    raise AssertionError(f"no way from {short_name(source)} to {short_name(target)}")


def edge_reshardings(
    source: MeshPlacement, target: MeshPlacement, nbytes: float, mesh: PlacementMesh, dims: tuple[int, ...] = ()
) -> tuple[Resharding, Resharding]:
    """Changes of a value in the forward pass and of its gradient in the backward pass, by placements of the value."""
    back = tuple(map(gradient, target)), tuple(map(gradient, source))
    return resharding(source, target, nbytes, mesh, dims), resharding(*back, nbytes, mesh, dims)
