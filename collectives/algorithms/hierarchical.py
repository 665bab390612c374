"""Hierarchical algorithms: within nodes, between nodes, within nodes. Each rank sends one slice over the network.

A rail connects one rank of every node and carries one slice. There are as many rails as ranks on the largest node. On
smaller nodes a rank serves several rails. The block of a rank belongs to a rail that the rank serves, so data crosses
the network once. Allgather on nodes {0 1 2} and {3 4 5}, a letter per block::

    start     a         b         c         d         e         f
    between   a d       b e       c f       a d       b e       c f       rails 0-3, 1-4, 2-5
    within    a d b e c f on all ranks of either node

Costs are for N nodes of M ranks, with h = ceil(log2 N) + ceil(log2 M).

(Traff, Hunold 2020, "Decomposing MPI collectives for exploiting multi-lane communication".)
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import NamedTuple

from collectives.algorithms import circulant, mst
from collectives.schedule.steps import Chunks, Recv, Rounds, Send, numbers, scattered
from collectives.schedule.topology import Nodes
from collectives.schedule.transforms import on, reverse


class NodeLayout(NamedTuple):
    """Placement of ranks on nodes, and rails: a rail joins one rank of every node and carries one slice of the data."""

    members: tuple[tuple[int, ...], ...]  # the ranks of each node
    node: tuple[int, ...]  # the node of every rank
    place: tuple[int, ...]  # its number among the ranks of that node
    widest: int  # ranks of the largest node: the number of rails
    order: tuple[int, ...]  # all ranks by rail, and on a rail by node: ranks of a rail are consecutive
    spots: tuple[int, ...]  # rail * nodes + node, for each rank of `order`

    def rails(self, node: int, places: range) -> range:
        """Rails served by the ranks at indices `places` within a node. Consecutive ranks serve consecutive rails."""
        ranks = len(self.members[node])
        return range(-(-places.start * self.widest // ranks), -(-places.stop * self.widest // ranks))

    def server(self, rail: int, node: int) -> int:
        """The rank that serves a rail on a node."""
        return self.members[node][rail * len(self.members[node]) // self.widest]

    def blocks(self, start: int, stop: int) -> Chunks:
        """Blocks whose spot (rail * nodes + node) is in `start` .. `stop` - 1. Blocks are numbered by `order`."""
        first, last = bisect_left(self.spots, start), bisect_left(self.spots, stop)
        return (range(first, last),) if first < last else ()

    def between(self, rail: int) -> Callable[[Chunks], Chunks]:
        """Function that maps ranges of nodes to the blocks of a rail on these nodes."""
        base = rail * len(self.members)
        return lambda nodes: tuple(run for part in nodes for run in self.blocks(base + part.start, base + part.stop))

    def within(self, node: int) -> Callable[[Chunks], Chunks]:
        """Function that maps ranges of places within a node to all blocks of the rails that these places serve."""
        count = len(self.members)

        def blocks(places: Chunks) -> Chunks:
            rails = (self.rails(node, part) for part in places)
            return tuple(run for part in rails for run in self.blocks(part.start * count, part.stop * count))

        return blocks


@lru_cache(maxsize=64)
def node_layout(size: int, nodes: Nodes | None) -> NodeLayout:
    """`NodeLayout` of `size` ranks placed on `nodes` (None: all on one node), cached for all ranks."""
    node = nodes or (0,) * size
    members: list[list[int]] = [[] for _ in range(max(node) + 1)]
    place = []
    for rank, its in enumerate(node):
        place.append(len(members[its]))
        members[its].append(rank)
    widest = max(map(len, members))
    by_spot = {
        -(-number * widest // len(ranks)) * len(members) + its: rank
        for its, ranks in enumerate(members)
        for number, rank in enumerate(ranks)
    }
    spots, order = zip(*sorted(by_spot.items()))
    return NodeLayout(tuple(map(tuple, members)), node, tuple(place), widest, order, spots)


def ceil_log(ranks: int) -> int:
    """ceil(log2(ranks)), for one rank or more."""
    return (ranks - 1).bit_length()


def _merged(schedules: Iterable[Rounds]) -> Rounds:
    """Merge schedules of one rank round by round: one message per peer and direction, none if it is empty."""
    for rounds in zip(*schedules):
        messages: dict[tuple[type, int], Chunks] = {}
        for step in chain.from_iterable(rounds):
            assert isinstance(step, (Send, Recv))
            messages[type(step), step.peer] = messages.get((type(step), step.peer), ()) + step.chunks
        yield [kind(peer, chunks) for (kind, peer), chunks in messages.items() if chunks]


def _between(rank: int, layout: NodeLayout, rounds: Callable[[int, int], Rounds]) -> Rounds:
    """Rounds of `rank` in collectives between nodes, merged over its rails. `rounds(node, nodes)` is for one."""
    node, place = layout.node[rank], layout.place[rank]
    return _merged(
        on(partial(layout.server, rail), rounds(node, len(layout.members)), layout.between(rail))
        for rail in layout.rails(node, range(place, place + 1))
    )


def _allgather(rank: int, layout: NodeLayout) -> Rounds:
    """Hierarchical allgather of blocks that are numbered by rail (`NodeLayout.order`), not by rank."""
    node = layout.node[rank]
    members = layout.members[node]
    yield from _between(rank, layout, circulant.allgather)
    yield from on(members, circulant.allgather(layout.place[rank], len(members)), layout.within(node))
    yield from repeat([], ceil_log(layout.widest) - ceil_log(len(members)))


def _scatter(rank: int, layout: NodeLayout, root: int) -> Rounds:
    """Hierarchical scatter from `root`. Blocks are numbered by rail, like the blocks of `_allgather`."""
    home = layout.node[root]
    members = layout.members[home]
    if layout.node[rank] == home:
        rounds = mst.scatter(layout.place[rank], len(members), layout.place[root])
        yield from on(members, rounds, layout.within(home))
    else:
        yield from repeat([], ceil_log(len(members)))
    yield from _between(rank, layout, lambda node, nodes: mst.scatter(node, nodes, home))


def _by_rank(layout: NodeLayout, rounds: Rounds) -> Rounds:
    """Renumber the blocks of a schedule from rail order to rank order."""
    return on(
        range(len(layout.order)), rounds, lambda chunks: scattered(layout.order[spot] for spot in numbers(chunks))
    )


def allgather(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Each rank gathers blocks from its counterparts on the other nodes. Then an allgather within each node.

    Cost: h alpha + (p-1)/p n beta. Between nodes: (N-1)/p n.
    """
    layout = node_layout(size, nodes)
    return _by_rank(layout, _allgather(rank, layout))


def reduce_scatter(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """Reverse of the allgather: a reduce-scatter within each node, then one among counterparts on all nodes.

    Cost: h alpha + (p-1)/p n (beta + gamma). Between nodes: (N-1)/p n. Commutative operations only.
    """
    return reverse(allgather(rank, size, nodes), rank, reducing=True)


def scatter(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The root scatters slices over its node. Each rank of it scatters its slice over counterparts on other nodes.

    Cost: h alpha + (p-1)/p n beta. Between nodes: (N-1)/p n.
    """
    layout = node_layout(size, nodes)
    return _by_rank(layout, _scatter(rank, layout, root))


def gather(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """Reverse of the scatter: the root's node gathers from its counterparts on other nodes. Then the root gathers.

    Cost: h alpha + (p-1)/p n beta. Between nodes: (N-1)/p n.
    """
    return reverse(scatter(rank, size, root, nodes), rank, reducing=False)


def broadcast(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The hierarchical scatter, then the hierarchical allgather.

    Cost: 2h alpha + 2(p-1)/p n beta. Between nodes: 2(N-1)/p n.
    """
    layout = node_layout(size, nodes)
    yield from _scatter(rank, layout, root)
    yield from _allgather(rank, layout)


def reduce(rank: int, size: int, root: int, nodes: Nodes | None) -> Rounds:
    """The hierarchical reduce-scatter, then the hierarchical gather at the root.

    Cost: 2h alpha + (p-1)/p n (2 beta + gamma). Between nodes: 2(N-1)/p n. Commutative operations only.
    """
    layout = node_layout(size, nodes)
    yield from reverse(_allgather(rank, layout), rank, reducing=True)
    yield from reverse(_scatter(rank, layout, root), rank, reducing=False)


def allreduce(rank: int, size: int, nodes: Nodes | None) -> Rounds:
    """The hierarchical reduce-scatter, then the allgather: within nodes, twice between nodes, within nodes.

    Cost: 2h alpha + (p-1)/p n (2 beta + gamma). Between nodes: 2(N-1)/p n. Commutative operations only.
    """
    layout = node_layout(size, nodes)
    yield from reverse(_allgather(rank, layout), rank, reducing=True)
    yield from _allgather(rank, layout)
