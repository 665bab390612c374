"""Complete settings: given values, values of a checkpoint, and recipes for data and model."""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel.data.datasets import TASKS
from parallel.data.shards import INDEX
from parallel.engine.settings import ALTERNATIVES, LAYOUT_FIELDS, OPTIONS, RUN_FIELDS, Settings
from parallel.optim.optimizers import OPTIMIZERS


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
    # each default depends on those before it: the model on the data, the recipe on both
    values = _over(values, {"data": Settings.data})
    values = _over(values, {"model": "gpt" if _is_text(values["data"]) else Settings.model})
    family, _, size = values["model"].partition(":")
    family = BASE_FAMILY.get(family, family)
    recipe = RECIPES.get((values["data"], family), {})
    if not size and "size" in recipe:
        values["model"] += f":{recipe['size']}"
    for below in (recipe, BY_FAMILY.get(family, {})):
        values = _over(values, below)
    settings = Settings(**{name: value for name, value in values.items() if name in OPTIONS})
    _refuse_unused(settings, explicit)
    return settings


def _not_taken(values: Mapping[str, Any], previous: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of fields that given `values` drop from a checkpoint. `expert_shards` stay if bits depend on them."""
    now = {**previous, **values}
    if now.get("layout") != previous.get("layout"):
        return (*RUN_FIELDS, *LAYOUT_FIELDS)
    if now.get("mesh") == previous.get("mesh"):
        return RUN_FIELDS
    parts = () if now.get("reproducible") else ("expert_shards",)
    return (*RUN_FIELDS, "context", "dispatch", "overlap_expert_comm", *parts)


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        if name not in OPTIONS:
            nearest = get_close_matches(name, OPTIONS, n=1, cutoff=0)[0]
            raise ValueError(f"settings: expected names of fields, such as {nearest!r}, found {name!r}")


def _refuse_unused(settings: Settings, given: set[str]) -> None:
    if "length" in given and not _is_text(settings.data):
        raise ValueError(f"length: it belongs to texts, of which it cuts sequences, and the data are {settings.data}")
    if "plateau_factor" in given and settings.plateau is None:
        raise ValueError("plateau_factor: it belongs to plateau, which is not given")
    for name in given:
        owners = [kind for kind, made in OPTIMIZERS.items() if name in {one.name for one in fields(made)}]
        if owners and settings.optimizer not in owners:
            raise ValueError(f"{name}: it belongs to {', '.join(owners)}, and the optimizer is {settings.optimizer}")


def _over(values: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings: `values`, then those in `below` that they neither set nor exclude (`steps` excludes `epochs`)."""
    dropped = {name for some in ALTERNATIVES for name in some if any(one in values for one in some)}
    return {name: value for name, value in below.items() if name not in dropped} | dict(values)


def _is_text(data: str) -> bool:
    """True for texts: bytes of a file, or the tokens of a sharded data set."""
    if data in TASKS:
        return data in TEXTS
    if Path(data, INDEX).is_file():
        with suppress(OSError, ValueError):  # an error of the index is raised where data are loaded
            return bool(json.loads(Path(data, INDEX).read_text())["kind"] == "tokens")
        return False
    return not data.endswith(".npz")


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
