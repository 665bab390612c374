"""Dense packing of codes of 1 to 8 bits: n codes of b bits take ceil(b n / 8) bytes.

A width is a sum of 4, 2 and 1. Every block of 32 codes is stored plane by plane, the widest first. The 8/w fields of a
byte come from elements 32 w/8 apart: byte j of a block of nibbles holds code j in its lower and code j + 16 in its
upper half (ggml's Q4_0 does the same). The codes after the last full block are a stream of bits, least significant
first.
"""

BLOCK = 32
"""Codes per block."""

POWERS = {bits: tuple(power for power in (4, 2, 1) if bits & power) for bits in range(1, 8)}
"""Planes of every width below 8: 7 bits are 4, 2 and 1."""


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes of `count` packed codes."""
    return -(-count * bits // 8)
