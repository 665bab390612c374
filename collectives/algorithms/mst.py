"""Minimum spanning trees: halve the ranks again and again; the root of one half serves the other half's.

Broadcast from rank 0 of 5; every arrow is the whole vector::

    round 0   0 ──────────> 3
    round 1   0 ────> 2     3 ──> 4
    round 2   0 ──> 1

The halves are neighbours in rank order, so the reversed trees reduce in rank order from any root. (Chan, Heimlich,
Purkayastha, van de Geijn 2007, sections 4.1 and 5.1: the MST algorithms.)
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.steps import Recv, Rounds, Send, span
from collectives.transforms import reverse


def _halvings(rank: int, size: int, root: int) -> Iterator[tuple[int, int, range]]:
    """The halvings of the ranks around `rank`: (root of all, root of the other half, ranks of the other half)."""
    start, stop = 0, size
    while stop - start > 1:
        middle = (start + stop + 1) // 2
        low, high = range(start, middle), range(middle, stop)
        other = high if root in low else low
        yield root, other.start, other
        if rank in other:
            root = other.start
        half = low if rank in low else high
        start, stop = half.start, half.stop


def broadcast(rank: int, size: int, root: int) -> Rounds:
    """The root sends the vector to the root of the other half; then both halves do the same within.

    ceil(log2 p) rounds: q (alpha + n beta).
    """
    for source, target, _ in _halvings(rank, size, root):
        if rank == source:
            yield [Send(target, span(0, size))]
        elif rank == target:
            yield [Recv(source, span(0, size))]
        else:
            yield []


def scatter(rank: int, size: int, root: int) -> Rounds:
    """The root sends the other half's blocks to that half's root; then both halves do the same within.

    ceil(log2 p) rounds: q alpha + (p-1)/p n beta.
    """
    for source, target, half in _halvings(rank, size, root):
        if rank == source:
            yield [Send(target, span(half.start, half.stop))]
        elif rank == target:
            yield [Recv(source, span(half.start, half.stop))]
        else:
            yield []


def reduce(rank: int, size: int, root: int) -> Rounds:
    """The broadcast backwards: sums flow to the roots of ever larger halves.

    ceil(log2 p) rounds: q (alpha + n beta + n gamma). Keeps rank order.
    """
    return reverse(broadcast(rank, size, root), rank, reducing=True)


def gather(rank: int, size: int, root: int) -> Rounds:
    """The scatter backwards: blocks flow to the roots of ever larger halves.

    ceil(log2 p) rounds: q alpha + (p-1)/p n beta.
    """
    return reverse(scatter(rank, size, root), rank, reducing=False)


def allgather(rank: int, size: int) -> Rounds:
    """All blocks flow up the tree to rank 0, and all of them down again.

    2 ceil(log2 p) rounds: 2q alpha + (q + (p-1)/p) n beta.
    """
    yield from gather(rank, size, 0)
    yield from broadcast(rank, size, 0)


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Sums flow up the tree to rank 0, and every rank's block of them down again.

    2 ceil(log2 p) rounds: 2q alpha + (q + (p-1)/p) n beta + q n gamma. Keeps rank order.
    """
    yield from reduce(rank, size, 0)
    yield from scatter(rank, size, 0)


def allreduce(rank: int, size: int) -> Rounds:
    """Sums flow up the tree to rank 0, and the result down again.

    2 ceil(log2 p) rounds: 2q alpha + q n (2 beta + gamma). Keeps rank order.
    """
    yield from reduce(rank, size, 0)
    yield from broadcast(rank, size, 0)
