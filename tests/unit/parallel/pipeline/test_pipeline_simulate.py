"""The clock of pipelines; plans that cannot be carried out are refused, with the grid of where progress stops."""

from fractions import Fraction

import pytest

from parallel.pipeline.schedule import lowering
from parallel.pipeline.schedule import timeline as draw
from parallel.pipeline.schedule.actions import BW, F, from_csv, parse
from parallel.pipeline.schedule.activation_memory import peaks
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.schedule.schedules import SCHEDULES, ScheduleEntry, tabled
from parallel.pipeline.schedule.simulator import ActionTimes, PlanError, simulate
from parallel.pipeline.schedule.stage_placement import loop


def spans(timeline, stage):
    return {str(event.action): (event.start, event.end) for event in timeline.computed[stage]}


def plan_of(text, microbatches, placement=None):
    actions = from_csv(text)
    return PipelinePlan("mine", placement or loop(len(actions)), microbatches, actions)


# ------------------------------------------------------------------------------------------ the clock


def test_a_message_takes_its_time():
    timeline = simulate(lower(build("gpipe", 2, 1)), ActionTimes(2, 3, 1, message=5))
    assert spans(timeline, 0) == {"0F0": (0, 2), "0BW0": (18, 22)}
    assert spans(timeline, 1) == {"1F0": (7, 9), "1BW0": (9, 13)}
    assert [(str(event.action), event.start, event.end) for event in timeline.messages] == [
        ("0SF0", 2, 7),
        ("1SB0", 13, 18),
    ]


def test_parts_may_be_uneven():
    times = ActionTimes(forward=[1, 4, 2], backward=[2, 8, 4], weights=0, message=[10, 100, 1000])
    timeline = simulate(lower(build("naive", 3, 1)), times)
    assert timeline.busy == (3, 12, 6)
    assert timeline.makespan == 21 + 2 * (10 + 100)  # the model's last part sends nothing


def test_sends_hide_behind_computation():
    """Receives are posted ahead: a message no longer than a computation costs nothing once the pipeline is full."""
    slow, fast = (simulate(lower(build("gpipe", 2, 50)), ActionTimes(10, 10, 0, message)) for message in (10, 0))
    assert slow.makespan - fast.makespan == 2 * 10


def test_a_receive_that_is_posted_late_delays_its_message(monkeypatch):
    ahead = simulate(lower(build("gpipe", 2, 4)), ActionTimes(2, 2, 0, 1))
    monkeypatch.setattr(lowering, "AHEAD", 0)
    late = simulate(lower(build("gpipe", 2, 4)), ActionTimes(2, 2, 0, 1))
    assert late.makespan > ahead.makespan


def test_fractions_stay_exact_and_floats_floats():
    third = Fraction(1, 3)
    assert simulate(lower(build("1f1b", 3, 3)), ActionTimes(third, third, third)).makespan == 5
    assert simulate(lower(build("1f1b", 3, 3)), ActionTimes(0.5, 0.5, 0.5)).bubble == pytest.approx(2 / 5)


def test_times_for_another_number_of_parts_are_refused():
    with pytest.raises(ValueError, match="one for each of 3 parts; found 2"):
        simulate(lower(build("1f1b", 3, 3)), ActionTimes(forward=[1, 2]))


def test_activations_are_alive_from_f_to_w():
    assert peaks(build("zb-h1", 4, 8)) == (4, 4, 4, 4)
    assert peaks(build("1f1b", 2, 4), held=[7, 100]) == (14, 100)


# ------------------------------------------------------------------------------------------ what is refused


def refusal(plan):
    with pytest.raises(PlanError) as refused:
        simulate(plan)
    return str(refused.value)


def test_a_circle_is_refused_with_the_grid():
    """Stage 1 wants to go back before it has gone forward."""
    said = refusal(lower(plan_of("0F0,0F1,0BW0,0BW1\n1F0,1BW1,1F1,1BW0\n", 2)))
    assert "deadlock: the stages wait for each other" in said
    first, second = said.splitlines()[1:]
    assert first.split()[:2] == ["stage", "0"] and "> 0BW0" in first and first.endswith("waits for the message of 0RB0")
    assert second.split()[:2] == ["stage", "1"] and "> 1BW1" in second and second.endswith("waits for 1F1")
    assert "of    8 done" in second


def without(plan, text):
    return plan.with_actions([[action for action in line if str(action) != text] for line in plan.actions])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", ["F", "backward", "W", "SF", "RB"])
def test_whatever_is_missing_is_named(name, kind):
    plan = lower(build(name, 3, 4))
    kinds = ("B", "BW") if kind == "backward" else (kind,)
    missing = next((action for line in plan.actions for action in line[::-1] if action.kind in kinds), None)
    if missing is None:
        assert kind == "W"
        return
    said = refusal(without(plan, str(missing)))
    what = {"SF": "nothing is sent for", "RB": "deadlock", "BW": f"{missing._replace(kind='B')} is missing"}
    assert what.get(missing.kind, f"{missing} is missing") in said
    assert said.count("\nstage") == 3


@pytest.mark.parametrize(
    "text, told",
    [
        ("0F0,0BW0,0F0", "0F0 occurs twice"),
        ("0F0,0BW0,0W0", "0W0 occurs twice"),
        ("0F0,0B0,0W0,0F1,0B1,0W1", "0F1: expected one of 1 micro-batches"),
        ("0F0,0.1BW0", "0.1BW0 is in the line of stage 0, which has 1 chunks"),
        ("0F0,0SF0,0BW0", "0SF0: no other stage to exchange with"),
        ("0F0,0BW0,0U0", "0U0: mine has no updates within a step"),
        ("0BW0,0F0", "deadlock"),
    ],
)
def test_what_is_out_of_place_is_named(text, told):
    assert told in refusal(plan_of(text, 1))


def test_a_micro_batch_on_another_route_is_named():
    plan = build("dualpipe", 2, 4)
    wrong = plan.with_actions([[action._replace(chunk=1 - action.chunk) for action in line] for line in plan.actions])
    assert "not on the route of the micro-batch" in refusal(wrong)


def test_lines_of_too_few_stages_are_refused():
    plan = lower(build("1f1b", 3, 3))
    assert "expected actions of 3 stages, found those of 2" in refusal(plan.with_actions(plan.actions[:2]))


def test_messages_that_overtake_each_other_are_refused():
    said = refusal(lower(plan_of("0F0,0F1,0BW0,0BW1\n1F1,1F0,1BW0,1BW1\n", 2)))
    assert "1RF0 is sent before 1RF1 but received after it" in said


def test_a_message_that_nobody_receives_is_refused():
    said = refusal(without(lower(build("1f1b", 2, 2)), "0RB1"))
    assert "1SB1 is never received" in said and "waits for the message of 0RB1" in said


def test_weights_before_their_time_are_refused():
    plan = lower(build("pipedream", 2, 4))
    eager = PipelinePlan("eager", plan.placement, 4, plan.actions, ((0, 1, 2, 3), (0, 1, 2, 3)))
    assert "0F1 uses version 1, after 0 updates" in refusal(eager)
    assert "0U1: the next update is number 0" in refusal(without(plan, "0U0"))


def test_every_send_may_wait_for_its_receive():
    """No plan leans on buffers of the MPI: a message flies only when both ends are ready for it."""
    plan = lower(build("1f1b", 2, 2))
    timeline = simulate(plan, ActionTimes(message=1))
    posted = {str(action): at for line in plan.actions for at, action in enumerate(line)}
    assert all(event.start >= 0 and str(event.action) in posted for event in timeline.messages)


def test_messages_are_lowered_once():
    plan = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match="expected one without messages, found 0RB0"):
        lower(lower(plan))


def test_the_other_end_of_a_message():
    plan = lower(build("zb-v", 2, 2))
    assert plan.peer(parse("0SF0")) == (1, 0) and plan.peer(parse("1.1SF0")) == (0, 1)
    assert plan.peer(parse("0.1RF0")) == (1, 1) and plan.peer(parse("1SB0")) == (0, 0)
    with pytest.raises(ValueError, match="1SF0: no other stage"):
        plan.peer(parse("1SF0"))


# ------------------------------------------------------------------------------------------ one's own


def backwards_first(stage, stages, microbatches):
    """Micro-batches in pairs."""
    for m in range(0, microbatches, 2):
        pair = range(m, min(m + 2, microbatches))
        yield from (F(stage, each) for each in pair)
        yield from (BW(stage, each) for each in pair)


@pytest.mark.parametrize("stages, microbatches", [(1, 1), (3, 5), (4, 8)])
def test_a_schedule_of_ones_own_is_a_function_and_a_line(monkeypatch, stages, microbatches):
    monkeypatch.setitem(SCHEDULES, "mine", ScheduleEntry(backwards_first))
    timeline = simulate(lower(build("mine", stages, microbatches)))
    assert max(peaks(timeline.plan)) == min(2, microbatches)
    assert sum(timeline.busy) == 3 * stages * microbatches


def test_or_a_table_and_a_line(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "mine", ScheduleEntry(tabled(from_csv("0F0,0F1,0BW0,0BW1\n1F0,1BW0,1F1,1BW1\n"))))
    assert simulate(lower(build("mine", 2, 2))).makespan == 9
    with pytest.raises(ValueError, match="stages: the table has lines of 2, found 3"):
        build("mine", 3, 2)
    assert "1F2 is missing" in refusal(lower(build("mine", 2, 3)))


# ------------------------------------------------------------------------------------------ drawn


def test_a_timeline_as_text():
    half = Fraction(1, 2)
    text = draw.table(simulate(lower(build("interleaved", 2, 2)), ActionTimes(half, half, half)))
    assert text.splitlines()[0] == "stage 0  F0   F1   F'0  F'1  ·    ·    BW'0 ─    ·    BW'1 ─    BW0  ─    BW1  ─"
    wide = draw.table(simulate(lower(build("1f1b", 2, 8))))
    narrow = draw.table(simulate(lower(build("1f1b", 2, 8))), width=60)
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))
    assert narrow.count("F") == wide.count("F") == 16


def test_a_table_that_nobody_could_read_is_refused():
    with pytest.raises(ValueError, match="expected times with a common unit"):
        draw.table(simulate(lower(build("1f1b", 2, 2)), ActionTimes(0.1, 0.1, 0.1)))
