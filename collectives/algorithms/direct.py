"""Direct: all pairs exchange in one round. Most messages, fewest rounds; best where latency is low.

(The "linear" and "spread-out" algorithms of MPI libraries; reads in rank order, so all keep it.)
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedule.steps import Recv, RecvReduce, Round, Rounds, Send, one, span


def _others(rank: int, size: int) -> Iterator[int]:
    """All other ranks, the next one first, so that ranks start with different peers."""
    return ((rank + distance) % size for distance in range(1, size))


def broadcast(rank: int, size: int, root: int) -> Rounds:
    """The root sends the vector to all ranks in one round.

    1 round, p-1 messages: (p-1)(alpha + n beta) through one port.
    """
    everything = span(0, size)
    if size > 1:
        yield [Send(peer, everything) for peer in _others(rank, size)] if rank == root else [Recv(root, everything)]


def scatter(rank: int, size: int, root: int) -> Rounds:
    """The root sends each rank its block in one round.

    1 round, p-1 messages: (p-1) alpha + (p-1)/p n beta.
    """
    if size > 1:
        yield [Send(peer, one(peer)) for peer in _others(rank, size)] if rank == root else [Recv(root, one(rank))]


def gather(rank: int, size: int, root: int) -> Rounds:
    """Each rank sends its block to the root in one round.

    1 round, p-1 messages: (p-1) alpha + (p-1)/p n beta.
    """
    if size > 1:
        yield [Recv(peer, one(peer)) for peer in _others(rank, size)] if rank == root else [Send(root, one(rank))]


def allgather(rank: int, size: int) -> Rounds:
    """Each rank sends its block to all ranks in one round.

    1 round, p-1 messages: (p-1) alpha + (p-1)/p n beta.
    """
    sends: Round = [Send(peer, one(rank)) for peer in _others(rank, size)]
    receives: Round = [Recv(peer, one(peer)) for peer in _others(rank, size)]
    if size > 1:
        yield sends + receives


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Each rank sends a block to each rank; then each combines its blocks in rank order.

    1 round, p-1 messages: (p-1) alpha + (p-1)/p n (beta + gamma). Keeps rank order.
    """
    if size == 1:
        return
    mine = one(rank)
    sends: Round = [Send(peer, one(peer)) for peer in _others(rank, size)]
    lower: Round = [RecvReduce(peer, mine, "left") for peer in range(rank - 1, -1, -1)]
    higher: Round = [RecvReduce(peer, mine, "right") for peer in range(rank + 1, size)]
    yield sends + lower + higher


def allreduce(rank: int, size: int) -> Rounds:
    """Each rank sums one block over all ranks, then sends it to all ranks.

    2 rounds, 2(p-1) messages: 2(p-1) alpha + (p-1)/p n (2 beta + gamma). Keeps rank order; all ranks get the same bits.
    """
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def reduce(rank: int, size: int, root: int) -> Rounds:
    """Each rank sums one block over all ranks, then sends it to the root.

    2 rounds, 2(p-1) messages: 2(p-1) alpha + (p-1)/p n (2 beta + gamma). Keeps rank order.
    """
    yield from reduce_scatter(rank, size)
    yield from gather(rank, size, root)


def alltoall(rank: int, size: int) -> Rounds:
    """Each rank sends a block to each rank in one round.

    1 round, p-1 messages: (p-1) alpha + (p-1)/p n beta, n what one rank holds.
    """
    sends: Round = [Send(peer, one(rank * size + peer)) for peer in _others(rank, size)]
    receives: Round = [Recv(peer, one(peer * size + rank)) for peer in _others(rank, size)]
    if size > 1:
        yield sends + receives
