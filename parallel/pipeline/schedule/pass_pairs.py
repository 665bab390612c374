"""Pairs of passes of a stage: a forward pass, and the backward pass of another micro-batch directly after it.

The passes of a pair are computed in turns: one computes while messages of the other travel between ranks of the stage
(DualPipe; combined 1F1B of Megatron-LM). A pair begins when the inputs of both have arrived, and its results are sent
when both are done; so it may have to wait longer than each pass alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from parallel.pipeline.schedule.actions import Action, halves
from parallel.pipeline.schedule.lowering import COMPUTED, lower
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan
from parallel.pipeline.schedule.simulator import ActionTimes, simulate


def paired(plan: PipelinePlan) -> PipelinePlan:
    """Plan, without messages, with all pairs that are `executable`. Without any if they cannot shorten the step.

    The shortest step is one in which a pair takes the time of its longer pass (F, B and W take 1 unit each). In 1F1B
    and ZB-H1 every pair needs the result of the neighbour's pair before it, so that of two neighbours one waits; in
    ZB-H2 the last stage has no pairs, and no step is shorter than that stage.

    Raises PlanError if the plan cannot be executed.

    >>> from parallel.pipeline.schedule.pipeline_plan import build
    >>> [f"{first} {second}" for first, second in paired(build("dualpipe", stages=2, microbatches=4)).pairs]
    ['0F2 0.1BW1', '0.1F3 0BW0', '1.1F3 1BW0', '1F2 1.1BW1']
    >>> paired(build("1f1b", stages=2, microbatches=4)).pairs
    ()
    """
    found = replace(plan, pairs=tuple(executable(plan).items()))
    shortest = simulate(lower(found), ActionTimes(overlap=1)).makespan
    return found if shortest < simulate(lower(plan)).makespan else plan


def executable(plan: PipelinePlan) -> dict[Action, Action]:
    """Second pass of each pair, by the first, in order of stages: all but those without which no stage could go on.

    The plan is executed without times. When every stage waits, the pair is dissolved whose first pass has its input, on
    the first such stage.
    """
    pairs = dict(pair for line in plan.actions for pair in candidates(line))
    done: set[Action] = set()
    positions = [0] * plan.stages

    def can_begin(*block: Action) -> bool:
        return done.issuperset(need for action in block for need in _input(action, plan))

    def advance(stage: int) -> bool:
        """Execute actions of a stage until one has to wait. True if there were some."""
        line, start = plan.actions[stage], positions[stage]
        while positions[stage] < len(line):
            action = line[positions[stage]]
            block = (action, pairs[action]) if action in pairs else (action,)
            if not can_begin(*block):
                break
            done.update(half for one in block for half in halves(one))
            positions[stage] += len(block)
        return positions[stage] > start

    while True:
        if any([advance(stage) for stage in range(plan.stages)]):
            continue
        waiting = [line[at] for line, at in zip(plan.actions, positions) if at < len(line)]
        blocked = next((action for action in waiting if action in pairs and can_begin(action)), None)
        if blocked is None:  # at the end, or in a plan that cannot be executed without pairs either
            return pairs
        del pairs[blocked]


def candidates(line: tuple[Action, ...]) -> Iterator[tuple[Action, Action]]:
    """Neighbours of a stage's line that may be a pair: a forward, then a backward pass of another micro-batch.

    In this order the activations of both are in memory without pairs too.
    """
    for first, second in pairwise(line):
        if first.kind == "F" and second.kind in ("B", "BW") and first.microbatch != second.microbatch:
            yield first, second


def _input(action: Action, plan: PipelinePlan) -> list[Action]:
    """Pass of a neighbouring part whose result this action needs: a list of one, or empty."""
    source = plan.source(action) if action.kind in COMPUTED else None
    if source is None:
        return []
    return [Action(source.stage, "F" if action.kind == "F" else "B", action.microbatch, source.chunk)]
