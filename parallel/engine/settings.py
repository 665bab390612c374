"""Settings: configuration of a training run, its engine and its memory forecast."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

PIPELINE_MICROBATCHES = 8
"""Default number of micro-batches per step in each pipeline."""

REPRODUCIBLE_MICROBATCHES = (8, 4, 2, 1)
"""Default numbers of micro-batches per step with `reproducible`, on any number of ranks: the first that suits."""

REPRODUCIBLE_SAMPLES = 4
"""Least samples of these micro-batches, if there are several: small ones take longer per sample."""

POOL_MICROBATCHES = 4
"""Default number of micro-batches per rank and step with `pool`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Configuration of a training run, which every engine takes: ``Engine(model, loss, comm, optimizer, settings)``.

    Built from keywords, from a mapping (`complete`, which adds recipes) or from the command line of ``chorus train``.
    None leaves a value open. Engines ignore fields of other layouts (`parallel.trainer.strategies` refuses them), and
    those that describe their arguments: data, model and optimizer.

    Attributes
    ----------
    data, model : key of `parallel.data.datasets.TASKS` or a path; ``family`` or ``family:size`` of `parallel.nn.models`
    layout : dp-naive, dp-bucket, dp, zero1 to zero3; pp:SCHEDULE; ps; local, group, sgp, hogwild, federated
    precision, optimizer : keys of `parallel.optim.precision.PRECISIONS` and `parallel.optim.optimizers.OPTIMIZERS`
    rate : peak learning rate, at least 0: linear warm-up, then half a cosine down to a tenth
    decay : weight decay, at least 0
    momentum, beta2 : from 0 to below 1: momentum of sgd; decay of the second moment of all other optimizers
    clip : limit of the gradient norm; 0 for none
    batch : samples per step over all ranks and micro-batches (federated: per local step of a client), at least 1
    batch_tokens : in place of `batch`: tokens per step, at least 1
    micro_batch, accumulate, microbatches : one of: samples per micro-batch; micro-batches per rank; per pipeline
    epochs, steps : passes over the training set, used if `steps` is None; steps of the whole training
    warm_up : steps of the learning-rate warm-up
    length : tokens per sequence, at least 1
    window : neighbouring samples that are shuffled among themselves; by default all, or those of some shards
    dropout : probability, from 0 to below 1
    experts : mixtures of experts of gpt-moe, such as ``8,k=2,every=2`` (`parallel.nn.expert_layers.ExpertLayers.parse`)
    depths : blocks of gpt models for some tokens only, such as ``0.125`` (`parallel.nn.depth_layers.DepthLayers.parse`)
    recompute : recompute activations: none, selective (attention), full, or one of these for each block; True is full
    products : operands of matrix products: "stored", or a format of `parallel.nn.transforms.few_bit_product`
    fake_quant, fake_quant_inputs : train with weights, and layer inputs, rounded to this spec (`quant.parse`); "": none
    prune, prune_pattern : fraction of weights to prune, from 0 to below 1; elements, rows, or N:M
    reproducible : sum in canonical order, bitwise equal on any mesh (of any ``tp`` and ``cp`` with the same
        `tensor_shards` and `sequence_parts`)
    seed : of initial values, sample order and dropout, at least 0
    check_every : compare replicated parameters between ranks every so many steps; 0 for never
    bucket_bytes, first_bytes : least bytes of a gradient bucket, and of the bucket that is complete first
    compress : gradient compression, as in `parallel.engine.grad_compression`; "none", or "auto" to measure and choose
    pool : ranks take micro-batches from a shared queue as they get ready
    device : "cpu" or "cuda" (the current device)
    trace : record profiler events
    stages, virtual : pipelines: ranks in sequence; model chunks per stage
    mesh : axis names and sizes, such as ``dp=2,tp=2`` or, for pipelines, ``pp=4,zero1=2``; the last axis has
        neighbours. ``ep`` ranks share the experts of mixtures, along tp and then over neighbouring replicas;
        ``etp`` ranks along tp have parts of the same experts
    dispatch : exchange of tokens between replicas that share experts: direct or hierarchical, perhaps with a format of
        rows, as ``direct:int8`` (`parallel.sharding.expert.dispatch`)
    overlap_expert_comm : a forward pass runs while tokens of another micro-batch's backward pass travel along ``ep``,
        and conversely; needs the memory of both. In pipelines these are `parallel.pipeline.schedule.pass_pairs`
    tensor_shards : parts of every operator that is cut along ``tp``, a multiple of its ranks; by default as many
    expert_shards : parts of the hidden features of every expert; by default as ``etp`` needs (one on other meshes)
    sequence_parallel : between operators cut along ``tp``, its ranks divide the sequence, or the tokens along ``cp``
    sequence_parts : parts of every sequence that is divided along ``cp``, a multiple of its ranks; by default as many
    context : attention over divided sequences: ring, allgather, ulysses, or "auto", the fastest by prediction
    stage_ranks : pipelines: replicas of each part of the model, which take turns, such as ``2,1,1``, or ``auto``
    cuts : pipelines: first units of the parts, then the number of units, such as ``0,2,5``
    memory : pp:auto: bytes that a stage may take
    servers, replicas : parameter server: number of servers, and of servers that hold a copy of each parameter
    consistency : parameter server: bsp, async or ssp:S
    slow : parameter server, for experiments: ``RANK:FACTOR,...`` slows workers down
    delay : parameter server, for experiments: seconds added to each work part
    record, replay : parameter server: file prefix to write the order of events to, or to read it from
    fault_tolerant : go on after the death of a rank, if the layout can and the MPI survives it
    tau, group : decentralized styles: steps between averages (sgp: staleness), and ranks per group
    overlap : decentralized styles: fraction of its share of a step by which a rank also trains on the next ranks'
    clients, client_fraction : federated: number of clients; the fraction of them that take part in a step, a round
    local_epochs : federated: passes of a client over its samples in a round
    label_shards : federated: runs of neighbouring samples, sorted by label, of each client; 0 deals samples at random

    Raises
    ------
    ValueError
        If a value has the wrong type or is out of range; the message begins with the field's name.
    """

    data: str = "digits"
    model: str = "mlp"
    layout: str = "dp"
    precision: str = "fp32"
    optimizer: str = "adamw"
    rate: float = 1e-3
    decay: float = 0.01
    momentum: float = 0.9
    beta2: float = 0.999
    clip: float = 0.0
    batch: int = 64
    batch_tokens: int | None = None
    micro_batch: int | None = None
    accumulate: int | None = None
    epochs: float = 10
    steps: int | None = None
    warm_up: int = 0
    length: int = 128
    window: int | None = None
    dropout: float = 0.0
    experts: str | None = None
    depths: str | None = None
    recompute: bool | str = "none"
    products: str = "stored"
    fake_quant: str = ""
    fake_quant_inputs: str = ""
    prune: float = 0.0
    prune_pattern: str = "elements"
    reproducible: bool = False
    seed: int = 0
    check_every: int = 0
    bucket_bytes: int = 4 << 20
    first_bytes: int = 1 << 20
    pool: bool = False
    device: str = "cpu"
    trace: bool = False
    stages: int | None = None
    microbatches: int | None = None
    virtual: int | None = None
    mesh: str | None = None
    stage_ranks: str | None = None
    tensor_shards: int | None = None
    expert_shards: int | None = None
    sequence_parallel: bool = False
    sequence_parts: int | None = None
    context: str = "auto"
    dispatch: str = "direct"
    overlap_expert_comm: bool = False
    cuts: str | None = None
    memory: float | None = None
    servers: int = 1
    replicas: int = 1
    consistency: str = "bsp"
    slow: str = ""
    delay: float = 0.0
    record: str = ""
    replay: str = ""
    fault_tolerant: bool = False
    tau: int | None = None
    group: int | None = None
    overlap: float | None = None
    clients: int | None = None
    client_fraction: float | None = None
    local_epochs: int | None = None
    label_shards: int | None = None
    compress: str = "none"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, types = getattr(self, field.name), TYPES[str(field.type)]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise ValueError(f"{field.name}: expected {field.type}, found {value!r}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{name}: expected a number from {least:g} on, found {value:g}")
        for name in BELOW_ONE:
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}: expected a number from 0 to below 1, found {getattr(self, name):g}")
        given = [name for name in _MICRO_BATCHES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: expected one of {', '.join(_MICRO_BATCHES)}, found {' and '.join(given)}")

    def micro(self, ranks: int) -> int:
        """Samples per micro-batch if `ranks` ranks, or pipelines, share the step (as set, or by default).

        >>> Settings(batch=64).micro(4), Settings(batch=64, accumulate=3).micro(4)
        (16, 6)
        >>> [Settings(batch=batch, reproducible=True).micro(4) for batch in (64, 24, 3)]
        [8, 6, 3]
        """
        if self.micro_batch is not None:
            return self.micro_batch
        return -(-self.batch // self._parts(ranks, self.batch // REPRODUCIBLE_SAMPLES))

    def micro_tokens(self, ranks: int) -> int:
        """Tokens per micro-batch if `ranks` ranks, or pipelines, share a step of `batch_tokens` tokens."""
        assert self.batch_tokens is not None
        return -(-self.batch_tokens // self._parts(ranks))

    def rounds(self, ranks: int) -> int:
        """Most micro-batches of one of `ranks` ranks, or pipelines, that share a step.

        >>> Settings(batch=64).rounds(4), Settings(batch=64, micro_batch=4).rounds(4)
        (1, 4)
        """
        parts = -(-self.batch // self.micro(ranks)) if self.batch_tokens is None else self._parts(ranks)
        return -(-parts // ranks)

    def _parts(self, ranks: int, most: int = max(REPRODUCIBLE_MICROBATCHES)) -> int:
        """Number of micro-batches of a step; at most `most` where `reproducible` sets it."""
        each = self.accumulate if self.microbatches is None else self.microbatches
        if each is not None:
            return each * ranks
        if self.reproducible:
            return next((parts for parts in REPRODUCIBLE_MICROBATCHES if parts <= most), 1)
        if self.layout.startswith("pp"):
            return ranks * PIPELINE_MICROBATCHES
        return ranks * (POOL_MICROBATCHES if self.pool else 1)

    def shared(self) -> dict[str, Any]:
        """Settings by name that must be equal on all ranks: all except those of a single run, such as `device`."""
        return {name: getattr(self, name) for name in NAMES if name not in RUN_FIELDS}


TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (float, int)}
TYPES["bool | str"] = (bool, str)
TYPES |= {f"{name} | None": (*types, type(None)) for name, types in TYPES.items()}
"""Accepted types, by a field's annotation."""

_FROM_ONE = "batch micro_batch accumulate length window bucket_bytes first_bytes stages microbatches virtual memory"
_FROM_ONE += " tensor_shards expert_shards sequence_parts batch_tokens clients local_epochs"
_FROM_ZERO = "overlap rate decay momentum beta2 clip epochs steps warm_up dropout prune seed check_every delay"
_FROM_ZERO += " client_fraction label_shards"
LEAST = dict.fromkeys(_FROM_ONE.split(), 1) | dict.fromkeys(_FROM_ZERO.split(), 0)
"""Smallest value of numeric fields."""

BELOW_ONE = ("dropout", "prune", "momentum", "beta2")

NAMES = tuple(field.name for field in fields(Settings))

_MICRO_BATCHES = ("micro_batch", "accumulate", "microbatches")

ALTERNATIVES = (("steps", "epochs"), ("batch", "batch_tokens"), _MICRO_BATCHES, ("mesh", "stages"))
"""Fields that replace each other: a given one drops the others from defaults and checkpoints."""

BUILD_FIELDS = ("dropout", "recompute", "experts", "depths")
"""Options of `parallel.nn.models.build`."""

TRANSFORM_FIELDS = ("products", "fake_quant", "fake_quant_inputs", "prune", "prune_pattern")
"""Fields that describe transforms of a model (`parallel.nn.transforms`)."""

MODEL_FIELDS = ("data", "length", "model", *BUILD_FIELDS, *TRANSFORM_FIELDS)
"""Fields that determine the model that is trained, and the shapes of its samples."""

MESH_FIELDS = ("mesh", "tensor_shards", "expert_shards", "sequence_parallel", "sequence_parts", "context", "dispatch")
PIPELINE_FIELDS = ("stages", "microbatches", "virtual", "mesh", "stage_ranks", "cuts", "memory")
SERVER_FIELDS = ("servers", "replicas", "consistency", "slow", "delay", "record", "replay")
STYLE_FIELDS = ("tau", "group", "overlap", "clients", "client_fraction", "local_epochs", "label_shards")

LAYOUT_FIELDS = (*MESH_FIELDS, *PIPELINE_FIELDS, *SERVER_FIELDS, *STYLE_FIELDS, "overlap_expert_comm")
"""Fields of one kind of layout only: another layout drops the checkpoint's values."""

RUN_FIELDS = ("slow", "delay", "record", "replay", "device", "trace", "fault_tolerant")
"""Fields of one run: a restart does not take them from the checkpoint, and ranks may differ in them."""


DEFAULTS = Settings()
"""Settings of an engine that gets none."""


def complete(given: Mapping[str, Any], previous: Mapping[str, Any] | None = None) -> Settings:
    """Settings from `given` values (None: not given), else `previous` (a checkpoint's), else defaults for the model.

    `RUN_FIELDS`, for another layout `LAYOUT_FIELDS`, and for another mesh `context` and the exchange between experts,
    are not taken from `previous`, nor are names that are no fields (of another version). A given mesh with an axis
    ``pp`` implies the layout pp. Raises ValueError if a given name is no field, or if a value is out of range or given
    without use: `momentum` without sgd, `length` without a text.

    >>> complete({"data": "pydoc", "steps": None}).model
    'gpt:mini'
    >>> complete({"epochs": 3}, previous={"steps": 100, "seed": 7}).steps is None
    True
    >>> complete({"layout": "dp"}, previous={"layout": "ps", "servers": 2}).servers
    1
    >>> complete({"layout": "dp"}, previous={"layout": "local", "tau": 4}).tau is None
    True
    >>> complete({"mesh": "dp=4"}, previous={"mesh": "dp=4,ep=2", "dispatch": "hierarchical"}).dispatch
    'direct'
    >>> complete({"mesh": "pp=2,tp=2"}).layout
    'pp'
    """
    _refuse_unknown(given)
    values, previous = {name: value for name, value in given.items() if value is not None}, dict(previous or {})
    explicit = set(values)
    axes = [axis.partition("=")[0].strip() for axis in values.get("mesh", "").split(",")]
    values = ({"layout": "pp"} if "pp" in axes else {}) | values
    dropped = _not_taken(values, previous)
    values = _over(values, {name: value for name, value in previous.items() if name not in dropped})
    values = _over(values, {"data": Settings.data})
    values = _over(values, {"model": "gpt" if _is_text(values["data"]) else Settings.model})
    family, _, size = values["model"].partition(":")
    family = BASE_FAMILY.get(family, family)
    recipe = RECIPES.get((values["data"], family), {})
    if not size and "size" in recipe:
        values["model"] += f":{recipe['size']}"
    for below in (recipe, BY_FAMILY.get(family, {})):
        values = _over(values, below)
    settings = Settings(**{name: value for name, value in values.items() if name in NAMES})
    _refuse_unused(settings, explicit)
    return settings


def _not_taken(values: Mapping[str, Any], previous: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of fields that given `values` drop from a checkpoint; `expert_shards` stay if bits depend on them."""
    now = {**previous, **values}
    if now.get("layout") != previous.get("layout"):
        return (*RUN_FIELDS, *LAYOUT_FIELDS)
    if now.get("mesh") == previous.get("mesh"):
        return RUN_FIELDS
    parts = () if now.get("reproducible") else ("expert_shards",)
    return (*RUN_FIELDS, "context", "dispatch", "overlap_expert_comm", *parts)


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        if name not in NAMES:
            nearest = get_close_matches(name, NAMES, n=1, cutoff=0)[0]
            raise ValueError(f"settings: expected names of fields, such as {nearest!r}, found {name!r}")


def _refuse_unused(settings: Settings, given: set[str]) -> None:
    sgd = settings.optimizer == "sgd"
    for name, used, owner, found in (
        ("momentum", sgd, "sgd", f"the optimizer is {settings.optimizer}"),
        ("beta2", not sgd, "adam, adamw, lamb", f"the optimizer is {settings.optimizer}"),
        ("length", _is_text(settings.data), "texts, of which it cuts sequences", f"the data are {settings.data}"),
    ):
        if name in given and not used:
            raise ValueError(f"{name}: it belongs to {owner}, and {found}")


def _over(values: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings: `values`, and those of `below` that they neither set nor exclude (`steps` excludes `epochs`)."""
    dropped = {name for some in ALTERNATIVES for name in some if any(one in values for one in some)}
    return {name: value for name, value in below.items() if name not in dropped} | dict(values)


def _is_text(data: str) -> bool:
    """True for texts: bytes of a file, or the tokens of a sharded data set."""
    if data in TEXTS or data in ARRAYS:
        return data in TEXTS
    if Path(data).is_dir():
        with suppress(OSError, ValueError):  # an error of the index is raised where data are loaded
            return bool(json.loads(Path(data, "index.json").read_text())["kind"] == "tokens")
        return False
    return not data.endswith(".npz")


ARRAYS = ("digits", "teacher", "teacher_classes")
TEXTS = ("pydoc", "copy")

BY_FAMILY: dict[str, dict[str, Any]] = {
    "mlp": {"rate": 2e-3, "epochs": 20},
    "convnet": {"rate": 3e-3, "epochs": 20},
    "gpt": {"rate": 2e-3, "beta2": 0.99, "warm_up": 100, "batch": 16, "steps": 2000, "decay": 0.1, "clip": 1.0},
}

RECIPES: dict[tuple[str | None, str], dict[str, Any]] = {
    ("digits", "mlp"): {"rate": 3e-3, "epochs": 15, "dropout": 0.1},
    ("digits", "convnet"): {"rate": 5e-3, "epochs": 25},
    ("copy", "gpt"): {"size": "tiny", "length": 32, "rate": 3e-3, "steps": 600},
    ("pydoc", "gpt"): {"size": "mini", "length": 128, "steps": 4500},
}
"""Values found to train well, by data and model family."""

BASE_FAMILY = {"gpt-moe": "gpt"}
"""Family whose values a model family takes."""
