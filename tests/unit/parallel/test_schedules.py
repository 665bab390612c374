"""Learning rates at their corners."""

import json
import math

import pytest

from parallel.optim.lr_schedules import SCHEDULES, LRSchedule, describe, rate_at

EXAMPLES = {
    "constant": {"rate": 0.5},
    "linear_warm_up": {"rate": 0.5, "warm_up": 4},
    "cosine": {"rate": 0.5, "steps": 10, "floor": 0.1},
    "warm_up_cosine": {"rate": 0.5, "warm_up": 4, "steps": 14, "floor": 0.1},
}


@pytest.mark.parametrize(
    "name, points",
    [
        ("constant", {0: 0.5, 10**9: 0.5}),
        ("linear_warm_up", {0: 0.125, 2: 0.375, 3: 0.5, 4: 0.5, 10**9: 0.5}),
        ("cosine", {0: 0.5, 5: 0.3, 10: 0.1, 11: 0.1, 10**9: 0.1}),
        ("warm_up_cosine", {0: 0.125, 3: 0.5, 4: 0.5, 9: 0.3, 14: 0.1, 10**9: 0.1}),
    ],
)
def test_corners(name, points):
    schedule = LRSchedule(name, **EXAMPLES[name])
    assert {step: schedule(step) for step in points} == pytest.approx(points, abs=1e-15)


@pytest.mark.parametrize(
    "name, settings, first",
    [
        ("linear_warm_up", {"rate": 1.0, "warm_up": 0}, 1.0),
        ("cosine", {"rate": 1.0, "steps": 0}, 0.0),
        ("warm_up_cosine", {"rate": 1.0, "warm_up": 0, "steps": 10}, 1.0),
        ("warm_up_cosine", {"rate": 1.0, "warm_up": 10, "steps": 10}, 0.1),
        ("warm_up_cosine", {"rate": 1.0, "warm_up": 0, "steps": 0}, 0.0),
    ],
)
def test_nothing_to_warm_up_or_to_cool_down(name, settings, first):
    assert LRSchedule(name, **settings)(0) == pytest.approx(first)


def test_every_schedule_has_an_example():
    assert EXAMPLES.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_description_makes_the_same_schedule(name):
    schedule = LRSchedule(name, **EXAMPLES[name])
    again = LRSchedule(**json.loads(json.dumps(describe(schedule))))
    assert again == schedule and hash(again) == hash(schedule)
    assert [again(step) for step in range(20)] == [schedule(step) for step in range(20)]
    assert again != LRSchedule(name, **{**EXAMPLES[name], "rate": 0.25})


def test_rates_that_are_no_schedules():
    assert rate_at(0.5, 3) == 0.5 and describe(0.5) == 0.5
    assert rate_at(math.sqrt, 9) == 3.0 and describe(math.sqrt) == "sqrt"


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("step", {}, "schedule: expected one of constant, .*, found 'step'"),
        ("cosine", {"rate": 1.0}, "schedule cosine: missing a required argument: 'steps'"),
        ("cosine", {"rate": 1.0, "steps": 3, "top": 1}, "schedule cosine: .*'top'"),
        ("cosine", {"rate": -1.0, "steps": 3}, "rate: expected a number from 0 on, found -1.0"),
        ("cosine", {"rate": math.nan, "steps": 3}, "rate: .* found nan"),
        ("cosine", {"rate": 1.0, "steps": 2.5}, "steps: expected a whole number from 0 on, found 2.5"),
        ("warm_up_cosine", {"rate": 1.0, "warm_up": 5, "steps": 4}, "warm_up: expected at most steps = 4, found 5"),
    ],
)
def test_settings_out_of_range(name, settings, message):
    with pytest.raises(ValueError, match=message):
        LRSchedule(name, **settings)
