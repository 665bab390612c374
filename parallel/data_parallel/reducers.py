"""The sum of a bucket's gradients over the micro-batches of a step, exchanged between ranks once, at its end.

`Plain` adds into one vector and leaves the ranks' sums to MPI's reductions; `Canonical` keeps nodes of the canonical
tree and lets every part's owner add those of all ranks. Both have the same motions:

    begin, (open, put ..., shut) for each micro-batch, then allreduce or reduce_scatter, and before that tell;
    or instead start, test until it is done, finish: an allreduce that goes on beside the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives.runtime.requests import Request, wait_all
from parallel.data_parallel.grad_bucket import Bucket, Filling
from parallel.runtime.tree_sum import Counter, Node, Pool, played
from parallel.data_parallel.run_context import Context
from parallel.nn.operator import Array, Parameter

Numbers = Sequence[tuple[int, ...]]
"""The micro-batches of every rank."""


class Moment(NamedTuple):
    """Which step it is, how many targets all ranks have in it, and what the loss is multiplied with."""

    step: int
    targets: int
    scale: float

    @property
    def unit(self) -> float:
        """What a mean gradient is multiplied with in its sums."""
        return self.targets * self.scale


START = Moment(0, 1, 1.0)


class Plain:
    """Every micro-batch adds to one vector; the order of terms between ranks is MPI's.

    Parameters
    ----------
    context : Context
    bucket : Bucket
    vector : array
        The bucket's gradient.
    scratch, part : array
        As long as the longest tensor; as long as the longest of this rank's parts, for `reduce_scatter`.
    """

    alone = False
    """Whether no other bucket may be under way beside it."""

    def __init__(self, context: Context, bucket: Bucket, vector: Array, scratch: Array, part: Array):
        self.bucket, self.vector = bucket, vector
        self._comm, self._part = context.comm, part
        self._filling = Filling(bucket, scratch)
        self._request: Request | None = None

    @property
    def complete(self) -> bool:
        """Whether this backward has handed in all of the bucket."""
        return not self._filling.missing

    def begin(self) -> None:
        """A step begins."""
        self._filling.fresh(self.vector)

    def tell(self, everyone: Numbers, moment: Moment = START) -> None:
        """Who has which micro-batches: it is no matter."""

    def open(self, number: int) -> None:
        """A backward begins."""
        self._filling.expect()

    def put(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Add a gradient."""
        self._filling.put(parameter, compute)

    def shut(self, number: int) -> None:
        """The backward has handed in all that it has."""

    def allreduce(self) -> None:
        """Leave the sum over the ranks on all of them."""
        self.start()
        self.finish()

    def reduce_scatter(self) -> None:
        """Leave this rank's part of the sum where it belongs in the vector; the rest of the vector is of no use."""
        self._filling.complete()
        part = self._part[: self.bucket.own.size]
        self._comm.Reduce_scatter(self.vector, part, self.bucket.counts)
        self.vector[self.bucket.within(self.bucket.own)] = part

    def bind(self) -> None:
        """Bind the request of `start`, unless it is. Collective, which `start` is not from then on."""
        if self._request is None:
            self._request = self._comm.Allreduce_init(MPI.IN_PLACE, self.vector)

    def start(self) -> None:
        """Begin `allreduce`, by a request that is bound once."""
        self._filling.complete()
        self.bind()
        assert self._request is not None
        self._request.Start()

    def test(self) -> bool:
        """Whether what was started is over, but for `finish`."""
        assert self._request is not None
        return self._request.Test()

    def finish(self) -> None:
        """Wait for what was started."""
        assert self._request is not None
        self._request.Wait()

    def close(self) -> None:
        """Give the request back."""
        if self._request is not None:
            self._request.Free()
            self._request = None


class Canonical:
    """Every micro-batch's gradient is a leaf of the canonical tree; the owner of a part adds the nodes of all ranks.

    Parameters
    ----------
    As of `Plain`; the last one is not used.
    """

    alone = False

    def __init__(self, context: Context, bucket: Bucket, vector: Array, scratch: Array, part: Array):
        self.bucket, self.vector = bucket, vector
        self._context, self._comm = context, context.comm
        self._filling = Filling(bucket, scratch)
        self._counter = Counter(Pool(lambda: context.memory.own("gradients", bucket.span.size, context.wide)))
        self._arriving = context.memory.own("buffers", 0, context.wide)
        self._nodes: list[tuple[Node, ...]] = []
        self._requests: list[Request] = []

    @property
    def complete(self) -> bool:
        """Whether this backward has handed in all of the bucket."""
        return not self._filling.missing

    def begin(self) -> None:
        """A step begins; one before it may have been broken off."""
        self._counter.clear()

    def tell(self, everyone: Numbers, moment: Moment = START) -> None:
        """Who has which micro-batches, and so which nodes."""
        self._nodes = [played(numbers).nodes for numbers in everyone]

    def open(self, number: int) -> None:
        """A backward begins, in a vector of its own."""
        self._filling.fresh(self._counter.pool.take())
        self._filling.expect()

    def put(self, parameter: Parameter, compute: Callable[[Array], object]) -> None:
        """Add a gradient."""
        self._filling.put(parameter, compute)

    def shut(self, number: int) -> None:
        """The backward has handed in all that it has: a leaf."""
        self._filling.complete()
        self._counter.push(Node(0, number), self._filling.vector, ours=True)

    def allreduce(self) -> None:
        """Leave the sum over the ranks on all of them."""
        self._exchange(self._comm.Alltoallv)
        self.finish()

    def reduce_scatter(self) -> None:
        """Leave this rank's part of the sum where it belongs in the vector; the rest of the vector is of no use."""
        self._exchange(self._comm.Alltoallv)
        self._add()

    def bind(self) -> None:
        """Nothing is bound."""

    def start(self) -> None:
        """Begin the exchange of `allreduce`."""
        self._requests = self._exchange(self._comm.Ialltoallv)

    def test(self) -> bool:
        """Whether what was started is over, but for `finish`."""
        return all([request.Test() for request in self._requests])

    def finish(self) -> None:
        """Wait for what was started; add, and tell everyone."""
        wait_all(self._requests)
        self._requests = []
        self._add()
        self._comm.Allgatherv(MPI.IN_PLACE, [self.vector, self.bucket.counts])

    def close(self) -> None:
        """Nothing is kept."""

    def _exchange(self, alltoallv: Callable[[Any, Any], Any]) -> list[Any]:
        """Send everyone its part of this rank's nodes: the k-th ones of all ranks in the k-th call."""
        size, ranks = self.bucket.own.size, len(self._nodes)
        nodes = sum(map(len, self._nodes))
        if len(self._arriving) < nodes * size:
            self._context.memory.allocated["buffers"] -= self._arriving.nbytes
            self._arriving = self._context.memory.own("buffers", nodes * size, self._context.wide)
        starts = [part.start - self.bucket.span.start for part in self.bucket.parts]
        calls, at = [], 0
        for turn in range(max(map(len, self._nodes))):
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
        """Add what has arrived, as the tree wants it."""
        size, at = self.bucket.own.size, 0
        sums = Counter(Pool(list))  # in place: nothing is taken from the pool
        for turn in range(max(map(len, self._nodes))):
            for nodes in self._nodes:
                if turn < len(nodes):
                    sums.push(nodes[turn], self._arriving[at : at + size], ours=True)
                    at += size
        total = sums.total()
        self.vector[self.bucket.within(self.bucket.own)] = 0 if total is None else total
        self._counter.clear()
