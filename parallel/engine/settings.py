"""Settings: configuration of a training run, its engine and its memory forecast. Every option is declared once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel.data.datasets import TASKS
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.grad_compression import AUTO, COMPRESSORS, NONE
from parallel.engine.option import MODEL, OPTIMIZER, PROGRAM, Option, OptionGroup, names_in, option, options_in
from parallel.nn.expert_layers import WORDS
from parallel.nn.loss import LOSSES
from parallel.nn.models import MODELS
from parallel.nn.recompute import KINDS
from parallel.nn.transforms.few_bit_product import PRODUCTS
from parallel.nn.transforms.pruning import PATTERNS
from parallel.optim.optimizers import OPTIMIZERS
from parallel.optim.precision import PRECISIONS
from parallel.sharding.context.divide_model import ALGORITHMS

PIPELINE_MICROBATCHES = 8
"""Default number of micro-batches per step in each pipeline."""

REPRODUCIBLE_MICROBATCHES = (8, 4, 2, 1)
"""Default numbers of micro-batches per step with `reproducible`, on any number of ranks: the first that suits."""

REPRODUCIBLE_SAMPLES = 4
"""Least samples of these micro-batches, if there are several: small ones take longer per sample."""

POOL_MICROBATCHES = 4
"""Default number of micro-batches per rank and step with `pool`."""

STORED = "stored"
"""Value of `products`: operands of matrix products as they are stored."""

MESHES = (*LAYOUTS, "pp")
REPLICAS = ("local", "group", "sgp", "hogwild")
LAYOUT_NAMES = (*MESHES, "ps", *REPLICAS, "federated")
"""All layouts, without variants: those on meshes, the server, and decentralised styles."""

on_mesh = partial(option, layouts=MESHES)
in_pipeline = partial(option, layouts=("pp",))
of_server = partial(option, layouts=("ps",))
federated = partial(option, layouts=("federated",))
of_model = partial(option, owner=MODEL)
of_optimizer = partial(option, owner=OPTIMIZER)
of_program = partial(option, owner=PROGRAM)


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions(OptionGroup):
    """Execution."""

    layout: str = option("dp", "strategy: {names} (default {default})", "LAYOUT", former="parallel", names=LAYOUT_NAMES)
    precision: str = option("fp32", "precision of weights and activations (default {default})", choices=PRECISIONS)
    device: str = option("cpu", "cuda is the current device (default {default})", choices=("cpu", "cuda"), one_run=True)
    reproducible: bool = option(False, "bitwise the same result on any number of ranks, in any layout")
    seed: int = option(0, "seed of weights, order of samples, and dropout (default {default})", "N", least=0)
    check_every: int = option(0, "compare replicated parameters between ranks every N steps; 0: never", "N", least=0)
    trace: bool = option(False, "record profiler events", flag="", one_run=True)
    fault_tolerant: bool = of_program(False, "go on after the death of a rank, if possible", flag="", one_run=True)


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """Data and steps."""

    data: str = of_program("digits", "{names}, a text or .npz file, or shards (default {default})", "NAME", names=TASKS)
    length: int = of_program(128, "tokens per sequence of a text", "N", least=1)
    tokenizer: str = of_program("", "tokenizer.json of the library tokenizers (default: a text's bytes)", "FILE")
    window: int | None = option(None, "neighbouring samples to shuffle (default: all, or some shards)", "N", least=1)
    batch: int = option(64, "samples per step, over all ranks; federated: per client and local step", "N", least=1)
    batch_tokens: int | None = option(None, "tokens per step, over all ranks, of a text", "N", least=1)
    drop_last: bool = option(False, "leave out an epoch's last step if it is short", layouts=(*MESHES, "ps", *REPLICAS))
    micro_batch: int | None = option(None, "samples per micro-batch", "N", least=1)
    accumulate: int | None = option(None, "micro-batches of each rank in a step (default 1)", "K", least=1)
    epochs: float = of_program(10, "passes over the training set", "N", least=0)
    steps: int | None = option(None, "steps in all, with those before a restart", "N", least=0)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """Model, few bits and pruning."""

    model: str = of_program(
        "mlp",
        "family, perhaps with a size as in gpt:tiny: {names}",
        "NAME",
        names=[f"{name} ({' '.join(family.sizes)})" for name, family in MODELS.items()],
    )
    loss: str = of_program(
        "", "{names}, with a number as in huber:0.5 or cross_entropy:0.1 (smoothing)", "NAME", names=LOSSES
    )
    class_weights: str = of_program("", "weights of the classes, 1,0.5,2, in cross_entropy or bce", "W,...")
    dropout: float = of_model(0.0, "dropout probability", "P", least=0, below=1)
    recompute: bool | str = of_model(
        "none",
        "compute activations again: {names}, or one per block (alone: full)",
        "KIND",
        names=KINDS,
        bare="full",
    )
    experts: str | None = of_model(
        None, "mixtures of experts of gpt-moe, as in 8,k=2,capacity=1.25 (words: {names})", "HOW", names=WORDS
    )
    depths: str | None = of_model(
        None, "part of the tokens for every second block of gpt models, as in 0.125 or 0.5,every=1", "HOW"
    )
    products: str = option(STORED, "operands of matrix products (default {default})", choices=(STORED, *PRODUCTS))
    fake_quant: str = option("", "train with weights rounded to a format of chorus quantize, as int4_g32", "SPEC")
    fake_quant_inputs: str = on_mesh("", "and with layer inputs rounded, in moving ranges, as int8", "SPEC")
    prune: float = option(0.0, "fraction of weights to prune, reached after half of the steps", "S", least=0, below=1)
    prune_pattern: str = option("elements", "{names}, or N:M: N of M remain (default {default})", "P", names=PATTERNS)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(OptionGroup):
    """Optimizer."""

    optimizer: str = of_optimizer("adamw", "default {default}", choices=OPTIMIZERS)
    rate: float = of_optimizer(1e-3, "peak learning rate (lr)", "R", least=0)
    warm_up: int = of_optimizer(0, "steps up to the peak rate; then half a cosine down to a tenth", "N", least=0)
    decay: float = of_optimizer(0.01, "weight decay", "D", least=0)
    momentum: float = of_optimizer(0.9, "momentum of sgd", "M", least=0, below=1)
    beta2: float = of_optimizer(0.999, "decay of the second moment, of the others", "B", least=0, below=1)
    plateau: int | None = of_program(
        None, "tests in a row without a better loss, after which one more lowers the rate", "N", least=0
    )
    plateau_factor: float = of_program(0.1, "factor of that (default {default})", "F", least=0, below=1)
    early_stop: int | None = of_program(
        None, "tests in a row without a better loss that end the training", "N", least=1
    )
    clip: float = option(0.0, "limit of the gradient norm, 0 for none", "NORM", least=0)


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions(OptionGroup):
    """Data parallelism."""

    bucket_bytes: int = option(4 << 20, "least bytes of a bucket of gradients (default {default})", "N", least=1)
    first_bytes: int = option(1 << 20, "least bytes of the bucket that is complete first", least=1, flag="")
    compress: str = on_mesh(NONE, "compression of gradients: {names}", "HOW", names=(*COMPRESSORS, AUTO, NONE))
    pool: bool = option(
        False,
        "ranks take micro-batches from a shared queue as they get ready (layouts dp... and zero1)",
        layouts=[name for name, layout in LAYOUTS.items() if layout.drawn],
    )


@dataclass(frozen=True, kw_only=True)
class MeshOptions(OptionGroup):
    """Mesh."""

    mesh: str | None = on_mesh(
        None,
        "axes and sizes, as in dp=2,cp=2,tp=2, dp=4,ep=2 (ranks that share experts; etp: parts of them) or, for "
        "pipelines, pp=2,zero1=2,tp=2; the last axis has neighbours",
        "AXES",
    )
    tensor_shards: int | None = on_mesh(
        None, "parts of each operator cut along tp, for equal bits with any tp that divides them", "T", least=1
    )
    expert_shards: int | None = on_mesh(None, "parts of each expert, likewise (default: as etp needs)", "S", least=1)
    sequence_parallel: bool = on_mesh(False, "ranks of tp divide sequences (or tokens along cp) between cut operators")
    sequence_parts: int | None = on_mesh(None, "parts of each sequence along cp, likewise (default cp)", "P", least=1)
    context: str = on_mesh("auto", "attention along cp: {names}, or {default}: the fastest", "NAME", names=ALGORITHMS)
    dispatch: str = on_mesh(
        "direct", "tokens along ep: direct or hierarchical, perhaps with :int8 or :fp8 (default {default})", "NAME"
    )
    overlap_expert_comm: bool = option(
        False,
        "a micro-batch's forward pass runs while tokens of another one's backward pass travel along ep, and conversely",
        layouts=[name for name in MESHES if name == "pp" or not LAYOUTS[name].sharded],
    )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(OptionGroup):
    """Pipelines (pp, or pp:SCHEDULE)."""

    stages: int | None = in_pipeline(None, "ranks of a pipeline (default: all)", "P", least=1)
    microbatches: int | None = in_pipeline(None, "micro-batches of a step in each pipeline (default 8)", "M", least=1)
    virtual: int | None = in_pipeline(None, "model chunks on each stage (pp:interleaved)", "V", least=1)
    stage_ranks: str | None = in_pipeline(
        None, "ranks of each part, which take turns, as in 2,1,1, or auto (pp:1f1b, pp:pipedream...)", "RANKS"
    )
    cuts: str | None = in_pipeline(None, "first unit of each chunk, number of units: 0,2,5 (default measured)", "UNITS")
    memory: float | None = in_pipeline(None, "memory of a stage, for pp:auto", "BYTES", least=1)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(OptionGroup):
    """Parameter server (ps)."""

    servers: int = of_server(1, "servers, which are the first ranks (default {default})", "S", least=1)
    replicas: int = of_server(1, "servers with a copy of each parameter (default {default})", "K")
    consistency: str = of_server("bsp", "bsp, async, or ssp:S for at most S clocks late (default {default})", "RULE")
    slow: str = of_server("", "slow workers, as in 2:5,3:1.5, for experiments", "RANK:FACTOR", one_run=True)
    delay: float = of_server(0.0, "seconds added to each part, for experiments", least=0, flag="", one_run=True)
    record: str = of_server("", "write the order of events into FILE.0, FILE.1, ...", "FILE", one_run=True)
    replay: str = of_server("", "repeat the recorded order of events", "FILE", one_run=True)


@dataclass(frozen=True, kw_only=True)
class DecentralizedOptions(OptionGroup):
    """Decentralised training."""

    tau: int | None = option(
        None, "local, group: steps between averages (8, 10); sgp: delay (0)", "N", layouts=("local", "group", "sgp")
    )
    group: int | None = option(None, "ranks of a group (default: square root of all)", "S", layouts=("group",))
    overlap: float | None = option(
        None, "fraction of its share by which a rank also trains on the next ranks'", "F", least=0, layouts=REPLICAS
    )
    clients: int | None = federated(None, "federated: clients with samples of their own (default 20)", "K", least=1)
    client_fraction: float | None = federated(None, "federated: part of them in a round (default 0.5)", "C", least=0)
    local_epochs: int | None = federated(None, "federated: epochs of a client in a round (default 5)", "E", least=1)
    label_shards: int | None = federated(
        None, "federated: runs of samples with one label of each client (default 2); 0 deals at random", "N", least=0
    )


_MICRO_BATCHES = ("micro_batch", "accumulate", "microbatches")


@dataclass(frozen=True, kw_only=True)
class Settings(
    ExecutionOptions,
    DataOptions,
    ModelOptions,
    OptimizerOptions,
    DataParallelOptions,
    MeshOptions,
    PipelineOptions,
    ServerOptions,
    DecentralizedOptions,
):
    """Configuration of a training run, which every engine takes: ``Engine(model, loss, comm, optimizer, settings)``.

    Built from keywords, from a mapping (`parallel.trainer.recipes.complete`) or from the command line of ``chorus
    train``, whose ``--help`` lists the options. None leaves a value open. Engines ignore options of other layouts
    (`expect_used` refuses them), and those that describe their arguments: data, model and optimizer.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in _MICRO_BATCHES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: expected one of {', '.join(_MICRO_BATCHES)}, found {' and '.join(given)}")

    def expect_used(self) -> None:
        """Raise ValueError if an option that the layout does not use is not at its default."""
        kind = self.layout.partition(":")[0]
        for name, one in OPTIONS.items():
            if one.layouts and kind not in one.layouts and getattr(self, name) != one.default:
                raise ValueError(f"{name}: it belongs to {', '.join(one.layouts)}, and the layout is {self.layout}")

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
        return {name: getattr(self, name) for name in OPTIONS if name not in RUN_FIELDS}


DEFAULTS = Settings()
"""Settings of an engine that gets none."""

GROUPS: tuple[Any, ...] = Settings.__bases__

OPTIONS: dict[str, Option] = {one.name: one for group in GROUPS for one in options_in(group)}
"""All options by name."""

ALTERNATIVES = (("steps", "epochs"), ("batch", "batch_tokens"), _MICRO_BATCHES, ("mesh", "stages"))
"""Options that replace each other: a given one drops the others from defaults and checkpoints."""

BUILD_FIELDS = tuple(name for name in names_in(ModelOptions) if OPTIONS[name].owner == MODEL)
"""Options of `parallel.nn.models.build`."""

TRANSFORM_FIELDS = tuple(name for name in names_in(ModelOptions) if not OPTIONS[name].owner)
"""Options that describe transforms of a model (`parallel.nn.transforms`)."""

MODEL_FIELDS = ("data", "length", "tokenizer", *names_in(ModelOptions))
"""Options that determine the model that is trained, and the shapes of its samples."""

LAYOUT_FIELDS = names_in(MeshOptions, PipelineOptions, ServerOptions, DecentralizedOptions)
"""Options of one kind of layout only: another layout drops the checkpoint's values."""

RUN_FIELDS = tuple(one.name for one in OPTIONS.values() if one.one_run)
"""Options of one run: a restart does not take them from the checkpoint, and ranks may differ in them."""
