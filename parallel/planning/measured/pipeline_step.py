"""Predicted step of a pipeline: its schedule simulated with the stages' times, then gradients and update of a stage."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.grad_compression import NONE
from parallel.pipeline.schedule.simulator import ActionTimes, Timeline, simulate
from parallel.pipeline.schedule.stage_placement import Number
from parallel.pipeline.stage_params import Portion
from parallel.planning.measured.core_sharing import CoreSharing
from parallel.planning.measured.data_parallel_step import EXCHANGES, RankGroup, UnitWork
from parallel.planning.measured.message_costs import MessageCosts
from parallel.planning.measured.step_timeline import COMPUTE, IDLE, UPDATE, StepTimeline, TimeSpan


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
    """Step of a pipeline. ``update(n)`` is the time to update n weights.

    If more ranks compute at once than cores exist, all of them are slower. Waiting ranks leave the cores to
    them.
    """
    timeline = simulate(work.portions[0].plan, _times(work, messages))
    shared = SharedTime(timeline, sharing)
    lines = [[tuple(map(shared.at, event[1:])) for event in line] for line in timeline.computed]
    busy, whole = max(sum(end - start for start, end in line) for line in lines), shared.at(timeline.makespan)
    step = StepTimeline(spans=_spans(timeline, shared), now=whole)
    step.parts |= {COMPUTE: busy, IDLE: whole - busy}
    stages = [_after(portion, work, messages) for portion in work.portions]
    sums = [sum(seconds for _, seconds in each) for each, _ in stages]
    slowest = sums.index(max(sums))  # stages exchange gradients at the same time
    for cause, seconds in stages[slowest][0]:
        step.spend("gradients", cause, seconds, f"stage {slowest}")
    step.spend("update", UPDATE, max(update(weights) for _, weights in stages) * sharing.crowd, "stage 0")
    return step


def _times(work: PipelineWork, messages: MessageCosts) -> ActionTimes:
    """Seconds of the parts' actions. The exchanges of a unit are halved between F and B."""
    first, parts = work.portions[0], list(pairwise(work.portions[0].cuts))
    units = [work.units[start:stop] for start, stop in parts]
    here = [first.plan.placement.owners(part)[0].stage for part in range(len(parts))]
    at = [next(rank for rank in range(first.mesh.size) if first.stage(rank) == stage) for stage in here]
    flying = [  # neighbours on one stage, as at the turn of a vee, exchange no message
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
    """Seconds of a stage's gradient sums, by their cause (replicas, tied weights), and elements that a rank updates."""
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


class SharedTime:
    """Time at which stages that share cores reach the times of a simulation in which each has a core of its own.

    All ranks that compute at once are equally slow, so the order of events stays. Every stage represents the same
    number of ranks that share the cores.
    """

    def __init__(self, timeline: Timeline, sharing: CoreSharing):
        changes: Counter[float] = Counter()
        for event in (event for line in timeline.computed for event in line):
            changes[float(event[1])] += 1
            changes[float(event[2])] -= 1
        each = sharing.ranks / len(timeline.computed) / sharing.cores
        self._times, self._shared, active = [0.0], [0.0], 0
        for time in sorted(changes):
            passed = (time - self._times[-1]) * max(1.0, active * each)
            self._times.append(time)
            self._shared.append(self._shared[-1] + passed)
            active += changes[time]

    def at(self, time: Number) -> float:
        return float(np.interp(float(time), self._times, self._shared)) + max(0.0, float(time) - self._times[-1])


def _spans(timeline: Timeline, shared: SharedTime) -> list[TimeSpan]:
    return [
        TimeSpan(f"stage {stage}", f"{event.action.kind}{event.action.microbatch}", COMPUTE, *map(shared.at, event[1:]))
        for stage, line in enumerate(timeline.computed)
        for event in line
    ]
