"""Partition of a model's flat parameter vector, from shapes alone. Imports no MPI, allocates nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from parallel.nn.compose import Sequential
from parallel.nn.flat_params import FlatParams, ParamSpan, buckets
from parallel.nn.operator import Operator
from parallel.optim.precision import Precision


@dataclass(frozen=True)
class PartitionSpec:
    """Model as units and flat parameter vector, number of ranks, precision, and bucket sizes."""

    units: tuple[Operator, ...]  # items of the model, whose weights are gathered and released together
    flat: FlatParams
    ranks: int
    rank: int
    precision: Precision
    reproducible: bool  # gradients are added in canonical order
    bucket_bytes: int  # least bytes of a bucket of gradients
    first_bytes: int  # least bytes of the bucket that is complete first
    seed: int = 0
    compress: Any = None  # `parallel.engine.grad_compression.CompressorFactory` or None

    def scratch(self, adds: bool) -> int:
        """Elements of the scratch buffer: the longest tensor with several gradients to add before the exchange.

        These are the tensors with several uses; if a layout `adds` up micro-batches in place, all of them are.
        """
        adds = adds and not self.reproducible
        return max((place.size for place in self.flat.places if adds or place.parameter.uses > 1), default=0)

    def buckets(self, most: int | None = None) -> tuple[tuple[ParamSpan, ...], ...]:
        """Parameters of each gradient bucket. Sizes are raised so that there are at most `most` + 1 buckets."""
        itemsize = self.precision.wide.itemsize
        least = 0 if most is None else -(-self.flat.length * itemsize // most)
        nbytes = max(self.bucket_bytes, least)
        runs = reversed(self.runs())
        return tuple(some for run in runs for some in buckets(run, nbytes, self.first_bytes, itemsize))

    def runs(self) -> list[Sequence[ParamSpan]]:
        """Neighbouring parameters that may share a bucket: with compression, those that the same ranks have.

        The values of a compressed sum depend on the other tensors of the bucket and on their positions. Ranks with
        copies of a tensor and other shards beside it would get different sums for it.
        """
        if self.compress is None:
            return [self.flat.places] if self.flat.places else []
        return [tuple(run) for _, run in groupby(self.flat.places, lambda place: place.parameter.placement)]

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Indices of the units that use each parameter, ascending, keyed by id(parameter)."""
        users: dict[int, tuple[int, ...]] = {}
        for number, unit in enumerate(self.units):
            for parameter in unit.parameters():
                users[id(parameter)] = (*users.get(id(parameter), ()), number)
        return users


def units_of(model: Operator) -> tuple[Operator, ...]:
    """Split a model into units, gathered and released as a whole: the items of a `Sequential`, else the model."""
    return tuple(model.items) if isinstance(model, Sequential) else (model,)
