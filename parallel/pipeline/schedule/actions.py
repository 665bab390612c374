"""The whole language of pipelines: what a stage does to one micro-batch, as a value that prints, parses and fits a CSV.

>>> print(F(2, 0), BW(2, 0), W(0, 3, chunk=1))
2F0 2BW0 0.1W3
>>> parse("0.1W3") == W(0, 3, chunk=1)
True

The number in front is the stage: a rank's place along the pipeline. Behind a dot stands the chunk, where it is not 0:
a stage that has several parts of the model has them as chunks 0, 1 and so on (`placement` says which parts). Last comes
the micro-batch.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal["F", "B", "W", "BW", "U", "SF", "RF", "SB", "RB"]
"""What is done.

| kind | |
| --- | --- |
| ``F`` | forward; at the end of the model also the loss |
| ``B`` | backward as far as the gradient of the chunk's input: what the stage before waits for |
| ``W`` | the rest of the backward: the gradients of the chunk's weights |
| ``BW`` | full backward: both in one |
| ``U`` | update of the chunk's weights, in schedules that do not wait for the others; its number counts updates |
| ``SF``, ``RF`` | start to send the activations that the chunk's F made; get ready to receive those that its F takes |
| ``SB``, ``RB`` | start to send the gradient that the chunk's B made; get ready to receive the one that its B takes |
"""

FORWARD, BACKWARD = ("F", "SF", "RF"), ("B", "BW", "SB", "RB")
"""On the way from the input to the loss, and back."""

SENDS, RECEIVES = ("SF", "SB"), ("RF", "RB")


class Action(NamedTuple):
    """Something that a stage does.

    Attributes
    ----------
    stage : int
        Who does it: the rank's place along the pipeline.
    kind : str
        One of `Kind`.
    microbatch : int
        To what; the number of the update for ``"U"``.
    chunk : int
        With which of the stage's parts of the model.
    """

    stage: int
    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{f'.{self.chunk}' if self.chunk else ''}{self.kind}{self.microbatch}"


Actions: TypeAlias = tuple[tuple[Action, ...], ...]
"""What every stage does, in order."""


def F(stage: int, microbatch: int, chunk: int = 0) -> Action:
    """Forward."""
    return Action(stage, "F", microbatch, chunk)


def B(stage: int, microbatch: int, chunk: int = 0) -> Action:
    """Gradient of the input."""
    return Action(stage, "B", microbatch, chunk)


def W(stage: int, microbatch: int, chunk: int = 0) -> Action:
    """Gradients of the weights."""
    return Action(stage, "W", microbatch, chunk)


def BW(stage: int, microbatch: int, chunk: int = 0) -> Action:
    """Full backward."""
    return Action(stage, "BW", microbatch, chunk)


def U(stage: int, number: int, chunk: int = 0) -> Action:
    """Update number `number`: makes version `number` + 1 of the chunk's weights out of version `number`."""
    return Action(stage, "U", number, chunk)


def halves(action: Action) -> list[Action]:
    """B and W in place of BW; what is something else stays as it is."""
    return [action._replace(kind="B"), action._replace(kind="W")] if action.kind == "BW" else [action]


_PATTERN = re.compile(r"(\d+)(?:\.(\d+))?([A-Z]+)(\d+)")


def parse(text: str) -> Action:
    """The action that prints as `text`.

    Raises
    ------
    ValueError
        If none does.
    """
    found = _PATTERN.fullmatch(text.strip())
    if found is None or found[3] not in get_args(Kind):
        kinds = ", ".join(get_args(Kind))
        raise ValueError(f"expected an action such as 2F0 or 2.1BW0, of kind {kinds}; found {text!r}")
    return Action(int(found[1]), found[3], int(found[4]), int(found[2] or 0))  # type: ignore[arg-type]


def to_csv(actions: Sequence[Iterable[Action]]) -> str:
    """A line for every stage, a cell for every action."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(action) for action in line] for line in actions)
    return text.getvalue()


def from_csv(text: str) -> Actions:
    """What `to_csv` wrote, or a table made by hand: empty cells are passed over, so that columns may be moments.

    Raises
    ------
    ValueError
        If a cell is no action, or an action of another stage than its line's; it names line and column.
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
