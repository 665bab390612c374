"""ZeRO: every rank updates a part of the weights, and keeps only what it needs for that.

Stage 1 divides the optimiser's state, stage 2 the gradients as well, stage 3 the weights too. (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from parallel import shares
from parallel.data_parallel.grad_bucket import Bucket, buckets_of
from parallel.data_parallel.run_context import Context
from parallel.data_parallel.ddp import Naive
from parallel.nn.flat_params import Place, Span
from parallel.nn.operator import Array, Parameter
from parallel.data_parallel.partition_spec import Plan
from parallel.data_parallel.reducers import START, Moment, Numbers
from parallel.data_parallel.param_store import resident_slots, slot_sizes


class Stage1(Naive):
    """Gradients of all micro-batches are added up on every rank; in the end each gets the sum of its part."""

    @staticmethod
    def cut(plan: Plan) -> Sequence[Sequence[Place]]:
        return plan.buckets()

    def part(self) -> Array:
        longest = max((bucket.own.size for bucket in self.buckets), default=0)
        return self._context.memory.own("buffers", longest, self._context.wide)

    def spans(self) -> list[Span]:
        return [bucket.own for bucket in self.buckets]

    def settle(self) -> None:
        for sum_ in self.sums:
            self._blocking("reduce_scatter", sum_)


class Stage2:
    """A bucket is reduced to everyone's part as soon as a backward has left it, and its memory used again.

    Attributes
    ----------
    own, started
        As of `Naive`.
    """

    def __init__(self, context: Context):
        self._context = context
        self.buckets = buckets_of(self.cut(context.plan), context.plan)
        self.users = users_of(self.buckets, context.plan)
        size = sum(bucket.own.size for bucket in self.buckets)
        self.vector = context.memory.own("gradients", size, context.wide)
        self.own, at = [], 0
        for bucket in self.buckets:
            self.own.append((bucket.own, self.vector[at : at + bucket.own.size]))
            at += bucket.own.size
        slot, sizes = slots(self.users, [bucket.span.size for bucket in self.buckets])
        weights = self.weights(context.plan)
        dtypes = [context.wide] * len(sizes) + [context.storage] * len(weights)
        context.memory.reserve([*sizes, *weights], dtypes)
        memory = [context.memory.seen("gradients", size, context.wide) for size in sizes]
        scratch = context.memory.own("buffers", context.plan.scratch(adds=False), context.wide)
        parts = context.plan.ranks if context.plan.reproducible else 1
        longest = parts * max((bucket.own.size for bucket in self.buckets), default=0)
        arriving = context.memory.own("buffers", longest, context.wide)
        kind = shares.Canonical if context.plan.reproducible else shares.Plain
        self.shares = [
            kind(context, bucket, memory[slot[bucket.number]][: bucket.span.size], own, scratch, arriving)
            for bucket, (_, own) in zip(self.buckets, self.own)
        ]
        self._of = {id(place.parameter): share for share in self.shares for place in share.bucket.places}
        self.started = 0
        self._turn = 0

    @staticmethod
    def cut(plan: Plan) -> Sequence[Sequence[Place]]:
        """The buckets' places."""
        return plan.buckets()

    def weights(self, plan: Plan) -> list[int]:
        """Elements of the vectors of weights that the neighbours will see."""
        return [plan.flat.length]

    @staticmethod
    def rounds(everyone: Numbers, rank: int) -> int:
        """Every rank takes part in as many micro-batches as any has."""
        return max(map(len, everyone))

    def begin(self, everyone: Numbers, moment: Moment = START) -> None:
        """A step begins."""
        self.started = 0
        for share in self.shares:
            share.begin(everyone)

    def open(self, turn: int, number: int | None) -> None:
        """A backward begins, if only on other ranks."""
        self._turn = turn
        for share in self.shares:
            share.open()

    def __call__(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Take a gradient."""
        self._of[id(parameter)].put(parameter, compute)

    def left(self, unit: int) -> None:
        """The backward has left a unit: exchange the buckets that no other unit will add to."""
        for share, units in zip(self.shares, self.users):
            if units[0] == unit:
                self.started += 1
                with self._context.recorder("communication", "reduce_scatter", bucket=share.bucket.number):
                    share.exchange(self._turn)

    def shut(self) -> None:
        """The backward is over."""

    def finish(self) -> None:
        """Complete the gradients in `own`."""
        for share in self.shares:
            share.settle()

    def close(self) -> None:
        """Nothing is kept."""


class Stage3(Stage2):
    """As stage 2, with a bucket for each unit, whose weights come and go with it (`weights.Gathered`)."""

    @staticmethod
    def cut(plan: Plan) -> Sequence[Sequence[Place]]:
        runs = groupby(plan.flat.places, lambda place: plan.users[id(place.parameter)])
        return [list(run) for _, run in runs][::-1]

    def weights(self, plan: Plan) -> list[int]:
        own = sum(bucket.own.size for bucket in self.buckets)
        return [own, *slot_sizes(resident_slots(self.users), self.buckets).values()]


def users_of(buckets: Sequence[Bucket], plan: Plan) -> list[tuple[int, ...]]:
    """For every bucket the units that use it, ascending."""
    return [
        tuple(sorted({unit for place in bucket.places for unit in plan.users[id(place.parameter)]}))
        for bucket in buckets
    ]


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
