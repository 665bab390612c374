"""Division of a sequence's positions over the ranks of a mesh axis. Pure functions of length and number of ranks.

With a causal mask later queries see more keys, so contiguous pieces give the last rank most of the work. `zigzag`
gives each rank an early and a late chunk, of 2c chunks for c ranks (Llama 3, arXiv:2407.21783, section 3.3.2).
`striped` deals out single positions (Brandon et al., "Striped Attention", arXiv:2311.09431).

>>> division = SequenceDivision("zigzag", 8, 2)
>>> [division.blocks(rank) for rank in (0, 1)]
[(range(0, 2), range(6, 8)), (range(2, 4), range(4, 6))]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import numpy as np

from collectives.schedule.chunks import even
from parallel.nn.attention_mask import AttentionMask

Blocks = tuple[range, ...]
"""Ascending ranges of positions, in the order in which a rank's arrays hold them."""


def _cuts(length: int, pieces: int) -> list[range]:
    """Neighbouring ranges of nearly equal length. The longer ones come first."""
    return [range(start, stop) for start, stop in pairwise(accumulate(even(length, pieces), initial=0))]


def _contiguous(length: int, parts: int, part: int) -> Blocks:
    return (_cuts(length, parts)[part],)


def _zigzag(length: int, parts: int, part: int) -> Blocks:
    chunks = _cuts(length, 2 * parts)
    return chunks[part], chunks[2 * parts - 1 - part]


def _striped(length: int, parts: int, part: int) -> Blocks:
    return (range(part, length, parts),)


DIVISIONS: dict[str, Callable[[int, int, int], Blocks]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}
"""Blocks of one part, by name of the division, from (length, number of parts, part)."""


@dataclass(frozen=True)
class SequenceDivision:
    """Positions 0 to `length` - 1 of a sequence, divided over `ranks` ranks.

    Parameters
    ----------
    name : str
        Key of `DIVISIONS`. Any length is divided. Pieces differ by one position at most, and may be empty.
    length, ranks : int
    parts : int
        Multiple of `ranks` (0: `ranks`): number of parts of the sequence. Each rank holds neighbouring parts. Results
        computed part by part have the same bits on any number of ranks that divides `parts`.
    """

    name: str
    length: int
    ranks: int
    parts: int = 0

    def __post_init__(self) -> None:
        if self.name not in DIVISIONS:
            raise ValueError(f"division: expected one of {', '.join(DIVISIONS)}; found {self.name!r}")
        if self.ranks < 1 or self.length < 0:
            raise ValueError(f"division: expected a rank or more and no negative length, found {self}")
        if self.parts % self.ranks:
            raise ValueError(f"division: expected parts that {self.ranks} ranks divide, found {self.parts}")

    @property
    def parts_per_rank(self) -> int:
        return max(self.parts // self.ranks, 1)

    def parts_of(self, rank: int) -> range:
        """Numbers of the parts that a rank holds."""
        return range(rank * self.parts_per_rank, (rank + 1) * self.parts_per_rank)

    def part_blocks(self, part: int) -> Blocks:
        """Blocks of a part."""
        return DIVISIONS[self.name](self.length, self.ranks * self.parts_per_rank, part)

    def part_size(self, part: int) -> int:
        """Number of positions of a part."""
        return sum(map(len, self.part_blocks(part)))

    def blocks(self, rank: int) -> Blocks:
        """Blocks of all parts of a rank, in the order of the parts."""
        return tuple(block for part in self.parts_of(rank) for block in self.part_blocks(part))

    def part_slices(self, rank: int) -> list[slice]:
        """Slices of the rank's parts in its arrays, along the axis of positions."""
        sizes = map(self.part_size, self.parts_of(rank))
        return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]

    def positions(self, rank: int) -> np.ndarray:
        """Positions of the rank's tokens in the sequence, int64, in the order of its arrays. Read-only."""
        return _positions(self, rank)

    def size(self, rank: int) -> int:
        """Number of positions of a rank."""
        return sum(map(len, self.blocks(rank)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of positions of every rank."""
        return tuple(map(self.size, range(self.ranks)))

    def pairs(self, rank: int, step: int, mask: AttentionMask) -> int:
        """Pairs of query and key that a rank computes in a step of ring attention: its queries see another's keys.

        In step i the keys come from rank - i (modulo the number of ranks). With zigzag, a causal mask and chunks of
        n positions this is 2 n^2 for every rank and step. The diagonals of step 0 add n.

        >>> [SequenceDivision("zigzag", 24, 3).pairs(1, step, AttentionMask()) for step in range(3)]
        [36, 32, 32]
        """
        return mask.pairs(self.blocks(rank), self.blocks((rank - step) % self.ranks))


@cache
def _positions(division: SequenceDivision, rank: int) -> np.ndarray:
    blocks = [np.arange(block.start, block.stop, block.step) for block in division.blocks(rank)]
    positions = np.concatenate([np.zeros(0, np.int64), *blocks])
    positions.flags.writeable = False
    return positions
