"""Neighbouring parameters whose gradients travel together, and how a backward fills them in. Knows no MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from parallel.nn.flat_params import Flat, Place, Span, shards
from parallel.nn.operator import Array, Parameter
from parallel.data_parallel.partition_spec import Plan


class Bucket:
    """A run of the flat vector, cut in a part for every rank.

    Parameters
    ----------
    number : int
        Buckets are exchanged in this order, on all ranks.
    places : sequence of Place
        Neighbours, in ascending order.
    ranks, rank : int

    Attributes
    ----------
    span : Span
    parts : tuple of Span
        Rank by rank, of whole blocks.
    own : Span
        This rank's part.
    counts : list of int
        Elements of the parts.
    uses : int
        Gradients that a backward hands in.
    """

    def __init__(self, number: int, places: Sequence[Place], ranks: int, rank: int):
        self.number, self.places = number, tuple(places)
        self.span = Span(places[0].span.start, places[-1].span.stop)
        self.parts = shards(self.span, ranks)
        self.own = self.parts[rank]
        self.counts = [part.size for part in self.parts]
        self.uses = sum(place.parameter.uses for place in places)

    def within(self, span: Span) -> slice:
        """Where a part of the bucket lies in a vector that holds the bucket."""
        return slice(span.start - self.span.start, span.stop - self.span.start)


def buckets_of(cut: Iterable[Sequence[Place]], plan: Plan) -> list[Bucket]:
    """Numbered buckets of these places; without those that have none."""
    return [Bucket(number, places, plan.ranks, plan.rank) for number, places in enumerate(filter(None, cut))]


class Filling:
    """The gradient of a bucket while a backward hands it in, tensor by tensor, in any order.

    Parameters
    ----------
    bucket : Bucket
    scratch : array
        As long as `Plan.scratch` says: for all gradients of a tensor but the first, until they are added.
    """

    def __init__(self, bucket: Bucket, scratch: Array):
        self.bucket, self._scratch = bucket, scratch
        self._starts = {id(place.parameter): place.span.start - bucket.span.start for place in bucket.places}
        self._written: set[int] = set()
        self.vector: Array = None
        self.missing = 0

    def fresh(self, vector: Array) -> None:
        """Fill this vector from now on; what it holds means nothing."""
        self.vector = vector
        self._written.clear()

    def expect(self) -> None:
        """A backward begins: as many gradients are to come as there are uses."""
        self.missing = self.bucket.uses

    def put(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Write the first gradient of a tensor, add the others."""
        self.missing -= 1
        view = Flat.view(self.vector, parameter, self._starts[id(parameter)])
        if id(parameter) in self._written:
            more = Flat.view(self._scratch, parameter, 0)
            compute(more)
            view += more
        else:
            compute(view)
            self._written.add(id(parameter))

    def complete(self, gaps: bool = False) -> None:
        """Zeros for tensors that got nothing, and, if asked for, between the tensors."""
        for place in self.bucket.places:
            start = self._starts[id(place.parameter)]
            if id(place.parameter) not in self._written:
                self.vector[start : start + place.span.size] = 0
                self._written.add(id(place.parameter))
            elif gaps:
                self.vector[start + place.size : start + place.span.size] = 0
