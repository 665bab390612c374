"""This rank's part of a bucket's gradient, summed over all ranks after every micro-batch, in memory that is reused.

`Plain` leaves the ranks' sums to a reduce-scatter; `Canonical` gets the leaves of all ranks for its part, and carries.
Both have the same motions: begin, (open, put ..., exchange) for each turn, settle.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from parallel.data_parallel.grad_bucket import Bucket, Filling
from parallel.runtime.tree_sum import Counter, Node, Pool
from parallel.data_parallel.run_context import Context
from parallel.nn.operator import Array, Parameter
from parallel.data_parallel.reducers import Numbers


class Plain:
    """The order of terms is the reduce-scatter's.

    Parameters
    ----------
    context : Context
    bucket : Bucket
    memory : array
        For the whole bucket, while a backward fills it in; others may use it at other times.
    own : array
        For the sum of this rank's part.
    scratch, arriving : array
        As long as the longest tensor; as the longest of this rank's parts, in `Canonical` from every rank.
    """

    def __init__(self, context: Context, bucket: Bucket, memory: Array, own: Array, scratch: Array, arriving: Array):
        self.bucket = bucket
        self._comm, self._memory, self._own, self._arriving = context.comm, memory, own, arriving
        self._filling = Filling(bucket, scratch)
        self._empty = True

    def begin(self, everyone: Numbers) -> None:
        """A step begins."""
        self._empty = True

    def open(self) -> None:
        """A backward begins."""
        self._filling.fresh(self._memory)
        self._filling.expect()

    def put(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Add a gradient."""
        self._filling.put(parameter, compute)

    def exchange(self, turn: int) -> None:
        """Add this turn's gradients of all ranks."""
        self._filling.complete(gaps=True)
        into = self._own if self._empty else self._arriving[: self._own.size]
        self._comm.Reduce_scatter(self._memory, into, self.bucket.counts)
        if not self._empty:
            self._own += into
        self._empty = False

    def settle(self) -> None:
        """The step's turns are over."""
        if self._empty:
            self._own[...] = 0


class Canonical(Plain):
    """The order of terms is that of the canonical tree. Parameters as of `Plain`."""

    def __init__(self, context: Context, bucket: Bucket, memory: Array, own: Array, scratch: Array, arriving: Array):
        super().__init__(context, bucket, memory, own, scratch, arriving)
        self._rank = context.plan.rank
        self._counter = Counter(Pool(lambda: context.memory.own("gradients", bucket.own.size, context.wide)))
        self._everyone: Numbers = ()

    def begin(self, everyone: Numbers) -> None:
        """A step begins."""
        self._everyone = everyone

    def exchange(self, turn: int) -> None:
        """Get the turn's leaves of all ranks that have one, for this rank's part."""
        leaves = [numbers[turn] if turn < len(numbers) else None for numbers in self._everyone]
        size, here = self._own.size, leaves[self._rank] is not None
        if here:
            self._filling.complete(gaps=True)
        starts = [part.start - self.bucket.span.start for part in self.bucket.parts]
        sent = self.bucket.counts if here else [0] * len(leaves)
        counts = [0 if leaf is None else size for leaf in leaves]
        places = list(accumulate(counts[:-1], initial=0))
        self._comm.Alltoallv([self._memory, sent, starts, None], [self._arriving, counts, places, None])
        for leaf, place in zip(leaves, places):
            if leaf is not None:
                self._counter.push(Node(0, leaf), self._arriving[place : place + size], ours=False)

    def settle(self) -> None:
        """The step's turns are over."""
        total = self._counter.total()
        self._own[...] = 0 if total is None else total
        if total is not None:
            self._counter.pool.give(total)
