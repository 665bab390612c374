"""Alltoall: one partner per round, or blocks forwarded by powers of two.

(Bruck et al. 1997, section 3; Thakur, Rabenseifner, Gropp 2005, section 4.2.)
"""

from __future__ import annotations

from collectives.schedule.steps import Recv, Rounds, Send, one, scattered


def alltoall(rank: int, size: int) -> Rounds:
    """In round k each rank sends to the rank at distance k and receives from the one at distance -k.

    p-1 rounds: (p-1) alpha + (p-1)/p n beta, n what one rank holds.
    """
    for distance in range(1, size):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        yield [Send(ahead, one(rank * size + ahead)), Recv(behind, one(behind * size + rank))]


def bruck_alltoall(rank: int, size: int) -> Rounds:
    """In round k every block with bit 2^k set in its remaining distance moves 2^k ranks on.

    ceil(log2 p) rounds of up to half the blocks: q alpha + about q/2 n beta. For small blocks.
    """

    def moving(holder: int, hop: int) -> list[int]:
        """Blocks that are at `holder` before the hop and have it before them."""
        blocks = []
        for distance in range(size):
            if distance & hop:
                source = (holder - distance % hop) % size
                blocks.append(source * size + (source + distance) % size)
        return blocks

    hop = 1
    while hop < size:
        ahead, behind = (rank + hop) % size, (rank - hop) % size
        yield [Send(ahead, scattered(moving(rank, hop))), Recv(behind, scattered(moving(behind, hop)))]
        hop *= 2
