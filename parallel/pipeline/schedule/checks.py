"""What may be wrong with a plan, apart from deadlocks: each check yields what it finds, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action, halves
from parallel.pipeline.schedule.stage_placement import Place
from parallel.pipeline.schedule.pipeline_plan import Plan


def out_of_place(plan: Plan) -> Iterator[str]:
    """Actions of another stage, chunk or micro-batch than there is, and those that are there twice."""
    if len(plan.actions) != plan.stages:
        yield f"expected actions of {plan.stages} stages, found those of {len(plan.actions)}"
        return
    seen: set[Action] = set()
    for stage, line in enumerate(plan.actions):
        for action in line:
            place = Place(action.stage, action.chunk)
            if action.stage != stage or place not in plan.placement.part:
                yield f"{action} is in the line of stage {stage}, which has {plan.placement.chunks} chunks"
            elif action.kind != "U" and place not in plan.placement.route(action.microbatch):
                yield f"{action}: the micro-batch does not come by there"
            elif action.kind != "U" and action.microbatch >= plan.microbatches:
                yield f"{action}: there are {plan.microbatches} micro-batches"
            elif action.kind in SENDS + RECEIVES and not _leads_anywhere(action, plan):
                yield f"{action}: there is no other stage at that side of it"
            elif not seen.isdisjoint(halves(action)):
                yield f"{action} is there twice"
            seen.update(halves(action))


def _leads_anywhere(action: Action, plan: Plan) -> bool:
    """Whether an action that sends or receives has another stage at the other end."""
    peer = plan.target(action) if action.kind in SENDS else plan.source(action)
    return peer is not None and peer.stage != action.stage


def missing(plan: Plan) -> Iterator[str]:
    """F, B and W of every micro-batch at every place that it comes by."""
    there = {each for line in plan.actions for action in line for each in halves(action)}
    for number in range(plan.microbatches):
        for place in plan.placement.route(number):
            for kind in ("F", "B", "W"):
                action = Action(place.stage, kind, number, place.chunk)
                if action not in there:
                    yield f"{action} is missing"


def overtaking(plan: Plan) -> Iterator[str]:
    """Messages of a kind between two places that are received in another order than they are sent in."""
    sent: dict[tuple[str, Place], list[int]] = defaultdict(list)
    received: dict[tuple[str, Place], list[int]] = defaultdict(list)
    for line in plan.actions:
        for action in line:
            if action.kind in SENDS:
                sent[action.kind[1], plan.peer(action)].append(action.microbatch)
            elif action.kind in RECEIVES:
                received[action.kind[1], Place(action.stage, action.chunk)].append(action.microbatch)
    for (kind, place), numbers in sent.items():
        others = received[kind, place]
        late = next((at for at, (one, other) in enumerate(zip(numbers, others)) if one != other), None)
        if late is not None and sorted(numbers) == sorted(others):
            expected = Action(place.stage, "RF" if kind == "F" else "RB", numbers[late], place.chunk)
            yield f"{expected} comes before {expected._replace(microbatch=others[late])}, which is received before it"


def too_new(plan: Plan) -> Iterator[str]:
    """Weights that are used before there are any such, and updates out of order."""
    if plan.versions is None:
        yield from (
            f"{action}: {plan.name} does not update on the way"
            for line in plan.actions
            for action in line
            if action.kind == "U"
        )
        return
    for stage, line in enumerate(plan.actions):
        updates: dict[int, int] = defaultdict(int)
        for action in line:
            if action.kind == "U":
                if action.microbatch != updates[action.chunk]:
                    yield f"{action}: the next update has number {updates[action.chunk]}"
                updates[action.chunk] += 1
            elif action.kind == "F" and plan.versions[stage][action.microbatch] > updates[action.chunk]:
                version = plan.versions[stage][action.microbatch]
                yield f"{action} uses version {version}, when there were {updates[action.chunk]} updates"
