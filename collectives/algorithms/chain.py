"""Chain: each rank passes the data on to the next, starting at the root. Optimal for many segments.

Broadcast of segments a b c from rank 0 of 4::

    round       0       1       2       3       4
    0 -> 1      a       b       c
    1 -> 2              a       b       c
    2 -> 3                      a       b       c

(Chan et al. 2007, section 5.3. Chain and pipeline in Open MPI's coll/base.)
"""

from collectives.schedule.steps import Recv, Rounds, Send, span
from collectives.schedule.transforms import reverse


def broadcast(rank: int, size: int, root: int) -> Rounds:
    """The vector travels from the root through all ranks to the one before the root.

    Cost: (k+p-2)(alpha + n/k beta) in k segments.
    """
    place, vector = (rank - root) % size, span(0, size)
    for time in range(size - 1):
        if time == place:
            yield [Send((rank + 1) % size, vector)]
        else:
            yield [Recv((rank - 1) % size, vector)] if time == place - 1 else []


def reduce(rank: int, size: int, root: int) -> Rounds:
    """Reverse of the broadcast: partial sums travel through all ranks to the root.

    Cost: (k+p-2)(alpha + n/k (beta + gamma)) in k segments. Commutative operations only.
    """
    return reverse(broadcast(rank, size, root), rank, reducing=True)
