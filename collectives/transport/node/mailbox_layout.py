"""Places of mailboxes in the memory of a node: sizes of their parts, and offsets in the range of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.instructions import INLINE, LINE, SHORT_SPACING, SLOTS, SPREAD

SHORT, SHORT_PARTS = 1 << 10, 64
"""Bytes of the longest short message, in the buffer of its slot, and the parts of a bounce buffer that it may use.

Longer messages take less time in a bounce buffer: compiled code copies into it with non-temporal stores.
"""

CELL = 1 << 17
"""Most bytes of a bounce buffer (cell), the eager buffer of a medium message."""

CHANNELS = 32
"""Independent sets of mailboxes: the first for blocking calls, the next `NONBLOCKING` for non-blocking ones, the others
for persistent requests."""

NONBLOCKING = 4
"""Channels of non-blocking calls. The calls take them in turn."""

BUDGET, OTHER_BUDGET = 1 << 24, 1 << 26
"""Most bytes of bounce buffers per rank: for blocking calls, and for all other channels together.

Memory of one is allocated at its first use.
"""

LEAST = 256
"""Least bytes of a bounce buffer. Halved if addresses are short."""


class SlotMemory(NamedTuple):
    """Memory for the data of eager messages in one direction: a rank's mailboxes, and byte offsets in them.

    `inline` is the offset of the data beside the first flag, `short` of the first buffer of `short_bytes`, `cell` of
    the first bounce buffer of `cell_bytes`. Messages of a length use places 0, 1, 2 ... up to `period` in turn.
    """

    memory: np.ndarray
    inline: int
    short: int
    short_bytes: int
    cell: int
    cell_bytes: int

    def period(self, nbytes: int) -> int:
        """Number of places of messages of this length: number of messages after which a place is reused."""
        fit = nbytes and self.cell_bytes // (-(-nbytes // LINE) * LINE)
        return SLOTS * fit if nbytes >= SPREAD and fit else SLOTS

    def start(self, place: int, nbytes: int) -> int:
        """Byte offset of a message's place."""
        turn, slot = divmod(place, SLOTS)
        if nbytes <= INLINE:
            return self.inline + slot * LINE
        if nbytes <= self.short_bytes:
            return self.short + slot * SHORT_SPACING * self.short_bytes
        return self.cell + slot * self.cell_bytes + turn * (-(-nbytes // LINE) * LINE)

    def addresses(self, nbytes: int) -> list[int]:
        """Addresses of all places of messages of this length."""
        first = MPI.Get_address(self.memory)
        return [first + self.start(place, nbytes) for place in range(self.period(nbytes))]


class ChannelMemory(NamedTuple):
    """Mailboxes of one channel in the ranges of a node's ranks, at the same offsets in all of them."""

    memory: list[np.ndarray]  #: the ranges, by rank on the node
    words: list[memoryview]  #: the same as 8-byte words
    flags: int  #: offset in bytes of the flags to the first rank
    cells: int  #: offset in bytes of the bounce buffers for the first rank


class Layout:
    """Bytes of a communicator's mailboxes with `size` ranks on a node: bounce buffers are halved as often as given.

    Lists are indexed by channel.
    """

    def __init__(self, size: int, halvings: int = 0) -> None:
        self.size, self.box = size, LINE * (SLOTS + 2)  # flags, acknowledgements, an offer
        each, other = BUDGET // (SLOTS * size), OTHER_BUDGET // (CHANNELS * SLOTS * size)
        cells = min(CELL, max(LEAST, each // LINE * LINE)), max(LEAST, other // LINE * LINE)
        if size == 1:  # no messages
            cells = LEAST, LEAST
        first, others = (max(LINE, (cell >> halvings) // LINE * LINE) for cell in cells)
        self.cells = [first, *[others] * (CHANNELS - 1)]
        first, others = (min(SHORT, cell // SHORT_PARTS // LINE * LINE) for cell in (first, others))
        self.short = [first, *[others] * (CHANNELS - 1)]

    def starts(self, channels: Sequence[int], head: int) -> tuple[list[tuple[int, int]], int]:
        """Offsets of the flags and of the bounce buffers of channels behind `head` bytes, and the bytes of all."""
        flags = self.size * self.box
        end, found = head + len(channels) * flags, []
        for number, channel in enumerate(channels):
            found.append((head + number * flags, end))
            end += self.size * SLOTS * (self.cells[channel] + SHORT_SPACING * self.short[channel])
        return found, end


FIRST_CHANNELS = range(1 + NONBLOCKING)
"""Channels whose memory exists from a communicator's creation.

Memory of persistent requests follows with the requests.
"""


def head_bytes(size: int) -> int:
    """Bytes at the start of a range for the marks of the ranks that have departed from it."""
    return -(-8 * size // LINE) * LINE


def mailbox_bytes(size: int, halvings: int) -> int:
    return Layout(size, halvings).starts(FIRST_CHANNELS, head_bytes(size))[1]
