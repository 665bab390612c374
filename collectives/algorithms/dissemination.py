"""Dissemination barrier, for any number of ranks: each round doubles the ranks that a rank knows to have entered."""

from collectives.schedule.steps import NOTHING, Recv, Rounds, Send


def barrier(rank: int, size: int) -> Rounds:
    """In round k each rank sends an empty message to rank + 2^k and receives one from rank - 2^k, modulo p.

    Cost: q alpha, q = ceil(log2 p). (Hensgen, Finkel, Manber 1988.)
    """
    distance = 1
    while distance < size:
        yield [Send((rank + distance) % size, NOTHING), Recv((rank - distance) % size, NOTHING)]
        distance *= 2
