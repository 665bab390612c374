"""Work by step, and the choice of an algorithm by cost."""

import numpy as np
import pytest

from collectives.analysis.cost_functions import UniformNetwork
from parallel.nn.attention_mask import CAUSAL, FULL, AttentionMask
from parallel.sharding.context.cost_formulas import AttentionWork, fastest, ring_work, score_steps, seconds
from parallel.sharding.context.sequence_division import DIVISIONS, SequenceDivision

FREE = UniformNetwork(0.0, 0.0, 0.0)
SLOW = UniformNetwork(1e-5, 1e-6, 0.0)
LATENT = UniformNetwork(1.0, 0.0, 0.0)


@pytest.mark.parametrize("mask", [CAUSAL, FULL, AttentionMask(window=5)], ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
def test_every_visible_score_has_a_rank_and_a_step(name, mask):
    """The picture and the table count the same."""
    division = SequenceDivision(name, 24, 3)
    rank, step = score_steps(division, mask)
    assert ((rank < 0) == (step < 0)).all()
    pairs = ring_work(division, mask).pairs
    found = [[((rank == owner) & (step == number)).sum() for owner in range(3)] for number in range(3)]
    assert np.array_equal(found, pairs)


def test_efficiency():
    """Four ranks: contiguous computes 528 pairs in the time of 4 (36 + 3 * 64)."""
    shares = {name: ring_work(SequenceDivision(name, 32, 4), CAUSAL).efficiency for name in DIVISIONS}
    assert shares == {"contiguous": 528 / 912, "zigzag": 1.0, "striped": 528 / 576}
    assert ring_work(SequenceDivision("zigzag", 0, 2), CAUSAL).efficiency == 1.0


def work(name="zigzag", heads=8, kv_heads=8, ranks=4, length=1024):
    return AttentionWork(SequenceDivision(name, length, ranks), 2, heads, kv_heads, 16)


def test_without_network_costs_only_the_balance_counts():
    """Pairs of all ranks, times 14 operations per number of a head, divided by the ranks."""
    even = 14 * 2 * 8 * 16 * (1024 * 1025 // 2) / 4
    for algorithm in ("allgather", "ulysses", "ring"):
        assert seconds(algorithm, work(), FREE, 1.0) == pytest.approx(even)
    assert seconds("ulysses", work("contiguous"), FREE, 1.0) == pytest.approx(even)
    assert seconds("ring", work("contiguous"), FREE, 1.0) > 1.7 * even


def test_choice():
    assert fastest(work(), SLOW, 1e12) == "ulysses"  # fewest bytes
    assert fastest(work(heads=6, kv_heads=6), SLOW, 1e12) != "ulysses"  # 4 ranks do not divide 6 heads
    assert fastest(work(kv_heads=1, length=8192), SLOW, 1e8) == "ring"  # hidden behind the computation
    assert fastest(work(ranks=1), LATENT, 1.0) == "ring"  # nothing to exchange: the first
