"""Dissemination: the number of ranks heard of doubles every round, for any number of ranks."""

from __future__ import annotations

from collectives.schedule.steps import NOTHING, Recv, Rounds, Send


def barrier(rank: int, size: int) -> Rounds:
    """Each rank sends an empty message to distance 1, 2, 4 ... and receives one from the same distance below.

    Cost: q alpha, q = ceil(log2 p). (Hensgen, Finkel, Manber 1988.)
    """
    distance = 1
    while distance < size:
        yield [Send((rank + distance) % size, NOTHING), Recv((rank - distance) % size, NOTHING)]
        distance *= 2
