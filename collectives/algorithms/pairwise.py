"""Alltoall algorithms: pairwise exchange, and Bruck's forwarding of blocks by powers of two.

(Bruck et al. 1997, section 3. Thakur, Rabenseifner, Gropp 2005, section 4.2.)
"""

from collectives.schedule.steps import Recv, Rounds, Send, one, scattered


def alltoall(rank: int, size: int) -> Rounds:
    """In round k each rank sends to the rank at distance k and receives from the one at distance -k.

    Cost: (p-1) alpha + (p-1)/p n beta, n what one rank holds.
    """
    for distance in range(1, size):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        yield [Send(ahead, one(rank * size + ahead)), Recv(behind, one(behind * size + rank))]


def bruck_alltoall(rank: int, size: int) -> Rounds:
    """In round k every block whose distance from source to destination has bit k set moves on by 2^k ranks.

    Cost: q alpha + about q/2 n beta, q = ceil(log2 p). For small blocks.
    """

    def moving(holder: int, hop: int) -> list[int]:
        """Blocks (source * size + destination) that rank `holder` sends in the round of distance `hop`."""
        sources = ((distance, (holder - distance % hop) % size) for distance in range(size) if distance & hop)
        return [source * size + (source + distance) % size for distance, source in sources]

    hop = 1
    while hop < size:
        ahead, behind = (rank + hop) % size, (rank - hop) % size
        yield [Send(ahead, scattered(moving(rank, hop))), Recv(behind, scattered(moving(behind, hop)))]
        hop *= 2
