"""Partition of a model's flat vector, from shapes and settings alone. Imports no MPI and allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import FlatParams, ParamSpan, buckets
from parallel.nn.operator import Operator
from parallel.optim.precision import PRECISIONS, Precision


@dataclass(frozen=True)
class PartitionSpec:
    """The model and its vector, the ranks, the types of numbers."""

    units: tuple[Operator, ...]  # items of the model, whose weights are gathered and released together
    flat: FlatParams
    ranks: int
    rank: int
    precision: Precision
    reproducible: bool  # gradients are added in canonical order
    bucket_bytes: int  # least bytes of a bucket of gradients
    first_bytes: int  # least bytes of the bucket that is complete first
    seed: int = 0
    compress: Any = None  # `parallel.grad_compression.CompressorFactory` or None

    def scratch(self, adds: bool) -> int:
        """Elements of the longest tensor that gets several gradients before its sum is exchanged.

        These are the tensors with several uses; if a layout `adds` up micro-batches in place, all of them are.
        """
        adds = adds and not self.reproducible
        return max((place.size for place in self.flat.places if adds or place.parameter.uses > 1), default=0)

    def buckets(self, most: int | None = None) -> tuple[tuple[ParamSpan, ...], ...]:
        """Tensors of every bucket; at most `most` + 1 buckets."""
        itemsize = self.precision.wide.itemsize
        least = 0 if most is None else -(-self.flat.length * itemsize // most)
        return buckets(self.flat.places, max(self.bucket_bytes, least), self.first_bytes, itemsize)

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Numbers of the units that use a parameter, ascending, by its identity."""
        users: dict[int, tuple[int, ...]] = {}
        for number, unit in enumerate(self.units):
            for parameter in unit.parameters():
                users[id(parameter)] = (*users.get(id(parameter), ()), number)
        return users


def plan_of(model: Operator, ranks: int, rank: int, settings: Settings, compress: Any = None) -> PartitionSpec:
    """Partition of a model's vector, for the engine and its forecast; names the parameters and sets their dtype."""
    flat, precision = FlatParams(model), PRECISIONS[settings.precision]
    for place in flat.places:
        place.parameter.dtype = precision.storage
    return PartitionSpec(
        units=units_of(model),
        flat=flat,
        ranks=ranks,
        rank=rank,
        precision=precision,
        reproducible=settings.reproducible,
        bucket_bytes=settings.bucket_bytes,
        first_bytes=settings.first_bytes,
        seed=settings.seed,
        compress=compress,
    )


def units_of(model: Operator) -> tuple[Operator, ...]:
    """Units of a model: a `Sequential`'s items; any other operator is one unit."""
    return tuple(model.items) if isinstance(model, Sequential) else (model,)
