"""Table of data-parallel layouts (DDP, ZeRO): gradient reduction, parameter storage, assignment of micro-batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

from parallel.data.sampler import contiguous, interleaved
from parallel.engine.data_parallel.ddp import BucketedDDP, NaiveDDP, OverlappedDDP
from parallel.engine.data_parallel.param_store import ReplicatedParams, ShardedParams
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.data_parallel.zero import Zero1, Zero2, Zero3
from parallel.nn.flat_params import Span, shards


class DataParallelLayout(NamedTuple):
    """Data-parallel layout: constructor of its gradient sink. `share(count, rank, ranks)` gives a rank's micro-batches.

    With `divided` every rank updates a part of the weights only, with `sharded` it also stores only that. With `drawn`
    ranks may draw micro-batches during the step, since no rank waits for another before its end. `across_stages` is the
    layout of parameters that several stages of a pipeline hold, which may not wait for each other before the end; None
    if it is not for pipelines, as replicas would wait for each other in different actions.
    """

    gradients: type[NaiveDDP] | type[Zero2]
    share: Callable[[int, int, int], range]
    divided: bool
    drawn: bool
    across_stages: str | None = None
    sharded: bool = False

    def weights(self, context: RunContext, gradients: Any) -> ReplicatedParams | ShardedParams:
        if self.sharded:
            return ShardedParams(context, gradients.buckets, gradients.users)
        return ReplicatedParams(context, [span for span, _ in gradients.own], gradients.buckets if self.divided else ())

    def spans(self, context: RunContext, gradients: Any) -> list[list[Span]]:
        """Spans of the flat vector by rank, together all of it: each rank's part of gradient norms and checkpoints."""
        ranks = range(context.plan.ranks)
        if self.divided:
            return [[bucket.parts[rank] for bucket in gradients.buckets] for rank in ranks]
        return [[span] for span in shards(context.flat.span, len(ranks))]


LAYOUTS = {
    "dp-naive": DataParallelLayout(NaiveDDP, contiguous, divided=False, drawn=True, across_stages="dp-naive"),
    "dp-bucket": DataParallelLayout(BucketedDDP, contiguous, divided=False, drawn=True),
    "dp": DataParallelLayout(OverlappedDDP, contiguous, divided=False, drawn=True, across_stages="dp"),
    "zero1": DataParallelLayout(Zero1, contiguous, divided=True, drawn=True, across_stages="zero1"),
    "zero2": DataParallelLayout(Zero2, interleaved, divided=True, drawn=False, across_stages="zero1"),
    "zero3": DataParallelLayout(Zero3, interleaved, divided=True, drawn=False, across_stages="zero1", sharded=True),
}
