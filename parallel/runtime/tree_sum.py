"""The order in which gradients are added, the same for every layout: a binary tree over the step's micro-batches.

Micro-batches are numbered 0 to M-1. Node (k, i) is the sum over numbers 2^k i up to 2^k (i+1): its left half plus its
right half, and of what lies beyond M-1 nothing is added. Whoever has both halves of a node adds them, like a carry in
binary addition, so a rank can add what it has before it knows the rest; the order in which terms come, and who has
them, never shows in the digits. (Pairwise summation: Higham, "The Accuracy of Floating Point Summation", SIAM J. Sci.
Comput. 14, 1993.) Knows no MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple


class TreeNode(NamedTuple):
    """A node of the tree: the numbers from ``place << level`` on, ``1 << level`` of them."""

    level: int
    place: int

    @property
    def first(self) -> int:
        """The first number below it."""
        return self.place << self.level


class VectorPool:
    """Vectors that are given back and taken again.

    Parameters
    ----------
    make : callable () -> array
        Makes one more.
    """

    def __init__(self, make: Callable[[], Any]):
        self._make, self._idle = make, []  # type: ignore[var-annotated]

    def take(self) -> Any:
        """A vector with undefined contents."""
        return self._idle.pop() if self._idle else self._make()

    def give(self, vector: Any) -> None:
        """Take it back."""
        self._idle.append(vector)


class TreeSum:
    """Sums of the nodes that are known, as few of them as can be.

    Parameters
    ----------
    pool : Pool
        Where vectors come from and go to.
    """

    def __init__(self, pool: VectorPool):
        self.pool = pool
        self.sums: dict[TreeNode, Any] = {}

    def push(self, node: TreeNode, vector: Any, ours: bool) -> None:
        """Add the sum of one more node, and carry.

        Parameters
        ----------
        vector : array
        ours : bool
            Whether the vector comes from the pool, and is the counter's from now on; otherwise it is only read.
        """
        while (other := self.sums.pop(sibling := TreeNode(node.level, node.place ^ 1), None)) is not None:
            other += vector  # left + right and right + left have the same bits
            if ours:
                self.pool.give(vector)
            node, vector, ours = TreeNode(sibling.level + 1, sibling.place >> 1), other, True
        if not ours:
            kept = self.pool.take()
            kept[...] = vector
            vector = kept
        self.sums[node] = vector

    def clear(self) -> None:
        """Forget all sums, and give their vectors back."""
        for vector in self.sums.values():
            self.pool.give(vector)
        self.sums = {}

    def total(self) -> Any:
        """The sum of all, an array from the pool; None if there was nothing. The counter is empty afterwards."""
        parts = [self.sums[node] for node in in_order(self.sums)]
        self.sums = {}
        while len(parts) > 1:  # what is missing on the right is left out: the last one joins its left neighbour
            right = parts.pop()
            parts[-1] += right
            self.pool.give(right)
        return parts[0] if parts else None


def in_order(nodes: Iterable[TreeNode]) -> list[TreeNode]:
    """Nodes from left to right."""
    return sorted(nodes, key=lambda node: node.first)


class TreeSumForecast(NamedTuple):
    """Nodes and vectors that a `TreeSum` uses, computed without vectors.

    Attributes
    ----------
    nodes : tuple of Node
        Its sums after the last number, from left to right.
    kept, taken : int
        The most vectors that it has at once, if it copies what it has to keep; and if those that come are its own.
    """

    nodes: tuple[TreeNode, ...]
    kept: int
    taken: int


@lru_cache(maxsize=256)
def tree_forecast(numbers: tuple[int, ...]) -> TreeSumForecast:
    """A counter to which these micro-batches come, in this order.

    >>> tree_forecast((2, 3, 4))
    TreeSumForecast(nodes=(TreeNode(level=1, place=1), TreeNode(level=0, place=4)), kept=2, taken=2)
    """
    nodes: set[TreeNode] = set()
    kept = taken = 0
    for number in numbers:
        taken = max(taken, len(nodes) + 1)
        node = TreeNode(0, number)
        while (sibling := TreeNode(node.level, node.place ^ 1)) in nodes:
            nodes.remove(sibling)
            node = TreeNode(node.level + 1, node.place >> 1)
        nodes.add(node)
        kept = max(kept, len(nodes))
    return TreeSumForecast(tuple(in_order(nodes)), kept, taken)
