"""Every schedule of the table: proved, held against its formulas, its messages and versions of weights counted."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import pytest

from parallel.pipeline.schedule.activation_memory import peaks, versions
from parallel.pipeline.schedule.formulas import FORMULAS, deviations, evaluate
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import build, truncate
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.simulator import ActionTimes, simulate
from parallel.pipeline.schedule.stage_placement import StagePlace, loop, opposed, replicated, vee

ROOT = Path(__file__).resolve().parents[4]
SYNCHRONOUS = [name for name, entry in SCHEDULES.items() if entry.version is None]
SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in sorted({1, 2, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 3, 24})] + [
    (13, 27),
    (16, 3),
    (16, 64),
]
TIMES = [(1, 1, 1), (3, 2, 1), (2, 2, 2), (5, 4, 3)]


def test_the_names_are_those_that_are_promised():
    promised = "naive gpipe 1f1b interleaved pipedream pipedream-2bw zb-h1 zb-h2 zb-v dualpipe"
    assert set(promised.split()) <= set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_page_has_it(name):
    assert f"| `{name}` |" in (ROOT / "docs" / "guide" / "pipelines.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_ends_and_costs_what_the_formulas_say(name):
    for turn, (stages, microbatches) in enumerate(SIZES):
        plan = lower(build(name, stages, microbatches))
        forward, backward, weights = TIMES[turn % len(TIMES)]
        parts = Fraction(plan.placement.parts, stages)
        timeline = simulate(plan, ActionTimes(forward / parts, backward / parts, weights / parts))
        assert deviations(name, timeline, microbatches, forward, backward, weights) == []


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formulas_hold_somewhere(name):
    """So that the comparison above compares something: at 4 stages and 8 micro-batches all of them do."""
    letters = {"p": 4, "m": 8, "v": 2, "n": 1, "F": 1, "B": 1, "W": 1}
    assert evaluate(FORMULAS[name].holds, **letters) is True


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("stages, microbatches", [(1, 1), (2, 5), (3, 2), (4, 4), (4, 11), (5, 9), (6, 24)])
def test_interleaved_needs_no_multiple_of_the_stages(virtual, stages, microbatches):
    plan = lower(build("interleaved", stages, microbatches, virtual=virtual))
    each = Fraction(1, virtual)
    timeline = simulate(plan, ActionTimes(each, each, each))
    assert deviations("interleaved", timeline, microbatches, 1, 1, 1) == []
    if microbatches >= stages:
        assert set(timeline.idle) == {Fraction(3 * (stages - 1), virtual)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages, microbatches", [(1, 1), (2, 3), (4, 8), (7, 5)])
def test_the_bubble_is_a_share(name, stages, microbatches):
    timeline = simulate(lower(build(name, stages, microbatches)), ActionTimes(3, 5, 1))
    assert timeline.bubble == Fraction(stages - 1, microbatches + stages - 1)


@pytest.mark.parametrize("stages", [4, 6, 8])
def test_dualpipe_is_no_worse_than_its_table(stages):
    """DeepSeek-V3, table 2: (p/2-1)(t_F&B + t_BW - 3 t_W), p + 1 micro-batches."""
    for F_, B_, W_ in [(1, 1, 1), (2, 3, 2), (1, 2, 1), (3, 2, 1), (2, 2, 1)]:
        timeline = simulate(lower(build("dualpipe", stages, 2 * stages)), ActionTimes(F_, B_, W_))
        assert timeline.idle[0] <= (stages // 2 - 1) * ((F_ + B_ + W_) + (B_ + W_) - 3 * W_)
    assert peaks(timeline.plan) == (stages + 1,) * stages


def test_zero_bubble_schedules_are_less_idle_the_more_they_keep():
    """Qi et al., table 2: with t_F = t_B = t_W a third of 1F1B's, then nothing; p, then 2p - 1 micro-batches."""
    timelines = {name: simulate(lower(build(name, 8, 24))) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert [line.period - line.busy[0] for line in timelines.values()] == [21, 7, 0]
    assert [max(peaks(line.plan)) for line in timelines.values()] == [8, 8, 15]
    half = Fraction(1, 2)
    vee_shaped = simulate(lower(build("zb-v", 8, 24)), ActionTimes(half, half, half))
    assert vee_shaped.period == vee_shaped.busy[0]
    assert max(peaks(vee_shaped.plan, half)) == 8


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages, microbatches", [(1, 2), (2, 1), (3, 4), (4, 8)])
def test_messages_are_counted(name, stages, microbatches):
    """One each way between neighbours on a route that lie on two stages, for every micro-batch."""
    plan = lower(build(name, stages, microbatches))
    hops = Counter()
    for microbatch in range(microbatches):
        for one, other in pairwise(plan.placement.route(microbatch)):
            if one.stage != other.stage:
                hops[one.stage, other.stage] += 1
                hops[other.stage, one.stage] += 1
    assert plan.messages() == hops
    assert len(simulate(plan).messages) == hops.total()
    assert stages > 1 or not hops


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_micro_batches_come_in_order(name):
    """So that gradients are added in one order, whatever the schedule; of both routes where there are two."""
    plan = build(name, 4, 11)
    for line in plan.actions:
        for kinds in ("F", ("B", "BW"), ("W", "BW")):
            for chunk in range(plan.placement.chunks):
                order = [action.microbatch for action in line if action.kind in kinds and action.chunk == chunk]
                assert order == sorted(order)


# ------------------------------------------------------------------------------------------ versions of the weights


def used(plan):
    """By stage and micro-batch, how many updates the newest weights have seen at its F and at its B."""
    forward, backward = ([{} for _ in plan.actions] for _ in range(2))
    for stage, line in enumerate(plan.actions):
        updates = 0
        for action in line:
            if action.kind == "U":
                assert action.microbatch == updates
                updates += 1
            else:
                (forward if action.kind == "F" else backward)[stage][action.microbatch] = updates
    return forward, backward


@pytest.mark.parametrize("stages, microbatches, steps", [(1, 1, 3), (2, 4, 2), (4, 8, 2), (4, 2, 3), (5, 3, 4)])
def test_pipedream_uses_the_newest_weights_and_keeps_them(stages, microbatches, steps):
    plan = build("pipedream", stages, microbatches, steps=steps)
    forward, backward = used(plan)
    for stage in range(stages):
        said = dict(enumerate(plan.versions[stage]))
        assert forward[stage] == said
        staleness = {number: backward[stage][number] - said[number] for number in said}
        assert staleness == {number: min(number, stages - 1 - stage) for number in said}
    assert versions(plan) == tuple(min(stages - stage, plan.microbatches) for stage in range(stages))


@pytest.mark.parametrize("stages, microbatches, steps", [(1, 1, 3), (2, 4, 3), (4, 8, 4), (4, 3, 5), (8, 16, 3)])
def test_2bw_is_one_update_late_everywhere(stages, microbatches, steps):
    plan = build("pipedream-2bw", stages, microbatches, steps=steps)
    late = 1 if stages > 1 else 0
    for line in plan.versions:
        assert line == tuple(max(0, number // microbatches - late) for number in range(microbatches * steps))
    forward, _ = used(plan)
    for stage in range(stages):
        assert all(updates - 1 <= plan.versions[stage][number] <= updates for number, updates in forward[stage].items())
    assert max(versions(plan)) <= 2


def test_2bw_with_few_micro_batches_keeps_more_versions():
    plan = build("pipedream-2bw", 8, 2, steps=9)
    assert plan.versions[0][-1] == 8 - 4  # ceil(7 / 2) updates late
    simulate(lower(plan))
    assert max(versions(plan)) > 2


# ------------------------------------------------------------------------------------------ placements


def test_placements():
    assert loop(3, 2).routes == (((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)),)
    assert vee(3).routes == (((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)),)
    assert opposed(3).routes == (((0, 0), (1, 0), (2, 0)), ((2, 1), (1, 1), (0, 1)))
    both = opposed(4)
    assert both.parts == 4 and both.chunks == 2 and both.stages == 4
    assert both.owners(1) == [StagePlace(1, 0), StagePlace(2, 1)]
    assert both.route(5)[0] == StagePlace(3, 1)
    assert both.neighbour(StagePlace(0, 0), 0, -1) is None and both.neighbour(StagePlace(0, 1), 1, 1) is None
    turns = replicated((2, 1, 3))
    assert (turns.parts, turns.stages, turns.chunks, len(turns.routes)) == (3, 6, 1, 6)
    assert [turns.owners(part) for part in range(3)] == [[(0, 0), (1, 0)], [(2, 0)], [(3, 0), (4, 0), (5, 0)]]
    assert turns.route(7) == ((1, 0), (2, 0), (4, 0))
    assert turns.neighbour(StagePlace(2, 0), 5, 1) == (5, 0) and turns.neighbour(StagePlace(2, 0), 5, -1) == (1, 0)


def test_at_the_turn_there_is_no_message():
    plan = lower(build("zb-v", 1, 2))
    assert not plan.messages()
    assert simulate(plan).makespan == 12
    last = lower(build("zb-v", 3, 2)).actions[2]
    assert not [action for action in last if str(action) in ("2SF0", "2.1RF0", "2.1SB0", "2RB0")]


# ------------------------------------------------------------------------------------------ replicas that take turns

DIVISIONS = [ranks for count in (1, 2, 3) for ranks in product((1, 2, 3, 5), repeat=count) if sum(ranks) <= 8]


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("ranks", DIVISIONS, ids=str)
def test_replicas_take_turns_and_end(name, ranks):
    """Proved with updates that wait for all replicas, for plans cut short too; each micro-batch is at one replica."""
    for microbatches, steps in ((max(ranks), 1), (7, 1), (7, 3)):
        plan = build(name, sum(ranks), microbatches, ranks=ranks, steps=1 if name == "1f1b" else steps)
        for count in {1, microbatches, plan.microbatches - 1, plan.microbatches}:
            short = truncate(plan, count)
            simulate(lower(short))
            done = Counter(action.microbatch for line in short.actions for action in line if action.kind == "BW")
            assert done == Counter(dict.fromkeys(range(count), len(ranks)))
            numbers = [[action.microbatch for action in line if action.kind == "U"] for line in short.actions]
            assert all(line == numbers[0] == list(range(len(line))) for line in numbers)
            if plan.versions is not None:
                each = max(ranks) if name == "pipedream" else microbatches
                assert len(numbers[0]) == -(-count // each)


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "pipedream-2bw"])
def test_one_rank_of_each_part_is_the_schedule_itself(name):
    assert build(name, 4, 9, ranks=(1, 1, 1, 1)) == build(name, 4, 9)


def test_a_part_that_takes_twice_as_long_needs_two_ranks():
    """Parts of 2, 1 and 1 units on as many ranks are never idle between the first and the last micro-batches."""
    times = ActionTimes([2, 1, 1], [2, 1, 1], [2, 1, 1])
    even, turns = (simulate(lower(build("1f1b", sum(r), 60, ranks=r)), times) for r in ((1, 1, 1), (2, 1, 1)))
    assert even.makespan > 2 * 3 * 60 and turns.makespan < 1.1 * 3 * 60
    assert peaks(turns.plan) == (2, 2, 2, 1)


def test_pipedream_versions_of_replicas():
    """A forward uses the weights that its rank has then: so many updates were made before it."""
    plan = build("pipedream", 6, 20, ranks=(3, 2, 1))
    for line, known in zip(plan.actions, plan.versions):
        made = 0
        for action in line:
            made += action.kind == "U"
            if action.kind == "F":
                assert known[action.microbatch] == made


# ------------------------------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    "arguments, options, told",
    [
        (("1f1c", 2, 2), {}, "schedule: expected one of naive, gpipe, 1f1b"),
        (("1f1b", 0, 2), {}, "stages: expected at least 1, found 0"),
        (("1f1b", 2, 0), {}, "microbatches: expected at least 1, found 0"),
        (("interleaved", 2, 2), {"virtual": 0}, "virtual: expected at least 1, found 0"),
        (("1f1b", 2, 2), {"virtual": 2}, "virtual: 1f1b has 1 parts of the model per stage, found 2"),
        (("zb-v", 2, 2), {"virtual": 3}, "virtual: zb-v has 2 parts of the model per stage, found 3"),
        (("1f1b", 2, 2), {"steps": 2}, "steps: 1f1b flushes after every step: expected 1, found 2"),
    ],
)
def test_what_makes_no_plan_is_refused(arguments, options, told):
    with pytest.raises(ValueError, match=told):
        build(*arguments, **options)
