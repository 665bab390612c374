"""Layouts: where gradients go, where weights are, and who has which micro-batches; a line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from parallel.data import contiguous, interleaved
from parallel.data_parallel import Bucketed, Naive, Overlapped
from parallel.hall import Hall
from parallel.weights import Gathered, Whole
from parallel.zero import Stage1, Stage2, Stage3


class Layout(NamedTuple):
    """Who has what.

    Attributes
    ----------
    gradients : callable (hall) -> sink of gradients
    weights : callable (hall, sink) -> Whole or Gathered
    share : callable (micro-batches, rank, ranks) -> numbers
        This rank's micro-batches.
    divided : bool
        Whether every rank updates a part of the weights only.
    """

    gradients: Callable[[Hall], Any]
    weights: Callable[[Hall, Any], Whole | Gathered]
    share: Callable[[int, int, int], range]
    divided: bool


def _everywhere(hall: Hall, gradients: Any) -> Whole:
    return Whole(hall, [span for span, _ in gradients.own])


def _published(hall: Hall, gradients: Any) -> Whole:
    return Whole(hall, [span for span, _ in gradients.own], gradients.buckets)


def _just_in_time(hall: Hall, gradients: Any) -> Gathered:
    return Gathered(hall, gradients.buckets, gradients.users)


LAYOUTS = {
    "dp-naive": Layout(Naive, _everywhere, contiguous, divided=False),
    "dp-bucket": Layout(Bucketed, _everywhere, contiguous, divided=False),
    "dp": Layout(Overlapped, _everywhere, contiguous, divided=False),
    "zero1": Layout(Stage1, _published, contiguous, divided=True),
    "zero2": Layout(Stage2, _published, interleaved, divided=True),
    "zero3": Layout(Stage3, _just_in_time, interleaved, divided=True),
}
