"""Census: everyone counts the neighbours behind, then twice as many, until it has counted all but itself.

B is the sum of the i ranks behind, without oneself. The rank i behind has in its own B the i ranks before those, and
the rank i+1 behind has them in its B and its own term: so one message doubles i, or doubles it and adds one. The bits
of p-1 say which.

Ranks whose terms rank 0 of 6 has, p-1 = 5 = 101 in binary::

    start           0
    distance 1      0   5            i = 1
    distance 1      0   5 4          i = 2, bit 0: from rank 5 its B, which is rank 4
    distance 3      0   5 4 3 2 1    i = 5, bit 1: from rank 3 its B and itself

(Bar-Noy, Kipnis, Schieber 1993, "An optimal algorithm for computing census functions in message-passing systems".)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Round, Rounds, Send, span


class _Message(NamedTuple):
    """A round: how many ranks are counted before it, and whether the sender adds its own term to its B."""

    counted: int
    own: bool

    @property
    def distance(self) -> int:
        """How far it goes."""
        return self.counted + self.own


def _messages(size: int) -> Iterator[_Message]:
    counted = 0
    for bit in bin(size - 1)[2:] if size > 1 else "":
        yield _Message(counted, bit == "1")
        counted += counted + int(bit)


def allreduce(rank: int, size: int) -> Rounds:
    """The sum over the ranks behind doubles in length every round, whatever the number of ranks.

    ceil(log2 p) rounds, one vector each: q (alpha + n beta), about 2q n gamma. Commutative operations only; the
    terms meet in another order on every rank, so floating-point results may differ in their last bits.
    """
    mine, behind, both = (span(copy * size, (copy + 1) * size) for copy in range(3))
    messages = list(_messages(size))
    for message, following in zip(messages, [*messages[1:], None]):
        ahead, before = (rank + message.distance) % size, (rank - message.distance) % size
        steps: Round = [Send(ahead, mine if not message.counted else both if message.own else behind)]
        steps.append(RecvReduce(before, behind) if message.counted else Recv(before, behind))
        if following is None:
            steps.append(Reduce(behind, mine))
        elif following.own:
            steps += [Copy(behind, both), Reduce(mine, both)]
        yield steps


def ordered_allreduce(rank: int, size: int) -> Rounds:
    """The census with two sums: of the ranks behind down to rank 0, and of those before rank 0, at the other end.

    ceil(log2 p) rounds of one or two vectors: q alpha + less than 2q n beta, at most 3q n gamma. Keeps rank order; the
    brackets are others on every rank, so floating-point results may differ in their last bits.
    """
    mine, low, high, both, arrived = (span(copy * size, (copy + 1) * size) for copy in range(5))
    messages = list(_messages(size))
    for message, following in zip(messages, [*messages[1:], None]):
        counted, own = message
        ahead, before = (rank + message.distance) % size, (rank - message.distance) % size
        own_sum = both if rank and counted else mine
        steps: Round = [Send(ahead, (high if counted > rank else ()) + (own_sum if own else low if rank else ()))]
        if rank < message.distance:  # it comes from around the end, where nothing of it is low
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
