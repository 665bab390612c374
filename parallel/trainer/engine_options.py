"""Options of `Engine`: the settings that it uses, by name; others are refused."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from parallel.engine.settings import BUILD_FIELDS, DEFAULTS, LAYOUT_FIELDS, NAMES, TRANSFORM_FIELDS, Settings
from parallel.nn.operator import Operator
from parallel.nn.transforms.apply import transformed
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizers import OPTIMIZERS

OPTIONS = (
    *("layout", "precision", "clip", "batch", "batch_tokens", "micro_batch", "accumulate", "reproducible", "seed"),
    *("check_every", "bucket_bytes", "first_bytes", "compress", "pool", "device", "trace", "window", "steps"),
    *(*TRANSFORM_FIELDS, *LAYOUT_FIELDS),
)
"""Fields of `Settings` that an engine uses; the others describe data, model, optimizer and length of a training."""

_OPTIMIZERS = "optimizer rate decay momentum beta2 warm_up lr learning_rate weight_decay betas ema"
OWNERS = dict.fromkeys(BUILD_FIELDS, "the model") | dict.fromkeys(_OPTIMIZERS.split(), "the optimizer")
"""Argument of `Engine` that has a value, by the name of a setting; those of no argument are the training program's."""


def expect_parts(model: Any, loss: Any, optimizer: Any) -> None:
    """Raise a TypeError that names the argument of `Engine` that is of a wrong kind, such as a class."""
    methods = ("forward", "backward", "count")
    is_loss = not isinstance(loss, type) and all(callable(getattr(loss, name, None)) for name in methods)
    for name, holds, expected in (
        ("model", isinstance(model, Operator), "an operator, as nn.Sequential(...)"),
        ("loss", is_loss, f"an object with {', '.join(methods)}, as nn.SoftmaxCrossEntropy()"),
        ("optimizer", isinstance(optimizer, Optimizer), "an optimizer, as AdamW(lr=0.01)"),
    ):
        if not holds:
            value = {"model": model, "loss": loss, "optimizer": optimizer}[name]
            raise TypeError(f"{name}: expected {expected}; found {value!r}")


def with_options(settings: Settings, options: Mapping[str, Any], optimizer: Optimizer) -> Settings:
    """Settings with some fields replaced, and the optimizer's name.

    ValueError for options that are no fields of `Settings`, and for fields that an engine would ignore.
    """
    if not isinstance(settings, Settings):
        raise TypeError(f"settings: expected Settings, or options by name, found {settings!r}")
    for name in options:
        if name not in OPTIONS and name not in NAMES and name not in OWNERS:
            near = get_close_matches(name, OPTIONS, n=1)
            perhaps = f"perhaps {near[0]}" if near else f"they are {', '.join(OPTIONS)}"
            raise ValueError(f"{name}: expected an option of engines; {perhaps}")
    ignored = [name for name in NAMES if name not in OPTIONS and name != "optimizer"]
    changed = [name for name in ignored if getattr(settings, name) != getattr(DEFAULTS, name)]
    for name in (*(name for name in options if name not in OPTIONS), *changed):
        raise ValueError(f"{name}: expected an option of engines; {OWNERS.get(name, 'the training program')} has it")
    known = {kind: name for name, kind in OPTIMIZERS.items()}
    return replace(settings, **options, optimizer=known.get(type(optimizer), settings.optimizer))


def with_transforms(model: Operator, settings: Settings) -> Operator:
    """Model with the transforms of the settings (`parallel.nn.transforms`); ValueError names a setting."""
    if settings.prune and settings.steps is None:
        raise ValueError(f"steps: pruning reaches {settings.prune:g} after half of them; expected a number, found None")
    return transformed(model, settings, settings.steps or 0)  # type: ignore[arg-type]
