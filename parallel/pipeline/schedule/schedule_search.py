"""Search for the schedule, number of micro-batches and cuts with the shortest simulated step within a memory limit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from parallel.pipeline.schedule.activation_memory import peaks
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.pipeline.schedule.simulator import ActionTimes, simulate
from parallel.pipeline.schedule.stage_partition import LayerCost, MemoryLimit, partition
from parallel.pipeline.schedule.stage_placement import Number

VIRTUAL = (2, 3, 4)
"""Numbers of chunks to try, for schedules that leave it open."""


class PipelineChoice(NamedTuple):
    """One configuration (schedule, micro-batches, chunks, cuts) with its simulated time and memory."""

    schedule: str
    microbatches: int
    virtual: int | None  # chunks of a stage, where the schedule leaves it open
    cuts: list[range]  # layers of every part
    seconds: Number  # of a step
    nbytes: tuple[Number, ...]  # of parameters and peak activations, by stage


def search(
    layers: Callable[[int], Sequence[LayerCost]],
    stages: int,
    samples: int,
    limit: Number | None = None,
    *,
    microbatches: Iterable[int] | None = None,
) -> list[PipelineChoice]:
    """Configurations of synchronous schedules within the memory limit, fastest first (messages take no time).

    Equally fast ones are in order of peak memory.

    Parameters
    ----------
    layers : (samples of a micro-batch) -> costs
    stages, samples : ranks along the pipeline; samples of a step
    limit : bytes of parameters and activations that a stage may use
    microbatches : numbers of micro-batches to try; by default all divisors of `samples`

    Raises
    ------
    ValueError
        If the model has too few layers, or no configuration keeps the limit; the message names the closest one.
    """
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, found {samples}")
    if microbatches is None:
        microbatches = [number for number in range(1, samples + 1) if samples % number == 0]
    found: list[PipelineChoice] = []
    impossible: ValueError | None = None
    for number in microbatches:
        if number < 1 or samples % number:
            raise ValueError(f"microbatches: expected a divisor of {samples} samples, found {number}")
        costs = layers(samples // number)
        if len(costs) < stages:
            raise ValueError(f"layers: a model of {len(costs)} layers cannot be cut in {stages} parts")
        for name, entry in SCHEDULES.items():
            try:
                found += _choices(name, stages, number, costs, limit) if entry.version is None else ()
            except ValueError as error:  # the schedule may not support this number of micro-batches
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
    name: str, stages: int, microbatches: int, layers: Sequence[LayerCost], limit: Number | None
) -> Iterator[PipelineChoice]:
    """Configurations of schedule `name`, one per number of chunks. Some may exceed `limit`.

    The fastest cuts are tried first; if they exceed it, the fastest that give each chunk of a stage an equal share.
    """
    for virtual in VIRTUAL if "virtual" in SCHEDULES[name].options else (None,):
        plan = build(name, stages, microbatches, virtual=virtual)
        parts = plan.placement.parts
        if parts > len(layers):
            continue
        cuts = partition(layers, parts)
        nbytes = _footprint(plan, layers, cuts)
        if limit is not None and max(nbytes) > limit:
            alive = [max(peaks(plan, [int(part == this) for part in range(parts)])) for this in range(parts)]
            with suppress(ValueError):  # keep the fastest cuts, for the error message
                cuts = partition(layers, parts, MemoryLimit(limit / plan.placement.chunks, alive))
            nbytes = _footprint(plan, layers, cuts)
        forward, backward, weights = (_sums(layers, cuts, what) for what in ("forward", "backward", "weights"))
        times = ActionTimes(forward, backward, weights)
        seconds = simulate(lower(plan), times).makespan
        yield PipelineChoice(name, microbatches, virtual, cuts, seconds, nbytes)


def _sums(layers: Sequence[LayerCost], cuts: Sequence[range], what: str) -> list[Number]:
    return [sum(getattr(layers[at], what) for at in cut) for cut in cuts]


def _footprint(plan: PipelinePlan, layers: Sequence[LayerCost], cuts: Sequence[range]) -> tuple[Number, ...]:
    total = list(peaks(plan, _sums(layers, cuts, "activations")))
    fixed = _sums(layers, cuts, "parameters")
    for place, part in plan.placement.part.items():
        total[place.stage] += fixed[part]
    return tuple(total)
