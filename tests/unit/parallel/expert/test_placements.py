"""Placements of experts: who has which, bytes sent, and the program that draws them."""

import pytest
from support.program_runs import call

from parallel.cli import draw_placements
from parallel.expert.placements import ExpertPlacement, MixtureSize, placements

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
    rows, expert = 2 * 10 * 4 * 4, (2 * 8 * 4 + 8 + 4) * 4
    replicated, divided, both = placements(4, 2)
    assert replicated.sent(SIZE) == {"tokens": 0, "sums along tp": 0, "gradients": 2 * 8 * expert * 3 // 4}
    assert divided.sent(SIZE) == {"tokens": 4 * rows * 3 // 4, "sums along tp": 0, "gradients": 0}
    assert both.sent(SIZE) == {"tokens": 2 * rows, "sums along tp": 2 * rows, "gradients": 0}
    mixed = ExpertPlacement("mixed", 4, 1, 2).sent(SIZE)
    assert mixed == {"tokens": 2 * rows, "sums along tp": 0, "gradients": 4 * expert}


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
