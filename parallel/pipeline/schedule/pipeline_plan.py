"""Pipeline plan: actions of all stages in one or several steps. Also plans of fewer micro-batches or forwards only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from parallel.pipeline.schedule.actions import FORWARD, SENDS, Action, Actions, gradients_by_update
from parallel.pipeline.schedule.schedules import SCHEDULES, ScheduleEntry
from parallel.pipeline.schedule.stage_placement import StagePlace, StagePlacement, replicated


@dataclass(frozen=True)
class PipelinePlan:
    """Actions of all stages in order: without messages from `build`, with messages from `lowering.lower`.

    `versions` are by stage and micro-batch the number of updates (``U``) in the weights that its F, B and W use.
    `pairs` are neighbouring actions of a stage that are executed in turns (`pass_pairs.paired`).
    """

    name: str  # of the schedule
    placement: StagePlacement
    microbatches: int  # in all steps, numbered from 0
    actions: Actions
    versions: tuple[tuple[int, ...], ...] | None = None  # None without updates
    pairs: tuple[tuple[Action, Action], ...] = ()

    @cached_property
    def partners(self) -> dict[Action, Action]:
        """Second action of each pair, by the first."""
        return dict(self.pairs)

    @property
    def stages(self) -> int:
        return self.placement.stages

    def source(self, action: Action) -> StagePlace | None:
        """Stage and chunk that provide the input of a forward or backward. None at the model's input and the loss."""
        return self.placement.neighbour(action.place, action.microbatch, -1 if action.kind in FORWARD else 1)

    def target(self, action: Action) -> StagePlace | None:
        """Stage and chunk that receive the result of a forward or backward. None at the loss and the model's input."""
        return self.placement.neighbour(action.place, action.microbatch, 1 if action.kind in FORWARD else -1)

    def peer(self, action: Action) -> StagePlace:
        """Stage and chunk at the other end of a send or receive. ValueError if none, or the stage is the same."""
        peer = self.target(action) if action.kind in SENDS else self.source(action)
        if peer is None or peer.stage == action.stage:
            raise ValueError(f"{action}: no other stage to exchange with")
        return peer

    def messages(self) -> Counter[tuple[int, int]]:
        """Number of messages by (sending stage, receiving stage), for a plan with messages."""
        sends = (action for line in self.actions for action in line if action.kind in SENDS)
        return Counter((action.stage, self.peer(action).stage) for action in sends)

    def with_actions(self, actions: Sequence[Iterable[Action]]) -> PipelinePlan:
        return replace(self, actions=tuple(map(tuple, actions)))


def build(
    name: str,
    stages: int,
    microbatches: int,
    *,
    virtual: int | None = None,
    steps: int = 1,
    ranks: Sequence[int] | None = None,
) -> PipelinePlan:
    """Build the plan of schedule `name`, a key of `SCHEDULES`, without sends and receives.

    Parameters
    ----------
    stages, microbatches : ranks along the pipeline; micro-batches of a step
    virtual : parts of the model on every stage, for schedules that leave it open (default 2)
    steps : number of steps in the plan; more than 1 only for schedules without a flush
    ranks : replicas of each part of the model, for schedules with round robin; together they are the `stages`
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}; found {name!r}")
    entry = SCHEDULES[name]
    for what, count in {"stages": stages, "microbatches": microbatches, "virtual": virtual, "steps": steps}.items():
        if count is not None and count < 1:
            raise ValueError(f"{what}: expected at least 1, found {count}")
    options: dict[str, Any] = _options(name, entry, virtual, steps)
    placement = entry.placement(stages, *(count for what, count in options.items() if what == "virtual"))
    if ranks is not None:
        check_ranks(name, stages, ranks)
        options["ranks"], placement = ranks, replicated(ranks)
    version = partial(entry.version, ranks=ranks) if entry.version and ranks else entry.version
    actions = tuple(tuple(entry.actions(stage, stages, microbatches, **options)) for stage in range(stages))
    versions = None  # with a flush there are no updates within a step
    if version is not None:
        versions = tuple(
            tuple(version(stage, stages, number, microbatches) for number in range(steps * microbatches))
            for stage in range(stages)
        )
    return PipelinePlan(name, placement, steps * microbatches, actions, versions)


def check_ranks(name: str, stages: int, ranks: Sequence[int]) -> None:
    """Raise ValueError if the parts of schedule `name` cannot have so many ranks each on `stages` stages."""
    if name not in SCHEDULES or "ranks" not in SCHEDULES[name].options:
        can = ", ".join(other for other, one in SCHEDULES.items() if "ranks" in one.options)
        raise ValueError(f"ranks: stages have replicas in {can}; found {name}")
    if sum(ranks) != stages or min(ranks, default=0) < 1:
        raise ValueError(f"ranks: expected numbers from 1 on that add up to {stages}, found {tuple(ranks)}")


def _options(name: str, entry: ScheduleEntry, virtual: int | None, steps: int) -> dict[str, int]:
    if "steps" not in entry.options and steps > 1:
        raise ValueError(f"steps: {name} flushes after every step: expected 1, found {steps}")
    chunks = entry.placement(1).chunks
    if "virtual" not in entry.options and virtual not in (None, chunks):
        raise ValueError(f"virtual: {name} has {chunks} parts of the model per stage, found {virtual}")
    options = {"steps": steps, "virtual": virtual or 2}
    return {what: count for what, count in options.items() if what in entry.options}


def truncate(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """Plan with the first `microbatches` micro-batches only. ValueError if it has fewer.

    A valid plan stays valid: nothing waits for the removed actions, and the order of the others is unchanged.
    """
    if not 0 <= microbatches <= plan.microbatches:
        raise ValueError(f"micro-batches: {plan.name} is planned for up to {plan.microbatches}, found {microbatches}")
    if microbatches == plan.microbatches:
        return plan
    updates = {
        number
        for line in plan.actions
        for number, gradients in gradients_by_update(line).items()
        if any(action.microbatch < microbatches for action in gradients)  # of any stage: replicas update together
    }
    lines = [
        [action for action in line if action.microbatch in (updates if action.kind == "U" else range(microbatches))]
        for line in plan.actions
    ]
    known = plan.versions and tuple(versions[:microbatches] for versions in plan.versions)
    pairs = tuple(pair for pair in plan.pairs if all(action.microbatch < microbatches for action in pair))
    return replace(plan, microbatches=microbatches, versions=known, pairs=pairs).with_actions(lines)


def forward_only(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """Plan of forwards only, for any number of micro-batches, on the same placement and without messages.

    Groups of as many micro-batches as there are stages pass through a part before the next part starts.
    """
    placement = plan.placement
    lines: list[list[Action]] = [[] for _ in range(placement.stages)]
    for start in range(0, microbatches, placement.stages):
        numbers = range(start, min(start + placement.stages, microbatches))
        for part in range(placement.parts):
            for number in numbers:
                place = placement.route(number)[part]
                lines[place.stage].append(Action(place.stage, "F", number, place.chunk))
    return replace(plan, microbatches=microbatches, versions=None, pairs=()).with_actions(lines)
