"""Division of operators, in order, into pipeline stages on parts of a cluster, by dynamic programming.

The time of a step of B micro-batches is the time of one through all stages, plus B - 1 times the slowest stage: T =
sum of t_i + (B - 1) max of t_i (Zheng et al., "Alpa", OSDI 2022, section 5). For every candidate of the slowest
stage's time, F(s, k, d) is the least sum of s stages that hold the operators from k on with d devices. `exhaustive` is
the reference.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import inf
from typing import NamedTuple


class Stage(NamedTuple):
    """Operators `start` .. `stop` - 1 on a number of devices."""

    start: int
    stop: int
    devices: int


class StagePlan(NamedTuple):
    """Stages and seconds of a step."""

    stages: tuple[Stage, ...]
    seconds: float


StageSeconds = Callable[[Stage, int], float]
"""Seconds of a micro-batch on a stage. The number counts stages from it to the end, itself included.

Infinite if impossible.
"""


def total_seconds(stages: Sequence[Stage], seconds: StageSeconds, microbatches: int) -> float:
    """Seconds of a step of `microbatches` micro-batches."""
    times = [seconds(stage, len(stages) - at) for at, stage in enumerate(stages)]
    slowest = max(times)
    return sum(times) + (microbatches - 1) * slowest if slowest < inf else inf


def _divisions(operators: int, devices: int, sizes: Sequence[int], start: int = 0) -> Iterator[tuple[Stage, ...]]:
    """Yield all ways to hold the operators from `start` on with exactly `devices` devices."""
    if start == operators and not devices:
        yield ()
    for stop in range(start + 1, operators + 1):
        for size in sizes:
            if size <= devices:
                for others in _divisions(operators, devices - size, sizes, stop):
                    yield (Stage(start, stop, size), *others)


def exhaustive(
    operators: int, devices: int, sizes: Sequence[int], seconds: StageSeconds, microbatches: int, count: int = 0
) -> StagePlan | None:
    """As `best_stages`, by trying all divisions. For few operators and devices."""
    plans = [
        StagePlan(stages, total_seconds(stages, seconds, microbatches))
        for stages in _divisions(operators, devices, sizes)
        if len(stages) == (count or len(stages))
    ]
    best = min(plans, key=lambda plan: plan.seconds, default=None)
    return best if best and best.seconds < inf else None


def best_stages(
    operators: int, devices: int, sizes: Sequence[int], seconds: StageSeconds, microbatches: int, count: int = 0
) -> StagePlan | None:
    """Fastest division of operators 0 .. `operators` - 1 into stages on exactly `devices` devices.

    Parameters
    ----------
    sizes : sequence of int
        Numbers of devices that a stage may have.
    seconds : callable
    microbatches, count : int
        Micro-batches of a step. Number of stages, or 0 for the fastest.

    Returns
    -------
    StagePlan or None
        None if every division is impossible.
    """
    most = min(operators, devices // min(sizes))
    counts = range(count, count + 1) if 0 < count <= most else range(1, 1 if count else most + 1)
    cuts = [(start, stop) for start in range(operators) for stop in range(start + 1, operators + 1)]
    times = {
        (stage, left): seconds(stage, left)
        for start, stop in cuts
        for stage in (Stage(start, stop, size) for size in sizes if size <= devices)
        for left in range(1, min(most, operators - start) + 1)
    }
    best: StagePlan | None = None
    for slowest in sorted({time for time in times.values() if time < inf}):
        if best and microbatches * slowest >= best.seconds:  # a sum is at least its largest term
            break
        found = _least_sum(operators, devices, sizes, times, slowest, counts)
        if found and (best is None or found.seconds + (microbatches - 1) * slowest < best.seconds):
            plan = total_seconds(found.stages, lambda stage, left: times[stage, left], microbatches)
            best = StagePlan(found.stages, plan)
    return best


def _least_sum(
    operators: int,
    devices: int,
    sizes: Sequence[int],
    times: dict[tuple[Stage, int], float],
    slowest: float,
    counts: range,
) -> StagePlan | None:
    """Division of least sum among those without a stage slower than `slowest`."""

    @cache
    def least(start: int, left: int, free: int) -> StagePlan:
        if not left:
            return StagePlan((), 0.0 if start == operators and not free else inf)
        best = StagePlan((), inf)
        for stop in range(start + 1, operators - left + 2):
            for size in sizes:
                stage = Stage(start, stop, size)
                # slower stages belong to another candidate of the slowest time
                if size > free or times[stage, left] > slowest:
                    continue
                others = least(stop, left - 1, free - size)
                if times[stage, left] + others.seconds < best.seconds:
                    best = StagePlan((stage, *others.stages), times[stage, left] + others.seconds)
        return best

    found = min((least(0, count, devices) for count in counts), key=lambda plan: plan.seconds, default=None)
    return found if found and found.seconds < inf else None
