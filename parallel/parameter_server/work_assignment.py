"""Who does which part of a step: whoever is ready gets the next. Knows no MPI.

The parts of a step are its micro-batches. Workers draw them one by one, so a slow one gets less; what a worker held
that is gone goes to others.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple


class Part(NamedTuple):
    """A part of a step."""

    clock: int
    number: int


class Outcome(NamedTuple):
    """What a part came to: the sum of losses, the targets, the norm of its gradient per target, and who did it."""

    loss: float
    targets: int
    norm: float
    worker: int


@dataclass
class Course:
    """A step under way: the part that comes next, and what the others came to."""

    parts: int
    next: int = 0
    done: dict[int, Outcome] = field(default_factory=dict)


class Work:
    """The parts of all steps that are under way.

    Parameters
    ----------
    workers : int
    start : int
        The step that all begin with.

    Attributes
    ----------
    last : int
        The step after which all end; -1 if nobody wishes to.

    Examples
    --------
    >>> work = Work(2)
    >>> [work.draw(worker, clock=0, parts=3) for worker in (0, 1)]
    [Part(clock=0, number=0), Part(clock=0, number=1)]
    >>> work.done(1, Part(0, 1), Outcome(1.5, 4, 0.1, 1))
    >>> work.draw(1, clock=0, parts=3), work.draw(0, clock=0, parts=3)
    (Part(clock=0, number=2), Part(clock=0, number=0))
    """

    def __init__(self, workers: int, start: int = 0):
        self.last = -1
        self._start = start
        self._courses: dict[int, Course] = {}
        self._held: dict[int, Part] = {}
        self._returned: list[Part] = []
        self._at = [start] * workers

    def draw(self, worker: int, clock: int, parts: int, number: int | None = None) -> Part | None:
        """What a worker is to do; None if nothing is left of its step. One that holds a part gets it again.

        Parameters
        ----------
        number : int, optional
            Which part it must be, -1 for none: in a replay.
        """
        self.gone(worker)
        if clock < self._start:
            return None
        self._at[worker] = max(self._at[worker], clock)
        if self._returned and self._returned[0].clock <= clock:  # a later one needs this worker's own steps first
            self._held[worker] = self._returned.pop(0)
            return self._held[worker]
        course = self._courses.setdefault(clock, Course(parts))
        number = (course.next if course.next < course.parts else -1) if number is None else number
        if number < 0:
            self._at[worker] = clock + 1
            return None
        course.next = max(course.next, number + 1)
        self._held[worker] = Part(clock, number)
        return self._held[worker]

    def done(self, worker: int, part: Part, outcome: Outcome) -> None:
        """A part is done, and on all servers that it concerns."""
        if self._held.get(worker) == part:
            del self._held[worker]
        if part in self._returned:
            self._returned.remove(part)
        if part.clock in self._courses:
            self._courses[part.clock].done.setdefault(part.number, outcome)

    def gone(self, worker: int) -> None:
        """What a worker held goes to whoever draws next, the earliest first."""
        part = self._held.pop(worker, None)
        if part is not None:
            insort(self._returned, part)

    @property
    def returned(self) -> bool:
        """Whether a part waits to be done again."""
        return bool(self._returned)

    def forget(self, clock: int) -> None:
        """All parts of the steps before this one are done; what the last of them came to may still be asked for."""
        self._courses = {at: course for at, course in self._courses.items() if at == clock - 1}
        self._start = clock

    def end(self) -> None:
        """Somebody wishes to end: all do after the same step, the earliest that nobody has left yet."""
        if self.last < 0:
            self.last = max(self._at)

    def outcome(self, clock: int) -> list[Outcome]:
        """Of all parts of a step, in order."""
        course = self._courses.get(clock, Course(0))
        return [course.done[number] for number in sorted(course.done)]


def joined(outcomes: list[Outcome]) -> tuple[float, int, float | None]:
    """Mean loss, targets, and the mean norm over the parts; NaN, 0 and None of nothing.

    >>> joined([Outcome(3.0, 2, 0.5, 0), Outcome(1.0, 2, 1.5, 1)])
    (1.0, 4, 1.0)
    """
    count = sum(outcome.targets for outcome in outcomes)
    if not count:
        return math.nan, 0, None
    loss = math.fsum(outcome.loss for outcome in outcomes) / count
    return loss, count, math.fsum(outcome.norm for outcome in outcomes) / len(outcomes)
