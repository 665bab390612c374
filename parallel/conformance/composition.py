"""Random compositions of model, mesh and settings, and the simpler ones next to each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from parallel.engine.settings import Settings
from parallel.mesh.mesh import Mesh
from parallel.nn.compose import Sequential
from parallel.nn.models import mlp, transformer

LAYOUTS = ("dp", "dp-naive", "dp-bucket", "zero1", "zero2", "zero3")
PIPELINES = ("1f1b", "zb-h1", "gpipe")
CONTEXTS = ("auto", "ring", "allgather", "ulysses")


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Model, data, mesh and settings of a short training; the defaults are the simplest.

    Attributes
    ----------
    family : gpt or mlp
    vocabulary, length, layers, heads, head_width : of the model; for mlp classes, inputs, and widths heads x head_width
    dropout, recompute : of the model
    mesh, layout : as of `Settings`; for pipelines pp:SCHEDULE
    next_mesh, next_layout : of the second half of the training, which loads a checkpoint; "": there is none
    shards, parts : logical shards of operators, and parts of sequences
    sequence : ranks of tp have parts of the sequence between operators that are cut
    precision, optimizer, clip, reproducible, context, bucket_bytes : as of `Settings`
    microbatches, samples : of a step; samples of a micro-batch
    ignored : leave out some targets, unevenly
    steps : before a checkpoint, and again after it
    seed : of data and initial values
    """

    family: str = "gpt"
    vocabulary: int = 5
    length: int = 4
    layers: int = 1
    heads: int = 1
    head_width: int = 2
    dropout: bool = False
    recompute: bool = False
    mesh: str = "dp=1"
    layout: str = "dp"
    next_mesh: str = ""
    next_layout: str = "dp"
    shards: int = 1
    parts: int = 1
    sequence: bool = False
    precision: str = "fp64"
    optimizer: str = "sgd"
    clip: bool = False
    reproducible: bool = False
    context: str = "auto"
    bucket_bytes: int = 1 << 22
    microbatches: int = 1
    samples: int = 1
    ignored: bool = False
    steps: int = 1
    seed: int = 0

    @property
    def ranks(self) -> int:
        return Mesh.parse(self.mesh).size

    def __str__(self) -> str:
        """Every field that is not the simplest."""
        changed = {field.name: getattr(self, field.name) for field in fields(self)}
        return " ".join(f"{name}={value}" for name, value in changed.items() if value != getattr(SIMPLEST, name))

    def model(self) -> Sequential:
        rate, width = 0.2 * self.dropout, self.heads * self.head_width
        if self.family == "mlp":
            widths = [self.length, *[width] * self.layers, self.vocabulary]
            return mlp(widths, dropout=rate, recompute=self.recompute)
        size = self.vocabulary, self.length, self.layers, self.heads, width
        return transformer(*size, dropout=rate, recompute=self.recompute)

    def settings(self, mesh: str, layout: str) -> Settings:
        """Settings of an engine on this mesh."""
        sizes = Mesh.parse(mesh).sizes
        own: dict[str, Any] = {"context": self.context} if sizes.get("cp", 1) > 1 else {}
        if sizes.get("tp", 1) * self.shards > 1:
            own["sequence_parallel"] = self.sequence
        if self.reproducible:
            own |= {"tensor_shards": self.shards} | ({"sequence_parts": self.parts} if self.parts > 1 else {})
        return Settings(
            mesh=mesh,
            layout=layout,
            precision=self.precision,
            clip=0.5 if self.clip else 0.0,
            reproducible=self.reproducible,
            micro_batch=self.samples,
            batch=self.samples * self.microbatches,
            bucket_bytes=self.bucket_bytes,
            first_bytes=1,
            seed=self.seed,
            check_every=1,
            **own,
        )


SIMPLEST = Composition()


def draw(seed: int, most_ranks: int, pipelines: bool = False) -> Composition:
    """Composition number `seed`, of at most so many ranks; with `pipelines` perhaps cut into stages."""
    random = Random(seed)
    axes = ["dp", "cp", "tp"] + ["pp"] * (pipelines and random.random() < 0.5)
    sizes = _sizes(random, axes, most_ranks)
    family = "mlp" if sizes.get("cp", 1) == 1 and random.random() < 0.2 else "gpt"
    reproducible = random.random() < 0.6 and not any(size & (size - 1) for size in (sizes["cp"], sizes["tp"]))
    if "pp" in sizes:
        sizes.pop("cp")
    shards, parts = sizes["tp"], sizes.get("cp", 1)
    if reproducible:
        shards, parts = (size * random.choice([1, 2]) for size in (shards, parts))
        parts = 1 if family == "mlp" or "pp" in sizes else parts
    heads = shards * random.choice([1, 1, 2]) + (0 if reproducible else random.randrange(2))
    context = random.choice(CONTEXTS)
    if reproducible or sizes.get("cp", 1) == 1 or (context == "ulysses" and (heads // shards) % sizes["cp"]):
        context = "auto"
    precision = random.choice(["fp32", "bf16", "fp16", "fp64"]) if reproducible else "fp64"
    layers = random.choice([1, 2]) if family == "gpt" else random.choice([1, 2, 3])
    sequence = family == "gpt" and parts == 1 and shards > 1 and random.random() < 0.5
    layout = _layout(random, sizes)
    mesh = _mesh(random, sizes, layout)
    next_mesh, next_layout = (
        ("", "dp") if random.random() < 0.5 else _second(random, sizes, shards, parts, reproducible)
    )
    return Composition(
        family=family,
        vocabulary=max(shards, 2) + random.randrange(20),
        length=shards * random.choice([1, 2]) if sequence else random.choice([parts, 3, 5, 8, 13]),
        layers=max(layers, sizes.get("pp", 1) - 1),
        heads=heads,
        head_width=random.choice([1, 2, 3]) if family == "gpt" else random.choice([2, 3]),
        dropout=random.random() < 0.4,
        recompute=random.random() < 0.3,
        mesh=mesh,
        layout=layout,
        next_mesh=next_mesh,
        next_layout=next_layout,
        shards=shards,
        parts=parts,
        sequence=sequence,
        precision=precision,
        optimizer=random.choice(["sgd", "adamw"]),
        clip=random.random() < 0.5,
        reproducible=reproducible,
        context=context,
        bucket_bytes=random.choice([1, 1000, 1 << 22]),
        microbatches=random.choice([1, 2, 3, 5]) * (sizes["dp"] if "pp" in sizes else 1),  # as many in each pipeline
        samples=random.choice([1, 2, 3]),
        ignored=random.random() < 0.5,
        steps=random.choice([1, 2]),
        seed=seed,
    )


def _sizes(random: Random, axes: list[str], most: int) -> dict[str, int]:
    """Sizes of the axes, whose product is at most `most`, and above 1 if possible."""
    while True:
        sizes = {name: random.choice([1, 1, 2, 2, 3, 4]) for name in axes}
        if 1 < math.prod(sizes.values()) <= most or most == 1:
            return sizes if most > 1 else dict.fromkeys(axes, 1)


def _layout(random: Random, sizes: dict[str, int]) -> str:
    return f"pp:{random.choice(PIPELINES)}" if "pp" in sizes else random.choice(LAYOUTS)


def _mesh(random: Random, sizes: dict[str, int], layout: str) -> str:
    """Mesh of axes in any order; those of one rank may be left out."""
    kept = [name for name, size in sizes.items() if size > 1 or name == "pp" or random.random() < 0.3] or ["dp"]
    random.shuffle(kept)
    names = {name: name for name in kept}
    if layout.startswith("pp") and "dp" in names:
        names["dp"] = random.choice(["dp", "zero1", "zero3"])
    return ",".join(f"{names[name]}={sizes[name]}" for name in kept)


def _second(random: Random, sizes: dict[str, int], shards: int, parts: int, reproducible: bool) -> tuple[str, str]:
    """Another mesh of as many ranks, and a layout: for the second half of a training."""
    ranks = math.prod(sizes.values())
    fits = [
        {"dp": ranks // (tensor * context), "cp": context, "tp": tensor}
        for tensor in _divisors(shards if reproducible else min(shards, ranks))
        for context in _divisors(parts)
        if ranks % (tensor * context) == 0
    ]
    chosen = random.choice(fits)
    layout = _layout(random, chosen)
    return _mesh(random, chosen, layout), layout


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def simpler(composition: Composition) -> Iterator[Composition]:
    """Compositions with one field at its simplest value, or a smaller one, the largest changes first."""
    for field in fields(composition):
        least, now = getattr(SIMPLEST, field.name), getattr(composition, field.name)
        if now == least or field.name == "seed":
            continue
        changes: list[Any] = [least]
        if isinstance(now, int) and not isinstance(now, bool):
            changes += [value for value in (now // 2, now - 1) if least < value < now]
        for value in changes:
            yield replace(composition, **{field.name: value})
    yield from (replace(composition, mesh=mesh) for mesh in _smaller(composition.mesh))
    yield from (replace(composition, next_mesh=mesh) for mesh in _smaller(composition.next_mesh))


def _smaller(mesh: str) -> Iterator[str]:
    """Meshes with an axis of one rank less or left out."""
    sizes = Mesh.parse(mesh).sizes if mesh else {}
    for name, size in sizes.items():
        others = {other: value for other, value in sizes.items() if other != name}
        if others:
            yield str(Mesh(others))
        if size > 2:
            yield str(Mesh({**sizes, name: 2}))
