"""Static checks of a plan: generators that yield one text per fault."""

from collections import defaultdict
from collections.abc import Iterator

from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action, halves
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan
from parallel.pipeline.schedule.stage_placement import StagePlace


def misplaced_actions(plan: PipelinePlan) -> Iterator[str]:
    """Yield a text for every action with a wrong stage, chunk, micro-batch or message peer, and for duplicates."""
    if len(plan.actions) != plan.stages:
        yield f"expected actions of {plan.stages} stages, found those of {len(plan.actions)}"
        return
    seen: set[Action] = set()
    for stage, line in enumerate(plan.actions):
        for action in line:
            if action.stage != stage or action.place not in plan.placement.part:
                yield f"{action} is in the line of stage {stage}, which has {plan.placement.chunks} chunks"
            elif action.kind != "U" and action.place not in plan.placement.route(action.microbatch):
                yield f"{action}: not on the route of the micro-batch"
            elif action.kind != "U" and action.microbatch >= plan.microbatches:  # a U has the number of an update
                yield f"{action}: expected one of {plan.microbatches} micro-batches"
            elif action.kind in SENDS + RECEIVES and not _has_peer(action, plan):
                yield f"{action}: no other stage to exchange with"
            elif not seen.isdisjoint(halves(action)):
                yield f"{action} occurs twice"
            seen.update(halves(action))


def _has_peer(action: Action, plan: PipelinePlan) -> bool:
    peer = plan.target(action) if action.kind in SENDS else plan.source(action)
    return peer is not None and peer.stage != action.stage


def missing_actions(plan: PipelinePlan) -> Iterator[str]:
    there = {each for line in plan.actions for action in line for each in halves(action)}
    for number in range(plan.microbatches):
        for place in plan.placement.route(number):
            for kind in ("F", "B", "W"):
                action = Action(place.stage, kind, number, place.chunk)
                if action not in there:
                    yield f"{action} is missing"


def overtaking_messages(plan: PipelinePlan) -> Iterator[str]:
    """Yield a text if messages between two places are not received in the order of their sends."""
    sent: dict[tuple[str, StagePlace, StagePlace], list[int]] = defaultdict(list)
    received: dict[tuple[str, StagePlace, StagePlace], list[int]] = defaultdict(list)
    for line in plan.actions:
        for action in line:
            if action.kind in SENDS:
                sent[action.kind[1], action.place, plan.peer(action)].append(action.microbatch)
            elif action.kind in RECEIVES:
                received[action.kind[1], plan.peer(action), action.place].append(action.microbatch)
    for (kind, source, place), numbers in sent.items():
        others = received[kind, source, place]  # MPI matches messages of one tag in the order of sends
        late = next((at for at, (one, other) in enumerate(zip(numbers, others)) if one != other), None)
        if late is not None and sorted(numbers) == sorted(others):  # lost messages are of other checks
            expected = Action(place.stage, "RF" if kind == "F" else "RB", numbers[late], place.chunk)
            yield f"{expected} is sent before {expected._replace(microbatch=others[late])} but received after it"


def invalid_versions(plan: PipelinePlan) -> Iterator[str]:
    """Yield a text for every F before its weight version exists, and for every U out of order or without versions."""
    if plan.versions is None:
        yield from (
            f"{action}: {plan.name} has no updates within a step"
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
                    yield f"{action}: the next update is number {updates[action.chunk]}"
                updates[action.chunk] += 1
            elif action.kind == "F" and plan.versions[stage][action.microbatch] > updates[action.chunk]:
                # Older versions are stashed: only one that is still to come is an error.
                version = plan.versions[stage][action.microbatch]
                yield f"{action} uses version {version}, after {updates[action.chunk]} updates"
