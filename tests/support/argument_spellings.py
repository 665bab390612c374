"""An operation that does not commute, and tells by its result who was combined in which order: joining words.

A word is a 64-bit integer, ``digits * 16 + length``: up to 15 hexadecimal digits and how many there are. Joining is
associative, so an algorithm may put its brackets anywhere, but every term must keep its place.
"""

import numpy as np

DTYPE = np.dtype(np.int64)


def letters(rank, count, turn=0):
    """`count` words of one digit, different for neighbouring ranks and for neighbouring elements."""
    return ((rank * 7 + np.arange(count, dtype=DTYPE) * 3 + turn) % 15 << 4) + 1


def join(left, right):
    """Left word, then right word, element by element."""
    length = right & 15
    return (((left >> 4) << 4 * length) + (right >> 4) << 4) + (left & 15) + length


def spelled(ranks, count, turn=0):
    """What joining the letters of these ranks in this order must give."""
    whole = np.zeros(count, DTYPE)
    for rank in ranks:
        whole = join(whole, letters(rank, count, turn))
    return whole


def join_buffers(left, inout, datatype):
    """For ``MPI.Op.Create``: inout = left joined with inout."""
    mine = np.frombuffer(inout, DTYPE)
    mine[:] = join(np.frombuffer(left, DTYPE), mine)
