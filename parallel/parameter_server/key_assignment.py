"""Keys: ranges of the vector of parameters, the part of a bucket of gradients that a server has. Knows no MPI.

The vector is cut into a shard for each server, of equal length to a block. Gradients leave a backward in buckets; what
of a bucket lies in a shard is a key, and weights come back key by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from parallel.data_parallel.grad_bucket import Bucket
from parallel.nn.flat_params import Place, Span, buckets, shards
from parallel.nn.embedding import Embedding
from parallel.nn.operator import Array
from parallel.data_parallel.partition_spec import Plan


class Table(NamedTuple):
    """A tensor of which a step uses some rows only.

    Attributes
    ----------
    start : int
        Where it begins in the vector of parameters.
    width : int
        Elements of a row.
    """

    start: int
    width: int

    def places(self, rows: Array, span: Span) -> Array:
        """Where the elements of these rows lie in a span, counted from its beginning; those outside are left out.

        >>> Table(0, 100).places(np.array([2, 5]), Span(256, 512)).tolist()[:3]  # of row 2 the last 44
        [0, 1, 2]
        """
        places = (rows[:, None] * self.width + (np.arange(self.width) + self.start - span.start)).reshape(-1)
        return places[(places >= 0) & (places < span.size)]

    def within(self, rows: Array, span: Span) -> Array:
        """The rows that have elements in a span."""
        first, stop = (span.start - self.start) // self.width, -(-(span.stop - self.start) // self.width)
        return rows[(rows >= first) & (rows < stop)]


class Key(NamedTuple):
    """A range of parameters on one server.

    Attributes
    ----------
    number : int
        In order of servers.
    bucket : int
        With which others its gradient leaves the backward.
    server : int
    span : Span
    table : Table or None
        If it is part of one that is pushed and pulled by rows.
    """

    number: int
    bucket: int
    server: int
    span: Span
    table: Table | None


def tables(plan: Plan) -> dict[int, Table]:
    """By a parameter's identity: tables of which a micro-batch names the rows, since they take it as it comes.

    That is the embedding in front of a model, if its table serves nothing else.
    """
    first = plan.units[0] if plan.units else None
    if not isinstance(first, Embedding) or first.weight.uses > 1:
        return {}
    place = next(place for place in plan.flat.places if place.parameter is first.weight)
    return {id(first.weight): Table(place.span.start, first.width)}


def buckets_of(plan: Plan) -> list[Bucket]:
    """Buckets in the order in which a backward completes them; a table has one of its own."""
    by_rows, itemsize = tables(plan), plan.precision.wide.itemsize
    cut: list[tuple[Place, ...]] = []
    for alone, run in groupby(reversed(plan.flat.places), lambda place: id(place.parameter) in by_rows):
        places = list(run)[::-1]
        cut += [tuple(places)] if alone else buckets(places, plan.bucket_bytes, plan.first_bytes, itemsize)
    return [Bucket(number, places, 1, 0) for number, places in enumerate(cut)]


def keys_of(plan: Plan, made: Sequence[Bucket], servers: int) -> tuple[Key, ...]:
    """All keys of all servers."""
    by_rows, found = tables(plan), list[Key]()
    for server, shard in enumerate(shards(Span(0, plan.flat.length), servers)):
        for bucket in made:
            start, stop = max(shard.start, bucket.span.start), min(shard.stop, bucket.span.stop)
            if start < stop:
                table = by_rows.get(id(bucket.places[0].parameter))
                found.append(Key(len(found), bucket.number, server, Span(start, stop), table))
    return tuple(found)
