"""Bucket reducers: sum gradients over micro-batches and ranks, in MPI's or canonical order, all-reduced or sharded.

Whole reducers sum the micro-batches of a rank and exchange once per step: begin; begin_backward, end_backward for each
micro-batch; assign; then allreduce or reduce_scatter, or start, test until it is done, finish (to overlap the
backward).

Sharded reducers exchange after every micro-batch and keep this rank's part of the sum, so that the bucket's memory can
be reused: begin; begin_backward, exchange for each turn; finalize.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives.runtime.requests.request import Request
from collectives.runtime.requests.request_lists import wait_all
from parallel.engine.data_parallel.grad_bucket import GradBucket
from parallel.engine.data_parallel.run_context import RunContext
from parallel.runtime.tree_sum import TreeNode, TreeSum, VectorPool, tree_forecast
from quant.types import Array

Assignment = Sequence[tuple[int, ...]]
"""Numbers of the micro-batches of each rank, by rank."""

Turns = Sequence[tuple[int | None, ...]]
"""As `Assignment`, but None is a turn without a micro-batch, in whose exchanges the rank takes part."""


class StepScale(NamedTuple):
    """Scale of a step's gradient sums: step number, number of targets over all ranks, and loss scale."""

    step: int
    targets: float
    scale: float

    @property
    def unit(self) -> float:
        """Ratio of summed gradients to the mean gradient: targets x loss scale."""
        return self.targets * self.scale


START = StepScale(0, 1, 1.0)


class PlainReducer:
    """Bucket reducer that sums a rank's micro-batches in one vector. MPI chooses the order of the sum over ranks.

    `vector` is the bucket's gradient. `scratch` is as long as the longest tensor, `part` (for `reduce_scatter`) as long
    as the longest of this rank's parts.
    """

    alone = False
    """True if no other bucket may be in flight at the same time."""

    def __init__(self, context: RunContext, bucket: GradBucket, vector: Array, scratch: Array, part: Array):
        self.bucket, self.vector = bucket, vector
        self._comm, self._part = context.comm, part
        bucket.use_scratch(scratch)
        self._request: Any = None

    def begin(self) -> None:
        self.bucket.reset(self.vector)

    def assign(self, assignment: Turns, step_scale: StepScale = START) -> None:
        """No-op: the sum does not depend on which rank has which micro-batch."""

    def begin_backward(self, number: int) -> None:
        self.bucket.begin_backward()

    def end_backward(self, number: int) -> None:
        self.bucket.end_backward()

    def allreduce(self) -> None:
        self.start()
        self.finish()

    def reduce_scatter(self) -> None:
        """Reduce-scatter the bucket: this rank's part of `vector` becomes the sum over ranks, the rest undefined."""
        self.bucket.complete()
        part = self._part[: self.bucket.own.size]
        self._comm.Reduce_scatter(self.vector, part, self.bucket.counts)
        self.vector[self.bucket.within(self.bucket.own)] = part

    def bind(self) -> None:
        """Create the persistent allreduce request that `start` starts (collective, once)."""
        if self._request is None:
            self._request = self._comm.Allreduce_init(MPI.IN_PLACE, self.vector)

    def start(self) -> None:
        self.bucket.complete()
        self.bind()
        self._request.Start()

    def test(self) -> bool:
        """Progress the started exchange. True if it is complete and `finish` will not wait."""
        return bool(self._request.Test())

    def finish(self) -> None:
        self._request.Wait()

    def close(self) -> None:
        """Free the request. One that is active, of a step that was broken off, is freed when it ends."""
        if self._request is not None and not self._request.active:
            self._request.Free()
        self._request = None


class CanonicalReducer(PlainReducer):
    """Reproducible bucket reducer: sums over micro-batches in a fixed tree order, for any number of ranks."""

    def __init__(self, context: RunContext, bucket: GradBucket, vector: Array, scratch: Array, part: Array):
        super().__init__(context, bucket, vector, scratch, part)
        self._context = context
        self._counter = TreeSum(VectorPool(lambda: context.memory.private("gradients", bucket.span.size, context.wide)))
        self._arriving = context.memory.private("buffers", 0, context.wide)
        self._nodes: list[tuple[TreeNode, ...]] = []
        self._requests: list[Request] = []

    def begin(self) -> None:
        self._counter.clear()

    def assign(self, assignment: Turns, step_scale: StepScale = START) -> None:
        self._nodes = [tree_forecast(numbers).nodes for numbers in assignment]

    def begin_backward(self, number: int) -> None:
        self.bucket.reset(self._counter.pool.take())
        self.bucket.begin_backward()

    def end_backward(self, number: int) -> None:
        self.bucket.end_backward()
        self.bucket.complete()
        self._counter.push(TreeNode(0, number), self.bucket.vector, ours=True)

    def allreduce(self) -> None:
        self._exchange(self._comm.Alltoallv)
        self.finish()

    def reduce_scatter(self) -> None:
        self._exchange(self._comm.Alltoallv)
        self._add()

    def bind(self) -> None:
        """No-op: the exchange has no persistent request."""

    def start(self) -> None:
        self._requests = self._exchange(self._comm.Ialltoallv)

    def test(self) -> bool:
        return all([request.Test() for request in self._requests])

    def finish(self) -> None:
        wait_all(self._requests)
        self._requests = []
        self._add()
        self._comm.Allgatherv(MPI.IN_PLACE, [self.vector, self.bucket.counts])

    def _exchange(self, alltoallv: Callable[[Any, Any], Any]) -> list[Any]:
        """Send each rank its part of this rank's tree nodes, an all-to-all for each. Returns results of `alltoallv`."""
        size, ranks = self.bucket.own.size, len(self._nodes)
        length = size * sum(map(len, self._nodes))
        if len(self._arriving) < length:
            self._context.memory.allocated["buffers"] -= self._arriving.nbytes
            self._arriving = self._context.memory.private("buffers", length, self._context.wide)
        starts = [part.start - self.bucket.span.start for part in self.bucket.parts]
        calls, at = [], 0
        for turn in range(max(map(len, self._nodes))):  # as often on each rank: an all-to-all is collective
            mine = self._nodes[self._context.plan.rank]
            here = turn < len(mine)
            node = self._counter.sums[mine[turn]] if here else self.vector
            sent = [node, self.bucket.counts if here else [0] * ranks, starts, None]
            counts = [size if turn < len(nodes) else 0 for nodes in self._nodes]
            places = list(accumulate(counts[:-1], initial=at))
            calls.append(alltoallv(sent, [self._arriving, counts, places, None]))
            at += sum(counts)
        return calls

    def _add(self) -> None:
        size, at = self.bucket.own.size, 0
        sums = TreeSum(VectorPool(list))  # in place: nothing is taken from the pool
        for turn in range(max(map(len, self._nodes))):
            for nodes in self._nodes:
                if turn < len(nodes):
                    sums.push(nodes[turn], self._arriving[at : at + size], ours=True)
                    at += size
        total = sums.total()
        self.vector[self.bucket.within(self.bucket.own)] = 0 if total is None else total
        self._counter.clear()


class ShardedPlainReducer:
    """Bucket reducer that reduce-scatters after every micro-batch and keeps only this rank's part of the sum.

    `memory` holds the whole bucket during a backward (other buckets may use it at other times), `own` the sum of this
    rank's part. `scratch` is as long as the longest tensor; `arriving` as the longest of this rank's parts, in
    `ShardedCanonicalReducer` one from every rank.
    """

    def __init__(
        self, context: RunContext, bucket: GradBucket, memory: Array, own: Array, scratch: Array, arriving: Array
    ):
        self.bucket = bucket
        self._comm, self._memory, self._own, self._arriving = context.comm, memory, own, arriving
        bucket.use_scratch(scratch)
        self._empty = True

    def begin(self, assignment: Turns) -> None:
        self._empty = True

    def begin_backward(self) -> None:
        self.bucket.reset(self._memory)
        self.bucket.begin_backward()

    def exchange(self, turn: int) -> None:
        self.bucket.end_backward()
        self.bucket.complete(gaps=True)
        into = self._own if self._empty else self._arriving[: self._own.size]
        self._comm.Reduce_scatter(self._memory, into, self.bucket.counts)
        if not self._empty:
            self._own += into
        self._empty = False

    def finalize(self) -> None:
        if self._empty:
            self._own[...] = 0


class ShardedCanonicalReducer(ShardedPlainReducer):
    """Reproducible sharded bucket reducer: all-to-all after every micro-batch, summed in a fixed tree order."""

    def __init__(
        self, context: RunContext, bucket: GradBucket, memory: Array, own: Array, scratch: Array, arriving: Array
    ):
        super().__init__(context, bucket, memory, own, scratch, arriving)
        self._rank = context.plan.rank
        self._counter = TreeSum(VectorPool(lambda: context.memory.private("gradients", bucket.own.size, context.wide)))
        self._assignment: Turns = ()

    def begin(self, assignment: Turns) -> None:
        self._assignment = assignment

    def exchange(self, turn: int) -> None:
        """Exchange the gradients of every rank's `turn`-th micro-batch: receive this rank's part of each and add it."""
        leaves = [numbers[turn] if turn < len(numbers) else None for numbers in self._assignment]
        self.bucket.end_backward()
        size, here = self._own.size, leaves[self._rank] is not None
        if here:
            self.bucket.complete(gaps=True)
        starts = [part.start - self.bucket.span.start for part in self.bucket.parts]
        sent = self.bucket.counts if here else [0] * len(leaves)  # else nothing: all ranks take part
        counts = [0 if leaf is None else size for leaf in leaves]
        places = list(accumulate(counts[:-1], initial=0))
        self._comm.Alltoallv([self._memory, sent, starts, None], [self._arriving, counts, places, None])
        for leaf, place in zip(leaves, places):
            if leaf is not None:
                self._counter.push(TreeNode(0, leaf), self._arriving[place : place + size], ours=False)

    def finalize(self) -> None:
        total = self._counter.total()
        self._own[...] = 0 if total is None else total
        if total is not None:
            self._counter.pool.give(total)
