"""Peak memory of a stage: activations and weight versions, from the order of its actions alone."""

from collections import Counter
from itertools import accumulate

from parallel.pipeline.schedule.actions import Action, halves
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan
from parallel.pipeline.schedule.stage_placement import Number, PerPart, spread


def peaks(plan: PipelinePlan, held: PerPart = 1) -> tuple[Number, ...]:
    """Peak activation memory by stage: micro-batches alive at once, counted per chunk, times their size `held`.

    A micro-batch is alive in a part from the begin of its F to the end of its W (or BW). `held` is its size there, one
    number or one per part.

    >>> from parallel.pipeline.schedule.pipeline_plan import build
    >>> peaks(build("gpipe", stages=3, microbatches=5)), peaks(build("1f1b", stages=3, microbatches=5))
    ((5, 5, 5), (3, 2, 1))
    """
    sizes = spread(held, plan.placement.parts)

    def change(action: Action) -> Number:
        size = sizes[plan.placement.part[action.place]]
        return {"F": size, "W": -size, "BW": -size}.get(action.kind, 0)

    return tuple(max(accumulate(map(change, line), initial=0)) for line in plan.actions)


def versions(plan: PipelinePlan) -> tuple[int, ...]:
    """Maximum number of weight versions alive, by stage: the newest and those in use between F and W of a micro-batch.

    1 for plans without updates.

    >>> from parallel.pipeline.schedule.pipeline_plan import build
    >>> versions(build("pipedream", stages=3, microbatches=6)), versions(build("pipedream-2bw", 3, 6, steps=3))
    ((3, 2, 1), (2, 2, 2))
    """
    if plan.versions is None:
        return (1,) * plan.stages
    result = []
    for line, version in zip(plan.actions, plan.versions):
        newest, most, used = 0, 1, Counter[int]()
        for half in (half for action in line for half in halves(action)):
            if half.kind == "U":
                newest = half.microbatch + 1
            elif half.kind in ("F", "W"):
                used[version[half.microbatch]] += 1 if half.kind == "F" else -1
            most = max(most, len({newest, *(+used)}))  # + drops versions with a count of 0
        result.append(most)
    return tuple(result)
