"""The life of a loss scale, and the table of precisions."""

import json

import pytest

from parallel.optim.precision import PRECISIONS, LossScale


def test_growth_backoff_floor_and_ceiling():
    scale = LossScale(value=4.0, interval=3, floor=1.0, ceiling=16.0)
    life = []
    for finite in "yynyyyyyyyyynnnnnny":
        scale.update(finite == "y")
        life.append(scale.value)
    assert life == [4, 4, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 8, 4, 2, 1, 1, 1, 1]


def test_it_does_not_pass_the_ceiling():
    scale = LossScale(value=16.0, interval=1, ceiling=16.0)
    scale.update(True)
    assert scale.value == 16.0


def test_steps_left_out_in_a_row_are_counted():
    scale = LossScale()
    for finite, skipped in ((False, 1), (False, 2), (True, 0), (False, 1)):
        scale.update(finite)
        assert scale.skipped == skipped


def test_it_gives_up_at_the_floor():
    """Not by how many steps were left out, but by how many at the floor, in a row; and there is a finite one."""
    scale = LossScale(value=8.0, patience=2)
    for finite in "nnnnnynn":
        scale.update(finite == "y")
    assert (scale.stuck, scale.skipped) == (2, 2)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row, in the last 3 of them .* its floor 1\.0"):
        scale.update(False)


def test_a_fixed_scale_stays():
    scale = LossScale(8.0, growth=1.0, backoff=1.0)
    for finite in [True] * 2001 + [False]:
        scale.update(finite)
    assert scale.value == 8.0


def test_a_life_goes_on_where_it_was_saved():
    life = [True, False, True, True, True, True, False, True]
    one, other = LossScale(value=8.0, interval=2), LossScale()
    for number, finite in enumerate(life):
        if number == 5:
            other.load(json.loads(json.dumps(one.state())))
        one.update(finite)
        if number >= 5:
            other.update(finite)
    assert one == other


@pytest.mark.parametrize("before, now", [("fp32", "fp16"), ("bf16", "fp16"), ("fp16", "fp32"), ("fp16", "bf16")])
def test_a_precision_without_scaling_leaves_the_scale_of_one_with_it(before, now):
    saved, scale = PRECISIONS[before].loss_scale(), PRECISIONS[now].loss_scale()
    scale.load(saved.state())
    assert scale == PRECISIONS[now].loss_scale()
    with pytest.raises(ValueError, match="growth: expected"):
        scale.load(saved.state() | {"growth": 0.5})


@pytest.mark.parametrize("state", [{}, {"value": 2.0}, LossScale().state() | {"more": 1}])
def test_a_foreign_state(state):
    scale = LossScale()
    with pytest.raises(ValueError, match="state: expected backoff, ceiling"):
        scale.load(state)
    assert scale == LossScale()


def test_a_broken_state_changes_nothing():
    scale = LossScale()
    with pytest.raises(ValueError, match="value: expected"):
        scale.load(scale.state() | {"value": float("nan")})
    assert scale == LossScale()


@pytest.mark.parametrize(
    "settings",
    [
        {"value": 0.0},
        {"value": 0.5},
        {"value": float("inf")},
        {"growth": 0.5},
        {"backoff": 0.0},
        {"backoff": 2.0},
        {"interval": 0},
        {"floor": 0.0},
        {"floor": 8.0, "ceiling": 4.0},
        {"good": 2000},
        {"skipped": -1},
    ],
)
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=f"{list(settings)[-1]}: expected"):
        LossScale(**settings)


@pytest.mark.parametrize(
    "name, states, nbytes",
    [("fp32", 2, 16), ("bf16", 2, 18), ("fp16", 2, 18), ("fp64", 2, 32), ("fp32", 0, 8), ("bf16", 1, 14)],
)
def test_bytes_per_parameter(name, states, nbytes):
    assert sum(PRECISIONS[name].bytes_per_parameter(states).values()) == nbytes


def test_who_has_masters_and_scales():
    assert [name for name, precision in PRECISIONS.items() if precision.master] == ["bf16", "fp16"]
    assert [name for name, precision in PRECISIONS.items() if precision.loss_scale().value != 1] == ["fp16"]
