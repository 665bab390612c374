"""Naive algorithms: one rank exchanges with all others, one after another. The reference for tests.

A rank that waits has empty rounds, so that the rounds of all ranks are aligned and can be pipelined.
"""

from collections.abc import Callable, Iterable

from collectives.schedule.steps import NOTHING, Recv, RecvReduce, Rounds, Send, Step, one, span


def _others(root: int, size: int) -> list[int]:
    """All ranks but the root: root - 1 down to 0, then root + 1 up, so that reductions keep rank order."""
    return [*range(root - 1, -1, -1), *range(root + 1, size)]


def _in_turn(
    rank: int, root: int, peers: Iterable[int], at_root: Callable[[int], Step], at_peer: Callable[[int], Step]
) -> Rounds:
    """One round per peer: the root has the step `at_root(peer)`, this peer `at_peer(peer)`, all other ranks none."""
    for peer in peers:
        yield [at_root(peer)] if rank == root else [at_peer(peer)] if rank == peer else []


def broadcast(rank: int, size: int, root: int) -> Rounds:
    """The root sends the whole vector to one rank after another. Cost: (p-1)(alpha + n beta)."""
    vector = span(0, size)
    return _in_turn(rank, root, _others(root, size), lambda peer: Send(peer, vector), lambda peer: Recv(root, vector))


def reduce(rank: int, size: int, root: int) -> Rounds:
    """The root receives the vectors of the other ranks one after another and combines them in rank order.

    Cost: (p-1)(alpha + n beta + n gamma). Keeps rank order.
    """
    vector = span(0, size)

    def combine(peer: int) -> Step:
        return RecvReduce(peer, vector, "left" if peer < root else "right")

    return _in_turn(rank, root, _others(root, size), combine, lambda peer: Send(root, vector))


def scatter(rank: int, size: int, root: int) -> Rounds:
    """The root sends every rank its block, one after another. Cost: (p-1) alpha + (p-1)/p n beta."""
    peers = _others(root, size)
    return _in_turn(rank, root, peers, lambda peer: Send(peer, one(peer)), lambda peer: Recv(root, one(peer)))


def gather(rank: int, size: int, root: int) -> Rounds:
    """The root receives the block of one rank after another. Cost: (p-1) alpha + (p-1)/p n beta."""
    peers = _others(root, size)
    return _in_turn(rank, root, peers, lambda peer: Recv(peer, one(peer)), lambda peer: Send(root, one(peer)))


def allgather(rank: int, size: int) -> Rounds:
    """Rank 0 gathers all blocks, then sends all of them to each rank. Cost: 2(p-1) alpha + (p-1)(1 + 1/p) n beta."""
    yield from gather(rank, size, 0)
    yield from broadcast(rank, size, 0)


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Rank 0 reduces all vectors, then sends each rank its block.

    Cost: 2(p-1) alpha + (p-1)(1 + 1/p) n beta + (p-1) n gamma. Keeps rank order.
    """
    yield from reduce(rank, size, 0)
    yield from scatter(rank, size, 0)


def allreduce(rank: int, size: int) -> Rounds:
    """Rank 0 reduces all vectors, then sends the result to each rank.

    Cost: (p-1)(2 alpha + 2 n beta + n gamma). Keeps rank order.
    """
    yield from reduce(rank, size, 0)
    yield from broadcast(rank, size, 0)


def barrier(rank: int, size: int) -> Rounds:
    """Each rank sends an empty message to rank 0. Then rank 0 sends one to each rank. Cost: 2(p-1) alpha."""
    peers = range(1, size)
    yield from _in_turn(rank, 0, peers, lambda peer: Recv(peer, NOTHING), lambda peer: Send(0, NOTHING))
    yield from _in_turn(rank, 0, peers, lambda peer: Send(peer, NOTHING), lambda peer: Recv(0, NOTHING))
