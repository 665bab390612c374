"""Search for the schedule, number of microbatches and cuts with the shortest simulated step within a memory limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from parallel.pipeline.schedule.activation_memory import peaks
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.numeric import Number
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.simulator import ActionTimes, simulate
from parallel.pipeline.schedule.stage_partition import LayerCost, MemoryLimit, partition
from parallel.pipeline.schedule.stage_placement import StagePlacement

VIRTUAL = (2, 3, 4)
"""Numbers of chunks to try, for schedules that leave it open."""


class PipelineChoice(NamedTuple):
    """One configuration and its simulated cost.

    Attributes
    ----------
    virtual : chunks of a stage, where the schedule leaves it open
    cuts : layers of every part
    seconds, bubble : duration of a step, and idle share
    nbytes : bytes of parameters and peak activations, by stage
    """

    schedule: str
    microbatches: int
    virtual: int | None
    cuts: tuple[range, ...]
    seconds: Number
    bubble: Number
    nbytes: tuple[Number, ...]


def search(
    layers: Callable[[int], Sequence[LayerCost]],
    stages: int,
    samples: int,
    limit: Number | None = None,
    *,
    message: Callable[[Number], Number] | None = None,
    microbatches: Iterable[int] | None = None,
    schedules: Sequence[str] | None = None,
) -> list[PipelineChoice]:
    """Find all configurations within the memory limit, fastest first (then least peak memory).

    Parameters
    ----------
    layers : callable (samples of a microbatch) -> sequence of LayerCost
    stages, samples : int
        Ranks along the pipeline; samples of a step.
    limit : number, optional
        Bytes of parameters and activations that a stage may use.
    message : callable (bytes) -> seconds, optional
        Cost of a message; default 0.
    microbatches : iterable of int, optional
        Numbers of microbatches to try; by default all divisors of `samples`.
    schedules : sequence of str, optional
        Names to try; by default all schedules with a flush.

    Raises
    ------
    ValueError
        If the model has too few layers, or no configuration keeps the limit; the message names the closest one.
    """
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, found {samples}")
    if microbatches is None:
        microbatches = [number for number in range(1, samples + 1) if samples % number == 0]
    names = [name for name, entry in SCHEDULES.items() if entry.version is None] if schedules is None else schedules
    unknown = next((name for name in names if name not in SCHEDULES), None)
    if unknown is not None:
        raise ValueError(f"schedules: expected names out of {', '.join(SCHEDULES)}; found {unknown!r}")
    found: list[PipelineChoice] = []
    impossible: ValueError | None = None
    for number in microbatches:
        if number < 1 or samples % number:
            raise ValueError(f"microbatches: expected a divisor of {samples} samples, found {number}")
        costs = layers(samples // number)
        if len(costs) < stages:
            raise ValueError(f"layers: a model of {len(costs)} layers cannot be cut in {stages} parts")
        for name in names:
            try:
                found += _choices(name, stages, number, costs, limit, message)
            except ValueError as error:  # the schedule may not support this number of microbatches
                impossible = error
    fitting = [choice for choice in found if limit is None or max(choice.nbytes) <= limit]
    if fitting:
        return sorted(fitting, key=lambda choice: (choice.seconds, max(choice.nbytes)))
    if not found:
        raise ValueError("the model has too few layers for all schedules") from impossible
    least = min(found, key=lambda choice: max(choice.nbytes))
    closest = f"{least.schedule} with {least.microbatches} micro-batches takes {max(least.nbytes)}"
    raise ValueError(f"limit: no schedule keeps {limit} bytes on a stage; {closest}")


def _choices(
    name: str,
    stages: int,
    microbatches: int,
    layers: Sequence[LayerCost],
    limit: Number | None,
    message: Callable[[Number], Number] | None,
) -> Iterator[PipelineChoice]:
    """Choices of one schedule, for each number of chunks; cut by memory where the fastest cuts exceed the limit."""
    has_virtual = "virtual" in inspect.signature(SCHEDULES[name].actions).parameters
    for virtual in VIRTUAL if has_virtual else (None,):
        plan = build(name, stages, microbatches, virtual=virtual)
        if plan.placement.parts > len(layers):
            continue
        cuts = partition(layers, plan.placement.parts, message)
        nbytes = footprint(plan, layers, cuts)
        if limit is not None and max(nbytes) > limit:
            try:
                each = MemoryLimit(limit / plan.placement.chunks, _microbatches_alive(plan))
                cuts = partition(layers, plan.placement.parts, message, each)
            except ValueError:  # keep the fastest cuts, for the error message
                pass
            nbytes = footprint(plan, layers, cuts)
        timeline = simulate(lower(plan), times(layers, cuts, message))
        seconds = timeline.makespan + (_exchange_seconds(plan, layers, cuts, message) if message else 0)
        yield PipelineChoice(name, microbatches, virtual, tuple(cuts), seconds, timeline.bubble, nbytes)


def times(
    layers: Sequence[LayerCost], cuts: Sequence[range], message: Callable[[Number], Number] | None = None
) -> ActionTimes:
    """Durations of the parts of a model with these cuts, for the simulator."""
    F, B, W = (_sums(layers, cuts, what) for what in ("forward", "backward", "weights"))
    return ActionTimes(F, B, W, [message(layers[cut[-1]].output) for cut in cuts] if message else 0)


def _sums(layers: Sequence[LayerCost], cuts: Sequence[range], what: str) -> list[Number]:
    """Sum of a field of `LayerCost`, by part."""
    return [sum(getattr(layers[at], what) for at in cut) for cut in cuts]


def footprint(plan: PipelinePlan, layers: Sequence[LayerCost], cuts: Sequence[range]) -> tuple[Number, ...]:
    """Bytes of parameters and peak activations, by stage."""
    fixed, activations = _sums(layers, cuts, "parameters"), peaks(plan, _sums(layers, cuts, "activations"))
    return tuple(most + sum(fixed[part] for part in here) for most, here in zip(activations, parts_of(plan.placement)))


def parts_of(placement: StagePlacement) -> list[list[int]]:
    return [
        [number for place, number in sorted(placement.part.items()) if place.stage == stage]
        for stage in range(placement.stages)
    ]


def _exchange_seconds(
    plan: PipelinePlan, layers: Sequence[LayerCost], cuts: Sequence[range], message: Callable[[Number], Number]
) -> Number:
    """Seconds for summing gradients of parts that two stages have: one message each way per part."""
    if len(plan.placement.routes) == 1:
        return 0
    gradients = _sums(layers, cuts, "gradients")
    return max(sum(message(gradients[part]) for part in here) for here in parts_of(plan.placement))


def _microbatches_alive(plan: PipelinePlan) -> list[Number]:
    """Most microbatches alive at once, by part."""
    parts = range(plan.placement.parts)
    return [max(peaks(plan, [int(part == this) for part in parts])) for this in parts]
