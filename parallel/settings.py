"""All that decides a training, in plain values: what is said, what a checkpoint keeps, and good defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

REPRODUCIBLE_PARTS = 8
"""Micro-batches of a step in a reproducible training that does not say how many: the same for any number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training. `complete` makes one from what is said of it.

    Attributes
    ----------
    data : str
        A key of `parallel.datasets.TASKS`, or a path.
    model : str
        ``family`` or ``family:size``, as in `parallel.nn.models.build`.
    layout, precision : str
        As `parallel.engine.Engine` has them.
    optimizer : str
        A key of `parallel.optim.OPTIMIZERS`.
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
    servers, replicas : int
        Of the ranks, how many are servers, and how many of these have a copy of each parameter.
    consistency, slow, record, replay : str
        As `parallel.server` has them: the rule of clocks, ranks and by what factor they are slower, and files.
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
    servers: int = 1
    replicas: int = 1
    consistency: str = "bsp"
    slow: str = ""
    record: str = ""
    replay: str = ""

    def micro(self, ranks: int) -> int:
        """Samples of a micro-batch on so many ranks.

        >>> Settings(batch=64).micro(4), Settings(batch=64, accumulate=3).micro(4)
        (16, 6)
        """
        if self.micro_batch is not None:
            return self.micro_batch
        if self.accumulate is not None:
            parts = self.accumulate * ranks
        else:
            parts = REPRODUCIBLE_PARTS if self.reproducible else ranks
        return -(-self.batch // parts)


NAMES = tuple(field.name for field in fields(Settings))

INSTEAD = (("steps", "epochs"), ("micro_batch", "accumulate"))
"""Pairs of which one is enough: whoever says the one does not want the other, where less is said."""

OF_SERVERS = ("servers", "replicas", "consistency", "slow", "record", "replay")

OF_THE_LAYOUT = OF_SERVERS
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
    gone = {name for pair in INSTEAD for name in pair if any(one in said for one in pair)}
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
