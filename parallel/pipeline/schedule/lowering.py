"""Messages for any plan: after what makes it, something is sent; some actions before what needs it, it is received.

- The F of a place makes activations for the F of the next place on its route, its B (or BW) a gradient for the B of the
  place before. Where both lie on one stage the stage hands it over to itself, and there is no message.
- ``SF`` and ``SB`` stand right behind the action that made what they send. They start a message and do not wait for it.
- ``RF`` and ``RB`` make ready a buffer and do not wait either; it is the F, B or BW of the same stage, chunk and
  micro-batch that waits until the message has come. They stand so far ahead of it that it can arrive meanwhile.
- Between two places the messages of a kind leave in the order in which they are received (the proof sees to it), so one
  tag for every kind and receiving chunk will do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from parallel.pipeline.schedule.actions import RECEIVES, SENDS, Action
from parallel.pipeline.schedule.pipeline_plan import Plan

AHEAD = 2
"""How many actions lie between posting a receive and the action that needs it."""

COMPUTED = ("F", "B", "BW")
"""What needs something from the place before it or after it, and makes something for the other."""


def lower(plan: Plan, ahead: int = AHEAD) -> Plan:
    """The same plan with its messages.

    Parameters
    ----------
    plan : Plan
        One that has none.
    ahead : int
        How many of the stage's computations lie between posting a receive and the action that needs it; 0: none.

    Raises
    ------
    ValueError
        If there are messages in it already.
    """
    if ahead < 0:
        raise ValueError(f"ahead: expected a number of actions from 0 on, found {ahead}")
    present = next((action for line in plan.actions for action in line if action.kind in SENDS + RECEIVES), None)
    if present is not None:
        raise ValueError(f"plan: expected one without messages, found {present}")
    return plan.with_actions([tuple(_lowered(line, plan, ahead)) for line in plan.actions])


def _lowered(line: tuple[Action, ...], plan: Plan, ahead: int) -> Iterator[Action]:
    wanted = deque(line)
    for index, action in enumerate(line):
        while wanted and len(line) - len(wanted) <= index + ahead:
            yield from received(wanted.popleft(), plan)
        yield action
        yield from sent(action, plan)


def received(action: Action, plan: Plan) -> list[Action]:
    """The receive that an action needs, if it needs one."""
    if action.kind not in COMPUTED:
        return []
    source = plan.source(action)
    here = source is None or source.stage == action.stage
    return [] if here else [action._replace(kind="RF" if action.kind == "F" else "RB")]


def sent(action: Action, plan: Plan) -> list[Action]:
    """The send that follows an action, if one does."""
    if action.kind not in COMPUTED:
        return []
    target = plan.target(action)
    here = target is None or target.stage == action.stage
    return [] if here else [action._replace(kind="SF" if action.kind == "F" else "SB")]
