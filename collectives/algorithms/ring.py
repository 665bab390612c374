"""Ring: each rank sends to the right and receives from the left, one chunk per round. Optimal volume.

Reduce-scatter on 3 ranks. ``a1`` is chunk a of rank 1::

                rank 0          rank 1          rank 2
    start       a0  b0  c0      a1  b1  c1      a2  b2  c2
    round 0     c0 to 1         a1 to 2         b2 to 0
                a0 b02 c0       a1  b1 c01      a12 b2  c2
    round 1     b02 to 1        c01 to 2        a12 to 0
                a012            b012            c012

(Chan et al. 2007, section 4.2, bucket algorithms. Patarasu and Yuan 2009.)
"""

from collections.abc import Iterator

from collectives.algorithms import mst
from collectives.schedule.steps import Recv, RecvReduce, Round, Rounds, Send, one


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Chunk c starts at rank c+1, gains a term at every hop, and ends complete at rank c.

    Cost: (p-1) alpha + (p-1)/p n (beta + gamma). Commutative operations only.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(1, size):
        yield [Send(right, one((rank - step) % size)), RecvReduce(left, one((rank - step - 1) % size))]


def _around(rank: int, size: int) -> Iterator[tuple[Send, Recv]]:
    """Yield, per round, the send to the right and the receive from the left that pass every chunk around the ring."""
    left, right = (rank - 1) % size, (rank + 1) % size
    for step in range(size - 1):
        yield Send(right, one((rank - step) % size)), Recv(left, one((rank - step - 1) % size))


def allgather(rank: int, size: int) -> Rounds:
    """Chunk c starts at rank c and travels to the right through all ranks. Cost: (p-1) alpha + (p-1)/p n beta."""
    return ([send, receive] for send, receive in _around(rank, size))


def allreduce(rank: int, size: int) -> Rounds:
    """Reduce-scatter around the ring, then allgather around the ring.

    Cost: 2(p-1) alpha + (p-1)/p n (2 beta + gamma). Commutative operations only.
    """
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def broadcast(rank: int, size: int, root: int) -> Rounds:
    """The root scatters its vector down a tree. Then an allgather runs around the ring, where the root only sends.

    Cost: (q + p-1) alpha + 2(p-1)/p n beta, q = ceil(log2 p). (Chan et al. 2007, section 5.2.)
    """
    yield from mst.scatter(rank, size, root)
    for send, receive in _around(rank, size):
        steps: Round = [send] if send.peer != root else []
        yield [*steps, receive] if rank != root else steps


def reduce(rank: int, size: int, root: int) -> Rounds:
    """Reduce-scatter around the ring, then a gather up a tree.

    Cost: (q + p-1) alpha + (p-1)/p n (2 beta + gamma). Commutative operations only.
    """
    yield from reduce_scatter(rank, size)
    yield from mst.gather(rank, size, root)
