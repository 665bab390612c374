"""Direct: each rank exchanges with all peers, or the root, in one round (reduce, allreduce: two), for low latency.

(The "linear" and "spread-out" algorithms of MPI libraries. Reductions combine in rank order.)
"""

from collections.abc import Iterator

from collectives.schedule.steps import Recv, RecvReduce, Rounds, Send, Step, one, span


def others(rank: int, size: int) -> Iterator[int]:
    """All other ranks, the next one first, so that ranks start with different peers."""
    return ((rank + distance) % size for distance in range(1, size))


def _one_round(steps: list[Step]) -> Rounds:
    """Yield one round of all steps. No round if there are no steps (on one rank)."""
    if steps:
        yield steps


def broadcast(rank: int, size: int, root: int) -> Rounds:
    """The root sends the vector to all ranks in one round. Cost: (p-1)(alpha + n beta) through one port."""
    vector = span(0, size)
    return _one_round([Send(peer, vector) for peer in others(rank, size)] if rank == root else [Recv(root, vector)])


def scatter(rank: int, size: int, root: int) -> Rounds:
    """The root sends each rank its block in one round. Cost: (p-1) alpha + (p-1)/p n beta."""
    return _one_round(
        [Send(peer, one(peer)) for peer in others(rank, size)] if rank == root else [Recv(root, one(rank))]
    )


def gather(rank: int, size: int, root: int) -> Rounds:
    """Each rank sends its block to the root in one round. Cost: (p-1) alpha + (p-1)/p n beta."""
    return _one_round(
        [Recv(peer, one(peer)) for peer in others(rank, size)] if rank == root else [Send(root, one(rank))]
    )


def allgather(rank: int, size: int) -> Rounds:
    """Each rank sends its block to all ranks in one round. Cost: (p-1) alpha + (p-1)/p n beta."""
    sends: list[Step] = [Send(peer, one(rank)) for peer in others(rank, size)]
    return _one_round(sends + [Recv(peer, one(peer)) for peer in others(rank, size)])


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Each rank sends every other rank the receiver's block in one round, and combines what it receives in rank order.

    Cost: (p-1) alpha + (p-1)/p n (beta + gamma). Keeps rank order.
    """
    mine = one(rank)
    sends: list[Step] = [Send(peer, one(peer)) for peer in others(rank, size)]
    lower = [RecvReduce(peer, mine, "left") for peer in range(rank - 1, -1, -1)]
    higher = [RecvReduce(peer, mine, "right") for peer in range(rank + 1, size)]
    return _one_round([*sends, *lower, *higher])


def allreduce(rank: int, size: int) -> Rounds:
    """Each rank sums one block over all ranks, then sends it to all ranks.

    Cost: 2(p-1) alpha + (p-1)/p n (2 beta + gamma). Keeps rank order. All ranks get the same bits.
    """
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def reduce(rank: int, size: int, root: int) -> Rounds:
    """Each rank sums one block over all ranks, then sends it to the root.

    Cost: 2(p-1) alpha + (p-1)/p n (2 beta + gamma). Keeps rank order.
    """
    yield from reduce_scatter(rank, size)
    yield from gather(rank, size, root)


def alltoall(rank: int, size: int) -> Rounds:
    """Each rank sends a block to each rank in one round. Cost: (p-1) alpha + (p-1)/p n beta, n what one rank holds."""
    sends: list[Step] = [Send(peer, one(rank * size + peer)) for peer in others(rank, size)]
    return _one_round(sends + [Recv(peer, one(peer * size + rank)) for peer in others(rank, size)])
