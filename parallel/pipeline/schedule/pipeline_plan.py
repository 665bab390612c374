"""A plan: what all stages do in a step, or in several, as data."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from parallel.pipeline.schedule.actions import FORWARD, SENDS, Action, Actions
from parallel.pipeline.schedule.stage_placement import Place, Placement
from parallel.pipeline.schedule.schedules import SCHEDULES, Entry


@dataclass(frozen=True)
class Plan:
    """What all stages do.

    Attributes
    ----------
    name : str
        Of the schedule.
    placement : Placement
        Which parts of the model are where.
    microbatches : int
        How many there are in all: numbers 0 to `microbatches` - 1.
    actions : tuple of tuples of Action
        By stage, in order; without messages as `build` makes it, with them as `lowering.lower` does.
    versions : tuple of tuples of int, optional
        By stage and micro-batch: how many of the plan's updates (``U``) the weights have seen that the micro-batch's
        F, B and W use. None if there are no updates within the plan.
    """

    name: str
    placement: Placement
    microbatches: int
    actions: Actions
    versions: tuple[tuple[int, ...], ...] | None = None

    @property
    def stages(self) -> int:
        return self.placement.stages

    def source(self, action: Action) -> Place | None:
        """Where that comes from which a forward or backward takes; None for the model's input, and the loss."""
        here = Place(action.stage, action.chunk)
        return (self.placement.before if action.kind in FORWARD else self.placement.after)[here]

    def target(self, action: Action) -> Place | None:
        """Where that goes to which a forward or backward makes; None behind the loss, and in front of the model."""
        here = Place(action.stage, action.chunk)
        return (self.placement.after if action.kind in FORWARD else self.placement.before)[here]

    def peer(self, action: Action) -> Place:
        """The other end of a message, for an action that sends or receives.

        Raises
        ------
        ValueError
            If there is none, or it is on the same stage.
        """
        peer = self.target(action) if action.kind in SENDS else self.source(action)
        if peer is None or peer.stage == action.stage:
            raise ValueError(f"{action}: there is no other stage to send to or to receive from")
        return peer

    def messages(self) -> Counter[tuple[int, int]]:
        """How many messages go from a stage to another, by (from, to); of a plan that has them."""
        sends = (action for line in self.actions for action in line if action.kind in SENDS)
        return Counter((action.stage, self.peer(action).stage) for action in sends)

    def with_actions(self, actions: Sequence[Iterable[Action]]) -> Plan:
        """The same with other actions."""
        return replace(self, actions=tuple(map(tuple, actions)))


def build(name: str, stages: int, microbatches: int, *, virtual: int | None = None, steps: int = 1) -> Plan:
    """The plan of a schedule of the table, without messages.

    Parameters
    ----------
    name : str
        In `SCHEDULES`.
    stages, microbatches : int
        Ranks along the pipeline; micro-batches of a step.
    virtual : int, optional
        Parts of the model on every stage, for schedules that leave it open (2 if not given).
    steps : int
        How many steps the plan is for; only schedules that update on the way can do several.

    Raises
    ------
    ValueError
        If there is no such schedule, or none for so many stages, micro-batches, chunks or steps.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}; found {name!r}")
    entry = SCHEDULES[name]
    for what, count in {"stages": stages, "microbatches": microbatches, "virtual": virtual, "steps": steps}.items():
        if count is not None and count < 1:
            raise ValueError(f"{what}: expected at least 1, found {count}")
    options = _options(name, entry, virtual, steps)
    placement = entry.placement(stages, *(count for what, count in options.items() if what == "virtual"))
    actions = tuple(tuple(entry.actions(stage, stages, microbatches, **options)) for stage in range(stages))
    versions = None
    if entry.version is not None:
        versions = tuple(
            tuple(entry.version(stage, stages, number, microbatches) for number in range(steps * microbatches))
            for stage in range(stages)
        )
    return Plan(name, placement, steps * microbatches, actions, versions)


def _options(name: str, entry: Entry, virtual: int | None, steps: int) -> dict[str, int]:
    """What the schedule's function takes besides stage, stages and micro-batches."""
    takes = inspect.signature(entry.actions).parameters
    if "steps" not in takes and steps > 1:
        raise ValueError(f"steps: {name} ends a step before the next; expected 1, found {steps}")
    chunks = entry.placement(1).chunks
    if "virtual" not in takes and virtual not in (None, chunks):
        raise ValueError(f"virtual: {name} has {chunks} parts of the model on a stage, found {virtual}")
    options = {"steps": steps, "virtual": virtual or 2}
    return {what: count for what, count in options.items() if what in takes}
