"""Pairs of passes in plans: those of every schedule, deadlocks, messages, times, and fewer micro-batches."""

from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise
from random import Random

import pytest

from parallel.pipeline.schedule.actions import BW, F, from_csv
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pass_pairs import candidates, executable, paired
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build, forward_only, truncate
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.simulator import ActionTimes, PlanError, simulate
from parallel.pipeline.schedule.stage_placement import loop

SYNCHRONOUS = [name for name, entry in SCHEDULES.items() if entry.version is None]
WITHOUT = ("naive", "1f1b", "zb-h1", "zb-h2")
"""Schedules that pairs do not shorten: a stage waits for its neighbour in every one, or the last stage has none."""

FEW, MANY = (
    [(p, m) for p in stages for m in sorted({1, 2, p, p + 1, 2 * p + 3, 12})] for stages in ((1, 2, 3, 4), (5, 8))
)
SIZES = {"few": FEW, "many": pytest.param([*MANY, (13, 27)], marks=pytest.mark.full)}
"""Numbers of stages and of micro-batches."""


def with_all(plan):
    """Plan with all pairs that can be executed, also if they do not shorten the step."""
    return replace(plan, pairs=tuple(executable(plan).items()))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_schedule_ends(name, sizes):
    """Pairs are neighbours, of two micro-batches, and every action is in one pair at most."""
    for stages, microbatches in sizes:
        plan = build(name, stages, microbatches)
        chosen, every = paired(plan), with_all(plan)
        shortest = simulate(lower(plan)).makespan
        neighbours = {pair for line in plan.actions for pair in pairwise(line)}
        for found in (every, chosen):
            assert simulate(lower(found)).makespan >= shortest
            actions = [action for pair in found.pairs for action in pair]
            assert len(set(actions)) == len(actions)
            assert neighbours.issuperset(found.pairs)
            assert all(one.kind == "F" and one.microbatch != other.microbatch for one, other in found.pairs)
        assert chosen == paired(plan)
        assert chosen.pairs in (every.pairs, ())
        if name in WITHOUT:
            assert chosen.pairs == ()
        elif microbatches >= 2 * stages + 3:
            assert chosen.pairs


@pytest.mark.parametrize("name, pairs", [("1f1b", 18), ("zb-h1", 18), ("zb-h2", 12), ("gpipe", 1), ("zb-v", 28)])
def test_numbers_of_pairs(name, pairs):
    """Of gpipe on the last stage: on the others the first backward pass needs the last forward pass beside it."""
    assert len(executable(build(name, 4, 8))) == pairs


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("stages, microbatches", [(2, 8), (4, 8), (4, 32), (8, 40)])
def test_longer_steps_with_pairs(name, stages, microbatches):
    """Although a pair takes the time of its longer pass only."""
    plan = build(name, stages, microbatches)
    assert simulate(lower(with_all(plan)), ActionTimes(overlap=1)).makespan >= simulate(lower(plan)).makespan


@pytest.mark.parametrize("stages", [2, 4, 6, 8])
@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_steady_state_of_dualpipe(stages, rounds):
    """It has nothing but pairs, and every forward pass after the first full backward pass is in one."""
    microbatches, half = 2 * stages * rounds, stages // 2
    plan = paired(build("dualpipe", stages, microbatches))
    inside = {action for pair in plan.pairs for action in pair}
    for stage, line in enumerate(plan.actions):
        steady = microbatches // 2 - half - (half - 1 - min(stage, stages - 1 - stage))  # turns of two pairs
        runs = [len(list(run)) for is_inside, run in groupby(line, inside.__contains__) if is_inside]
        assert max(runs) >= 4 * steady
        first = next(at for at, action in enumerate(line) if action.kind == "BW")
        assert all(action in plan.partners for action in line[first - 1 :] if action.kind == "F")


def test_a_pair_that_needs_its_own_result():
    """On stage 0 the backward pass waits for the forward pass before it, over stage 1 and another micro-batch."""
    line = "0F0,0F1,0BW0,0BW1\n1F0,1F1,1BW0,1BW1\n"
    plan = PipelinePlan("mine", loop(2), 2, from_csv(line))
    every = [pair for line in plan.actions for pair in candidates(line)]
    assert every == [(F(0, 1), BW(0, 0)), (F(1, 1), BW(1, 0))]
    with pytest.raises(PlanError, match="deadlock"):
        simulate(lower(replace(plan, pairs=tuple(every))))
    assert executable(plan) == {F(1, 1): BW(1, 0)}


def random_plan(random, stages, microbatches, chunks):
    """Plan that can be executed, in random order."""
    empty = PipelinePlan("random", loop(stages, chunks), microbatches, ((),) * stages)
    waiting = {
        kind(place.stage, number, place.chunk)
        for number in range(microbatches)
        for place in empty.placement.route(number)
        for kind in (F, BW)
    }
    lines, done = [[] for _ in range(stages)], set()

    def ready(action):
        source = empty.source(action)
        own = [action._replace(kind="F")] if action.kind == "BW" else []
        needs = own + ([] if source is None else [action._replace(stage=source.stage, chunk=source.chunk)])
        return done.issuperset(needs)

    while waiting:
        action = random.choice(sorted(filter(ready, waiting)))
        lines[action.stage].append(action)
        waiting.remove(action)
        done.add(action)
    return empty.with_actions(lines)


@pytest.mark.parametrize("seed", range(40))
def test_random_plans(seed):
    """All pairs that remain can be executed; if some do not, with these the stages wait for each other."""
    random = Random(seed)
    plan = random_plan(random, random.randint(1, 4), random.randint(1, 6), random.randint(1, 2))
    found = with_all(plan)
    simulate_untimed(found)
    every = tuple(pair for line in plan.actions for pair in candidates(line))
    if len(every) > len(found.pairs):
        with pytest.raises(PlanError, match="deadlock"):
            simulate_untimed(replace(plan, pairs=every))


def simulate_untimed(plan):
    """Simulate a plan whose messages may overtake each other: an error is a deadlock."""
    try:
        simulate(lower(plan))
    except PlanError as error:
        if "deadlock" in str(error):
            raise


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe", "dualpipe-v"])
def test_messages_around_a_pair(name):
    """Receives of both passes before it, sends after it; a pair begins when both messages have arrived."""
    plan = lower(paired(build(name, 4, 12)))
    assert plan.messages() == lower(build(name, 4, 12)).messages()
    started = {event.action: event.start for line in simulate(plan).computed for event in line}
    arrived = {event.action: event.end for event in simulate(plan).messages}
    for one, other in plan.pairs:
        line = plan.actions[one.stage]
        at = line.index(one)
        assert line[at + 1] == other
        for action in (one, other):
            kind = "F" if action.kind == "F" else "B"
            assert all(line.index(each) < at for each in line if each == action._replace(kind=f"R{kind}"))
            assert all(line.index(each) > at + 1 for each in line if each == action._replace(kind=f"S{kind}"))
            source = plan.source(action)
            if source is not None and source.stage != action.stage:
                sent = action._replace(kind=f"S{kind}", stage=source.stage, chunk=source.chunk)
                assert started[one] >= arrived[sent]


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zb-v", "dualpipe", "dualpipe-v"])
def test_fewer_micro_batches(name):
    """Pairs stay as long as both of their micro-batches are there; evaluations have none."""
    plan = lower(paired(build(name, 3, 14)))
    for microbatches in range(15):
        part = truncate(plan, microbatches)
        assert len(simulate(part).computed) == 3
        present = {action for line in part.actions for action in line}
        assert set(part.pairs) == {pair for pair in plan.pairs if present.issuperset(pair)}
    assert lower(forward_only(plan, 20)).pairs == ()


def test_times_of_pairs():
    """From the sum of both passes to the longer one."""
    plan = lower(paired(build("dualpipe", 2, 8)))
    times = [simulate(plan, ActionTimes(overlap=Fraction(part, 2))).makespan for part in range(3)]
    assert times == [24, 21, 18]
    assert simulate(lower(build("dualpipe", 2, 8)), ActionTimes(overlap=1)).makespan == 24
