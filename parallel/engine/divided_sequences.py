"""Sequences divided over the axis ``cp`` of a mesh: settings, models of a rank by length, and who has which samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parallel.engine.settings import Settings
from parallel.nn.operator import Operator
from parallel.nn.placement import Placement, Replicate, Shard
from parallel.sharding.context.models_by_length import AUTO, ModelsByLength, WholeSequences
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor.check import check_placements

REPLICAS, CONTEXT, TENSOR = "dp", "cp", "tp"

INVARIANT = "allgather"
"""Attention whose bits do not depend on the number of ranks."""

INPUTS: dict[str, Placement] = {REPLICAS: Shard(0), TENSOR: Replicate(), CONTEXT: Shard(1)}
"""Placement of a model's input along each axis."""

Finish = Callable[[Operator, Any], tuple[Operator, Any]]

SequenceModels = ModelsByLength | WholeSequences


def parts_of(settings: Settings, ranks: int) -> int:
    """Parts of every sequence: `settings.sequence_parts`, by default one per rank of the axis."""
    return settings.sequence_parts or ranks


def check_sequences(settings: Settings, mesh: Mesh) -> None:
    """Raise ValueError if settings do not go with sequences that are divided on this mesh."""
    ranks = mesh.sizes.get(CONTEXT, 1)
    parts = parts_of(settings, ranks)
    if parts % ranks:
        raise ValueError(f"sequence_parts: expected a multiple of cp, in {mesh}; found {parts}")
    if parts == 1:
        if settings.context != AUTO and CONTEXT not in mesh.sizes:
            raise ValueError(f"context: {settings.context} is for sequences divided along cp; found {mesh}")
        return
    if settings.pool:
        raise ValueError(f"pool: ranks that share sequences need the same micro-batches; found pool and {mesh}")
    if settings.reproducible and settings.context not in (AUTO, INVARIANT):
        raise ValueError(f"context: reproducible training needs {INVARIANT}, found {settings.context}")
    if settings.reproducible and parts & (parts - 1):
        fits = "cp=2 or cp=4" if ranks & (ranks - 1) else f"sequence_parts={1 << (parts - 1).bit_length()}"
        expected = f"expected a power of two of parts, found {parts}; {fits} would fit"
        raise ValueError(f"sequence_parts: reproducible sums follow a binary tree: {expected}")
    _check_slices(settings, mesh, parts > ranks)


def _check_slices(settings: Settings, mesh: Mesh, several: bool) -> None:
    """Raise ValueError if ranks along tp have slices of `several` parts that are no subtree of a reproducible sum."""
    tensor = mesh.sizes.get(TENSOR, 1)
    shards = settings.tensor_shards or tensor
    if several and tensor > 1 and shards & (shards - 1) and settings.reproducible and settings.sequence_parallel:
        expected = f"on ranks with several parts of a sequence, sequence_parallel takes a power of two; found {shards}"
        raise ValueError(f"tensor_shards: reproducible sums follow a binary tree: {expected}, and {mesh}")


def sequence_models(
    model: Operator, loss: Any, axis: Any, settings: Settings, finish: Finish = lambda *both: both
) -> SequenceModels:
    """Models for this rank's tokens, with all placements checked; `finish` is applied to each that is made.

    Raises PlacementError or ValueError for a model whose sequences cannot be divided.
    """
    parts = parts_of(settings, axis.size)
    if parts == 1:
        return WholeSequences(*finish(model, loss))
    algorithm = INVARIANT if settings.reproducible else settings.context
    tensor = Mesh.parse(settings.mesh).sizes.get(TENSOR, 1) if settings.mesh else 1
    multiple = (settings.tensor_shards or tensor) if settings.sequence_parallel else 1
    if multiple > 1 and (settings.reproducible or parts > axis.size):
        _expect_one_use(model)
    models = ModelsByLength(model, loss, axis, parts, algorithm, finish, multiple)
    check_placements(*models.of(1)[:2], INPUTS, {REPLICAS, CONTEXT})
    return models


def _expect_one_use(model: Operator) -> None:
    """Raise ValueError if a parameter that is not cut has several uses: the order of the sums would depend on ranks."""
    for parameter in model.parameters():
        if parameter.uses > 1 and parameter.cut is None:
            expected = "expected one use of every tensor that is not cut, on slices of the parts of a sequence"
            raise ValueError(f"sequence_parallel: {expected}; found {parameter.uses} of {parameter.name}")


class Teams(NamedTuple):
    """Teams of replicas: each has samples of its own, and its ranks share their sequences.

    `places` are every replica's team and its part of the sequences; `parts` are the ranks of a team.
    """

    places: tuple[tuple[int, int], ...]
    parts: int

    @classmethod
    def of(cls, replicas: Mesh) -> Teams:
        """Teams on a mesh of replicas, without axes along which operators are cut."""
        groups = replicas.groups([CONTEXT])
        places = {rank: (team, part) for team, group in enumerate(groups) for part, rank in enumerate(group)}
        return cls(tuple(places[rank] for rank in range(replicas.size)), len(groups[0]))

    @property
    def number(self) -> int:
        return len(self.places) // self.parts

    def leaf(self, number: int, rank: int) -> int:
        """Number of a replica's term of the gradient of a micro-batch, which has as many terms as a team has ranks."""
        return number * self.parts + self.places[rank][1]

    def leaves(self, assignment: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Numbers of the terms of the gradient by replica (`leaf`), from the micro-batches of every team.

        >>> Teams.of(Mesh.parse("dp=2,cp=2")).leaves([(0, 1), (2,)])
        [(0, 2), (1, 3), (4,), (5,)]
        """
        teams = enumerate(team for team, _ in self.places)
        return [tuple(self.leaf(number, rank) for number in assignment[team]) for rank, team in teams]
