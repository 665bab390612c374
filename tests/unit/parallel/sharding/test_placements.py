"""Placements of experts: who has which, bytes sent, and the program that draws them."""

import numpy as np
import pytest
from support import thread_ranks
from support.expert_cases import played
from support.mixture_cases import EXPERTS, HIDDEN, WIDTH, mixture
from support.program_runs import call

from parallel.cli import draw_placements
from parallel.nn.compose import Sequential
from parallel.nn.router import RouterSettings
from parallel.sharding.expert.placements import ExpertPlacement, MixtureSize, placements
from parallel.sharding.tensor.cut_model import cut
from parallel.sharding.tensor.mixture_shards import ExpertCut

SIZE = MixtureSize(experts=8, choices=2, tokens=10, width=4, hidden=8)


@pytest.mark.parametrize("ranks, tp", [(1, 1), (4, 2), (8, 2), (6, 3), (10, 1)])
def test_every_replica_group_has_all_experts(ranks, tp):
    for placement in placements(ranks, tp):
        group = [
            expert
            for rank in range(0, placement.ep * placement.tp, placement.tp)
            for expert in placement.experts_of(rank, SIZE.experts)
        ]
        assert group == list(range(SIZE.experts))
        parts = [placement.experts_of(rank, SIZE.experts) for rank in range(placement.tp)]
        assert parts == parts[:1] * placement.tp and placement.dp * placement.tp == ranks


def test_bytes():
    """Rows of all choices there and back in both passes; rings of two passes' sums; a ring of gradients."""
    rows, tokens, expert = 2 * 10 * 4 * 4, 10 * 4 * 4, (2 * 8 * 4 + 8 + 4) * 4
    weights = 2 * 10 * 4
    replicated, divided, both = placements(4, 2)
    assert replicated.sent(SIZE) == {"tokens": 0, "sums along tp": 0, "gradients": 2 * 8 * expert * 3 // 4}
    assert divided.sent(SIZE) == {"tokens": 4 * rows * 3 // 4, "sums along tp": 0, "gradients": 0}
    assert both.sent(SIZE) == {"tokens": 2 * rows, "sums along tp": 2 * tokens + weights, "gradients": 0}
    mixed = ExpertPlacement("mixed", 4, 1, 2).sent(SIZE)
    assert mixed == {"tokens": 2 * rows, "sums along tp": 0, "gradients": 4 * expert}


@pytest.mark.parametrize("choices", [2, 3])
@pytest.mark.parametrize("tp", [2, 3])
def test_bytes_of_sums_are_those_of_a_mixture(tp, choices):
    """A ring allreduce of n bytes sends 2 n (t-1)/t on each of t ranks; each expert is cut into t parts."""
    x, how = np.ones((2, 6, WIDTH), np.float32), ExpertCut(slices=tp, spread=True)

    def summed(axis):
        model = Sequential([mixture(RouterSettings(choices))], cuts={"0": "experts"})
        played(cut(model, None, axis, experts=how)[0], x, np.float32, 0)
        return sum(nbytes for kind, nbytes in axis.comm.calls if kind == "allreduce")

    size = MixtureSize(EXPERTS, choices, 12, WIDTH, HIDDEN)
    expected = ExpertPlacement("cut", 1, tp, 1).sent(size)["sums along tp"]
    assert [2 * nbytes * (tp - 1) // tp for nbytes in thread_ranks.run(tp, summed)] == [expected] * tp


def test_tp_divides_the_ranks():
    with pytest.raises(ValueError, match="tp: expected a divisor of 4 ranks, found 3"):
        placements(4, 3)
    found = call(draw_placements.main, "--ranks", 4, "--tp", 3)
    assert found.returncode == 2 and "divisor of 4 ranks" in found.stderr


def test_text_and_picture(tmp_path):
    text = call(draw_placements.main, "--ranks", 4).stdout
    assert "data and model axes (dp=2,tp=2,ep=2)\n  rank 0: 0 1 2 3 (1/2 of each)" in text
    assert "divided over all ranks (dp=4,tp=1,ep=4)\n  rank 0: 0 1\n" in text
    pytest.importorskip("matplotlib")
    path = tmp_path / "placements.svg"
    assert call(draw_placements.main, "-o", path).returncode == 0 and "<svg" in path.read_text()
