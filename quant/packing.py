"""Codes of 1 to 8 bits, dense, with planes that fit vectors: b bits times n elements take ceil(b n / 8) bytes.

A width is a sum of 4, 2 and 1 (and 8 is whole bytes), and every block of 32 codes is stored power by power, the largest
first. The 8/w fields of a byte come from elements that are 32 w/8 apart, so that byte j of a block of nibbles holds code j
in its lower and code j + 16 in its upper half, as in ggml's Q4_0. What is left after the last full block, fewer than 32
codes, is a stream of bits, least significant first.
"""

from __future__ import annotations

BLOCK = 32
"""Codes of a block."""

POWERS = {bits: tuple(power for power in (4, 2, 1) if bits & power) for bits in range(1, 8)}
"""The planes of every width below 8: 7 bits are 4, 2 and 1."""


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of so many codes.

    >>> packed_nbytes(10, 3)
    4
    """
    return -(-count * bits // 8)
