"""Census allreduce in ceil(log2 p) rounds: each round about doubles the number of ranks in a rank's partial sum.

B, the partial sum, covers the i ranks before a rank, without its own term. The B of the rank at distance i covers the
i ranks before those. The B of the rank at distance i+1 plus its own term covers i+1. So one message changes i to 2i or
2i+1. The bits of p-1 decide which.

Terms held by rank 0 of 6, p-1 = 5 = 101 in binary::

    start           0
    distance 1      0   5            i = 1
    distance 1      0   5 4          i = 2, bit 0: B of rank 5 (the term of rank 4)
    distance 3      0   5 4 3 2 1    i = 5, bit 1: B and own term of rank 3

(Bar-Noy, Kipnis, Schieber 1993, "An optimal algorithm for computing census functions in message-passing systems".)
"""

from functools import lru_cache
from typing import NamedTuple

from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Round, Rounds, Send, span


class _CensusRound(NamedTuple):
    """One census round: number of ranks in the partial sum before it. True if the sender adds its own term."""

    counted: int
    own: bool

    @property
    def distance(self) -> int:
        """Rank distance d of the round: send to rank + d, receive from rank - d, modulo p."""
        return self.counted + self.own


@lru_cache(maxsize=64)
def _messages(size: int) -> tuple[_CensusRound, ...]:
    """Rounds of the census, the same for all ranks."""
    counted, found = 0, []
    for bit in bin(size - 1)[2:] if size > 1 else "":
        found.append(_CensusRound(counted, bit == "1"))
        counted += counted + int(bit)
    return tuple(found)


def allreduce(rank: int, size: int) -> Rounds:
    """Each round about doubles the number of ranks in a rank's partial sum, for any number of ranks.

    Cost: q (alpha + n beta) + about 2q n gamma, q = ceil(log2 p). Commutative operations only. The order of terms
    differs between ranks, so floating-point results may differ in their last bits.
    """
    mine, behind, both = (span(copy * size, (copy + 1) * size) for copy in range(3))
    messages = _messages(size)
    for message, following in zip(messages, (*messages[1:], None)):
        ahead, before = (rank + message.distance) % size, (rank - message.distance) % size
        # B is empty before the first round: the own term goes alone
        steps: Round = [Send(ahead, mine if not message.counted else both if message.own else behind)]
        steps.append(RecvReduce(before, behind) if message.counted else Recv(before, behind))
        if following is None:
            steps.append(Reduce(behind, mine))
        elif following.own:
            steps += [Copy(behind, both), Reduce(mine, both)]
        yield steps


def ordered_allreduce(rank: int, size: int) -> Rounds:
    """Census allreduce in rank order: partial sums of lower ranks and of wrapped-around higher ranks are kept apart.

    Cost: q alpha + less than 2q n beta, at most 3q n gamma. Keeps rank order. The association differs between ranks,
    so floating-point results may differ in their last bits.
    """
    mine, low, high, both, arrived = (span(copy * size, (copy + 1) * size) for copy in range(5))
    messages = _messages(size)
    for message, following in zip(messages, (*messages[1:], None)):
        counted, own = message
        distance = counted + own
        ahead, before = (rank + distance) % size, (rank - distance) % size
        own_sum = both if rank and counted else mine
        steps: Round = [Send(ahead, (high if counted > rank else ()) + (own_sum if own else low if rank else ()))]
        if rank < distance:  # it comes from around the end, where nothing of it is low
            steps.append(RecvReduce(before, high, "left") if counted > rank else Recv(before, high))
        elif not counted:
            steps.append(Recv(before, low))
        elif counted <= before:
            steps.append(RecvReduce(before, low, "left"))
        elif own or before:
            steps += [Recv(before, high + arrived), Reduce(arrived, low, "left")]
        else:
            steps.append(Recv(before, high))
        if following is None:
            steps += [Reduce(low, mine, "left")] if rank else []
            steps += [Reduce(high, mine, "right")] if rank < size - 1 else []
        elif following.own and rank:
            steps += [Copy(low, both), Reduce(mine, both, "right")]
        yield steps
