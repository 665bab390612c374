"""Minimum spanning tree: halve the ranks recursively. The root of one half sends to the root of the other.

Broadcast from rank 0 of 5. Every arrow is the whole vector::

    round 0   0 ──────────> 3
    round 1   0 ────> 2     3 ──> 4
    round 2   0 ──> 1

The halves are neighbours in rank order, so the reversed trees reduce in rank order from any root. (Chan, Heimlich,
Purkayastha, van de Geijn 2007, sections 4.1 and 5.1: the MST algorithms.)
"""

from collections.abc import Iterator
from typing import NamedTuple

from collectives.schedule.steps import NOTHING, Chunks, Recv, Round, Rounds, Send, span
from collectives.schedule.transforms import reverse


class _RangeSplit(NamedTuple):
    """Split of a range of ranks with root `source`: `half` is the half without it, `target` the root of that half."""

    source: int
    target: int
    half: range


def _halvings(rank: int, size: int, root: int) -> Iterator[_RangeSplit | None]:
    """Yield, for each of ceil(log2 p) rounds, the split of the range that holds `rank`. None once it is alone.

    Of an odd number of ranks the root keeps the larger half, so that a scatter sends the smaller one away.
    """
    start, stop = 0, size
    for _ in range((size - 1).bit_length()):
        if stop - start == 1:
            yield None
            continue
        larger = (stop - start + 1) // 2
        if root < start + larger:
            middle = start + larger
            other = range(middle, stop)
        else:
            middle = stop - larger
            other = range(start, middle)
        yield _RangeSplit(root, other.start, other)
        if other.start <= rank < other.stop:
            root = other.start
        start, stop = (start, middle) if rank < middle else (middle, stop)


def _messages(halving: _RangeSplit | None, rank: int, chunks: Chunks) -> Round:
    if halving is None or rank not in (halving.source, halving.target):
        return []
    return [Send(halving.target, chunks) if rank == halving.source else Recv(halving.source, chunks)]


def broadcast(rank: int, size: int, root: int) -> Rounds:
    """The root sends the vector to the root of the other half of the ranks. Then each half does the same.

    Cost: q (alpha + n beta), q = ceil(log2 p).
    """
    everything = span(0, size)
    for halving in _halvings(rank, size, root):
        yield _messages(halving, rank, everything)


def scatter(rank: int, size: int, root: int) -> Rounds:
    """The root sends the blocks of the other half of the ranks to that half's root. Then each half does the same.

    Cost: q alpha + (p-1)/p n beta.
    """
    for halving in _halvings(rank, size, root):
        yield _messages(halving, rank, (halving.half,) if halving else NOTHING)


def reduce(rank: int, size: int, root: int) -> Rounds:
    """Reverse of the broadcast: roots of halves send their sums to the roots of larger halves, up to the root.

    Cost: q (alpha + n beta + n gamma). Keeps rank order.
    """
    return reverse(broadcast(rank, size, root), rank, reducing=True)


def gather(rank: int, size: int, root: int) -> Rounds:
    """Reverse of the scatter: blocks go to roots of larger and larger halves. Cost: q alpha + (p-1)/p n beta."""
    return reverse(scatter(rank, size, root), rank, reducing=False)


def allgather(rank: int, size: int) -> Rounds:
    """Gather up a tree to rank 0, then broadcast of all blocks down it. Cost: 2q alpha + (q + (p-1)/p) n beta."""
    yield from gather(rank, size, 0)
    yield from broadcast(rank, size, 0)


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Reduce up a tree to rank 0, then scatter of the result down it.

    Cost: 2q alpha + (q + (p-1)/p) n beta + q n gamma. Keeps rank order.
    """
    yield from reduce(rank, size, 0)
    yield from scatter(rank, size, 0)


def allreduce(rank: int, size: int) -> Rounds:
    """Reduce up a tree to rank 0, then broadcast of the result down it.

    Cost: 2q alpha + q n (2 beta + gamma). Keeps rank order.
    """
    yield from reduce(rank, size, 0)
    yield from broadcast(rank, size, 0)
