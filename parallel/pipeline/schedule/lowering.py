"""Lowering: adds sends and receives to a plan.

- The F of a place produces activations for the F of the next place on its route, its B (or BW) a gradient for the B of
  the previous place. If both are on one stage, there is no message.
- ``SF`` and ``SB`` follow the action that produced their data, or its pair; they start a message and do not wait.
- ``RF`` and ``RB`` post a buffer and do not wait; the F, B or BW of the same stage, chunk and micro-batch waits for the
  message. They are posted early enough for the message to arrive during other computations.
- Messages of one kind between two places are received in the order of their sends (checked by the simulator), so one
  tag per kind and receiving chunk suffices.
"""

from collections import deque
from collections.abc import Callable, Iterator

from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action, Kind
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan
from parallel.pipeline.schedule.stage_placement import StagePlace

AHEAD = 2
"""Number of computations between posting a receive and the action that needs it."""

COMPUTED = ("F", "B", "BW")
"""Kinds that take a message's data, and produce the data of another."""


def lower(plan: PipelinePlan) -> PipelinePlan:
    """Plan with sends and receives added. ValueError if it has some."""
    present = next((action for line in plan.actions for action in line if action.kind in SENDS + RECEIVES), None)
    if present is not None:
        raise ValueError(f"plan: expected one without messages, found {present}")
    return plan.with_actions([tuple(_lowered(line, plan)) for line in plan.actions])


def _lowered(line: tuple[Action, ...], plan: PipelinePlan) -> Iterator[Action]:
    wanted, actions, done = deque(line), iter(line), 0
    for action in actions:
        block = (action, next(actions)) if action in plan.partners else (action,)
        done += len(block)
        while wanted and len(line) - len(wanted) < done + AHEAD:
            yield from received(wanted.popleft(), plan)
        yield from block
        for one in block:
            yield from _message(one, plan.target, "SF", "SB")


def received(action: Action, plan: PipelinePlan) -> list[Action]:
    """Receive action for the input of a computation: a list of one, or empty if the input comes without a message."""
    return _message(action, plan.source, "RF", "RB")


def _message(
    action: Action, peer_of: Callable[[Action], StagePlace | None], forward: Kind, backward: Kind
) -> list[Action]:
    peer = peer_of(action) if action.kind in COMPUTED else None
    if peer is None or peer.stage == action.stage:
        return []
    return [action._replace(kind=forward if action.kind == "F" else backward)]
