"""Plans made of plans: for a step that has fewer micro-batches, and for forwards alone.

Whatever is left out of a plan for all stages leaves one that ends: nothing waits for it any more, and all else keeps
its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parallel.pipeline.schedule.actions import Action
from parallel.pipeline.schedule.pipeline_plan import Plan


def fewer(plan: Plan, microbatches: int) -> Plan:
    """The plan without the last micro-batches.

    Raises
    ------
    ValueError
        If it has not so many.
    """
    if not 0 <= microbatches <= plan.microbatches:
        raise ValueError(f"micro-batches: {plan.name} is planned for up to {plan.microbatches}, found {microbatches}")
    if microbatches == plan.microbatches:
        return plan
    lines = [list(_only(line, microbatches)) for line in plan.actions]
    known = plan.versions and tuple(versions[:microbatches] for versions in plan.versions)
    return replace(plan, microbatches=microbatches, versions=known).with_actions(lines)


def _only(line: Iterable[Action], microbatches: int) -> Iterator[Action]:
    """Actions of the first micro-batches, and updates that have something to update with."""
    gradients = False
    for action in line:
        if action.kind == "U":
            if gradients:
                yield action
            gradients = False
        elif action.microbatch < microbatches:
            gradients = gradients or action.kind in ("W", "BW")
            yield action


def forwards(plan: Plan, microbatches: int) -> Plan:
    """Forwards of any number of micro-batches through the same parts, without messages.

    As many micro-batches as there are stages go through a part before the next part begins, everywhere in one order.
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
