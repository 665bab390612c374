"""Recursive halving and doubling: partners swap halves, then halves of halves, until everyone owns one block.

The ranks beyond the largest power of two P fold into a neighbour first, and hear the result from it at the end. The
vector is cut in P blocks; reduce-scatter on 4 ranks, what each still has to sum::

    start       0123    0123    0123    0123
    distance 2  01      01      23      23
    distance 1  0       1       2       3

(Thakur, Rabenseifner, Gropp 2005, sections 4.3 and 4.5; Rabenseifner 2004.)
"""

from __future__ import annotations

from typing import NamedTuple

from collectives.steps import Recv, RecvReduce, Round, Rounds, Send, span


class _Folded(NamedTuple):
    """The power of two that plays, and how many ranks it leaves over."""

    power: int
    spare: int

    @classmethod
    def of(cls, size: int) -> _Folded:
        power = 1 << (size.bit_length() - 1)
        return cls(power, size - power)

    def place(self, rank: int) -> int:
        """The rank's place among those that play; -1 if it sits out."""
        if rank >= 2 * self.spare:
            return rank - self.spare
        return -1 if rank % 2 else rank // 2

    def rank(self, place: int) -> int:
        """The rank at a place."""
        return 2 * place if place < self.spare else place + self.spare


def allreduce(rank: int, size: int) -> Rounds:
    """Partners swap and sum halves at distance P/2, P/4 ... 1, then collect them again at distance 1, 2 ... P/2.

    2 log2 p rounds when p is a power of two, 2 more otherwise: 2q alpha + 2(p-1)/p n beta + (p-1)/p n gamma, and
    n (2 beta + gamma) more. Commutative operations only. (Rabenseifner's algorithm.)
    """
    folded = _Folded.of(size)
    power, place = folded.power, folded.place(rank)
    everything = span(0, power)
    if folded.spare:
        yield _fold(rank, folded.spare, everything)
    halves = _halves(place, power)
    for other, kept, given in halves:
        peer = folded.rank(other)
        steps: Round = [Send(peer, span(*given)), RecvReduce(peer, span(*kept), "right" if peer > rank else "left")]
        yield steps if place >= 0 else []
    for other, kept, given in reversed(halves):
        peer = folded.rank(other)
        back: Round = [Send(peer, span(*kept)), Recv(peer, span(*given))]
        yield back if place >= 0 else []
    if folded.spare:
        yield _unfold(rank, folded.spare, everything)


def _halves(place: int, power: int) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """At every distance: the partner, the blocks that the place keeps, and those that it gives to the partner."""
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


def _fold(rank: int, spare: int, everything: tuple[range, ...]) -> Round:
    if rank >= 2 * spare:
        return []
    return [Send(rank - 1, everything)] if rank % 2 else [RecvReduce(rank + 1, everything, "right")]


def _unfold(rank: int, spare: int, everything: tuple[range, ...]) -> Round:
    if rank >= 2 * spare:
        return []
    return [Recv(rank - 1, everything)] if rank % 2 else [Send(rank + 1, everything)]
