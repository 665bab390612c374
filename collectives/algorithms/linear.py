"""Naive algorithms: one rank exchanges with all others, one after another. The reference for tests.

A rank that waits has empty rounds, so that the rounds of all ranks are aligned and can be pipelined.
"""

from __future__ import annotations

from collectives.schedule.steps import NOTHING, Recv, RecvReduce, Rounds, Send, one, span


def _others(root: int, size: int) -> list[int]:
    """All ranks but the root: downwards from it to 0, then upwards from it, the order that keeps rank order."""
    return [*range(root - 1, -1, -1), *range(root + 1, size)]


def broadcast(rank: int, size: int, root: int) -> Rounds:
    """The root sends the whole vector to one rank after another.

    p-1 rounds: (p-1)(alpha + n beta).
    """
    for peer in _others(root, size):
        if rank == root:
            yield [Send(peer, span(0, size))]
        elif rank == peer:
            yield [Recv(root, span(0, size))]
        else:
            yield []


def reduce(rank: int, size: int, root: int) -> Rounds:
    """The root receives and combines the vector of one rank after another, each on its side in rank order.

    p-1 rounds: (p-1)(alpha + n beta + n gamma). Keeps rank order.
    """
    for peer in _others(root, size):
        if rank == root:
            yield [RecvReduce(peer, span(0, size), "left" if peer < root else "right")]
        elif rank == peer:
            yield [Send(root, span(0, size))]
        else:
            yield []


def scatter(rank: int, size: int, root: int) -> Rounds:
    """The root sends every rank its block.

    p-1 rounds: (p-1) alpha + (p-1)/p n beta.
    """
    for peer in _others(root, size):
        if rank == root:
            yield [Send(peer, one(peer))]
        elif rank == peer:
            yield [Recv(root, one(peer))]
        else:
            yield []


def gather(rank: int, size: int, root: int) -> Rounds:
    """The root receives the block of one rank after another.

    p-1 rounds: (p-1) alpha + (p-1)/p n beta.
    """
    for peer in _others(root, size):
        if rank == root:
            yield [Recv(peer, one(peer))]
        elif rank == peer:
            yield [Send(root, one(peer))]
        else:
            yield []


def allgather(rank: int, size: int) -> Rounds:
    """Rank 0 gathers all blocks, then sends all of them to each rank.

    2(p-1) rounds: 2(p-1) alpha + (p-1)(1 + 1/p) n beta.
    """
    yield from gather(rank, size, 0)
    yield from broadcast(rank, size, 0)


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Rank 0 reduces all vectors, then sends each rank its block.

    2(p-1) rounds: 2(p-1) alpha + (p-1)(1 + 1/p) n beta + (p-1) n gamma. Keeps rank order.
    """
    yield from reduce(rank, size, 0)
    yield from scatter(rank, size, 0)


def allreduce(rank: int, size: int) -> Rounds:
    """Rank 0 reduces all vectors, then sends the result to each rank.

    2(p-1) rounds: (p-1)(2 alpha + 2 n beta + n gamma). Keeps rank order.
    """
    yield from reduce(rank, size, 0)
    yield from broadcast(rank, size, 0)


def barrier(rank: int, size: int) -> Rounds:
    """Each rank sends an empty message to rank 0; then rank 0 sends one to each rank.

    2(p-1) rounds: 2(p-1) alpha.
    """
    for peer in range(1, size):
        if rank == 0:
            yield [Recv(peer, NOTHING)]
        elif rank == peer:
            yield [Send(0, NOTHING)]
        else:
            yield []
    for peer in range(1, size):
        if rank == 0:
            yield [Send(peer, NOTHING)]
        elif rank == peer:
            yield [Recv(0, NOTHING)]
        else:
            yield []
