"""Work of ring attention by rank and step: which rank computes which scores when, and how well it is balanced."""

from typing import NamedTuple

import numpy as np

from parallel.nn.attention_mask import AttentionMask
from parallel.sharding.context.sequence_division import SequenceDivision


class RingWork(NamedTuple):
    """Pairs of query and key that each rank computes in each step: `pairs` has shape (steps, ranks)."""

    pairs: np.ndarray

    @property
    def efficiency(self) -> float:
        """Share of time in which ranks compute, if a step takes as long as its rank with most pairs. 1 if no pairs."""
        time = self.pairs.max(axis=1).sum() * self.pairs.shape[1]
        return float(self.pairs.sum() / time) if time else 1.0


def ring_work(division: SequenceDivision, mask: AttentionMask) -> RingWork:
    """Pairs by step and rank.

    >>> ring_work(SequenceDivision("contiguous", 8, 2), AttentionMask()).pairs.tolist()
    [[10, 10], [0, 16]]
    """
    ranks = range(division.ranks)
    return RingWork(np.array([[division.pairs(rank, step, mask) for rank in ranks] for step in ranks], np.int64))


def score_steps(division: SequenceDivision, mask: AttentionMask) -> tuple[np.ndarray, np.ndarray]:
    """Rank and step in which each score is computed, int arrays (queries, keys). -1 where the mask hides the key."""
    owner = np.empty(division.length, np.int64)
    for rank in range(division.ranks):
        owner[division.positions(rank)] = rank
    limits = [mask.seen_from(position) for position in range(division.length)]
    keys = np.arange(division.length)
    seen = np.array([(keys >= low) & (keys < (division.length if end is None else end)) for low, end in limits])
    seen = seen.reshape(division.length, division.length)
    step = (owner[:, None] - owner[None]) % division.ranks
    return np.where(seen, owner[:, None], -1), np.where(seen, step, -1)
