"""All that decides a training, in plain values: what a command line says, what a checkpoint keeps, and good defaults.

What is left open (None) is filled from the checkpoint that is resumed, and then from the recipe for the data and the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

REPRODUCIBLE_PARTS = 8
"""Micro-batches of a step in a reproducible training that does not say how many: the same for any number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A training.

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
    clip : float
        Limit of the gradient's norm; 0 for none.
    batch : int
        Samples of a step, over all ranks and micro-batches.
    micro_batch : int
        Samples that go through the model at once.
    accumulate : int
        Micro-batches of each rank in a step, where `micro_batch` is open.
    epochs : float
        Passes over the training set, where `steps` is open.
    steps, warm_up : int
    length : int
        Of the sequences, in data that have sequences.
    dropout : float
    recompute, reproducible : bool
    seed : int
    check_every : int
        Compare parameters over the ranks after every so many steps.
    bucket_bytes : int
        Of a bucket of gradients.
    """

    data: str | None = None
    model: str | None = None
    layout: str | None = None
    precision: str | None = None
    optimizer: str | None = None
    rate: float | None = None
    decay: float | None = None
    momentum: float | None = None
    clip: float | None = None
    batch: int | None = None
    micro_batch: int | None = None
    accumulate: int | None = None
    epochs: float | None = None
    steps: int | None = None
    warm_up: int | None = None
    length: int | None = None
    dropout: float | None = None
    recompute: bool | None = None
    reproducible: bool | None = None
    seed: int | None = None
    check_every: int | None = None
    bucket_bytes: int | None = None

    def over(self, below: Mapping[str, Any]) -> Settings:
        """These settings, and where they are open, those below. Of two that exclude each other one is enough."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        for one, other in (("steps", "epochs"), ("micro_batch", "accumulate")):
            if one in said or other in said:
                below = {name: value for name, value in below.items() if name not in (one, other)}
        known = {field.name for field in fields(self)}
        return replace(Settings(), **{name: value for name, value in below.items() if name in known} | said)

    def complete(self) -> Settings:
        """With the recipe for whatever is still open.

        Examples
        --------
        >>> Settings(data="pydoc", rate=0.1).complete().model
        'gpt'
        """
        settings = self.over({"data": "digits"})
        settings = settings.over({"model": "gpt" if settings.data in TEXTS or _is_text(settings.data) else "mlp"})
        family = str(settings.model).partition(":")[0]
        return settings.over(RECIPES.get((settings.data, family), {})).over(BY_FAMILY.get(family, {})).over(COMMON)

    def micro(self, ranks: int) -> int:
        """Samples of a micro-batch on so many ranks."""
        assert self.batch is not None and self.accumulate is not None
        if self.micro_batch is not None:
            return self.micro_batch
        parts = REPRODUCIBLE_PARTS if self.reproducible and self.accumulate == 0 else max(1, self.accumulate) * ranks
        return max(1, -(-self.batch // parts))

    def known(self) -> dict[str, Any]:
        """What is not open."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _is_text(data: str | None) -> bool:
    return data is not None and "." in data and not data.endswith(".npz")


TEXTS = ("pydoc", "copy")

COMMON: dict[str, Any] = {
    "layout": "dp",
    "precision": "fp32",
    "optimizer": "adamw",
    "rate": 1e-3,
    "decay": 0.01,
    "momentum": 0.9,
    "clip": 1.0,
    "batch": 64,
    "accumulate": 0,
    "epochs": 10,
    "warm_up": 0,
    "length": 128,
    "dropout": 0.0,
    "recompute": False,
    "reproducible": False,
    "seed": 0,
    "check_every": 0,
    "bucket_bytes": 4 << 20,
}

BY_FAMILY: dict[str, dict[str, Any]] = {
    "mlp": {"rate": 2e-3, "epochs": 20, "clip": 0.0},
    "convnet": {"rate": 3e-3, "epochs": 20, "clip": 0.0},
    "gpt": {"rate": 1e-3, "warm_up": 50, "batch": 32, "steps": 1000, "decay": 0.1},
}

RECIPES: dict[tuple[str | None, str], dict[str, Any]] = {
    ("digits", "mlp"): {"rate": 3e-3, "epochs": 30, "dropout": 0.1},
    ("digits", "convnet"): {"rate": 5e-3, "epochs": 25},
    ("copy", "gpt"): {"length": 32, "model": "gpt:tiny", "rate": 3e-3, "steps": 600},
    ("pydoc", "gpt"): {"length": 128, "batch": 32, "rate": 2e-3, "warm_up": 100, "steps": 1000},
}
"""What was found to learn well, by data and family of models."""
