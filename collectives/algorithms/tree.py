"""Sums by one binary tree over the ranks, whose order of additions depends only on the ranks' order.

Each rank gets all ranks' contributions to its block at once, and combines neighbours, then neighbouring results, and
so on. A rightmost one without a neighbour waits. On 5 ranks, for every block::

    a   b   c   d   e
    a+b     c+d     e
    (a+b)+(c+d)     e
    ((a+b)+(c+d))+e

If each rank first adds 2^k contributions by the same tree, the bits equal the sum over 2^k times as many ranks. This
is the basis of sums that do not depend on the number of ranks (`parallel.sharding.tensor`). Other algorithms choose an
order for each block.

(Pairwise summation: Higham, "The Accuracy of Floating Point Summation", SIAM J. Sci. Comput. 14, 1993.)
"""

from collections.abc import Iterator

from collectives.algorithms import direct
from collectives.schedule.steps import Copy, Recv, Reduce, Round, Rounds, Send, one


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Each rank sends every other rank the receiver's block in one round, and combines what it receives by a tree.

    Cost: (p-1) alpha + (p-1)/p n (beta + gamma). Keeps rank order. The same tree for every block.
    """
    if size == 1:
        return

    def place(peer: int) -> int:
        """Chunk of the contribution of a rank: the own block, or its copy in scratch."""
        return rank if peer == rank else (peer + 1) * size + rank

    steps: Round = [Send(peer, one(peer)) for peer in direct.others(rank, size)]
    steps += [Recv(peer, one(place(peer))) for peer in direct.others(rank, size)]
    steps += [Reduce(one(place(right)), one(place(left)), "right") for left, right in _pairs(size)]
    yield [*steps, Copy(one(place(0)), one(rank))] if rank else steps


def allreduce(rank: int, size: int) -> Rounds:
    """Reduce-scatter by the tree, then each rank sends its block of the result to all ranks.

    Cost: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma. Keeps rank order. The same tree for every element.
    """
    yield from reduce_scatter(rank, size)
    yield from direct.allgather(rank, size)


def _pairs(size: int) -> Iterator[tuple[int, int]]:
    """Pairs (left, right) of ranks in the order of the additions, each into the left one."""
    distance = 1
    while distance < size:
        yield from ((left, left + distance) for left in range(0, size - distance, 2 * distance))
        distance *= 2
