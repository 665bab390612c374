"""Table of data-parallel layouts: gradient sink, parameter store, assignment of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from parallel.data.sampler import contiguous, interleaved
from parallel.data_parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP
from parallel.data_parallel.param_store import ReplicatedParams, ShardedParams
from parallel.data_parallel.run_context import RunContext
from parallel.data_parallel.zero import Zero1, Zero2, Zero3
from parallel.nn.flat_params import Span, shards


class DataParallelLayout(NamedTuple):
    """A data-parallel layout: gradient sink, parameter store, assignment of micro-batches.

    Attributes
    ----------
    gradients : callable (context) -> sink of gradients
    weights : callable (context, sink) -> ReplicatedParams or ShardedParams
    share : callable (micro-batches, rank, ranks) -> numbers
        This rank's micro-batches.
    divided : bool
        Every rank updates a part of the weights only.
    drawn : bool
        Ranks may draw micro-batches while the step runs, since no rank waits for another before its end.
    """

    gradients: Callable[[RunContext], Any]
    weights: Callable[[RunContext, Any], ReplicatedParams | ShardedParams]
    share: Callable[[int, int, int], range]
    divided: bool
    drawn: bool

    def spans(self, context: RunContext, gradients: Any) -> list[list[Span]]:
        """Spans of each rank, of which it has the sum of gradients; together they make up the vector."""
        ranks = range(context.plan.ranks)
        if self.divided:
            return [[bucket.parts[rank] for bucket in gradients.buckets] for rank in ranks]
        return [[span] for span in shards(context.flat.span, len(ranks))]


def _everywhere(context: RunContext, gradients: Any) -> ReplicatedParams:
    return ReplicatedParams(context, [span for span, _ in gradients.own])


def _published(context: RunContext, gradients: Any) -> ReplicatedParams:
    return ReplicatedParams(context, [span for span, _ in gradients.own], gradients.buckets)


def _just_in_time(context: RunContext, gradients: Any) -> ShardedParams:
    return ShardedParams(context, gradients.buckets, gradients.users)


LAYOUTS = {
    "dp-naive": DataParallelLayout(NaiveDDP, _everywhere, contiguous, divided=False, drawn=True),
    "dp-bucket": DataParallelLayout(BucketedDDP, _everywhere, contiguous, divided=False, drawn=True),
    "dp": DataParallelLayout(OverlappedDDP, _everywhere, contiguous, divided=False, drawn=True),
    "zero1": DataParallelLayout(Zero1, _published, contiguous, divided=True, drawn=True),
    "zero2": DataParallelLayout(Zero2, _published, interleaved, divided=True, drawn=False),
    "zero3": DataParallelLayout(Zero3, _just_in_time, interleaved, divided=True, drawn=False),
}
