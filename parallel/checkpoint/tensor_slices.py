"""Slices of the tensors of the training state, independent of the layout: what checkpoints read and write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from parallel.nn.flat_params import Span
from parallel.optim.optimizer_span import OptimizerSpan
from quant.types import Array


class TensorSlice(NamedTuple):
    """Elements of a tensor that this rank holds: the unit of checkpoints.

    Attributes
    ----------
    name : str
        ``"model/<parameter>"``, ``"optimizer/<state>/<parameter>"``, or ``"feedback/<state>/<parameter>"``.
    shape, start : tuple of int, int
        Shape of the whole tensor, and first element in the flattened tensor.
    array : 1-D array
        View of the rank's memory, float32 or float64: assigning to its elements changes the state.
    mine : bool
        True if this rank writes it to checkpoints. Every element is in one such slice, on one rank.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    array: Array
    mine: bool


def tensor_slices(pieces: Sequence[OptimizerSpan], mine: Sequence[Span]) -> Iterator[TensorSlice]:
    """Slices of everything a rank holds in its pieces; it writes those in the spans `mine`."""
    for piece in pieces:
        vectors = {"model": piece.weights, **{f"optimizer/{name}": view for name, view in piece.state.items()}}
        for place in piece.places:
            for kind, vector in vectors.items():
                for start, stop, write in _divided(place.unpadded.intersection(piece.span), mine):
                    array = vector[start - piece.span.start : stop - piece.span.start]
                    name, shape = f"{kind}/{place.parameter.name}", place.parameter.shape
                    yield TensorSlice(name, shape, start - place.span.start, array, write)


def _divided(span: Span, mine: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """Pieces of a span, cut at the bounds of `mine`: (start, stop, True if in one of them)."""
    cuts = {span.start, span.stop} | {cut for part in mine for cut in part if span.start < cut < span.stop}
    for start, stop in pairwise(sorted(cuts)):
        yield start, stop, any(part.start <= start and stop <= part.stop for part in mine)
