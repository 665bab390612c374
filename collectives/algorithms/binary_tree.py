"""Binary tree: sums go up from both children of every rank, and the result comes down again.

The ranks of a subtree are neighbours, and its top is in their middle, so that sums keep rank order. 7 ranks::

          3
       1     5
      0 2   4 6

Ranks of one level take two rounds, one for each child. A binomial tree (`mst`) has as many messages and fewer rounds,
since no rank waits for the second child of another one.
"""

from typing import NamedTuple

from collectives.schedule.steps import Recv, Rounds, Send, one
from collectives.schedule.transforms import reverse


class _Node(NamedTuple):
    """Place of a rank in the tree: its level, 0 for the root, its parent, and the children by side, or None."""

    level: int
    parent: int | None
    is_right: bool
    children: tuple[int | None, int | None]


def _node(rank: int, size: int) -> _Node:
    start, stop, level, parent, right = 0, size, 0, None, False
    while (top := (start + stop) // 2) != rank:
        level, parent, right = level + 1, top, rank > top
        start, stop = (top + 1, stop) if right else (start, top)
    left = (start + top) // 2 if start < top else None
    return _Node(level, parent, right, (left, (top + 1 + stop) // 2 if top + 1 < stop else None))


def broadcast(rank: int, size: int) -> Rounds:
    """The vector goes down from the top, to the left child first.

    Cost: at most 2f (alpha + n beta), f = floor(log2 p).
    """
    node = _node(rank, size)
    # two rounds per level: a rank sends one message at a time, to the left child first
    for level in range(1, size.bit_length()):
        for right, child in enumerate(node.children):
            if node.level == level and node.is_right == bool(right) and node.parent is not None:
                yield [Recv(node.parent, one(0))]
            elif node.level == level - 1 and child is not None:
                yield [Send(child, one(0))]
            else:
                yield []


def reduce(rank: int, size: int) -> Rounds:
    """Sums of both subtrees go up to the top. Cost: at most 2f (alpha + n beta + n gamma). Keeps rank order."""
    return reverse(broadcast(rank, size), rank, reducing=True)


def allreduce(rank: int, size: int) -> Rounds:
    """Reduce to the top of the tree, then broadcast from it.

    Cost: at most 4f (alpha + n beta) + 2f n gamma, f = floor(log2 p). Keeps rank order. All ranks get the same bits.
    """
    yield from reduce(rank, size)
    yield from broadcast(rank, size)
