"""Recursive doubling: partners at distance 1, 2, 4 ... exchange all data that they hold.

If p exceeds the largest power of two P, the odd ranks of the first p - P pairs send their vector to the even ones first
and receive the result at the end. Exchanging groups are adjacent in rank order, so the algorithm suits non-commutative
operations.

Allreduce on 5 ranks, a letter per rank::

    fold        1 -> 0
    distance 1  (ab,c)  (d,e)       0 = a b,  2 = c,  3 = d,  4 = e  act as 0 1 2 3
    distance 2  (abc,de) (abc,de)
    unfold      0 -> 1

(Thakur, Rabenseifner, Gropp 2005, section 4.4.)
"""

from collectives.schedule.steps import Recv, RecvReduce, Round, Rounds, Send, span


def allreduce(rank: int, size: int) -> Rounds:
    """Partners exchange their sums and both add, at distance 1, 2, 4 ...

    Cost: alpha + n (beta + gamma) in each of log2 p rounds when p is a power of two, else floor(log2 p) + 2, the last
    without gamma. Keeps rank order. All ranks get the same bits.
    """
    power = 1 << (size.bit_length() - 1)
    folded = size - power
    everything = span(0, size)
    paired = rank < 2 * folded
    idle = paired and rank % 2
    if folded:
        # a left-over rank's terms are added on the right, so rank order is kept
        yield [Send(rank - 1, everything) if idle else RecvReduce(rank + 1, everything, "right")] if paired else []
    place = rank // 2 if paired else rank - folded
    distance = 1
    while distance < power:
        other = place ^ distance
        peer = 2 * other if other < folded else other + folded
        swap: Round = [Send(peer, everything), RecvReduce(peer, everything, "right" if peer > rank else "left")]
        yield [] if idle else swap
        distance *= 2
    if folded:
        yield [Recv(rank - 1, everything) if idle else Send(rank + 1, everything)] if paired else []
