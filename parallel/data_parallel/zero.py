"""ZeRO: every rank updates a part of the weights, and keeps only what it needs for that.

Stage 1 divides the optimiser's state, stage 2 the gradients as well, stage 3 the weights too. (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from parallel.data_parallel.ddp import NaiveDDP
from parallel.data_parallel.grad_bucket import buckets_of, of, users_of
from parallel.data_parallel.param_store import resident_slots, slot_sizes
from parallel.data_parallel.partition_spec import PartitionSpec
from parallel.data_parallel.reducers import (
    START,
    Numbers,
    ShardedCanonicalReducer,
    ShardedPlainReducer,
    StepScale,
)
from parallel.data_parallel.run_context import RunContext
from parallel.nn.flat_params import ParamSpan, Span
from parallel.nn.operator import Parameter
from quant.types import Array


class Zero1(NaiveDDP):
    """Sums of all gradients on every rank; a reduce-scatter at the end of the step (ZeRO stage 1)."""

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        return plan.buckets()

    def part(self) -> Array:
        longest = max((bucket.own.size for bucket in self.buckets), default=0)
        return self._context.memory.private("buffers", longest, self._context.wide)

    def spans(self) -> list[Span]:
        return [bucket.own for bucket in self.buckets]

    def finalize(self) -> None:
        for sum_ in self.sums:
            self._blocking("reduce_scatter", sum_)


class Zero2:
    """A reduce-scatter of each bucket after each backward, whose memory is then reused (ZeRO stage 2).

    Attributes
    ----------
    own, started
        As of `NaiveDDP`.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self.buckets = buckets_of(self.cut(context.plan), context.plan)
        self.users = users_of(self.buckets, context.plan)
        size = sum(bucket.own.size for bucket in self.buckets)
        self.vector = context.memory.private("gradients", size, context.wide)
        self.own, at = [], 0
        for bucket in self.buckets:
            self.own.append((bucket.own, self.vector[at : at + bucket.own.size]))
            at += bucket.own.size
        slot, sizes = slots(self.users, [bucket.span.size for bucket in self.buckets])
        weights = self.weights(context.plan)
        dtypes = [context.wide] * len(sizes) + [context.storage] * len(weights)
        context.memory.reserve([*sizes, *weights], dtypes)
        memory = [context.memory.shared("gradients", size, context.wide) for size in sizes]
        scratch = context.memory.private("buffers", context.plan.scratch(adds=False), context.wide)
        parts = context.plan.ranks if context.plan.reproducible else 1
        longest = parts * max((bucket.own.size for bucket in self.buckets), default=0)
        arriving = context.memory.private("buffers", longest, context.wide)
        reducer = ShardedCanonicalReducer if context.plan.reproducible else ShardedPlainReducer
        self.shares = [
            reducer(context, bucket, memory[slot[bucket.number]][: bucket.span.size], own, scratch, arriving)
            for bucket, (_, own) in zip(self.buckets, self.own)
        ]
        self._bucket_of = {id(place.parameter): bucket for bucket in self.buckets for place in bucket.places}
        self.started = 0
        self._turn = 0

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        """Parameters of each bucket."""
        return plan.buckets()

    def weights(self, plan: PartitionSpec) -> list[int]:
        """Elements of the weight vectors in shared memory."""
        return [plan.flat.length]

    @staticmethod
    def rounds(everyone: Numbers, rank: int) -> int:
        """Backwards that a rank takes part in: as many as any rank has micro-batches."""
        return max(map(len, everyone))

    def begin(self, everyone: Numbers, step_scale: StepScale = START) -> None:
        self.started = 0
        for share in self.shares:
            share.begin(everyone)

    def begin_backward(self, turn: int, number: int | None) -> None:
        """Begin a backward, of this rank or only of others."""
        self._turn = turn
        for share in self.shares:
            share.begin_backward()

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Accumulate a gradient."""
        of(self._bucket_of, parameter).accumulate(parameter, compute)

    def left(self, unit: int) -> None:
        """Exchange the buckets whose last unit the backward has left."""
        for share, units in zip(self.shares, self.users):
            if units[0] == unit:
                self.started += 1
                with self._context.recorder("communication", "reduce_scatter", bucket=share.bucket.number):
                    share.exchange(self._turn)

    def end_backward(self) -> None:
        """No-op: all buckets were exchanged when the backward left their units."""

    def finish(self) -> None:
        """Complete the gradients in `own`."""
        for share in self.shares:
            share.finalize()

    def close(self) -> None:
        """No-op."""


class Zero3(Zero2):
    """As stage 2, with a bucket for each unit, whose weights come and go with it (`weights.Gathered`)."""

    @staticmethod
    def cut(plan: PartitionSpec) -> Sequence[Sequence[ParamSpan]]:
        runs = groupby(plan.flat.places, lambda place: plan.users[id(place.parameter)])
        return [list(run) for _, run in runs][::-1]

    def weights(self, plan: PartitionSpec) -> list[int]:
        own = sum(bucket.own.size for bucket in self.buckets)
        return [own, *slot_sizes(resident_slots(self.users), self.buckets).values()]


def slots(users: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Memory for what is used for a while, as a backward goes down from the last unit to the first.

    Parameters
    ----------
    users : sequence of tuple of int
        The units that use each, ascending: it is used from the last of them to the first.
    sizes : sequence of int

    Returns
    -------
    list of int, list of int
        The slot of each, and the size of every slot. What shares a slot is not used at the same time.

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
