"""Plans derived from plans: with fewer microbatches, and with forwards only.

Removing microbatches from all stages keeps a valid plan valid: nothing waits for the removed actions, and the order of
the others is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parallel.pipeline.schedule.actions import Action
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan


def truncate(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """Plan with the first `microbatches` microbatches only; ValueError if it has fewer."""
    if not 0 <= microbatches <= plan.microbatches:
        raise ValueError(f"micro-batches: {plan.name} is planned for up to {plan.microbatches}, found {microbatches}")
    if microbatches == plan.microbatches:
        return plan
    lines = [list(_first_microbatches(line, microbatches)) for line in plan.actions]
    known = plan.versions and tuple(versions[:microbatches] for versions in plan.versions)
    return replace(plan, microbatches=microbatches, versions=known).with_actions(lines)


def _first_microbatches(line: Iterable[Action], microbatches: int) -> Iterator[Action]:
    """Actions of the first microbatches, without updates that have no gradients."""
    gradients = False
    for action in line:
        if action.kind == "U":
            if gradients:
                yield action
            gradients = False
        elif action.microbatch < microbatches:
            gradients = gradients or action.kind in ("W", "BW")
            yield action


def forward_only(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """Plan of forwards only, for any number of microbatches, on the same placement and without messages.

    Groups of as many microbatches as there are stages pass through a part before the next part starts.
    """
    placement = plan.placement
    lines: list[list[Action]] = [[] for _ in range(placement.stages)]
    for start in range(0, microbatches, placement.stages):
        numbers = range(start, min(start + placement.stages, microbatches))
        for part in range(placement.parts):
            for number in numbers:
                place = placement.route(number)[part]
                lines[place.stage].append(Action(place.stage, "F", number, place.chunk))
    return replace(plan, microbatches=microbatches, versions=None).with_actions(lines)
