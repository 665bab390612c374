"""Random compositions of model, mesh and settings."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from conformance.composition import ROUTERS, Composition
from parallel.engine.data_parallel.layouts import LAYOUTS as DATA_PARALLEL
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.sharding.context.ulysses_attention import refusal
from parallel.sharding.mesh import Mesh

LAYOUTS = ("dp", "dp-naive", "dp-bucket", "zero1", "zero2", "zero3")
REPLICAS = ("dp", "dp", "zero1", "zero2", "zero3")
PIPELINES = tuple(name for name, entry in SCHEDULES.items() if entry.version is None)
CONTEXTS = ("auto", "ring", "ring", "allgather", "ulysses")
COMPRESSIONS = ("int8", "int4", "sign", "topk:0.1", "powersgd:1")
SIZES = (1, 1, 1, 2, 2, 3, 4)
"""Sizes of an axis; those that come up more often stand here more often, as in the other tables."""


class Logical(NamedTuple):
    """Numbers that all meshes of a composition share.

    Logical shards, parts of experts in them (None: as a mesh needs), parts of sequences, units and micro-batches.
    """

    shards: int
    slices: int | None
    parts: int
    units: int
    microbatches: int
    reproducible: bool


def draw(seed: int, most_ranks: int) -> Composition:
    """Composition number `seed`, of at most so many ranks; four of ten are pipelines."""
    random = Random(seed)
    mixed = random.random() < 0.3
    sizes = _sizes(random, most_ranks, pipelines=random.random() < 0.4, whole=mixed and random.random() < 0.5)
    family = "gpt" if mixed else random.choice(["gpt", "gpt", "gated"] + ["mlp"] * 3 * (sizes["cp"] == 1))
    reproducible = random.random() < 0.6 and not any(size & (size - 1) for size in (sizes["cp"], sizes["tp"]))
    reproducible &= not mixed or sizes["cp"] == 1  # on divided sequences, mixtures do not have the bits of one rank
    shards, parts = (size * random.choice([1, 2]) * reproducible or size for size in (sizes["tp"], sizes["cp"]))
    parts = sizes["cp"] if mixed or family == "mlp" else parts
    layout = f"pp:{random.choice(PIPELINES)}" if "pp" in sizes else random.choice(LAYOUTS)
    layers = max(random.choice([1, 2, 3]), parts_of(layout, sizes.get("pp", 1)) - (1 if family == "mlp" else 2))
    sequence = family != "mlp" and not mixed and shards > 1 and random.random() < 0.5
    microbatches = random.choice([1, 2, 3, 5]) * (sizes["dp"] if "pp" in sizes else 1)  # as many in each pipeline
    folds, slices = _folds(random, sizes, shards // sizes["tp"], None) if mixed else ((1, 1), 1)
    units = layers + (1 if family == "mlp" else 2)
    logical = Logical(shards, slices if reproducible else None, parts, units, microbatches, reproducible)
    next_mesh, next_layout = (
        ("", "dp") if random.random() < 0.5 else _second(random, math.prod(sizes.values()), logical, mixed)
    )
    length = shards * parts * random.choice([1, 2, 3]) if sequence else random.choice([parts, 3, 5, 8, 13])
    heads = max(1, shards * random.choice([1, 1, 2]) + random.choice([0, 0, 1, -1]))
    mixtures = _mixtures(random, layers, reproducible) if mixed else {}
    kv_heads = random.choice([one for one in range(1, heads + 1) if heads % one == 0]) if family == "gated" else 0
    composition = Composition(
        family=family,
        vocabulary=max(shards, 2) + random.randrange(20),
        length=length,
        layers=layers,
        heads=heads,
        head_width=random.choice([1, 2, 3]) + (family == "mlp"),
        kv_heads=kv_heads,
        dropout=random.random() < 0.5,
        recompute=_recompute(random, family, layers),
        **mixtures,
        mesh=_mesh(random, sizes, layout, folds),
        layout=layout,
        cuts=_cuts(random, logical.units, parts_of(layout, sizes["pp"])) if "pp" in sizes else "",
        next_mesh=next_mesh,
        next_layout=next_layout,
        shards=shards,
        slices=slices if reproducible else 1,
        parts=parts,
        sequence=sequence,
        precision=random.choice(["fp32", "bf16", "fp16", "fp64"]) if reproducible else "fp64",
        optimizer=random.choice(["sgd", "adamw"]),
        clip=random.random() < 0.5,
        reproducible=reproducible,
        context=_context(random, sizes, heads, kv_heads, reproducible),
        bucket_bytes=random.choice([1, 1000, 1 << 22]),
        microbatches=microbatches,
        samples=random.choice([1, 2, 3]),
        ignored=random.random() < 0.5,
        smoothing=family != "mlp" and random.random() < 0.3,
        steps=random.choice([1, 2]),
        seed=seed,
    )
    if not reproducible and not mixed:
        composition = _compressed(random, composition)
    return _with_depths(random, composition)


def _with_depths(random: Random, composition: Composition) -> Composition:
    """The composition; now and then with blocks for some tokens, which are not computed part by part of a sequence."""
    whole = composition.parts == 1 or not composition.reproducible
    plain = composition.family == "gpt" and not composition.experts and composition.compress == "none"
    return replace(composition, depths=random.choice([0, 0, 0, 0.2, 0.6])) if whole and plain else composition


def _compressed(random: Random, composition: Composition) -> Composition:
    """The composition; half of the time with compressed gradients, if replicas have the whole sums.

    Stages without replicas have no place for what remains to be sent by another mesh.
    """
    meshes = [(composition.mesh, composition.layout), (composition.next_mesh, composition.next_layout)]
    layouts = [Mesh.parse(mesh).replicas if layout.startswith("pp") else layout for mesh, layout in meshes if mesh]
    alone = composition.next_layout.startswith("pp") and Mesh.parse(composition.next_mesh).summed.size == 1
    if random.random() < 0.5 or alone or any(DATA_PARALLEL[layout].divided for layout in layouts):
        return composition
    return replace(composition, compress=random.choice(COMPRESSIONS), precision="fp32")


def _sizes(random: Random, most: int, pipelines: bool, whole: bool) -> dict[str, int]:
    """Sizes of the axes, whose product is at most `most`, and above 1 if possible; with `whole` sequences cp=1."""
    axes = ["dp", "cp", "tp"] + ["pp"] * pipelines
    while most > 1:
        sizes = {name: random.choice(SIZES) for name in axes} | ({"cp": 1} if whole else {})
        if 1 < math.prod(sizes.values()) <= most:
            return sizes
    return dict.fromkeys(axes, 1)


def parts_of(layout: str, stages: int) -> int:
    """Parts of the model in a pipeline of so many stages; 1 for other layouts.

    >>> parts_of("pp:zb-v", 3), parts_of("zero1", 1)
    (6, 1)
    """
    name = layout.partition(":")[2]
    return build(name, stages, 1).placement.parts if name else 1


def _cuts(random: Random, units: int, parts: int) -> str:
    """Cuts of the units in parts of any lengths from 1 on."""
    if random.random() < 0.5:
        return ""
    return ",".join(map(str, [0, *sorted(random.sample(range(1, units), parts - 1)), units]))


def _recompute(random: Random, family: str, layers: int) -> str:
    """Recomputation of all blocks alike, or of each by itself."""
    kinds = ["none", "full"] if family == "mlp" else ["none", "selective", "full"]
    if family == "mlp" or random.random() < 0.7:
        return random.choice(["none", *kinds])
    return ",".join(random.choice(kinds) for _ in range(layers))


def _context(random: Random, sizes: dict[str, int], heads: int, kv_heads: int, reproducible: bool) -> str:
    """Attention over divided sequences; that by heads needs heads that the ranks divide."""
    context, ranks = random.choice(CONTEXTS), sizes["cp"]
    if reproducible or ranks == 1:
        return "auto"
    groups, tensor = kv_heads or heads, sizes["tp"]
    uneven = heads % tensor or max(groups, tensor) % min(groups, tensor)
    cut = uneven or refusal(heads // tensor, max(groups // tensor, 1), ranks)
    return "auto" if context == "ulysses" and cut else context


def _mesh(random: Random, sizes: dict[str, int], layout: str, folds: tuple[int, int]) -> str:
    """Mesh of axes in any order; those of one rank may be left out. `folds` are ep and etp."""
    kept = [name for name, size in sizes.items() if size > 1 or name == "pp" or random.random() < 0.3] or ["dp"]
    random.shuffle(kept)
    names = {name: name for name in kept}
    if layout.startswith("pp") and "dp" in names:
        names["dp"] = random.choice(REPLICAS)
    return str(Mesh({names[name]: sizes[name] for name in kept}, *folds))


def _folds(random: Random, sizes: dict[str, int], each: int, slices: int | None) -> tuple[tuple[int, int], int]:
    """Sizes of ep and etp on a mesh whose ranks have `each` logical shards, and the parts of experts (`slices`)."""
    tensor, replicas = sizes["tp"], sizes["dp"] * sizes["cp"]
    fits = [
        ((tensor // etp * share, etp), parts)
        for etp in _divisors(tensor)
        for share in _divisors(replicas)
        for parts in ([etp * each] if etp > 1 else _divisors(each))
    ]
    fits += [((1, 1), parts) for parts in (_divisors(each) if tensor == 1 else [1])]
    return random.choice([one for one in fits if slices in (None, one[1])])


def _mixtures(random: Random, layers: int, reproducible: bool) -> dict[str, Any]:
    """Mixtures of experts, some with fewer experts than ranks; choices between equal scores are reproducible only."""
    experts = random.choice([1, 2, 3, 4, 5, 8])
    return {
        "experts": experts,
        "choices": random.randint(1, min(experts, 3)),
        "every": random.choice([1, 1, min(2, layers)]),
        "router": random.choice([name for name in ROUTERS if reproducible or name != "one expert"]),
        "overlap": random.random() < 0.5,
    }


def _second(random: Random, ranks: int, logical: Logical, mixed: bool) -> tuple[str, str]:
    """Another mesh of as many ranks, and a layout: for the second half of a training."""
    shards = logical.shards if logical.reproducible else min(logical.shards, ranks)
    fits: list[dict[str, int]] = []
    for tensor, context, stages in _products(ranks, shards, logical.parts):
        replicas = ranks // (tensor * context * stages)
        if stages > 1 and (logical.microbatches % replicas or stages > logical.units):
            continue
        fits.append({"dp": replicas, "cp": context, "tp": tensor} | ({"pp": stages} if stages > 1 else {}))
    chosen = random.choice(fits)
    names = [name for name in PIPELINES if parts_of(f"pp:{name}", chosen.get("pp", 1)) <= logical.units]
    layout = f"pp:{random.choice(names)}" if "pp" in chosen else random.choice(LAYOUTS)
    each = shards // chosen["tp"] if logical.reproducible else 1
    folds, _ = _folds(random, chosen, each, logical.slices) if mixed else ((1, 1), 1)
    return _mesh(random, chosen, layout, folds), layout


def _products(ranks: int, shards: int, parts: int) -> list[tuple[int, int, int]]:
    """Sizes of tp, cp and pp, whose product divides the ranks."""
    every = [(tp, cp, pp) for tp in _divisors(shards) for cp in _divisors(parts) for pp in (1, 2, 3)]
    return [sizes for sizes in every if ranks % math.prod(sizes) == 0]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
