"""Leaders: one rank per node communicates with other nodes. Few messages, for short vectors.

Allreduce on nodes {0 1 2} and {3 4}, a letter per rank, sums held::

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
from collectives.algorithms.hierarchical import NodeLayout, house
from collectives.schedule.steps import NOTHING, Chunks, Rounds, numbers, one, scattered, span
from collectives.schedule.topology import Nodes
from collectives.schedule.transforms import on, reverse


def _log(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _whole(chunks: Chunks) -> Chunks:
    """The whole vector as one chunk."""
    return one(0)


def _no_data(chunks: Chunks) -> Chunks:
    return NOTHING


class _LeaderMessage(NamedTuple):
    """Position of a rank: the first rank of each node is its leader, except that the root leads its own node."""

    here: NodeLayout
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
        """A schedule of (node, nodes, the root's node) run by the leaders while the others wait."""
        mine = rounds(self.node, len(self.here.members), self.here.node[self.root])
        return on(self.leader, mine, chunks) if self.leader(self.node) == self.rank else ([] for _ in mine)

    def within(self, rounds: Callable[[int, int, int], Rounds], chunks: Callable[[Chunks], Chunks]) -> Rounds:
        """A schedule of (place, places, the leader's place) run within every node, in equally many rounds."""
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
    """Wrap a generator without a root in one that ignores the root."""
    return lambda node, nodes, home: generate(node, nodes)


def barrier(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Empty messages go up each node to its leader, between leaders, and down each node.

    On N nodes of M ranks ceil(log2 N) + 2 ceil(log2 M) rounds: so many alpha.
    """
    post = _LeaderMessage(house(size, nodes), rank)
    yield from reverse(post.within(mst.broadcast, _no_data), rank, reducing=False)
    yield from post.among(_rootless(dissemination.barrier), _no_data)
    yield from post.within(mst.broadcast, _no_data)


def broadcast(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The root sends the vector down a tree of leaders, and every leader sends it down a tree of its node.

    On N nodes of M ranks ceil(log2 N) + ceil(log2 M) rounds, each alpha + n beta.
    """
    post = _LeaderMessage(house(size, nodes), rank, root)
    yield from post.among(mst.broadcast, _whole)
    yield from post.within(mst.broadcast, _whole)


def reduce(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """Reverse of the broadcast: sums go up a tree in every node to its leader, then up a tree of leaders to the root.

    On N nodes of M ranks ceil(log2 N) + ceil(log2 M) rounds, each alpha + n (beta + gamma). Keeps rank order, if the
    ranks of every node are neighbours.
    """
    return reverse(broadcast(rank, size, root, nodes), rank, reducing=True)


def allreduce(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Sums go up a tree in every node to its leader; leaders exchange and add sums; the result goes down again.

    On N nodes of M ranks 2 ceil(log2 M) rounds and ceil(log2 N) between nodes, one more if N is no power of two, each
    alpha + n beta, and (ceil(log2 N) + ceil(log2 M)) n gamma. Keeps rank order, if the ranks of every node are
    neighbours; all ranks get the same bits.
    """
    post = _LeaderMessage(house(size, nodes), rank)
    yield from reverse(post.within(mst.broadcast, _whole), rank, reducing=True)
    yield from post.among(_rootless(recursive.allreduce), _whole)
    yield from post.within(mst.broadcast, _whole)


def scatter(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The root scatters the blocks of whole nodes down a tree of leaders; every leader scatters them over its node.

    On N nodes of M ranks ceil(log2 N) + ceil(log2 M) rounds: so many alpha + (p-1)/p n beta.
    """
    post = _LeaderMessage(house(size, nodes), rank, root)
    yield from post.among(mst.scatter, post.blocks)
    yield from post.within(mst.scatter, post.own)


def gather(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """Reverse of the scatter: blocks are gathered at the leader of every node, then at the root.

    On N nodes of M ranks ceil(log2 N) + ceil(log2 M) rounds: so many alpha + (p-1)/p n beta.
    """
    return reverse(scatter(rank, size, root, nodes), rank, reducing=False)


def allgather(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Blocks are gathered at the leader of every node; leaders exchange them and send all down a tree of the node.

    On N nodes of M ranks ceil(log2 N) + 2 ceil(log2 M) rounds: so many alpha + (p-1)/p n beta + ceil(log2 M) n beta.
    """
    post = _LeaderMessage(house(size, nodes), rank)
    yield from reverse(post.within(mst.scatter, post.own), rank, reducing=False)
    yield from post.among(_rootless(circulant.allgather), post.blocks)
    yield from post.within(mst.broadcast, post.every)


def reduce_scatter(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Reverse of the allgather: sums go to leaders, slices of them between leaders, and blocks from leaders.

    On N nodes of M ranks ceil(log2 N) + 2 ceil(log2 M) rounds: so many alpha + ((p-1)/p + ceil(log2 M)) n beta +
    ((p-M)/p + ceil(log2 M)) n gamma. Commutative operations only.
    """
    post = _LeaderMessage(house(size, nodes), rank)
    yield from reverse(post.within(mst.broadcast, post.every), rank, reducing=True)
    yield from post.among(_rootless(circulant.reduce_scatter), post.blocks)
    yield from post.within(mst.scatter, post.own)
