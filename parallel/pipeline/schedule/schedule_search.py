"""`auto`: which schedule, micro-batches and cuts make a step shortest within a limit of memory, by simulation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from parallel.pipeline.schedule.numeric import Number
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.activation_memory import peaks
from parallel.pipeline.schedule.stage_partition import Layer, Limit, partition
from parallel.pipeline.schedule.stage_placement import Placement
from parallel.pipeline.schedule.pipeline_plan import Plan, build
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.simulator import Times, simulate

VIRTUAL = (2, 3, 4)
"""Chunks of a stage to try, for schedules that leave their number open."""


class Choice(NamedTuple):
    """A way to train, and what the simulator says of it.

    Attributes
    ----------
    schedule : str
    microbatches : int
    virtual : int, optional
        Chunks of a stage, where the schedule leaves it open.
    cuts : tuple of range
        The layers of every part.
    seconds : number
        Of a step.
    bubble : number
        The idle share.
    nbytes : tuple of number
        By stage: parameters, and activations at their peak.
    """

    schedule: str
    microbatches: int
    virtual: int | None
    cuts: tuple[range, ...]
    seconds: Number
    bubble: Number
    nbytes: tuple[Number, ...]


def search(
    layers: Callable[[int], Sequence[Layer]],
    stages: int,
    samples: int,
    limit: Number | None = None,
    *,
    message: Callable[[Number], Number] | None = None,
    microbatches: Iterable[int] | None = None,
    schedules: Sequence[str] | None = None,
) -> list[Choice]:
    """All ways to train that keep to the limit, the fastest first.

    Parameters
    ----------
    layers : callable (samples of a micro-batch) -> layers of the model
        What they take for one such micro-batch.
    stages : int
    samples : int
        Of a step.
    limit : number, optional
        Bytes that a stage may take, for parameters and activations.
    message : callable (bytes) -> seconds, optional
        What a message costs; nothing, if not given.
    microbatches : iterable of int, optional
        Numbers of micro-batches to try; all that divide `samples`, if not given.
    schedules : sequence of str, optional
        Names of `SCHEDULES` to try; all whose gradients are those of one rank, if not given.

    Returns
    -------
    list of Choice
        Of those that take as long, the one with the smaller peak comes first. The same on all ranks, if they say the
        same of the layers.

    Raises
    ------
    ValueError
        If the model has too few layers, or nothing keeps to the limit; it says what comes closest.
    """
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, found {samples}")
    if microbatches is None:
        microbatches = [number for number in range(1, samples + 1) if samples % number == 0]
    names = [name for name, entry in SCHEDULES.items() if entry.version is None] if schedules is None else schedules
    unknown = next((name for name in names if name not in SCHEDULES), None)
    if unknown is not None:
        raise ValueError(f"schedules: expected names out of {', '.join(SCHEDULES)}; found {unknown!r}")
    found: list[Choice] = []
    impossible: ValueError | None = None
    for number in microbatches:
        if number < 1 or samples % number:
            raise ValueError(f"microbatches: expected a divisor of {samples} samples, found {number}")
        costs = layers(samples // number)
        if len(costs) < stages:
            raise ValueError(f"layers: a model of {len(costs)} layers cannot be cut in {stages} parts")
        for name in names:
            try:
                found += _tried(name, stages, number, costs, limit, message)
            except ValueError as error:  # a schedule need not be there for every number of micro-batches
                impossible = error
    fitting = [choice for choice in found if limit is None or max(choice.nbytes) <= limit]
    if fitting:
        return sorted(fitting, key=lambda choice: (choice.seconds, max(choice.nbytes)))
    if not found:
        raise ValueError("no schedule was tried that the model has layers enough for") from impossible
    least = min(found, key=lambda choice: max(choice.nbytes))
    closest = f"{least.schedule} with {least.microbatches} micro-batches takes {max(least.nbytes)}"
    raise ValueError(f"limit: nothing keeps to {limit} bytes on a stage; {closest}")


def _tried(
    name: str,
    stages: int,
    microbatches: int,
    layers: Sequence[Layer],
    limit: Number | None,
    message: Callable[[Number], Number] | None,
) -> Iterator[Choice]:
    """A schedule with each number of chunks that there are layers for; if need be cut by memory as well as by time."""
    is_open = "virtual" in inspect.signature(SCHEDULES[name].actions).parameters
    for virtual in VIRTUAL if is_open else (None,):
        plan = build(name, stages, microbatches, virtual=virtual)
        if plan.placement.parts > len(layers):
            continue
        cuts = partition(layers, plan.placement.parts, message)
        nbytes = footprint(plan, layers, cuts)
        if limit is not None and max(nbytes) > limit:
            try:
                each = Limit(limit / plan.placement.chunks, _kept(plan))
                cuts = partition(layers, plan.placement.parts, message, each)
            except ValueError:  # what comes closest is still worth knowing
                pass
            nbytes = footprint(plan, layers, cuts)
        timeline = simulate(lower(plan), times(layers, cuts, message))
        seconds = timeline.makespan + (_exchange(plan, layers, cuts, message) if message else 0)
        yield Choice(name, microbatches, virtual, tuple(cuts), seconds, timeline.bubble, nbytes)


def times(layers: Sequence[Layer], cuts: Sequence[range], message: Callable[[Number], Number] | None = None) -> Times:
    """What the simulator is told of a model that is cut so."""
    F, B, W = (
        [sum(getattr(layers[at], what) for at in cut) for cut in cuts] for what in ("forward", "backward", "weights")
    )
    return Times(F, B, W, [message(layers[cut[-1]].output) for cut in cuts] if message else 0)


def footprint(plan: Plan, layers: Sequence[Layer], cuts: Sequence[range]) -> tuple[Number, ...]:
    """By stage: bytes of its parameters, and of its activations at their peak."""
    fixed = [sum(layers[at].parameters for at in cut) for cut in cuts]
    activations = peaks(plan, [sum(layers[at].activations for at in cut) for cut in cuts])
    return tuple(most + sum(fixed[part] for part in here) for most, here in zip(activations, parts_of(plan.placement)))


def parts_of(placement: Placement) -> list[list[int]]:
    """By stage: the numbers of its parts of the model, chunk by chunk."""
    return [
        [number for place, number in sorted(placement.part.items()) if place.stage == stage]
        for stage in range(placement.stages)
    ]


def _exchange(
    plan: Plan, layers: Sequence[Layer], cuts: Sequence[range], message: Callable[[Number], Number]
) -> Number:
    """Seconds to sum the gradients of parts that two stages have: a message each way for each of its parts."""
    if len(plan.placement.routes) == 1:
        return 0
    gradients = [sum(layers[at].gradients for at in cut) for cut in cuts]
    return max(sum(message(gradients[part]) for part in here) for here in parts_of(plan.placement))


def _kept(plan: Plan) -> list[Number]:
    """By part: the most micro-batches that it keeps at once."""
    parts = range(plan.placement.parts)
    return [max(peaks(plan, [int(part == this) for part in parts])) for this in parts]
