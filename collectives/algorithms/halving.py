"""Recursive halving and doubling: partners exchange halves, then halves of halves, until each rank owns one block.

The ranks beyond the largest power of two P send their vector to a neighbour first and receive the result at the end.
The vector is cut in P blocks; reduce-scatter on 4 ranks, blocks that each still sums::

    start       0123    0123    0123    0123
    distance 2  01      01      23      23
    distance 1  0       1       2       3

(Thakur, Rabenseifner, Gropp 2005, sections 4.3 and 4.5; Rabenseifner 2004.)
"""

from __future__ import annotations

from typing import NamedTuple

from collectives.schedule.steps import Chunks, Recv, RecvReduce, Round, Rounds, Send, one, span
from collectives.schedule.transforms import reverse


class _PowerOfTwoSubset(NamedTuple):
    """The power-of-two subset of ranks that takes part, and the number of ranks left over.

    In the first pairs of ranks one represents both: the even one, unless `player` is the other.
    """

    power: int
    spare: int
    player: int = 0

    @classmethod
    def of(cls, size: int, player: int = 0) -> _PowerOfTwoSubset:
        power = 1 << (size.bit_length() - 1)
        return cls(power, size - power, player)

    def place(self, rank: int) -> int:
        """Index of the rank in the subset; -1 if it is left over."""
        if rank >= 2 * self.spare:
            return rank - self.spare
        return rank // 2 if self.rank(rank // 2) == rank else -1

    def rank(self, place: int) -> int:
        """Rank at an index of the subset."""
        if place >= self.spare:
            return place + self.spare
        return self.player if self.player // 2 == place else 2 * place

    def blocks(self, places: tuple[int, int]) -> Chunks:
        """Blocks of a range of indices and of the left-over ranks beside them, one block per rank."""
        start, stop = places
        return span(start + min(start, self.spare), stop + min(stop, self.spare))

    def fold(self, rank: int, everything: Chunks) -> Round:
        """Left-over ranks send their vector to their neighbour."""
        if rank >= 2 * self.spare:
            return []
        other = rank ^ 1
        if self.place(rank) < 0:
            return [Send(other, everything)]
        return [RecvReduce(other, everything, "right" if other > rank else "left")]

    def unfold(self, rank: int, everything: Chunks) -> Round:
        """Left-over ranks receive the result from their neighbour."""
        if rank >= 2 * self.spare:
            return []
        return [Recv(rank ^ 1, everything)] if self.place(rank) < 0 else [Send(rank ^ 1, everything)]


def allreduce(rank: int, size: int) -> Rounds:
    """Partners exchange and sum halves at distance P/2, P/4 ... 1, then gather them at distance 1, 2 ... P/2.

    2 log2 p rounds when p is a power of two, 2 more otherwise: 2q alpha + 2(p-1)/p n beta + (p-1)/p n gamma, and
    n (2 beta + gamma) more. Commutative operations only. (Rabenseifner's algorithm.)
    """
    folded = _PowerOfTwoSubset.of(size)
    everything = span(0, folded.power)
    if folded.spare:
        yield folded.fold(rank, everything)
    yield from _halving(rank, folded)
    for other, kept, given in reversed(_halves(folded.place(rank), folded.power)):
        peer = folded.rank(other)
        back: Round = [Send(peer, span(*kept)), Recv(peer, span(*given))]
        yield back if folded.place(rank) >= 0 else []
    if folded.spare:
        yield folded.unfold(rank, everything)


def reduce(rank: int, size: int, root: int) -> Rounds:
    """Partners exchange and sum halves at distance P/2, P/4 ... 1; then the root gathers the blocks over the same tree.

    2 log2 p rounds when p is a power of two, 1 more otherwise: 2q alpha + (p-1)/p n (2 beta + gamma), and n (beta +
    gamma) more. Commutative operations only. (Rabenseifner's algorithm.)
    """
    folded = _PowerOfTwoSubset.of(size, root if root < 2 * (size - (1 << (size.bit_length() - 1))) else 0)
    if folded.spare:
        yield folded.fold(rank, span(0, folded.power))
    yield from _halving(rank, folded)
    place, goal = folded.place(rank), folded.place(root)
    for other, kept, given in reversed(_halves(place, folded.power)):
        distance, peer = abs(other - place), folded.rank(other)
        if place < 0 or (place ^ goal) % distance:  # its blocks have left already
            yield []
        else:
            yield [Send(peer, span(*kept))] if (place ^ goal) & distance else [Recv(peer, span(*given))]


def allgather(rank: int, size: int) -> Rounds:
    """Partners exchange all blocks that they hold, at distance 1, 2, 4 ...

    log2 p rounds when p is a power of two: q alpha + (p-1)/p n beta, both bounds at once. Otherwise floor(log2 p) + 2:
    neighbours merge first, and ranks left over receive all blocks at the end, up to 2 n beta more.
    """
    folded = _PowerOfTwoSubset.of(size)
    if folded.spare:
        pair = rank < 2 * folded.spare
        yield [Send(rank - 1, one(rank)) if rank % 2 else Recv(rank + 1, one(rank + 1))] if pair else []
    for other, kept, given in reversed(_halves(folded.place(rank), folded.power)):
        peer = folded.rank(other)
        swap: Round = [Send(peer, folded.blocks(kept)), Recv(peer, folded.blocks(given))]
        yield swap if folded.place(rank) >= 0 else []
    if folded.spare:
        yield folded.unfold(rank, span(0, rank | 1) + span((rank | 1) + 1, size))


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Reverse of the allgather: partners exchange and sum halves at distance P/2, P/4 ... 1.

    log2 p rounds when p is a power of two: q alpha + (p-1)/p n (beta + gamma), all bounds at once. Otherwise
    floor(log2 p) + 2, and up to 2 n (beta + gamma) more. Commutative operations only.
    """
    return reverse(allgather(rank, size), rank, reducing=True)


def _halving(rank: int, folded: _PowerOfTwoSubset) -> Rounds:
    """Reduce-scatter of P blocks within the subset."""
    place = folded.place(rank)
    for other, kept, given in _halves(place, folded.power):
        peer = folded.rank(other)
        steps: Round = [Send(peer, span(*given)), RecvReduce(peer, span(*kept), "right" if peer > rank else "left")]
        yield steps if place >= 0 else []


def _halves(place: int, power: int) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """For every distance: the partner, the blocks kept, and the blocks sent to the partner."""
    place = max(place, 0)
    start, stop = 0, power
    halves = []
    while stop - start > 1:
        middle = (start + stop) // 2
        low, high = (start, middle), (middle, stop)
        kept, given = (low, high) if place < middle else (high, low)
        halves.append((place ^ (middle - start), kept, given))
        start, stop = kept
    return halves
