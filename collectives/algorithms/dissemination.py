"""Dissemination: news doubles its reach every round, whatever the number of ranks."""

from __future__ import annotations

from collectives.schedule.steps import NOTHING, Recv, Rounds, Send


def barrier(rank: int, size: int) -> Rounds:
    """Everyone tells the rank 1, 2, 4 ... further on that it came, and hears so from as far behind.

    ceil(log2 p) rounds: q alpha. (Hensgen, Finkel, Manber 1988.)
    """
    distance = 1
    while distance < size:
        yield [Send((rank + distance) % size, NOTHING), Recv((rank - distance) % size, NOTHING)]
        distance *= 2
