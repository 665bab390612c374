"""The state of a training as stretches of logical tensors, which know no layout: what checkpoints are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from parallel.nn.flat_params import Place, Span
from parallel.nn.operator import Array
from parallel.optim.optimizers import Piece


class Stretch(NamedTuple):
    """Elements of a logical tensor that this rank holds: what checkpoints read and write.

    Attributes
    ----------
    name : str
        ``"model/<parameter>"``, ``"optimizer/<state>/<parameter>"``, or ``"feedback/<state>/<parameter>"``.
    shape : tuple of int
        Of the whole tensor.
    start : int
        Where in the flattened tensor the stretch begins.
    array : 1-D array
        A view of the rank's memory: assigning to its elements changes the state. float32, or float64 in fp64.
    mine : bool
        Whether this rank is the one to write it to a checkpoint. Every element is in one such stretch, on one rank.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    array: Array
    mine: bool


def stretches(pieces: Sequence[Piece], mine: Sequence[Span]) -> Iterator[Stretch]:
    """All that a rank holds in its pieces; `mine` are the spans that it is to write."""
    for piece in pieces:
        vectors = {"model": piece.weights, **{f"optimizer/{name}": view for name, view in piece.state.items()}}
        for place in piece.places:
            for kind, vector in vectors.items():
                for start, stop, write in _divided(_common(piece.span, place), mine):
                    array = vector[start - piece.span.start : stop - piece.span.start]
                    name, shape = f"{kind}/{place.parameter.name}", place.parameter.shape
                    yield Stretch(name, shape, start - place.span.start, array, write)


def _common(span: Span, place: Place) -> Span:
    """The elements of a tensor, without its filling, that lie in a span; of no size if there are none."""
    start = max(span.start, place.span.start)
    return Span(start, max(start, min(span.stop, place.span.start + place.size)))


def _divided(span: Span, mine: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """A span cut where one of `mine` begins or ends: (start, stop, whether it is in one of them)."""
    cuts = {span.start, span.stop} | {cut for part in mine for cut in part if span.start < cut < span.stop}
    for start, stop in pairwise(sorted(cuts)):
        yield start, stop, any(part.start <= start and stop <= part.stop for part in mine)
