"""Recursive halving and doubling: partners exchange halves, then halves of halves, until each rank owns one block.

If p exceeds the largest power of two P, one rank of each of the first p - P pairs of neighbours is left over: it sends
its data to the other first and receives its result at the end, if it needs one. The vector is cut in P blocks.
Reduce-scatter on 4 ranks, blocks that each still sums::

    start       0123    0123    0123    0123
    distance 2  01      01      23      23
    distance 1  0       1       2       3

Costs are for p = P, with q = log2 p. For other p see each algorithm.

(Thakur, Rabenseifner, Gropp 2005, sections 4.3 and 4.5. Rabenseifner 2004.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.schedule.steps import Chunks, Recv, RecvReduce, Round, Rounds, Send, one, span
from collectives.schedule.transforms import reverse


class _Halving(NamedTuple):
    """One halving step of a rank: the partner's index in the subset, and ranges of blocks that it keeps and sends."""

    partner: int
    kept: tuple[int, int]
    given: tuple[int, int]


class _PowerOfTwoSubset(NamedTuple):
    """The largest power-of-two subset of the ranks, and the number of ranks left over. The subset runs the halving.

    In the first pairs of ranks one represents both: the even one, unless `player` is the other.
    """

    power: int
    spare: int
    player: int = 0

    @classmethod
    def of(cls, size: int, player: int = 0) -> _PowerOfTwoSubset:
        power = 1 << (size.bit_length() - 1)
        return cls(power, size - power, player if player < 2 * (size - power) else 0)

    def place(self, rank: int) -> int:
        """Index of the rank in the subset. -1 if it is left over."""
        if rank >= 2 * self.spare:
            return rank - self.spare
        return rank // 2 if self.rank(rank // 2) == rank else -1

    def rank(self, place: int) -> int:
        """Rank at an index of the subset."""
        if place >= self.spare:
            return place + self.spare
        return self.player if self.player // 2 == place else 2 * place

    def blocks(self, places: tuple[int, int]) -> Chunks:
        """Blocks, one per rank, of the subset's indices `places` (start, stop) and the left-over ranks among them."""
        start, stop = places
        return span(start + min(start, self.spare), stop + min(stop, self.spare))

    def fold(self, rank: int, everything: Chunks) -> Rounds:
        """Round in which left-over ranks send their vector to a neighbour to be added. None if none is left over."""
        if self.spare:
            other = rank ^ 1
            combine = RecvReduce(other, everything, "right" if other > rank else "left")
            mine = Send(other, everything) if self.place(rank) < 0 else combine
            yield [mine] if rank < 2 * self.spare else []

    def unfold(self, rank: int, everything: Chunks) -> Rounds:
        """Round in which left-over ranks receive the result from their neighbour. None if none is left over."""
        if self.spare:
            mine = (Recv if self.place(rank) < 0 else Send)(rank ^ 1, everything)
            yield [mine] if rank < 2 * self.spare else []

    def halvings(self, rank: int) -> list[_Halving]:
        """Halving steps of a rank, from all P blocks down to one, with partners at distance P/2, P/4 ... 1."""
        place = max(self.place(rank), 0)
        start, stop = 0, self.power
        found = []
        while stop - start > 1:
            middle = (start + stop) // 2
            low, high = (start, middle), (middle, stop)
            kept, given = (low, high) if place < middle else (high, low)
            found.append(_Halving(place ^ (middle - start), kept, given))
            start, stop = kept
        return found

    def halve(self, rank: int) -> Rounds:
        """Reduce-scatter of the P blocks over the ranks of the subset. Left-over ranks have empty rounds."""
        for partner, kept, given in self.halvings(rank):
            peer = self.rank(partner)
            steps: Round = [Send(peer, span(*given)), RecvReduce(peer, span(*kept), "right" if peer > rank else "left")]
            yield steps if self.place(rank) >= 0 else []

    def double(self, rank: int, blocks: Callable[[tuple[int, int]], Chunks]) -> Rounds:
        """Allgather over the ranks of the subset. `blocks` maps a range (start, stop) of indices to chunks."""
        for partner, kept, given in reversed(self.halvings(rank)):
            peer = self.rank(partner)
            steps: Round = [Send(peer, blocks(kept)), Recv(peer, blocks(given))]
            yield steps if self.place(rank) >= 0 else []


def allreduce(rank: int, size: int) -> Rounds:
    """Partners exchange and sum halves at distance P/2, P/4 ... 1, then gather them at distance 1, 2 ... P/2.

    Cost: 2q alpha + 2(p-1)/p n beta + (p-1)/p n gamma. For p > P, 2 rounds and n (2 beta + gamma) more. Commutative
    operations only. (Rabenseifner's algorithm.)
    """
    subset = _PowerOfTwoSubset.of(size)
    everything = span(0, subset.power)
    yield from subset.fold(rank, everything)
    yield from subset.halve(rank)
    yield from subset.double(rank, lambda places: span(*places))
    yield from subset.unfold(rank, everything)


def reduce(rank: int, size: int, root: int) -> Rounds:
    """Partners exchange and sum halves at distance P/2, P/4 ... 1. Then the root gathers the blocks over the same tree.

    Cost: 2q alpha + (p-1)/p n (2 beta + gamma). For p > P, 1 round and n (beta + gamma) more. Commutative operations
    only. (Rabenseifner's algorithm.)
    """
    subset = _PowerOfTwoSubset.of(size, player=root)
    yield from subset.fold(rank, span(0, subset.power))
    yield from subset.halve(rank)
    place, goal = subset.place(rank), subset.place(root)
    for partner, kept, given in reversed(subset.halvings(rank)):
        distance, peer = abs(partner - place), subset.rank(partner)
        if place < 0 or (place ^ goal) % distance:  # its blocks have left already
            yield []
        else:
            yield [Send(peer, span(*kept)) if (place ^ goal) & distance else Recv(peer, span(*given))]


def allgather(rank: int, size: int) -> Rounds:
    """Partners exchange all blocks that they hold, at distance 1, 2, 4 ...

    Cost: q alpha + (p-1)/p n beta, both bounds at once. For p > P floor(log2 p) + 2 rounds and up to 2 n beta more:
    neighbours merge first, and ranks left over receive all blocks at the end.
    """
    subset = _PowerOfTwoSubset.of(size)
    if subset.spare:
        pair = rank < 2 * subset.spare
        yield [Send(rank - 1, one(rank)) if rank % 2 else Recv(rank + 1, one(rank + 1))] if pair else []
    yield from subset.double(rank, subset.blocks)
    yield from subset.unfold(rank, span(0, rank | 1) + span((rank | 1) + 1, size))


def reduce_scatter(rank: int, size: int) -> Rounds:
    """Reverse of the allgather: partners exchange and sum halves at distance P/2, P/4 ... 1.

    Cost: q alpha + (p-1)/p n (beta + gamma), all bounds at once. For p > P floor(log2 p) + 2 rounds and up to
    2 n (beta + gamma) more. Commutative operations only.
    """
    return reverse(allgather(rank, size), rank, reducing=True)
