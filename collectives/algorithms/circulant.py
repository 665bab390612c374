"""Circulant graph: exchange with the ranks at distance 1, 2, 4 ..., for any number of ranks, with optimal volume.

Allgather on 5 ranks, blocks held after every round::

    start       0       1       2       3       4
    distance 1  01      12      23      34      40
    distance 2  0123    1234    2340    3401    4012
    distance 4  01234   12340   23401   34012   40123       (the last round sends one block only)

(Bruck, Ho, Kipnis, Upfal, Weathersby 1997, section 4. Traff 2024 for the reversal.)
"""

from collectives.schedule.steps import Recv, Rounds, Send, cyclic
from collectives.schedule.transforms import reverse


def allgather(rank: int, size: int) -> Rounds:
    """Each rank receives from distance 1, 2, 4 ... as many blocks as it holds (last round: the rest).

    Cost: q alpha + (p-1)/p n beta, q = ceil(log2 p). Both bounds are reached. (Bruck et al. 1997, section 4.)
    """
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        behind, ahead = (rank - distance) % size, (rank + distance) % size
        yield [Send(behind, cyclic(rank, count, size)), Recv(ahead, cyclic(rank + distance, count, size))]
        distance *= 2


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Reverse of the allgather: sums of fewer and fewer blocks travel over distance ... 4, 2, 1.

    Cost: q alpha + (p-1)/p n (beta + gamma), all bounds at once. Commutative operations only. (Traff 2024.)
    """
    return reverse(allgather(rank, size), rank, reducing=True)


def allreduce(rank: int, size: int) -> Rounds:
    """Reduce-scatter, then allgather, both over the same circulant graph.

    Cost: 2q alpha + 2(p-1)/p n beta + (p-1)/p n gamma. Commutative operations only. (Traff 2024.)
    """
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)
