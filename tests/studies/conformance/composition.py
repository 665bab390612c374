"""Compositions of model, mesh and settings, and the simpler ones next to each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from parallel.engine.data_parallel.layouts import LAYOUTS as DATA_PARALLEL
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.depths import DepthLayers
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.gated import gated_transformer
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.models import mlp, transformer
from parallel.nn.operator import normal
from parallel.nn.router import Router, RouterSettings
from parallel.sharding.mesh import Mesh

FAMILIES = ("gpt", "gated", "mlp")


ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "losses": {"balance_loss": 0.1, "z_loss": 0.01, "noise": True},
    "biases": {"scores": "sigmoid", "bias_rate": 0.1},
    "capacity": {"capacity": 0.6, "balance_loss": 0.1},
    "scores": {"capacity": 1.0, "priority": "score", "jitter": 0.1, "normalize": False},
    "one expert": {"balance_loss": 0.1},
}
"""Settings of routers, beside the number of choices."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Model, data, mesh and settings of a short training; the defaults are the simplest.

    Attributes
    ----------
    family : of `FAMILIES`
    vocabulary, length, layers, heads, head_width : of the model; for mlp classes, inputs, and widths heads x head_width
    kv_heads : of the family gated; 0: as many as heads
    dropout, recompute : of the model
    experts, choices, every : mixtures of gpt: number of experts (0: there is no mixture), of those of a token, and
        distance of blocks with a mixture
    router : name in `ROUTERS`
    depths : fraction of the tokens in every block of gpt (`parallel.nn.depths`); 0: there is no choice
    mesh, layout : as of `Settings`; for pipelines pp:SCHEDULE
    cuts : first unit of each part of a pipeline on `mesh`, and the number of units; "": nearly equal parts
    next_mesh, next_layout : of the second half of the training, which loads a checkpoint; "": there is none
    shards, slices, parts : logical shards of operators, parts of experts in them, and parts of sequences
    sequence : ranks of tp have parts of the sequence between operators that are cut
    precision, optimizer, clip, reproducible, context, bucket_bytes : as of `Settings`
    overlap : `overlap_expert_comm`, on meshes and layouts that have it
    compress : as of `Settings`; not "none": weights do not change, and what all steps have sent, with what remains to
        be sent, is compared
    microbatches, samples : of a step; samples of a micro-batch
    ignored : leave out some targets, unevenly
    smoothing : of labels, in the loss of transformers
    steps : before a checkpoint, and again after it
    seed : of data and initial values
    """

    family: str = "gpt"
    vocabulary: int = 5
    length: int = 4
    layers: int = 1
    heads: int = 1
    head_width: int = 2
    kv_heads: int = 0
    dropout: bool = False
    recompute: str = "none"
    experts: int = 0
    choices: int = 1
    every: int = 1
    router: str = "plain"
    depths: float = 0.0
    mesh: str = "dp=1"
    layout: str = "dp"
    cuts: str = ""
    next_mesh: str = ""
    next_layout: str = "dp"
    shards: int = 1
    slices: int = 1
    parts: int = 1
    sequence: bool = False
    precision: str = "fp64"
    optimizer: str = "sgd"
    clip: bool = False
    reproducible: bool = False
    context: str = "auto"
    bucket_bytes: int = 1 << 22
    overlap: bool = False
    compress: str = "none"
    microbatches: int = 1
    samples: int = 1
    ignored: bool = False
    smoothing: bool = False
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
        if self.family == "gated":
            kv_heads = self.kv_heads or None
            return gated_transformer(*size, kv_heads=kv_heads, dropout=rate, recompute=self.recompute)
        router = RouterSettings(**{"choices": self.choices, "normalize": self.choices > 1, **ROUTERS[self.router]})
        layers = ExpertLayers(self.experts, router, self.every, shared=self.experts % 2 == 1) if self.experts else None
        made = transformer(*size, dropout=rate, recompute=self.recompute, experts=layers)
        for _, operator in made.walk():
            if self.router == "one expert" and isinstance(operator, Router):
                operator.weight.init = normal(0.0)  # at first all tokens choose the same experts
        return DepthLayers(self.depths, every=1).of(made, width) if self.depths and self.layers else made

    def loss(self) -> MSE | SoftmaxCrossEntropy:
        return MSE() if self.family == "mlp" else SoftmaxCrossEntropy(0.1 * self.smoothing)

    def settings(self, mesh: str, layout: str) -> Settings:
        """Settings of an engine on this mesh."""
        sizes = Mesh.parse(mesh).sizes
        own: dict[str, Any] = {"context": self.context} if sizes.get("cp", 1) > 1 else {}
        if sizes.get("tp", 1) * self.shards > 1:
            own["sequence_parallel"] = self.sequence
        if self.cuts and (mesh, layout) == (self.mesh, self.layout):
            own["cuts"] = self.cuts
        if self.overlap and Mesh.parse(mesh).expert_replicas > 1:
            replicas = Mesh.parse(mesh).replicas if layout.startswith("pp") else layout
            several = layout.startswith("pp") or self.microbatches > Mesh.parse(mesh).samples.size
            own["overlap_expert_comm"] = several and not DATA_PARALLEL[replicas].sharded
        if self.reproducible:
            own |= {"tensor_shards": self.shards} | ({"expert_shards": self.slices} if self.experts else {})
            own |= {"sequence_parts": self.parts} if self.parts > 1 else {}
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
            compress=self.compress,
            seed=self.seed,
            check_every=1,
            **own,
        )


SIMPLEST = Composition()


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
    if mesh and str(Mesh(sizes)) != mesh:
        yield str(Mesh(sizes))  # without ep and etp
