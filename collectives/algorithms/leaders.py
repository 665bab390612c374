"""Leaders: one rank per node communicates with other nodes. Few messages, for short vectors.

Allreduce on nodes {0 1 2} and {3 4}, a letter per rank, sums held::

    start       a       b       c       d       e
    within      abc                     de              up the tree of each node, to 0 and 3
    leaders     abcde                   abcde           0 and 3 swap
    within      abcde   abcde   abcde   abcde   abcde   down again

Costs are for N nodes of M ranks, with qN = ceil(log2 N) and qM = ceil(log2 M).

(Karonis, de Supinski, Foster, Gropp, Lusk, Bresnahan 2000, "Exploiting hierarchy in parallel computer networks".)
"""

from collections.abc import Callable
from itertools import chain, repeat
from typing import NamedTuple

from collectives.algorithms import circulant, dissemination, mst, recursive
from collectives.algorithms.hierarchical import NodeLayout, ceil_log, node_layout
from collectives.schedule.steps import NOTHING, Chunks, Rounds, numbers, one, scattered, span
from collectives.schedule.topology import Nodes
from collectives.schedule.transforms import on, reverse

RootedRounds = Callable[[int, int, int], Rounds]
"""Generator of (rank, size, root)."""


def _whole(chunks: Chunks) -> Chunks:
    """Map any chunks to chunk 0, the whole vector."""
    return one(0)


def _no_data(chunks: Chunks) -> Chunks:
    return NOTHING


def _rootless(generate: Callable[[int, int], Rounds]) -> RootedRounds:
    """Turn a generator of (rank, size) into one of (rank, size, root) that ignores the root."""
    return lambda node, nodes, home: generate(node, nodes)


class _LeaderGroups(NamedTuple):
    """Groups that a rank may communicate in: the ranks of its node, and the leaders of all nodes.

    The first rank of each node is its leader, except that the root leads its own node.
    """

    layout: NodeLayout
    rank: int
    root: int = 0

    @property
    def node(self) -> int:
        return self.layout.node[self.rank]

    @property
    def members(self) -> tuple[int, ...]:
        return self.layout.members[self.node]

    def leader(self, node: int) -> int:
        """The rank that leads a node: the root on the root's node, else the first rank of the node."""
        return self.root if self.layout.node[self.root] == node else self.layout.members[node][0]

    def among(self, generate: RootedRounds, chunks: Callable[[Chunks], Chunks]) -> Rounds:
        """Rounds of this rank in a collective among the leaders, empty if it is no leader. Rooted at the root's leader.

        `generate` gets node numbers as ranks. `chunks` maps its chunks to chunks of the whole.
        """
        rounds = generate(self.node, len(self.layout.members), self.layout.node[self.root])
        return on(self.leader, rounds, chunks) if self.leader(self.node) == self.rank else ([] for _ in rounds)

    def within(self, generate: RootedRounds, chunks: Callable[[Chunks], Chunks]) -> Rounds:
        """Rounds of this rank in a collective of its node, rooted at the leader.

        Padded to the number of rounds of the largest node.
        """
        place, count = self.layout.place, len(self.members)
        rounds = generate(place[self.rank], count, place[self.leader(self.node)])
        return chain(on(self.members, rounds, chunks), repeat([], ceil_log(self.layout.widest) - ceil_log(count)))

    def blocks(self, nodes: Chunks) -> Chunks:
        """Blocks of all ranks of the given nodes."""
        return scattered(rank for node in numbers(nodes) for rank in self.layout.members[node])

    def own(self, places: Chunks) -> Chunks:
        """Blocks of the ranks at these positions in the node."""
        return scattered(self.members[place] for place in numbers(places))

    def every(self, chunks: Chunks) -> Chunks:
        """Map any chunks to the blocks of all ranks."""
        return span(0, len(self.layout.node))


def barrier(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Empty messages go up each node to its leader, between leaders, and down each node. Cost: (qN + 2 qM) alpha."""
    groups = _LeaderGroups(node_layout(size, nodes), rank)
    yield from reverse(groups.within(mst.broadcast, _no_data), rank, reducing=False)
    yield from groups.among(_rootless(dissemination.barrier), _no_data)
    yield from groups.within(mst.broadcast, _no_data)


def broadcast(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The root sends the vector down a tree of leaders, and every leader sends it down a tree of its node.

    Cost: (qN + qM)(alpha + n beta).
    """
    groups = _LeaderGroups(node_layout(size, nodes), rank, root)
    yield from groups.among(mst.broadcast, _whole)
    yield from groups.within(mst.broadcast, _whole)


def reduce(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """Reverse of the broadcast: sums go up a tree in every node to its leader, then up a tree of leaders to the root.

    Cost: (qN + qM)(alpha + n (beta + gamma)). Keeps rank order, if the ranks of every node are neighbours.
    """
    return reverse(broadcast(rank, size, root, nodes), rank, reducing=True)


def allreduce(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Sums go up a tree in every node to its leader. Leaders exchange and add sums. The result goes down again.

    Cost: (qN + 2 qM)(alpha + n beta) + (qN + qM) n gamma, with one more round between nodes if N is no power of two.
    Keeps rank order, if the ranks of every node are neighbours. All ranks get the same bits.
    """
    groups = _LeaderGroups(node_layout(size, nodes), rank)
    yield from reverse(groups.within(mst.broadcast, _whole), rank, reducing=True)
    yield from groups.among(_rootless(recursive.allreduce), _whole)
    yield from groups.within(mst.broadcast, _whole)


def scatter(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The root scatters the blocks of whole nodes down a tree of leaders. Every leader scatters them over its node.

    Cost: (qN + qM) alpha + (p-1)/p n beta.
    """
    groups = _LeaderGroups(node_layout(size, nodes), rank, root)
    yield from groups.among(mst.scatter, groups.blocks)
    yield from groups.within(mst.scatter, groups.own)


def gather(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """Reverse of the scatter: blocks are gathered at the leader of every node, then at the root.

    Cost: (qN + qM) alpha + (p-1)/p n beta.
    """
    return reverse(scatter(rank, size, root, nodes), rank, reducing=False)


def allgather(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Blocks are gathered at the leader of every node. Leaders exchange them and send all down a tree of the node.

    Cost: (qN + 2 qM) alpha + ((p-1)/p + qM) n beta.
    """
    groups = _LeaderGroups(node_layout(size, nodes), rank)
    yield from reverse(groups.within(mst.scatter, groups.own), rank, reducing=False)
    yield from groups.among(_rootless(circulant.allgather), groups.blocks)
    yield from groups.within(mst.broadcast, groups.every)


def reduce_scatter(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Reverse of the allgather: each leader sums its node. Leaders reduce-scatter the sums, then scatter their blocks.

    Cost: (qN + 2 qM) alpha + ((p-1)/p + qM) n beta + ((p-M)/p + qM) n gamma. Commutative operations only.
    """
    groups = _LeaderGroups(node_layout(size, nodes), rank)
    yield from reverse(groups.within(mst.broadcast, groups.every), rank, reducing=True)
    yield from groups.among(_rootless(circulant.reduce_scatter), groups.blocks)
    yield from groups.within(mst.scatter, groups.own)
