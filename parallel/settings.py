"""All that decides a training, in plain values: what is said, what a checkpoint keeps, and good defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

PIPELINED_PARTS = 8
"""Micro-batches of a step in each pipeline, in a training that does not say how many."""

REPRODUCIBLE_PARTS = 8
"""Micro-batches of a step in a reproducible training that does not say how many: the same for any number of ranks."""

POOLED_PARTS = 4
"""Micro-batches for each rank in a step whose micro-batches are drawn, if nobody says how many."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training. `complete` makes one from what is said of it.

    Attributes
    ----------
    data : str
        A key of `parallel.data.datasets.TASKS`, or a path.
    model : str
        ``family`` or ``family:size``, as in `parallel.nn.models.build`.
    layout, precision : str
        As `parallel.engine.data_parallel_engine.Engine` has them.
    optimizer : str
        A key of `parallel.optim.optimizers.OPTIMIZERS`.
    rate : float
        The highest learning rate: from zero up in `warm_up` steps, then down half a cosine to a tenth.
    decay : float
        Weight decay.
    momentum : float
        Of sgd.
    beta2 : float
        Decay of the second moment, of all others.
    clip : float
        Limit of the gradient's norm; 0 for none.
    batch : int
        Samples of a step, over all ranks and micro-batches.
    micro_batch : int or None
        Samples that go through the model at once.
    accumulate : int or None
        Micro-batches of each rank in a step, where `micro_batch` is open.
    epochs : float
        Passes over the training set, where `steps` is open.
    steps : int or None
    warm_up : int
        Steps.
    length : int
        Of the sequences, in data that have sequences.
    dropout : float
    recompute, reproducible : bool
    seed : int
    check_every : int
        Compare parameters over the ranks after every so many steps.
    bucket_bytes : int
        Of a bucket of gradients.
    tau, group : int or None
        Of the styles that need no server: `parallel.decentralized.styles.Options`.
    pool : bool
        Whether ranks draw the micro-batches of a step as they get ready.
    stages, microbatches, virtual : int or None
        Of a pipeline: ranks one behind the other; micro-batches of a step; parts of the model on each stage, where the
        schedule leaves them open.
    mesh : str or None
        Names of axes, and ranks along them.
    cuts : str or None
        The units with which a pipeline's parts begin, and how many units there are.
    memory : float or None
        Bytes that a stage may take, where the schedule is to be found.
    servers, replicas : int
        Of the ranks, how many are servers, and how many of these have a copy of each parameter.
    consistency, slow, record, replay : str
        As `parallel.server` has them: the rule of clocks, ranks and by what factor they are slower, and files.
    compress : str
        What becomes of gradients between ranks, as in `parallel.grad_compression`; "none" for nothing.
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
    clip: float = 1.0
    batch: int = 64
    micro_batch: int | None = None
    accumulate: int | None = None
    epochs: float = 10
    steps: int | None = None
    warm_up: int = 0
    length: int = 128
    dropout: float = 0.0
    recompute: bool = False
    reproducible: bool = False
    seed: int = 0
    check_every: int = 0
    bucket_bytes: int = 4 << 20
    pool: bool = False
    stages: int | None = None
    microbatches: int | None = None
    virtual: int | None = None
    mesh: str | None = None
    cuts: str | None = None
    memory: float | None = None
    servers: int = 1
    replicas: int = 1
    consistency: str = "bsp"
    slow: str = ""
    record: str = ""
    replay: str = ""
    tau: int | None = None
    group: int | None = None
    compress: str = "none"

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kinds = getattr(self, field.name), KINDS[str(field.type)]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ValueError(f"{field.name}: expected {field.type}, found {value!r}")

    def micro(self, ranks: int) -> int:
        """Samples of a micro-batch on so many ranks.

        >>> Settings(batch=64).micro(4), Settings(batch=64, accumulate=3).micro(4)
        (16, 6)
        """
        if self.micro_batch is not None:
            return self.micro_batch
        each = self.accumulate if self.microbatches is None else self.microbatches
        if each is not None:
            parts = each * ranks
        elif self.reproducible:
            parts = REPRODUCIBLE_PARTS
        else:
            parts = ranks * (PIPELINED_PARTS if self.layout.startswith("pp") else POOLED_PARTS if self.pool else 1)
        return -(-self.batch // parts)


KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (float, int)}
KINDS |= {f"{name} | None": (*kinds, type(None)) for name, kinds in KINDS.items()}
"""What a value may be, by the type that its field is said to have."""

NAMES = tuple(field.name for field in fields(Settings))

INSTEAD = (("steps", "epochs"), ("micro_batch", "accumulate", "microbatches"), ("mesh", "stages"))
"""Of which one is enough: whoever says the one does not want the others, where less is said."""

OF_PIPELINES = ("stages", "microbatches", "virtual", "mesh", "cuts", "memory")
OF_SERVERS = ("servers", "replicas", "consistency", "slow", "record", "replay")

OF_STYLES = ("tau", "group")
OF_THE_LAYOUT = (*OF_PIPELINES, *OF_SERVERS, *OF_STYLES)
"""Settings that have no meaning in another layout: whoever says another one has them no more."""

OF_THE_RUN = ("slow", "record", "replay")
"""Settings that a restart does not take from what was so before."""


def complete(said: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Settings:
    """Settings from what is said (None counts as unsaid), then what was so before, then the recipe.

    Examples
    --------
    >>> complete({"data": "pydoc", "steps": None}).model
    'gpt:mini'
    >>> complete({"epochs": 3}, before={"steps": 100, "seed": 7}).steps is None
    True
    >>> complete({"layout": "dp"}, before={"layout": "ps", "servers": 2}).servers
    1
    >>> complete({"layout": "dp"}, before={"layout": "local", "tau": 4}).tau is None
    True
    """
    said, before = {name: value for name, value in said.items() if value is not None}, dict(before or {})
    other = said.get("layout", before.get("layout")) != before.get("layout")
    gone = (*OF_THE_RUN, *OF_THE_LAYOUT) if other else OF_THE_RUN
    said = _over(said, {name: value for name, value in before.items() if name not in gone})
    said = _over(said, {"data": Settings.data})
    said = _over(said, {"model": "gpt" if _is_text(said["data"]) else Settings.model})
    family, _, size = said["model"].partition(":")
    recipe = RECIPES.get((said["data"], family), {})
    if not size and "size" in recipe:
        said["model"] = f"{family}:{recipe['size']}"
    for below in (recipe, BY_FAMILY.get(family, {})):
        said = _over(said, below)
    return Settings(**{name: value for name, value in said.items() if name in NAMES})


def _over(said: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    gone = {name for some in INSTEAD for name in some if any(one in said for one in some)}
    return {name: value for name, value in below.items() if name not in gone} | dict(said)


def _is_text(data: str) -> bool:
    return data in TEXTS or (data not in ARRAYS and not data.endswith(".npz"))


ARRAYS = ("digits", "teacher", "teacher_classes")
TEXTS = ("pydoc", "copy")

BY_FAMILY: dict[str, dict[str, Any]] = {
    "mlp": {"rate": 2e-3, "epochs": 20, "clip": 0.0},
    "convnet": {"rate": 3e-3, "epochs": 20, "clip": 0.0},
    "gpt": {"rate": 2e-3, "beta2": 0.99, "warm_up": 100, "batch": 16, "steps": 2000, "decay": 0.1},
}

RECIPES: dict[tuple[str | None, str], dict[str, Any]] = {
    ("digits", "mlp"): {"rate": 3e-3, "epochs": 15, "dropout": 0.1},
    ("digits", "convnet"): {"rate": 5e-3, "epochs": 25},
    ("copy", "gpt"): {"size": "tiny", "length": 32, "rate": 3e-3, "steps": 600},
    ("pydoc", "gpt"): {"size": "mini", "length": 128, "steps": 4500},
}
"""What was found to learn well, by data and family of models."""
