"""Flat parameter vector: all parameters one after another, each starting at a block of 256 elements.

The vector is the same for every layout. Shards, buckets and units are spans of whole blocks, and no block holds two
tensors, so sums per block have the same bits however the vector is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from collectives.schedule.chunks import even
from parallel.nn.operator import Operator, Parameter, name_all

BLOCK = 256
"""Elements per block: 1 KiB of float32, a multiple of every cache line and vector register."""


class Span(NamedTuple):
    """Range of elements, `start` up to but excluding `stop`, of the flat vector; both are multiples of BLOCK."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def intersection(self, other: Span) -> Span:
        """Overlap of this span and `other`; an empty span if they do not overlap."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


class ParamSpan(NamedTuple):
    """Parameter and its span of the flat vector, padded to whole blocks."""

    parameter: Parameter
    span: Span

    @property
    def size(self) -> int:
        """Number of elements of the parameter, without padding."""
        return self.parameter.size

    @property
    def unpadded(self) -> Span:
        """Span of the flat vector that the parameter itself fills, without padding."""
        return Span(self.span.start, self.span.start + self.size)


class FlatParams:
    """Layout of a model's parameters in one flat vector (positions only, no values). Construction calls `name_all`.

    Attributes
    ----------
    places : tuple of ParamSpan
        In order of units (the items of a `Sequential`), and within a unit in order of attributes.
    span : Span
        All elements, padding included.
    by_name : dict of str to ParamSpan
        By `Parameter.label`.
    """

    def __init__(self, model: Operator):
        place, places = 0, []
        for parameter in name_all(model):
            length = -(-parameter.size // BLOCK) * BLOCK
            places.append(ParamSpan(parameter, Span(place, place + length)))
            place += length
        self._hold(places)

    def _hold(self, places: Iterable[ParamSpan]) -> None:
        self.places = tuple(places)
        self.span = Span(self.places[0].span.start, self.places[-1].span.stop) if self.places else Span(0, 0)
        self.by_name = {place.parameter.label: place for place in self.places}

    @property
    def length(self) -> int:
        """Number of elements of these parameters in the flat vector, with padding."""
        return self.span.size

    def part(self, places: Iterable[ParamSpan]) -> FlatParams:
        """`FlatParams` of some neighbouring parameters only, whose spans remain positions in the whole vector."""
        part = object.__new__(FlatParams)
        part._hold(places)
        return part

    def within(self, span: Span) -> slice:
        """Slice that selects a span in an array holding exactly this vector."""
        return slice(span.start - self.span.start, span.stop - self.span.start)

    def bind(self, vector: Any, places: Iterable[ParamSpan] | None = None, start: int | None = None) -> None:
        """Set `data` of parameters (default: all) to views of `vector`, the flat vector's elements from `start` on."""
        start = self.span.start if start is None else start
        for parameter, span in self.places if places is None else places:
            parameter.bind(self.view(vector, parameter, span.start - start))

    def unbind(self) -> None:
        """Bind no values: parameters are not in memory until the next `bind`."""
        for parameter, _ in self.places:
            parameter.bind(None)

    @staticmethod
    def view(vector: Any, parameter: Parameter, start: int) -> Any:
        """View of as many elements of `vector` as the parameter has, from index `start` on, in its shape."""
        return vector[start : start + parameter.size].reshape(parameter.shape)

    def initialise(self, vector: Any, seed: int, span: Span | None = None) -> None:
        """Write the initial values of a span (default: all), 0 in padding, into `vector`, of the span's length."""
        span = self.span if span is None else span
        vector[...] = 0
        for place in self.places:
            here = place.unpadded.intersection(span)
            if here.size:
                values = place.parameter.first(seed).reshape(-1)[here.start - place.span.start :][: here.size]
                vector[here.start - span.start :][: here.size] = values


def shards(span: Span, ranks: int) -> tuple[Span, ...]:
    """Split a span into one shard per rank, of whole blocks and as equal as possible; some may be empty.

    >>> shards(Span(256, 1024), 2)
    (Span(start=256, stop=768), Span(start=768, stop=1024))
    """
    lengths = [blocks * BLOCK for blocks in even(span.size // BLOCK, ranks)]
    starts = list(accumulate(lengths, initial=span.start))
    return tuple(Span(start, start + length) for start, length in zip(starts, lengths))


def buckets(
    places: Sequence[ParamSpan], nbytes: int, first: int, itemsize: int = 4
) -> tuple[tuple[ParamSpan, ...], ...]:
    """Group parameters, last first as in a backward pass, into gradient buckets of `nbytes` or more (first: `first`).

    A bucket is closed when it has `nbytes` (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2), the first one
    when it has `first` bytes: a small one lets communication begin early. A remainder below `first`
    bytes joins the last bucket, as each exchange has a fixed cost; a larger one is a bucket, perhaps a small one.
    """
    done: list[tuple[ParamSpan, ...]] = []
    open_: list[ParamSpan] = []
    for place in reversed(places):
        open_.insert(0, place)
        if sum(place.span.size for place in open_) * itemsize >= (nbytes if done else first):
            done.append(tuple(open_))
            open_ = []
    if done and sum(place.span.size for place in open_) * itemsize < first:
        done[-1] = (*open_, *done[-1])
    elif open_:
        done.append(tuple(open_))
    return tuple(done)
