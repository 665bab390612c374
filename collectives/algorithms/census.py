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

from collectives.steps import Copy, Recv, RecvReduce, Reduce, Round, Rounds, Send, span


def allreduce(rank: int, size: int) -> Rounds:
    """The sum over the ranks behind doubles in length every round, whatever the number of ranks.

    ceil(log2 p) rounds, one vector each: q (alpha + n beta), about 2q n gamma. Commutative operations only; the
    terms meet in another order on every rank, so floating-point results may differ in their last bits.
    """
    mine, behind, both = (span(copy * size, (copy + 1) * size) for copy in range(3))
    bits = bin(size - 1)[3:]  # of p-1, without the first
    add_mine: Round = [Copy(behind, both), Reduce(mine, both)]
    counted = 1
    for place, bit in enumerate(["", *bits] if size > 1 else []):
        last = place == len(bits)
        following = "" if last else bits[place]
        steps: Round
        if place == 0:
            steps = [Send((rank + 1) % size, mine), Recv((rank - 1) % size, behind)]
        else:
            distance = counted + int(bit)
            ahead, before = (rank + distance) % size, (rank - distance) % size
            steps = [Send(ahead, both if bit == "1" else behind), RecvReduce(before, behind)]
            counted += distance
        if following == "1":
            steps += add_mine
        if last:
            steps.append(Reduce(behind, mine))
        yield steps
