"""Memory of every pipeline stage of a layout, by kind, and over the time of a step."""

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from parallel.pipeline.schedule.activation_memory import peaks
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.schedule.simulator import ActionTimes, simulate
from parallel.pipeline.schedule.stage_placement import Number
from parallel.planning.analytic.activations import embedding_bytes, head_bytes, layer_bytes, recomputed_bytes
from parallel.planning.analytic.layout import ClusterLayout, layer_ranges
from parallel.planning.analytic.states import (
    RESIDUAL,
    STATE_KINDS,
    StateRecipe,
    WeightCount,
    layer_weights,
    part_weights,
    state_bytes,
)
from parallel.planning.analytic.transformer import Transformer

MEMORY_KINDS = (*STATE_KINDS, RESIDUAL, "activations", "recomputed", "gathered")
"""Kinds of memory. recomputed: of the layer whose backward runs. gathered: whole weights of two layers in ZeRO-3."""

ROUNDS_OF_STAGES = 4
"""Number of micro-batches, in multiples of the stages, beyond which the number alive on a stage no longer grows."""


@lru_cache(maxsize=512)
def plan_of(schedule: str, stages: int, microbatches: int, virtual: int) -> PipelinePlan:
    """Plan of a pipeline, for at most a few rounds of micro-batches: memory does not grow further, but for gpipe's."""
    most = ROUNDS_OF_STAGES * stages
    if schedule != "gpipe" and microbatches > most:
        microbatches = most + microbatches % stages
    return build(schedule, stages, microbatches, virtual=virtual if virtual > 1 else None)


@lru_cache(maxsize=4096)
def alive_at_most(
    schedule: str, stages: int, microbatches: int, virtual: int, held: tuple[int, ...]
) -> tuple[Number, ...]:
    """Peak by stage of the memory of micro-batches that are alive. `held`: memory of one in each part of the model."""
    return peaks(plan_of(schedule, stages, microbatches, virtual), held)


def peak_activations(model: Transformer, layout: ClusterLayout, microbatches: int) -> list[int]:
    """Peak bytes of saved activations by stage.

    The peaks of each kind of layer, of the embedding and of the head are added. They need not coincide where a stage
    has several parts.
    """
    form = layout.schedule, layout.pp, microbatches, layout.virtual
    ranges = layer_ranges(model, layout)
    found = [0] * layout.pp
    for kind, _ in model.kinds():
        sparse = model.is_sparse(kind)
        held = tuple(
            sum(count for layer, count in model.kinds(layers) if model.is_sparse(layer) == sparse) for layers in ranges
        )
        nbytes = layer_bytes(model, kind, layout)
        found = [before + int(alive) * nbytes for before, alive in zip(found, alive_at_most(*form, held))]
    for place, nbytes in ((0, embedding_bytes(model, layout)), (layout.parts - 1, head_bytes(model, layout))):
        if nbytes:
            alive = alive_at_most(*form, tuple(int(part == place) for part in range(layout.parts)))
            found = [before + int(each) * nbytes for before, each in zip(found, alive)]
    return found


def stage_memory(
    model: Transformer, layout: ClusterLayout, recipe: StateRecipe, microbatches: int
) -> list[Counter[str]]:
    """Peak bytes by kind of a rank of every pipeline stage, for a step of `microbatches` per replica.

    Not included: buffers of messages, memory of libraries, and what an allocator loses.
    """
    plan = plan_of(layout.schedule, layout.pp, microbatches, layout.virtual)
    ranges = layer_ranges(model, layout)
    stages = []
    for stage, alive in enumerate(peak_activations(model, layout, microbatches)):
        parts = [number for place, number in plan.placement.part.items() if place.stage == stage]
        weights = WeightCount(*map(sum, zip(*(part_weights(model, ranges[part], layout) for part in parts))))
        memory = state_bytes(weights, recipe, layout)
        layers = [layer for part in parts for layer, _ in model.kinds(ranges[part])]
        memory["activations"] = alive
        # layers are recomputed one at a time
        memory["recomputed"] = max((recomputed_bytes(model, layer, layout) for layer in layers), default=0)
        if layout.zero == 3:
            largest = max(
                (sum(layer_weights(model, model.is_sparse(layer), layout.tp, layout.ep)) for layer in layers), default=0
            )
            memory["gathered"] = 2 * recipe.weights * largest  # the next layer is gathered while one computes
        stages.append(memory)
    return stages


class MemoryChange(NamedTuple):
    """Bytes of saved and recomputed activations of a stage from a time on, in the unit of the simulation."""

    time: Number
    saved: int
    recomputed: int


def over_time(model: Transformer, layout: ClusterLayout, microbatches: int, stage: int) -> list[MemoryChange]:
    """Activations of a stage over a step, layer by layer. A layer's forward takes 1 unit, its backward 2.

    The embedding counts to the first layer, the head to the last one.
    """
    plan, ranges = lower(plan_of(layout.schedule, layout.pp, microbatches, layout.virtual)), layer_ranges(model, layout)
    held = [layer_bytes(model, layer, layout) for layer in range(model.layers)]
    held[0] += embedding_bytes(model, layout)
    held[-1] += head_bytes(model, layout)
    counts = [len(each) for each in ranges]
    saved, changes = 0, [MemoryChange(0, 0, 0)]
    for action, start, end in simulate(plan, ActionTimes(counts, counts, counts)).computed[stage]:
        layers = ranges[plan.placement.part[action.place]]
        unit = (end - start) // len(layers)
        for begin, layer in zip(range(int(start), int(end), int(unit)), layers if action.kind == "F" else layers[::-1]):
            if action.kind == "F":
                saved += held[layer]
                changes.append(MemoryChange(begin, saved, 0))
                continue
            again = 0 if action.kind == "W" else recomputed_bytes(model, layer, layout)
            changes.append(MemoryChange(begin, saved, again))
            saved -= 0 if action.kind == "B" else held[layer]  # after B, its W needs them still
            changes.append(MemoryChange(begin + unit, saved, 0))
    return changes
