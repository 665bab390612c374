"""Predicted step of a pipeline: its schedule simulated with the stages' times, then gradients and update of a stage."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from parallel.data_parallel.layouts import LAYOUTS
from parallel.forecast.core_sharing import CoreSharing
from parallel.forecast.data_parallel_step import EXCHANGES, RankGroup, UnitWork
from parallel.forecast.message_costs import MessageCosts
from parallel.forecast.step_timeline import COMPUTE, IDLE, UPDATE, StepTimeline, TimeSpan
from parallel.grad_compression import NONE
from parallel.pipeline.schedule.simulator import ActionTimes, Timeline, simulate
from parallel.pipeline.stage_params import Portion


class PipelineWork(NamedTuple):
    """Work of all stages of a pipeline.

    Attributes
    ----------
    units, outputs : work, and bytes of the output, of each unit for a micro-batch
    portions : shares of the ranks of one pipeline, by stage
    ranks : numbers of the ranks of `Portion.mesh` among all
    compress : compression of gradients
    """

    units: Sequence[UnitWork]
    outputs: Sequence[int]
    portions: Sequence[Portion]
    ranks: Sequence[int]
    compress: str = NONE


def pipeline_step(
    work: PipelineWork, messages: MessageCosts, sharing: CoreSharing, update: Callable[[int], float]
) -> StepTimeline:
    """Step of a pipeline; ``update(n)`` is the time to update n weights.

    Where there are more ranks than cores, those that wait poll for messages, and so take their share of the cores too.
    """
    timeline = simulate(work.portions[0].plan, _times(work, messages))
    busy = [float(each) for each in timeline.busy]
    whole = float(timeline.makespan) * sharing.crowd
    step = StepTimeline(spans=_spans(timeline), now=whole)
    step.parts |= {COMPUTE: max(busy) * sharing.crowd, IDLE: whole - max(busy) * sharing.crowd}
    stages = [_after(portion, work, messages) for portion in work.portions]
    sums = [sum(seconds for _, seconds in each) for each, _ in stages]
    slowest = sums.index(max(sums))
    for cause, seconds in stages[slowest][0]:
        step.spend("gradients", cause, seconds, f"stage {slowest}")
    step.spend("update", UPDATE, max(update(weights) for _, weights in stages) * sharing.crowd, "stage 0")
    return step


def _times(work: PipelineWork, messages: MessageCosts) -> ActionTimes:
    """Seconds of the parts' actions; the exchanges of a unit are halved between F and B."""
    first, parts = work.portions[0], list(pairwise(work.portions[0].cuts))
    units = [work.units[start:stop] for start, stop in parts]
    here = [first.plan.placement.owners(part)[0].stage for part in range(len(parts))]
    at = [next(rank for rank in range(first.mesh.size) if first.stage(rank) == stage) for stage in here]
    flying = [
        messages.message(work.ranks[one], work.ranks[other], work.outputs[stop - 1]) if one != other else 0.0
        for (_, stop), one, other in zip(parts, at, [*at[1:], at[0]])
    ]
    return ActionTimes(
        [sum(unit.forward + unit.exchanges / 2 for unit in some) for some in units],
        [sum(unit.backward + unit.exchanges / 2 for unit in some) for some in units],
        [sum(unit.weights for unit in some) for some in units],
        flying,
    )


def _after(portion: Portion, work: PipelineWork, messages: MessageCosts) -> tuple[list[tuple[str, float]], int]:
    """Seconds of the gradient sums of a stage's parameter groups by cause, and elements that a rank updates."""
    sums: list[tuple[str, float]] = []
    own = 0
    for group, plan in portion.held:
        layout = portion.layout_of(group)
        exchange, kind = EXCHANGES[layout], LAYOUTS[layout]
        holders = [work.ranks[rank] for rank in portion.holders[group.number]]
        members = RankGroup(plan, holders, messages, work.compress)
        length = plan.flat.length
        idle = 0.0 if sums else math.inf
        sums.append((members.cause, members.seconds(exchange.collective, length, idle=idle)))
        if exchange.gathers_updates or exchange.gathers_units:
            sums.append((members.cause, members.seconds("allgatherv", length, weights=True, idle=0.0)))
        own += -(-length // plan.ranks) if kind.divided else length
    return sums, own


def _spans(timeline: Timeline) -> list[TimeSpan]:
    return [
        TimeSpan(f"stage {stage}", f"{event.action.kind}{event.action.microbatch}", COMPUTE, *map(float, event[1:]))
        for stage, line in enumerate(timeline.computed)
        for event in line
    ]
