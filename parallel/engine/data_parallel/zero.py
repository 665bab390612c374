"""ZeRO stages 1 to 3: each rank updates a part of the weights, and stores optimizer state only for that part.

Stage 1 divides the optimizer state, stage 2 the gradients as well, stage 3 the weights too. (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)
"""

from collections.abc import Callable, Sequence
from itertools import groupby

from parallel.engine.data_parallel.ddp import NaiveDDP
from parallel.engine.data_parallel.grad_bucket import buckets_of, of, own_views, users_of
from parallel.engine.data_parallel.param_store import resident_slots, slot_sizes
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.data_parallel.reducers import (
    START,
    ShardedCanonicalReducer,
    ShardedPlainReducer,
    StepScale,
    Turns,
)
from parallel.engine.data_parallel.run_context import RunContext
from parallel.nn.flat_params import ParamSpan, Span
from parallel.nn.operator import Parameter
from quant.types import Array


class Zero1(NaiveDDP):
    """ZeRO stage 1 gradient sink: full gradients on every rank, reduce-scattered at the end of the step."""

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        return plan.buckets()

    def part(self) -> Array:
        longest = max((bucket.own.size for bucket in self.buckets), default=0)
        return self._context.memory.private("buffers", longest, self._context.wide)

    def spans(self) -> list[Span]:
        return [bucket.own for bucket in self.buckets]

    def finalize(self) -> None:
        for reducer in self.reducers:
            self._blocking("reduce_scatter", reducer)


class Zero2:
    """ZeRO stage 2 gradient sink: each bucket is reduce-scattered during each backward, and its memory is reused.

    `own` is as of `NaiveDDP`.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self.buckets = buckets_of(self.cut(context.plan), context.plan)
        self.users = users_of(self.buckets, context.plan)
        own = sum(bucket.own.size for bucket in self.buckets)
        self.own = own_views(context.memory.private("gradients", own, context.wide), self.buckets)
        slot, sizes = slots(self.users, [bucket.span.size for bucket in self.buckets])
        weights = self.weights(context.plan)
        dtypes = [context.wide] * len(sizes) + [context.storage] * len(weights)
        context.memory.reserve([*sizes, *weights], dtypes)
        memory = [context.memory.shared("gradients", size, context.wide) for size in sizes]
        scratch = context.memory.private("buffers", context.plan.scratch(adds=False), context.wide)
        parts = context.plan.ranks if context.plan.reproducible else 1  # the tree needs every rank's gradient
        longest = parts * max((bucket.own.size for bucket in self.buckets), default=0)
        arriving = context.memory.private("buffers", longest, context.wide)
        make = ShardedCanonicalReducer if context.plan.reproducible else ShardedPlainReducer
        self.reducers = [
            make(context, bucket, memory[slot[bucket.number]][: bucket.span.size], own, scratch, arriving)
            for bucket, (_, own) in zip(self.buckets, self.own)
        ]
        self._bucket_of = {id(place.parameter): bucket for bucket in self.buckets for place in bucket.places}
        self._turn = 0

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        return plan.buckets()

    def weights(self, plan: PartitionSpec) -> list[int]:
        """Lengths of the weight vectors that the layout stores in shared memory, in elements."""
        return [plan.flat.length]

    @staticmethod
    def rounds(assignment: Turns, rank: int) -> int:
        """Number of backward passes per step, equal on all ranks: the most micro-batches of any rank."""
        return max(map(len, assignment))

    def begin(self, assignment: Turns, step_scale: StepScale = START) -> None:
        for reducer in self.reducers:
            reducer.begin(assignment)

    def bind(self) -> None:
        """No-op: reduce-scatters have no persistent requests."""

    def begin_backward(self, turn: int, number: int | None) -> None:
        self._turn = turn
        for reducer in self.reducers:
            reducer.begin_backward()

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        of(self._bucket_of, parameter).accumulate(parameter, compute)

    def left(self, unit: int) -> None:
        for reducer, units in zip(self.reducers, self.users):
            if units[0] == unit:
                with self._context.recorder("communication", "reduce_scatter", bucket=reducer.bucket.number):
                    reducer.exchange(self._turn)

    def end_backward(self) -> None:
        """No-op: each bucket was exchanged when backward left its last unit."""

    def finish(self) -> None:
        for reducer in self.reducers:
            reducer.finalize()

    def close(self) -> None: ...


class Zero3(Zero2):
    """ZeRO stage 3 gradient sink: as stage 2, but all parameters of a bucket are of one unit, or shared by the same."""

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        runs = groupby(plan.flat.places, lambda place: plan.users[id(place.parameter)])
        return [list(run) for _, run in runs][::-1]

    def weights(self, plan: PartitionSpec) -> list[int]:
        own = sum(bucket.own.size for bucket in self.buckets)
        return [own, *slot_sizes(resident_slots(self.users), self.buckets).values()]


def slots(users: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Assign buckets to shared buffers, each used by one bucket at a time. Returns (slot of each bucket, slot sizes).

    As a backward goes from the last unit to the first, a bucket is in use from the last to the first of its `users`
    (units, ascending).

    >>> slots([(2, 3), (1, 2), (0, 1)], [10, 20, 30])
    ([0, 1, 0], [30, 20])
    """
    chosen, lengths, free_below = [0] * len(users), [], []  # type: ignore[var-annotated]
    for number in sorted(range(len(users)), key=lambda number: -users[number][-1]):
        first, last = users[number][-1], users[number][0]
        slot = next((slot for slot, unit in enumerate(free_below) if first < unit), len(lengths))
        if slot == len(lengths):
            lengths.append(0)
            free_below.append(0)
        chosen[number], free_below[slot] = slot, last
        lengths[slot] = max(lengths[slot], sizes[number])
    return chosen, lengths
