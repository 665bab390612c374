"""Keys: ranges of the parameter vector, each the intersection of a gradient bucket with a server's shard. No MPI.

The vector is cut into one shard per server, equal up to a block. Gradients leave a backward in buckets and weights are
pulled key by key.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.nn.embedding import Embedding
from parallel.nn.flat_params import ParamSpan, Span, buckets, shards
from quant.types import Array


class EmbeddingTable(NamedTuple):
    """Embedding weight transferred by rows of `width` elements. It starts at `start` in the parameter vector."""

    start: int
    width: int

    def places(self, rows: Array, span: Span) -> Array:
        """Indices of the elements of `rows` in a span, relative to its start. Elements outside are left out.

        >>> EmbeddingTable(0, 100).places(np.array([2, 5]), Span(256, 512)).tolist()[:3]  # of row 2 the last 44
        [0, 1, 2]
        """
        places = (rows[:, None] * self.width + (np.arange(self.width) + self.start - span.start)).reshape(-1)
        return places[(places >= 0) & (places < span.size)]

    def within(self, rows: Array, span: Span) -> Array:
        first, stop = (span.start - self.start) // self.width, -(-(span.stop - self.start) // self.width)
        return rows[(rows >= first) & (rows < stop)]


class ServerKey(NamedTuple):
    """Range of the parameter vector on one server: the unit of pulls and pushes."""

    number: int  # in order of servers
    bucket: int  # bucket whose gradient contains this range
    server: int
    span: Span
    table: EmbeddingTable | None  # set if the key is pushed and pulled by rows

    def places(self, rows: Array) -> Array:
        assert self.table is not None
        return self.table.places(rows, self.span)


def tables(plan: PartitionSpec) -> dict[int, EmbeddingTable]:
    """Embedding tables of a model that are transferred by rows (at most one), by ``id(parameter)``.

    Only an embedding at the start of a model qualifies, as the input names its rows, and only if it is used once.
    """
    first = plan.units[0] if plan.units else None
    if not isinstance(first, Embedding) or first.weight.uses > 1:
        return {}
    place = next(place for place in plan.flat.places if place.parameter is first.weight)
    return {id(first.weight): EmbeddingTable(place.span.start, first.width)}


def buckets_of(plan: PartitionSpec) -> list[GradBucket]:
    """Gradient buckets in the order in which a backward completes them. An embedding table has its own."""
    by_rows, itemsize = tables(plan), plan.precision.wide.itemsize
    cut: list[tuple[ParamSpan, ...]] = []
    for alone, run in groupby(reversed(plan.flat.places), lambda place: id(place.parameter) in by_rows):
        places = list(run)[::-1]
        cut += [tuple(places)] if alone else buckets(places, plan.bucket_bytes, plan.first_bytes, itemsize)
    return [GradBucket(number, places, 1, 0) for number, places in enumerate(cut)]


def keys_of(plan: PartitionSpec, grad_buckets: Sequence[GradBucket], servers: int) -> tuple[ServerKey, ...]:
    by_rows, found = tables(plan), list[ServerKey]()
    for server, shard in enumerate(shards(Span(0, plan.flat.length), servers)):
        for bucket in grad_buckets:
            if (span := shard.intersection(bucket.span)).size:
                table = by_rows.get(id(bucket.places[0].parameter))
                found.append(ServerKey(len(found), bucket.number, server, span, table))
    return tuple(found)


def keys_of_unit(plan: PartitionSpec, keys: Sequence[ServerKey], unit: int) -> list[int]:
    spans = [place.span for place in plan.flat.places if unit in plan.users[id(place.parameter)]]
    return [key.number for key in keys if any(key.span.intersection(span).size for span in spans)]
