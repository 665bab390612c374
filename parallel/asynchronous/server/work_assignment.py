"""Assignment of a step's parts (micro-batches) to workers, on request. No MPI.

Workers draw parts one by one, so slow workers get fewer. The part of a dead worker is drawn again by another.
"""

import math
from bisect import insort
from typing import NamedTuple

from parallel.engine.operator_records import PartRecords, StepRecords, step_records


class WorkPart(NamedTuple):
    """One part (micro-batch) of a step: `number` of step `clock`."""

    clock: int
    number: int


class PartResult(NamedTuple):
    """Result of a micro-batch: sum of losses, targets, gradient norm per target (0 if synchronous), worker's number.

    `records` are packed loss terms and counts of operators (`PartRecords.packed`).
    """

    loss: float
    targets: float
    norm: float
    worker: int
    records: bytes = b""


class RankStep(NamedTuple):
    """Result of a step on one rank: mean loss, targets, gradient norm and records of operators.

    `last` is True if the training ends with it.

    Rank 0 has the result of all workers, a worker of its own micro-batches, other servers of none. If asynchronous,
    the norm is a mean over micro-batches. Otherwise it is the step's, and None on workers.
    """

    loss: float
    targets: float
    norm: float | None
    last: bool
    records: StepRecords


class WorkAssignment:
    """Assignment of the micro-batches of all steps in progress. `last` is the training's last step, -1 if not set."""

    def __init__(self, workers: int, start: int = 0):
        self.last = -1
        self._start = start
        self._next: dict[int, int] = {}  # part to draw, by step
        self._done: dict[int, dict[int, PartResult]] = {}  # by step and part
        self._held: dict[int, WorkPart] = {}
        self.returned: list[WorkPart] = []  # to be done again, ascending
        self._at = [start] * workers

    def draw(self, worker: int, clock: int, parts: int) -> WorkPart | None:
        """Assign a worker the earliest micro-batch to be redone, or the next of step `clock`. None if none is left.

        A part that the worker has not finished must be redone.
        """
        self.gone(worker)
        if clock < self._start:
            return None
        self._at[worker] = max(self._at[worker], clock)
        if self.returned and self.returned[0].clock <= clock:  # a later one needs this worker's own steps first
            self._held[worker] = self.returned.pop(0)
            return self._held[worker]
        following = self._next.get(clock, 0)
        if following >= parts:
            self._at[worker] = clock + 1
            return None
        self._next[clock] = following + 1
        self._held[worker] = WorkPart(clock, following)
        return self._held[worker]

    def done(self, worker: int, part: WorkPart, outcome: PartResult) -> None:
        """Record the result of a micro-batch whose gradient all servers have acknowledged."""
        if self._held.get(worker) == part:
            del self._held[worker]
        if part in self.returned:
            self.returned.remove(part)
        if part.clock >= self._start - 1:
            self._done.setdefault(part.clock, {}).setdefault(part.number, outcome)

    def gone(self, worker: int) -> None:
        """Put back a worker's unfinished micro-batch, if any. The earliest one put back is assigned first."""
        if (part := self._held.pop(worker, None)) is not None:
            insort(self.returned, part)

    def forget(self, clock: int) -> None:
        """Drop all results except the results of step ``clock - 1``.

        A `draw` for a step before `clock` then returns None.
        """
        self._next, self._done = {}, {clock - 1: self._done.get(clock - 1, {})}
        self._start = clock

    def end(self) -> None:
        if self.last < 0:
            self.last = max(self._at)

    def outcome(self, clock: int) -> list[PartResult]:
        return [outcome for _, outcome in sorted(self._done.get(clock, {}).items())]


def joined(outcomes: list[PartResult], last: bool) -> RankStep:
    """Result of a step from the results of its micro-batches, with their mean gradient norm.

    No norm without targets.
    """
    count = math.fsum(outcome.targets for outcome in outcomes)
    records = step_records([PartRecords.unpacked(outcome.records) for outcome in outcomes], count)
    if not count:
        return RankStep(math.nan, 0, None, last, records)
    loss = math.fsum(outcome.loss for outcome in outcomes) / count
    norm = math.fsum(outcome.norm for outcome in outcomes) / len(outcomes)
    return RankStep(loss, count, norm, last, records)
