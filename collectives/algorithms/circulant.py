"""Circulant graphs: everyone talks to the ranks 1, 2, 4 ... away, whatever their number, and no block moves in vain.

Allgather on 5 ranks, what each holds after every round::

    start       0       1       2       3       4
    distance 1  01      12      23      34      40
    distance 2  0123    1234    2340    3401    4012
    distance 4  01234   12340   23401   34012   40123       (the last round sends one block only)

(Bruck, Ho, Kipnis, Upfal, Weathersby 1997, section 4; Traff 2024 for the reversal.)
"""

from __future__ import annotations

from collectives.schedule.steps import Recv, Rounds, Send, cyclic
from collectives.schedule.transforms import reverse


def allgather(rank: int, size: int) -> Rounds:
    """Everyone fetches from 1, 2, 4 ... ranks further on as many blocks as it has, at the end only what it lacks.

    ceil(log2 p) rounds: q alpha + (p-1)/p n beta, both bounds at once. (Bruck et al. 1997, section 4.)
    """
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        behind, ahead = (rank - distance) % size, (rank + distance) % size
        yield [Send(behind, cyclic(rank, count, size)), Recv(ahead, cyclic(rank + distance, count, size))]
        distance *= 2


def reduce_scatter(rank: int, size: int) -> Rounds:
    """The allgather backwards: sums of ever fewer blocks flow to 4, 2, 1 ranks further on.

    ceil(log2 p) rounds: q alpha + (p-1)/p n (beta + gamma), all bounds at once. Commutative operations only.
    (Traff 2024.)
    """
    return reverse(allgather(rank, size), rank, reducing=True)


def allreduce(rank: int, size: int) -> Rounds:
    """Reduce-scatter, then allgather, both over the same circulant graph.

    2 ceil(log2 p) rounds: 2q alpha + 2(p-1)/p n beta + (p-1)/p n gamma. Commutative operations only. (Traff 2024.)
    """
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)
