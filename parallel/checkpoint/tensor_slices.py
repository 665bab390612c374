"""Slices of the tensors of the training state, independent of the layout: what checkpoints read and write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from parallel.nn.flat_params import ParamSpan, Span
from parallel.optim.optimizers import OptimizerSpan
from quant.types import Array


class TensorSlice(NamedTuple):
    """Elements of a logical tensor that this rank holds: what checkpoints read and write.

    Attributes
    ----------
    name : str
        ``"model/<parameter>"``, ``"optimizer/<state>/<parameter>"``, or ``"feedback/<state>/<parameter>"``.
    shape : tuple of int
        Of the whole tensor.
    start : int
        Where in the flattened tensor the slice begins.
    array : 1-D array
        A view of the rank's memory: assigning to its elements changes the state. float32, or float64 in fp64.
    mine : bool
        Whether this rank is the one to write it to a checkpoint. Every element is in one such slice, on one rank.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    array: Array
    mine: bool


def tensor_slices(pieces: Sequence[OptimizerSpan], mine: Sequence[Span]) -> Iterator[TensorSlice]:
    """All that a rank holds in its pieces; `mine` are the spans that it is to write."""
    for piece in pieces:
        vectors = {"model": piece.weights, **{f"optimizer/{name}": view for name, view in piece.state.items()}}
        for place in piece.places:
            for kind, vector in vectors.items():
                for start, stop, write in _divided(_common(piece.span, place), mine):
                    array = vector[start - piece.span.start : stop - piece.span.start]
                    name, shape = f"{kind}/{place.parameter.name}", place.parameter.shape
                    yield TensorSlice(name, shape, start - place.span.start, array, write)


def _common(span: Span, place: ParamSpan) -> Span:
    """Elements of a tensor, without padding, that lie in a span; empty if there are none."""
    start = max(span.start, place.span.start)
    return Span(start, max(start, min(span.stop, place.span.start + place.size)))


def _divided(span: Span, mine: Sequence[Span]) -> Iterator[tuple[int, int, bool]]:
    """Pieces of a span, cut at the bounds of `mine`: (start, stop, True if in one of them)."""
    cuts = {span.start, span.stop} | {cut for part in mine for cut in part if span.start < cut < span.stop}
    for start, stop in pairwise(sorted(cuts)):
        yield start, stop, any(part.start <= start and stop <= part.stop for part in mine)
