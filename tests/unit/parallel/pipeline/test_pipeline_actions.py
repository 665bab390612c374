"""Actions print, parse and travel through CSV; what is none is refused with its place."""

import pytest

from parallel.pipeline.schedule.actions import BW, B, F, U, W, from_csv, parse, to_csv
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.schedules import SCHEDULES


@pytest.mark.parametrize(
    "action, text",
    [
        (F(2, 0), "2F0"),
        (F(2, 0, 1), "2.1F0"),
        (B(10, 63), "10B63"),
        (W(0, 7, chunk=3), "0.3W7"),
        (BW(1, 2), "1BW2"),
        (U(0, 4), "0U4"),
        (F(1, 2)._replace(kind="SF"), "1SF2"),
        (F(1, 2, 1)._replace(kind="RB"), "1.1RB2"),
    ],
)
def test_actions_print_and_parse(action, text):
    assert str(action) == text and parse(text) == action and parse(f" {text} ") == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0x", "2.F0", "-1F0", "2f0", "2FB0", "1SW0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match="expected an action such as 2F0"):
        parse(text)


@pytest.mark.parametrize("name", SCHEDULES)
def test_plans_go_through_csv(name):
    plan = lower(build(name, stages=3, microbatches=4))
    text = to_csv(plan.actions)
    assert len(text.splitlines()) == 3
    assert from_csv(text) == plan.actions


def test_columns_may_be_moments():
    assert from_csv("0F0, ,0BW0\n,1F0\n") == ((F(0, 0), BW(0, 0)), (F(1, 0),))


@pytest.mark.parametrize(
    "text, told",
    [
        ("0F0,0F1\n1F0,1G1\n", "line 2, column 2: expected an action such as 2F0"),
        ("0F0\n0F1\n", "line 2, column 1: expected an action of stage 1, found 0F1"),
    ],
)
def test_a_wrong_cell_is_named(text, told):
    with pytest.raises(ValueError, match=told):
        from_csv(text)
