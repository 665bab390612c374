"""Bytes and time of attention over a divided sequence, by algorithm. The choice of the fastest.

Elements that a rank sends per layer, with c ranks, batch b, length s that 2c divides, a heads and g key/value heads of
width d, and g' the larger of g and c (with fewer key/value heads than ranks, ulysses sends copies):

    ==========  ===============================  ===========================================
    algorithm   forward                          backward
    ==========  ===============================  ===========================================
    ring        2 (c-1)/c b s g d                as forward, and as many float32 gradients
    allgather   2 (c-1)/c b s g d                as forward, and as many float32 gradients
    ulysses     2 (c-1)/c^2 b s (a + g') d       as forward
    ==========  ===============================  ===========================================

In seconds: ring hides the messages of a step behind its computation, so each step takes the longer of the two on the
rank with most pairs. The others exchange first and compute then. Ulysses computes as much on every rank.
"""

from typing import NamedTuple

import numpy as np

from collectives.analysis.cost_functions import UniformNetwork
from parallel.nn.attention_mask import CAUSAL, AttentionMask
from parallel.sharding.context.sequence_division import SequenceDivision
from parallel.sharding.context.ulysses_attention import refusal


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


BACKWARD_FLOPS = 2.5
"""Floating-point operations of a backward pass, in forward passes: five products, where forward has two."""


class AttentionWork(NamedTuple):
    """Attention of one layer over sequences of one division. `width` is the width of a head."""

    division: SequenceDivision
    batch: int
    heads: int
    kv_heads: int
    width: int
    mask: AttentionMask = CAUSAL
    itemsize: int = 4


def sent_bytes(algorithm: str, work: AttentionWork) -> tuple[int, int]:
    """Bytes that a rank sends (forward, backward). Exact for lengths that twice the ranks divide."""
    ranks, tokens = work.division.ranks, work.batch * work.division.length * work.width
    if algorithm == "ulysses":
        heads = work.heads + max(work.kv_heads, ranks)
        forward = 2 * (ranks - 1) * tokens * heads * work.itemsize // ranks**2
        return forward, forward
    elements = 2 * (ranks - 1) * tokens * work.kv_heads // ranks
    return elements * work.itemsize, elements * (work.itemsize + max(work.itemsize, 4))


def seconds(algorithm: str, work: AttentionWork, network: UniformNetwork, flops: float) -> float:
    """Time of a forward and a backward pass, of ranks that do `flops` operations per second each."""
    ranks, pairs = work.division.ranks, ring_work(work.division, work.mask).pairs
    pair = 4 * work.batch * work.heads * work.width * (1 + BACKWARD_FLOPS) / flops
    exchange = sum(sent_bytes(algorithm, work)) * network.beta
    if algorithm == "ulysses":
        return exchange + 7 * (ranks - 1) * network.alpha + pair * int(pairs.sum()) / ranks
    if algorithm == "allgather":
        return exchange + 3 * (ranks - 1) * network.alpha + pair * int(pairs.sum(axis=0).max())
    message = exchange / max(ranks - 1, 1) + 3 * network.alpha
    *steps, last = (pair * float(row.max()) for row in pairs)
    return sum(max(step, message) for step in steps) + last


def fastest(work: AttentionWork, network: UniformNetwork, flops: float) -> str:
    """Name of the algorithm that takes least time. Ulysses only where the ranks divide the heads.

    >>> from collectives.selection.cost_model import BUILT_IN
    >>> fastest(AttentionWork(SequenceDivision("zigzag", 32768, 4), 1, 32, 8, 64), BUILT_IN.network, 1e11)
    'ring'
    """
    names = ["ring", "allgather"]
    if not refusal(work.heads, work.kv_heads, work.division.ranks):
        names.append("ulysses")
    return min(names, key=lambda name: seconds(name, work, network, flops))
