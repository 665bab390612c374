"""Placement of ranks on nodes: the node number of every rank, nodes numbered in order of first appearance."""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

Nodes: TypeAlias = tuple[int, ...]
"""The node of every rank. Rank 0 is on node 0. None: one shared node, or an unknown placement."""


def numbered(nodes: Iterable[Hashable]) -> Nodes | None:
    """Node number of every rank from the ranks' node names. None if there is only one node.

    >>> numbered(["b", "a", "b"]), numbered([7, 7])
    ((0, 1, 0), None)
    """
    numbers: dict[Hashable, int] = {}
    placement = tuple(numbers.setdefault(node, len(numbers)) for node in nodes)
    return placement if len(numbers) > 1 else None


def regular(size: int, per_node: int) -> Nodes:
    """Placement of consecutive ranks on nodes of `per_node` ranks.

    >>> regular(5, 2)
    (0, 0, 1, 1, 2)
    """
    return tuple(rank // per_node for rank in range(size))


class HashedTuple(tuple[int, ...]):
    """Tuple with a cached hash, for placements of tens of thousands of ranks that are keys of caches."""

    def __hash__(self) -> int:
        known = self.__dict__
        if "hash" not in known:
            known["hash"] = super().__hash__()
        return int(known["hash"])


def contiguous(nodes: Nodes | None) -> bool:
    """True if the ranks of every node are consecutive.

    >>> contiguous((0, 0, 1)), contiguous((0, 1, 0)), contiguous(None)
    (True, False, True)
    """
    return nodes is None or list(nodes) == sorted(nodes)
