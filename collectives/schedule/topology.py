"""Which ranks share a node: a placement is the node number of every rank, nodes numbered as they first appear."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeAlias

Nodes: TypeAlias = tuple[int, ...]
"""The node of every rank; rank 0 is on node 0. Where all ranks share one node, or nothing is known, it is None."""


def numbered(nodes: Iterable[Hashable]) -> Nodes | None:
    """The placement of ranks on nodes that go by any names; None if there is only one.

    >>> numbered(["b", "a", "b"])
    (0, 1, 0)
    >>> numbered([7, 7]) is None
    True
    """
    numbers: dict[Hashable, int] = {}
    placement = tuple(numbers.setdefault(node, len(numbers)) for node in nodes)
    return placement if len(numbers) > 1 else None


def regular(size: int, per_node: int) -> Nodes:
    """The placement of ranks that fill one node after another.

    >>> regular(5, 2)
    (0, 0, 1, 1, 2)
    """
    return tuple(rank // per_node for rank in range(size))


class Lasting(tuple[int, ...]):
    """A placement whose hash is worked out once: for tens of thousands of ranks that look something up by it."""

    def __hash__(self) -> int:
        known = self.__dict__
        if "hash" not in known:
            known["hash"] = super().__hash__()
        return int(known["hash"])


def contiguous(nodes: Nodes | None) -> bool:
    """Whether the ranks of every node are neighbours.

    >>> contiguous((0, 0, 1)), contiguous((0, 1, 0)), contiguous(None)
    (True, False, True)
    """
    return nodes is None or list(nodes) == sorted(nodes)
