"""Search for the fastest layout of a model on a cluster: all candidates, by divisibility, then memory, then time.

Every rejected candidate keeps its reason.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from parallel.planning.analytic.layout import (
    NO_COMPRESSION,
    RECOMPUTE,
    ClusterLayout,
    accumulation,
    layer_ranges,
    misfits,
)
from parallel.planning.analytic.memory import stage_memory
from parallel.planning.analytic.states import WeightCount, part_weights, state_bytes
from parallel.planning.analytic.step_time import Setup, StepTime, balanced_layers, step_time
from parallel.planning.analytic.transformer import Transformer
from parallel.sharding.axis import REPLICAS, STAGES
from parallel.sharding.context.context_axis import CONTEXT
from parallel.sharding.tensor.tensor_axis import TENSOR

MICRO_BATCHES = (1, 2, 4, 8, 16)
PIPELINE_FORMS = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1))
"""Schedules, and parts of the model on a stage."""


class PlanChoice(NamedTuple):
    """Layout that fits, with peak bytes by kind of every stage, and the estimated step."""

    layout: ClusterLayout
    memory: list[Counter[str]]
    time: StepTime

    @property
    def nbytes(self) -> int:
        """Peak bytes of the stage that needs most."""
        return max(stage.total() for stage in self.memory)


class Rejection(NamedTuple):
    """Layout that was rejected: a kind of reason, the same for many, and the reason itself."""

    layout: ClusterLayout
    kind: str
    reason: str


class SearchResult(NamedTuple):
    """Choices, fastest first, and all rejected layouts."""

    choices: list[PlanChoice]
    rejected: list[Rejection]


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


TRIED: dict[str, Callable[[int], Sequence[int]]] = {
    TENSOR.name: divisors,
    CONTEXT.name: lambda devices: (1, 2, 4, 8),
    STAGES.name: divisors,
    REPLICAS.name: divisors,
}
"""Candidate numbers of ranks along an axis, by number of devices. Other axes have one rank, or the given number."""


def candidates(
    model: Transformer, setup: Setup, devices: int, fixed: Mapping[str, Any], compressions: Sequence[str] = ()
) -> Iterator[ClusterLayout]:
    """All layouts of `devices` devices, with the values of `fixed` by field. tp stays within a node.

    Replicas without ZeRO sum their gradients uncompressed and in each of `compressions`, or by `fixed`. Sequence
    parallelism is used with tp, ZeRO from stage 1 with replicas. Pipelines have equal numbers of layers and, where
    that is faster, fewer on the stage with the head. ValueError for an unknown field.
    """
    known = [each.name for each in fields(ClusterLayout)]
    if unknown := [name for name in fixed if name not in known]:
        raise ValueError(f"layout: expected fields out of {', '.join(known)}; found {unknown[0]!r}")
    experts = model.experts.count if model.experts else 1
    sums = [str(fixed.get("compress", each)) for each in (NO_COMPRESSION, *compressions)]
    names = list(dict.fromkeys((*TRIED, *ClusterLayout().mesh.sizes)))
    for counts in product(*(TRIED[name](devices) if name in TRIED else [fixed.get(name, 1)] for name in names)):
        sizes: dict[str, Any] = dict(zip(names, counts))
        tp, cp, pp = sizes["tp"], sizes["cp"], sizes["pp"]
        if prod(counts) != devices or (tp > setup.cluster.per_node and "tp" not in fixed):
            continue
        replicas = ClusterLayout(**sizes).replicas
        shares = [ep for ep in divisors(experts) if replicas % ep == 0]
        several = replicas > 1
        exchanges = [*((0, each) for each in dict.fromkeys(sums if several else [NO_COMPRESSION]))]
        exchanges += [(stage, NO_COMPRESSION) for stage in (1, 2, 3) if several]
        forms = PIPELINE_FORMS if pp > 1 else PIPELINE_FORMS[:1]
        levels = RECOMPUTE[1:] if cp > 1 else RECOMPUTE  # along cp scores are computed again in any case
        kinds = product(shares, exchanges, MICRO_BATCHES, levels, forms)
        for ep, (zero, compress), micro, recompute, (schedule, virtual) in kinds:
            options = {**sizes, "ep": ep, "zero": zero, "compress": compress, "micro_batch": micro}
            options |= {"recompute": recompute, "sequence": tp > 1, "virtual": virtual}
            options |= {"schedule": schedule, "layers": fixed.get("layers", ())}
            if any(options[name] != value for name, value in fixed.items()):
                continue
            layout = ClusterLayout(**options)
            yield layout
            divided = "layers" not in fixed and 1 < layout.parts <= model.layers
            if divided and (layers := balanced_layers(model, layout, setup)):
                yield replace(layout, layers=layers)


def judge(model: Transformer, layout: ClusterLayout, setup: Setup, sequences: int) -> PlanChoice | Rejection:
    """Memory and time of a layout, or why it is rejected: checked in the order of cost."""
    if found := next(misfits(model, layout, sequences), None):
        return Rejection(layout, "does not divide", found)
    weights = heaviest(model, layout)
    states = state_bytes(weights, setup.recipe, layout)
    if states.total() > setup.device.memory:
        return Rejection(layout, "weights, gradients and optimizer exceed the memory", too_much(states, setup))
    memory = stage_memory(model, layout, setup.recipe, accumulation(layout, sequences))
    largest = max(memory, key=Counter.total)
    if largest.total() > setup.device.memory:
        return Rejection(layout, "activations exceed the memory", too_much(largest, setup))
    return PlanChoice(layout, memory, step_time(model, layout, setup, sequences, weights))


def heaviest(model: Transformer, layout: ClusterLayout) -> WeightCount:
    """Parameters of a rank of the stage that has most."""
    ranges = layer_ranges(model, layout)
    stages = []
    for stage in range(layout.pp):
        parts = [part_weights(model, ranges[part], layout) for part in layout.parts_of(stage)]
        stages.append(WeightCount(*map(sum, zip(*parts))))
    return max(stages, key=sum)


def too_much(memory: Counter[str], setup: Setup) -> str:
    """Text: by how much, and of which kind there is most."""
    kind, most = memory.most_common(1)[0]
    over = memory.total() - setup.device.memory
    return f"{over / 1e9:.1f} GB over {setup.device.memory / 1e9:g} GB; {kind} {most / 1e9:.1f} GB"


def search(
    model: Transformer,
    setup: Setup,
    devices: int,
    sequences: int,
    fixed: Mapping[str, object] | None = None,
    compressions: Sequence[str] = (),
) -> SearchResult:
    """Judge all candidates. ValueError without devices or sequences, or for a precision that the device lacks."""
    if devices < 1 or sequences < 1:
        raise ValueError(f"expected at least 1 device and 1 sequence, found {devices} and {sequences}")
    setup.device.peak_of(setup.precision)
    layouts = candidates(model, setup, devices, fixed or {}, compressions)
    found = [judge(model, layout, setup, sequences) for layout in layouts]
    choices = [each for each in found if isinstance(each, PlanChoice)]
    choices.sort(key=lambda each: (each.time.total, each.nbytes))
    return SearchResult(choices, [each for each in found if isinstance(each, Rejection)])
