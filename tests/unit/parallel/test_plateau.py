"""Decisions by scores: as PyTorch's schedule, and after a restart as before."""

import json

import numpy as np
import pytest

from parallel import AdamW, EarlyStop, LRSchedule, ReduceLROnPlateau
from parallel.optim.lr_schedules import describe

SCORES = [3.0, 2.0, 2.0, 1.9999, float("nan"), 2.5, 2.4, 1.0, 1.0, 1.0, 1.0, 0.9, 5.0, 5.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("options", [{}, {"cooldown": 2}, {"threshold": 0.2}, {"min_lr": 0.01}])
def test_like_torch(mode, options):
    torch = pytest.importorskip("torch")
    inner = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(inner, mode, factor=0.3, patience=1, **options)
    ours = {"least": options.pop("min_lr")} if "min_lr" in options else options
    made = ReduceLROnPlateau(0.5, 1, 0.3, mode=mode, **ours)
    for score in SCORES:
        theirs.step(score)
        made.observe(score)
        assert made(7) == pytest.approx(inner.param_groups[0]["lr"], rel=1e-12)
    assert made.reductions > 1


def test_the_rate_of_a_schedule():
    inner = LRSchedule("linear_warm_up", rate=0.4, warm_up=4)
    made = ReduceLROnPlateau(inner, patience=0, factor=0.5, least=0.15)
    assert made.observe(1.0) is False and made.observe(1.0) is True
    assert [made(step) for step in (0, 1, 3)] == [0.1, 0.15, 0.2]
    assert describe(made)["rate"] == inner.describe() and json.dumps(describe(made))
    assert AdamW(lr=made).describe()["rate"]["name"] == "reduce_on_plateau"


def test_a_restart():
    for make in (lambda: ReduceLROnPlateau(1.0, 1, 0.5, cooldown=1), lambda: EarlyStop(3)):
        whole, before, after = make(), make(), make()
        expected = [whole.observe(score) for score in SCORES]
        found = [before.observe(score) for score in SCORES[:6]]
        after.load(json.loads(json.dumps(before.state())))
        assert found + [after.observe(score) for score in SCORES[6:]] == expected
        assert any(expected) and after.state() == whole.state()
        with pytest.raises(ValueError, match="waited"):
            after.load({"best": 1.0, "waited": -1, "cooling": 0, "reductions": 0})
        assert after.state() == whole.state()


def test_stops():
    stop = EarlyStop(2, mode="max")
    assert [stop.observe(score) for score in (0.5, 0.6, 0.6, 0.7, np.float32(0.1), 0.2)] == [False] * 5 + [True]
    assert [EarlyStop(1).observe(float("nan")) for _ in range(1)] == [True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStop(0), "patience: expected 1 or more"),
        (lambda: EarlyStop(2, mode="best"), "mode: expected min or max"),
        (lambda: ReduceLROnPlateau(0.1, patience=1.5), "patience: expected a whole number"),
        (lambda: ReduceLROnPlateau(0.1, factor=1.0), "factor: expected a number from 0 to below 1"),
        (lambda: ReduceLROnPlateau(-0.1), "rate: expected a number from 0 on"),
    ],
)
def test_refused_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
