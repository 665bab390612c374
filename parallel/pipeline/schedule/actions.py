"""Pipeline actions: one operation of a stage on one micro-batch, as a value that prints, parses and fits a CSV cell.

>>> print(F(2, 0), BW(2, 0), W(0, 3, chunk=1))
2F0 2BW0 0.1W3
>>> parse("0.1W3") == W(0, 3, chunk=1)
True

The text is ``stage[.chunk]kind microbatch``: the stage is the rank's position along the pipeline, the chunk (omitted
when 0) numbers the parts of the model on that stage (`stage_placement`).
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

from parallel.pipeline.schedule.stage_placement import StagePlace

Kind: TypeAlias = Literal["F", "B", "W", "BW", "U", "SF", "RF", "SB", "RB"]
"""Kind of an action.

| kind | meaning |
| --- | --- |
| ``F`` | forward; on the last part of the model also the loss |
| ``B`` | gradient of the chunk's input, needed by the previous stage |
| ``W`` | gradients of the chunk's weights |
| ``BW`` | full backward: B and W in one |
| ``U`` | update of the chunk's weights in schedules without a flush; its number counts updates |
| ``SF``, ``RF`` | start sending the activations of the chunk's F; post the receive for its F |
| ``SB``, ``RB`` | start sending the gradient of the chunk's B; post the receive for its B |
"""

FORWARD = ("F", "SF", "RF")
"""Kinds of the forward pass, messages included."""

SENDS, RECEIVES = ("SF", "SB"), ("RF", "RB")


class Action(NamedTuple):
    """One operation of a stage (position along the pipeline) on a micro-batch (for ``"U"``: the number of the update).

    `chunk` is the number of the part among those of the stage.
    """

    stage: int
    kind: Kind
    microbatch: int
    chunk: int = 0

    @property
    def place(self) -> StagePlace:
        return StagePlace(self.stage, self.chunk)

    def __str__(self) -> str:
        return f"{self.stage}{f'.{self.chunk}' if self.chunk else ''}{self.kind}{self.microbatch}"


Actions: TypeAlias = tuple[tuple[Action, ...], ...]
"""Actions of every stage, in execution order."""


def _action(kind: Kind, stage: int, microbatch: int, chunk: int = 0) -> Action:
    return Action(stage, kind, microbatch, chunk)


F, B, W, BW, U = (partial(_action, kind) for kind in ("F", "B", "W", "BW", "U"))
"""Constructors: ``F(stage, microbatch, chunk=0)``. U has the number of the update in place of the micro-batch."""


def halves(action: Action) -> list[Action]:
    """Split a full backward (BW) into [B, W]. Another action is returned alone."""
    return [action._replace(kind="B"), action._replace(kind="W")] if action.kind == "BW" else [action]


def gradients_by_update(line: Iterable[Action]) -> dict[int, list[Action]]:
    """Actions that make weight gradients (W, BW), by the number of the update that follows them on one stage.

    >>> gradients_by_update([BW(0, 0), BW(0, 1), U(0, 0), BW(0, 2), U(0, 1), U(0, 2)])[0]
    [Action(stage=0, kind='BW', microbatch=0, chunk=0), Action(stage=0, kind='BW', microbatch=1, chunk=0)]
    """
    updates: dict[int, list[Action]] = {}
    since: list[Action] = []
    for action in line:
        if action.kind == "U":
            updates[action.microbatch], since = since, []
        elif action.kind in ("W", "BW"):
            since.append(action)
    return updates


_PATTERN = re.compile(r"(\d+)(?:\.(\d+))?([A-Z]+)(\d+)")


def parse(text: str) -> Action:
    found = _PATTERN.fullmatch(text.strip())
    if found is None or found[3] not in get_args(Kind):
        kinds = ", ".join(get_args(Kind))
        raise ValueError(f"expected an action such as 2F0 or 2.1BW0, of kind {kinds}; found {text!r}")
    return Action(int(found[1]), found[3], int(found[4]), int(found[2] or 0))  # type: ignore[arg-type]


def to_csv(actions: Sequence[Iterable[Action]]) -> str:
    """Format actions as CSV: one line per stage, one cell per action."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(action) for action in line] for line in actions)
    return text.getvalue()


def from_csv(text: str) -> Actions:
    """Parse the output of `to_csv` or a table written by hand. Empty cells are skipped, so columns may be time slots.

    Raises ValueError, naming line and column, if a cell is not an action of its line's stage.
    """
    lines = []
    for stage, cells in enumerate(csv.reader(io.StringIO(text))):
        line = []
        for column, cell in enumerate(cells, 1):
            if not cell.strip():
                continue
            try:
                action = parse(cell)
                if action.stage != stage:
                    raise ValueError(f"expected an action of stage {stage}, found {action}")
            except ValueError as error:
                raise ValueError(f"line {stage + 1}, column {column}: {error}") from None
            line.append(action)
        lines.append(tuple(line))
    return tuple(lines)
