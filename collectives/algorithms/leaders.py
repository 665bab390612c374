"""Leaders: one rank of every node talks to the other nodes, for its whole node. Few messages: for short vectors.

Allreduce on nodes {0 1 2} and {3 4}, a letter per rank, who holds which sum::

    start       a       b       c       d       e
    within      abc                     de              up the tree of each node, to 0 and 3
    leaders     abcde                   abcde           0 and 3 swap
    within      abcde   abcde   abcde   abcde   abcde   down again

(Karonis, de Supinski, Foster, Gropp, Lusk, Bresnahan 2000, "Exploiting hierarchy in parallel computer networks".)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat
from typing import NamedTuple

from collectives.algorithms import circulant, dissemination, mst, recursive
from collectives.algorithms.hierarchical import House, house
from collectives.schedule.topology import Nodes
from collectives.schedule.steps import NOTHING, Chunks, Rounds, numbers, one, scattered, span
from collectives.schedule.transforms import on, reverse


def _log(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _whole(chunks: Chunks) -> Chunks:
    """The vector, which is not cut."""
    return one(0)


def _news(chunks: Chunks) -> Chunks:
    return NOTHING


class _Post(NamedTuple):
    """Where a rank stands: the first rank of each node is its leader, but the root leads its own node."""

    here: House
    rank: int
    root: int = 0

    @property
    def node(self) -> int:
        return self.here.node[self.rank]

    @property
    def members(self) -> tuple[int, ...]:
        return self.here.members[self.node]

    def leader(self, node: int) -> int:
        """The rank that leads a node."""
        return self.root if self.here.node[self.root] == node else self.here.members[node][0]

    def among(self, rounds: Callable[[int, int, int], Rounds], chunks: Callable[[Chunks], Chunks]) -> Rounds:
        """A schedule of (node, nodes, the root's node) played by the leaders, during which the others wait."""
        mine = rounds(self.node, len(self.here.members), self.here.node[self.root])
        return on(self.leader, mine, chunks) if self.leader(self.node) == self.rank else ([] for _ in mine)

    def within(self, rounds: Callable[[int, int, int], Rounds], chunks: Callable[[Chunks], Chunks]) -> Rounds:
        """A schedule of (place, places, the leader's place) played within every node, as long as on the largest."""
        place = self.here.place
        mine = rounds(place[self.rank], len(self.members), place[self.leader(self.node)])
        return chain(on(self.members, mine, chunks), repeat([], _log(self.here.widest) - _log(len(self.members))))

    def blocks(self, nodes: Chunks) -> Chunks:
        """The blocks of all ranks of some nodes."""
        return scattered(rank for node in numbers(nodes) for rank in self.here.members[node])

    def own(self, places: Chunks) -> Chunks:
        """The blocks of some ranks of this node."""
        return scattered(self.members[place] for place in numbers(places))

    def every(self, chunks: Chunks) -> Chunks:
        """All blocks."""
        return span(0, len(self.here.node))


def _rootless(generate: Callable[[int, int], Rounds]) -> Callable[[int, int, int], Rounds]:
    """A generator that takes no root, as one that does not look at it."""
    return lambda node, nodes, home: generate(node, nodes)


def barrier(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """The news that all of a node have come reaches its leader; leaders tell each other, and then their nodes.

    On N nodes of M ranks ceil(log2 N) + 2 ceil(log2 M) rounds: so many alpha.
    """
    post = _Post(house(size, nodes), rank)
    yield from reverse(post.within(mst.broadcast, _news), rank, reducing=False)
    yield from post.among(_rootless(dissemination.barrier), _news)
    yield from post.within(mst.broadcast, _news)


def broadcast(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The root sends the vector down a tree of leaders, and every leader sends it down a tree of its node.

    On N nodes of M ranks ceil(log2 N) + ceil(log2 M) rounds, each alpha + n beta.
    """
    post = _Post(house(size, nodes), rank, root)
    yield from post.among(mst.broadcast, _whole)
    yield from post.within(mst.broadcast, _whole)


def reduce(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The broadcast backwards: sums flow up a tree of every node to its leader, and up a tree of leaders to the root.

    On N nodes of M ranks ceil(log2 N) + ceil(log2 M) rounds, each alpha + n (beta + gamma). Keeps rank order, if the
    ranks of every node are neighbours.
    """
    return reverse(broadcast(rank, size, root, nodes), rank, reducing=True)


def allreduce(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Sums flow up a tree of every node to its leader; leaders swap sums and both add; the result flows down again.

    On N nodes of M ranks 2 ceil(log2 M) rounds and ceil(log2 N) between nodes, one more if N is no power of two, each
    alpha + n beta, and (ceil(log2 N) + ceil(log2 M)) n gamma. Keeps rank order, if the ranks of every node are
    neighbours; all ranks get the same bits.
    """
    post = _Post(house(size, nodes), rank)
    yield from reverse(post.within(mst.broadcast, _whole), rank, reducing=True)
    yield from post.among(_rootless(recursive.allreduce), _whole)
    yield from post.within(mst.broadcast, _whole)


def scatter(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The root scatters the blocks of whole nodes down a tree of leaders; every leader scatters them over its node.

    On N nodes of M ranks ceil(log2 N) + ceil(log2 M) rounds: so many alpha + (p-1)/p n beta.
    """
    post = _Post(house(size, nodes), rank, root)
    yield from post.among(mst.scatter, post.blocks)
    yield from post.within(mst.scatter, post.own)


def gather(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The scatter backwards: blocks gather at the leader of every node, and from there at the root.

    On N nodes of M ranks ceil(log2 N) + ceil(log2 M) rounds: so many alpha + (p-1)/p n beta.
    """
    return reverse(scatter(rank, size, root, nodes), rank, reducing=False)


def allgather(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Blocks gather at the leader of every node; leaders share them, and send all of them down a tree of the node.

    On N nodes of M ranks ceil(log2 N) + 2 ceil(log2 M) rounds: so many alpha + (p-1)/p n beta + ceil(log2 M) n beta.
    """
    post = _Post(house(size, nodes), rank)
    yield from reverse(post.within(mst.scatter, post.own), rank, reducing=False)
    yield from post.among(_rootless(circulant.allgather), post.blocks)
    yield from post.within(mst.broadcast, post.every)


def reduce_scatter(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """The allgather backwards: sums flow to leaders, slices of them between leaders, and blocks from leaders.

    On N nodes of M ranks ceil(log2 N) + 2 ceil(log2 M) rounds: so many alpha + ((p-1)/p + ceil(log2 M)) n beta +
    ((p-M)/p + ceil(log2 M)) n gamma. Commutative operations only.
    """
    post = _Post(house(size, nodes), rank)
    yield from reverse(post.within(mst.broadcast, post.every), rank, reducing=True)
    yield from post.among(_rootless(circulant.reduce_scatter), post.blocks)
    yield from post.within(mst.scatter, post.own)
