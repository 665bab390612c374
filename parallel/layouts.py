"""Layouts: where gradients go, where weights are, and who has which micro-batches; a line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from parallel.data_parallel.run_context import Context
from parallel.data.sampler import contiguous, interleaved
from parallel.data_parallel.ddp import Bucketed, Naive, Overlapped
from parallel.nn.flat_params import Span, shards
from parallel.data_parallel.param_store import Gathered, Whole
from parallel.data_parallel.zero import Stage1, Stage2, Stage3


class Layout(NamedTuple):
    """Who has what.

    Attributes
    ----------
    gradients : callable (context) -> sink of gradients
    weights : callable (context, sink) -> Whole or Gathered
    share : callable (micro-batches, rank, ranks) -> numbers
        This rank's micro-batches.
    divided : bool
        Whether every rank updates a part of the weights only.
    drawn : bool
        Whether ranks may draw micro-batches while the step runs, since nobody waits for others before its end.
    """

    gradients: Callable[[Context], Any]
    weights: Callable[[Context, Any], Whole | Gathered]
    share: Callable[[int, int, int], range]
    divided: bool
    drawn: bool

    def spans(self, context: Context, gradients: Any) -> list[list[Span]]:
        """Rank by rank, spans that make up the whole vector together: of what each has the sum of gradients."""
        ranks = range(context.plan.ranks)
        if self.divided:
            return [[bucket.parts[rank] for bucket in gradients.buckets] for rank in ranks]
        return [[span] for span in shards(context.flat.span, len(ranks))]


def _everywhere(context: Context, gradients: Any) -> Whole:
    return Whole(context, [span for span, _ in gradients.own])


def _published(context: Context, gradients: Any) -> Whole:
    return Whole(context, [span for span, _ in gradients.own], gradients.buckets)


def _just_in_time(context: Context, gradients: Any) -> Gathered:
    return Gathered(context, gradients.buckets, gradients.users)


LAYOUTS = {
    "dp-naive": Layout(Naive, _everywhere, contiguous, divided=False, drawn=True),
    "dp-bucket": Layout(Bucketed, _everywhere, contiguous, divided=False, drawn=True),
    "dp": Layout(Overlapped, _everywhere, contiguous, divided=False, drawn=True),
    "zero1": Layout(Stage1, _published, contiguous, divided=True, drawn=True),
    "zero2": Layout(Stage2, _published, interleaved, divided=True, drawn=False),
    "zero3": Layout(Stage3, _just_in_time, interleaved, divided=True, drawn=False),
}
