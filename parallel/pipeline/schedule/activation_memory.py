"""What a stage keeps at most: activations of micro-batches under way, and versions of its weights.

Both follow from the order of a stage's actions alone, whatever the times are.
"""

from __future__ import annotations

from collections import Counter

from parallel.pipeline.schedule.actions import halves
from parallel.pipeline.schedule.numeric import Number, PerPart, spread
from parallel.pipeline.schedule.stage_placement import Place
from parallel.pipeline.schedule.pipeline_plan import Plan


def peaks(plan: Plan, held: PerPart = 1, kept: PerPart | None = None) -> tuple[Number, ...]:
    """By stage: the most that it keeps at once for backwards to come.

    Parameters
    ----------
    plan : Plan
        With messages or without.
    held : number, or one for every part
        What a micro-batch takes in a part from the begin of its F to the end of its B. With 1, micro-batches are
        counted.
    kept : number, or one for every part, optional
        What is left of it until the end of its W; all, if not given.

    Examples
    --------
    >>> from parallel.pipeline.schedule.pipeline_plan import build
    >>> peaks(build("gpipe", stages=3, microbatches=5)), peaks(build("1f1b", stages=3, microbatches=5))
    ((5, 5, 5), (3, 2, 1))
    """
    parts = plan.placement.parts
    whole = spread(held, parts)
    rest = whole if kept is None else spread(kept, parts)
    result = []
    for line in plan.actions:
        now: Number = 0
        most: Number = 0
        for action in line:
            for half in halves(action):
                part = plan.placement.part[Place(half.stage, half.chunk)]
                change = {"F": whole[part], "B": rest[part] - whole[part], "W": -rest[part]}
                now += change.get(half.kind, 0)
                most = max(most, now)
        result.append(most)
    return tuple(result)


def versions(plan: Plan) -> tuple[int, ...]:
    """By stage: the most versions of its weights that it keeps at once, for a plan that updates on the way; else 1.

    These are the newest, and those that micro-batches between F and B use.

    Examples
    --------
    >>> from parallel.pipeline.schedule.pipeline_plan import build
    >>> versions(build("pipedream", stages=3, microbatches=6)), versions(build("pipedream-2bw", 3, 6, steps=3))
    ((3, 2, 1), (2, 2, 2))
    """
    if plan.versions is None:
        return (1,) * plan.stages
    result = []
    for line, version in zip(plan.actions, plan.versions):
        newest, most, used = 0, 1, Counter[int]()
        for action in line:
            for half in halves(action):
                if half.kind == "U":
                    newest = half.microbatch + 1
                elif half.kind in ("F", "W"):
                    used[version[half.microbatch]] += 1 if half.kind == "F" else -1
                most = max(most, len({newest, *(+used)}))
        result.append(most)
    return tuple(result)
