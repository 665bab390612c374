"""Prefix sums: rank r gets the sum over ranks 0 .. r (scan) or 0 .. r-1 (exscan).

(Hillis and Steele 1986. Open MPI and MPICH do the same in recursive doubling.)
"""

from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Round, Rounds, Send, span


def linear_scan(rank: int, size: int) -> Rounds:
    """The partial sum travels from rank to rank, and each rank adds its term.

    Cost: (p-1)(alpha + n (beta + gamma)). Keeps rank order.
    """
    vector = span(0, size)
    for time in range(size - 1):
        if rank == time:
            yield [Send(rank + 1, vector)]
        else:
            yield [RecvReduce(rank - 1, vector, "left")] if rank == time + 1 else []


def linear_exscan(rank: int, size: int) -> Rounds:
    """The partial sum travels from rank to rank. Each rank keeps it and sends it on with its own term added.

    Cost: (p-1)(alpha + n (beta + gamma)). Keeps rank order.
    """
    mine, so_far = span(0, size), span(size, 2 * size)
    for time in range(size - 1):
        if rank == time:
            yield [Send(rank + 1, mine)]
        elif rank == time + 1:
            yield [Recv(rank - 1, so_far), Reduce(so_far, mine, "left")] if rank < size - 1 else [Recv(rank - 1, mine)]
        else:
            yield []
    if 0 < rank < size - 1:
        yield [Copy(so_far, mine)]


def doubling_scan(rank: int, size: int) -> Rounds:
    """In round k each rank sends its partial sum to rank + 2^k and adds the one received from rank - 2^k.

    Cost: q (alpha + n beta + n gamma), q = ceil(log2 p). Keeps rank order.
    """
    mine = span(0, size)
    distance = 1
    while distance < size:
        up: Round = [Send(rank + distance, mine)] if rank + distance < size else []
        down: Round = [RecvReduce(rank - distance, mine, "left")] if rank >= distance else []
        yield up + down
        distance *= 2


def doubling_exscan(rank: int, size: int) -> Rounds:
    """As the doubling scan, with a second partial sum, the result, that leaves out the rank's own term.

    Cost: q (alpha + n beta + 2 n gamma). Keeps rank order.
    """
    mine, below, arrived = (span(copy * size, (copy + 1) * size) for copy in range(3))
    distance = 1
    while distance < size:
        up: Round = [Send(rank + distance, mine)] if rank + distance < size else []
        down: Round = []
        if rank >= distance:
            keep = Copy(arrived, below) if distance == 1 else Reduce(arrived, below, "left")
            down = [Recv(rank - distance, arrived), keep, Reduce(arrived, mine, "left")]
        yield up + down
        distance *= 2
    if rank:
        yield [Copy(below, mine)]
