"""Reproducible gradient sum: a fixed order of additions, a binary tree over a step's micro-batches, for any layout.

Micro-batches are numbered 0 to M-1. Node (k, i) is the sum over numbers from 2^k i up to 2^k (i+1), its left half plus
its right half. Numbers beyond M-1 are left out. A rank that has both halves of a node adds them, like a carry in
binary addition, before other terms arrive. The result does not depend on the order of arrival or the distribution over
ranks. (Pairwise summation: Higham, "The Accuracy of Floating Point Summation", SIAM J. Sci. Comput. 14, 1993.) Imports
no MPI.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple


class TreeNode(NamedTuple):
    """Node of the summation tree: the sum of ``1 << level`` micro-batches from number ``place << level`` on."""

    level: int
    place: int


class VectorPool:
    """Pool of reusable vectors, with arbitrary contents. `make` allocates one more if none is idle."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._idle = make, []  # type: ignore[var-annotated]

    def take(self) -> Any:
        return self._idle.pop() if self._idle else self._make()

    def give(self, vector: Any) -> None:
        self._idle.append(vector)


class TreeSum:
    """Incremental tree sum: keeps the sums of nodes pushed so far, and adds siblings as soon as it has both."""

    def __init__(self, pool: VectorPool):
        self.pool = pool
        self.sums: dict[TreeNode, Any] = {}

    def push(self, node: TreeNode, vector: Any, ours: bool) -> None:
        """Add a node's sum `vector` and combine siblings.

        Keep the vector if `ours` (the pool's), otherwise read it.
        """
        while (other := self.sums.pop(sibling := TreeNode(node.level, node.place ^ 1), None)) is not None:
            other += vector  # left + right and right + left have the same bits
            if ours:
                self.pool.give(vector)
            node, vector, ours = TreeNode(sibling.level + 1, sibling.place >> 1), other, True
        if not ours:
            vector, source = self.pool.take(), vector
            vector[...] = source
        self.sums[node] = vector

    def clear(self) -> None:
        for vector in self.sums.values():
            self.pool.give(vector)
        self.sums = {}

    def total(self) -> Any:
        """Empty the tree and return the sum of its nodes (None if it has none), a vector to give back to the pool."""
        parts = [self.sums[node] for node in in_order(self.sums)]
        self.sums = {}
        while len(parts) > 1:  # missing nodes on the right are left out: the last one joins its left neighbour
            right = parts.pop()
            parts[-1] += right
            self.pool.give(right)
        return parts[0] if parts else None


def in_order(nodes: Iterable[TreeNode]) -> list[TreeNode]:
    return sorted(nodes, key=lambda node: node.place << node.level)


class TreeSumForecast(NamedTuple):
    """Final nodes and peak number of vectors of a `TreeSum`, predicted without vectors."""

    nodes: tuple[TreeNode, ...]  # after the last number, from left to right
    kept: int  # most vectors at once if pushed vectors are only read
    taken: int  # most vectors at once if they are taken over


@lru_cache(maxsize=256)
def tree_forecast(numbers: tuple[int | None, ...]) -> TreeSumForecast:
    """Predict nodes and vectors of a `TreeSum` to which the micro-batches `numbers` are pushed in this order.

    None counts for nothing.

    >>> tree_forecast((2, 3, 4))
    TreeSumForecast(nodes=(TreeNode(level=1, place=1), TreeNode(level=0, place=4)), kept=2, taken=2)
    """
    nodes: set[TreeNode] = set()
    kept = taken = 0
    for number in (one for one in numbers if one is not None):
        taken = max(taken, len(nodes) + 1)
        node = TreeNode(0, number)
        while (sibling := TreeNode(node.level, node.place ^ 1)) in nodes:
            nodes.remove(sibling)
            node = TreeNode(node.level + 1, node.place >> 1)
        nodes.add(node)
        kept = max(kept, len(nodes))
    return TreeSumForecast(tuple(in_order(nodes)), kept, taken)
