"""Assignment of a step's parts (micro-batches) to workers, on request. No MPI.

Workers draw parts one by one, so slow workers get fewer; the part of a dead worker is drawn again by another.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple


class WorkPart(NamedTuple):
    """Part `number` of step `clock`."""

    clock: int
    number: int


class PartResult(NamedTuple):
    """Result of a part: sum of losses, number of targets, gradient norm per target, and the worker."""

    loss: float
    targets: int
    norm: float
    worker: int


class RankStep(NamedTuple):
    """A rank's step: mean loss, targets and mean norm of its parts; True if training ends with it; early pushes."""

    loss: float
    targets: int
    norm: float | None
    last: bool
    early: int


@dataclass
class StepProgress:
    """Step in progress: next part to draw, and results by part."""

    parts: int
    next: int = 0
    done: dict[int, PartResult] = field(default_factory=dict)


class WorkAssignment:
    """Parts of all steps in progress. `last` is the step after which the training ends; -1 if it is not set.

    >>> work = WorkAssignment(2)
    >>> [work.draw(worker, clock=0, parts=3) for worker in (0, 1)]
    [WorkPart(clock=0, number=0), WorkPart(clock=0, number=1)]
    >>> work.done(1, WorkPart(0, 1), PartResult(1.5, 4, 0.1, 1))
    >>> work.draw(1, clock=0, parts=3), work.draw(0, clock=0, parts=3)
    (WorkPart(clock=0, number=2), WorkPart(clock=0, number=0))
    """

    def __init__(self, workers: int, start: int = 0):
        self.last = -1
        self._start = start
        self._progress: dict[int, StepProgress] = {}
        self._held: dict[int, WorkPart] = {}
        self._returned: list[WorkPart] = []
        self._at = [start] * workers

    def draw(self, worker: int, clock: int, parts: int, number: int | None = None) -> WorkPart | None:
        """Assign the next part to a worker; None if none is left in its step. An unfinished part is assigned again.

        In a replay `number` is the recorded part, -1 for none.
        """
        self.gone(worker)
        if clock < self._start:
            return None
        self._at[worker] = max(self._at[worker], clock)
        if self._returned and self._returned[0].clock <= clock:  # a later one needs this worker's own steps first
            self._held[worker] = self._returned.pop(0)
            return self._held[worker]
        progress = self._progress.setdefault(clock, StepProgress(parts))
        number = (progress.next if progress.next < progress.parts else -1) if number is None else number
        if number < 0:
            self._at[worker] = clock + 1
            return None
        progress.next = max(progress.next, number + 1)
        self._held[worker] = WorkPart(clock, number)
        return self._held[worker]

    def done(self, worker: int, part: WorkPart, outcome: PartResult) -> None:
        """Record that a part is done and acknowledged by all servers concerned."""
        if self._held.get(worker) == part:
            del self._held[worker]
        if part in self._returned:
            self._returned.remove(part)
        if part.clock in self._progress:
            self._progress[part.clock].done.setdefault(part.number, outcome)

    def gone(self, worker: int) -> None:
        """Return the part of a worker; the earliest returned part is drawn first."""
        part = self._held.pop(worker, None)
        if part is not None:
            insort(self._returned, part)

    @property
    def returned(self) -> bool:
        """True if a part must be redone."""
        return bool(self._returned)

    def forget(self, clock: int) -> None:
        """Drop the steps before `clock`, except for the results of the last one."""
        self._progress = {at: progress for at, progress in self._progress.items() if at == clock - 1}
        self._start = clock

    def end(self) -> None:
        """End after the earliest step that no worker has left yet."""
        if self.last < 0:
            self.last = max(self._at)

    def outcome(self, clock: int) -> list[PartResult]:
        """Results of a step's parts, in order."""
        progress = self._progress.get(clock, StepProgress(0))
        return [progress.done[number] for number in sorted(progress.done)]


def joined(outcomes: list[PartResult]) -> tuple[float, int, float | None]:
    """Mean loss, number of targets, and mean norm over parts; NaN, 0 and None for no targets.

    >>> joined([PartResult(3.0, 2, 0.5, 0), PartResult(1.0, 2, 1.5, 1)])
    (1.0, 4, 1.0)
    """
    count = sum(outcome.targets for outcome in outcomes)
    if not count:
        return math.nan, 0, None
    loss = math.fsum(outcome.loss for outcome in outcomes) / count
    return loss, count, math.fsum(outcome.norm for outcome in outcomes) / len(outcomes)
