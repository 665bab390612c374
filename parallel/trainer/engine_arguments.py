"""Arguments of `Engine` and its methods: options, others of which are refused, batches, data sets, epochs."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.engine.fingerprint import array_text
from parallel.engine.option import OPTIMIZER
from parallel.engine.settings import DEFAULTS, OPTIONS, Settings
from parallel.nn.operator import Operator
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizers import OPTIMIZERS
from parallel.runtime.consistency_check import check_equal


def expect_same(comm: MPI.Intracomm, x: Any, y: Any, samples: Any = None) -> None:
    """Raise RankMismatch on all ranks if they have other batches, such as each a part of one. Collective.

    TypeError if they are no arrays of numbers with an axis of samples.
    """
    forms = [(name, array, *_form_of(array)) for name, array in (("x", x), ("y", y))]
    facts = [(name, _text_of(array, shape, good)) for name, array, shape, good in forms]
    check_equal(comm, [*facts, ("samples", None if samples is None else _text_of(samples, *_form_of(samples)))])
    for name, array, shape, good in forms:
        if not good or not shape:
            found = f"{getattr(array, 'dtype', type(array).__name__)} of shape {shape}"
            raise TypeError(f"{name}: expected an array of numbers with an axis of samples first, found {found}")


def expect_data(data: Any) -> None:
    """Raise TypeError for an object that is no data set."""
    if not (hasattr(data, "take") and hasattr(data, "__len__")):
        found = type(data).__name__
        raise TypeError(f"data: expected len(data) and data.take(indices), as ArrayDataset(x, y); found a {found}")


def expect_room(out: Any, scores: np.ndarray) -> None:
    """Raise ValueError for an array `out` that cannot take scores: of another shape, or of numbers that lose more."""
    fits = isinstance(out, np.ndarray) and out.shape == scores.shape and out.flags.writeable
    if not fits or not np.can_cast(scores.dtype, out.dtype, "same_kind"):
        found = f"{getattr(out, 'dtype', type(out).__name__)} of shape {np.shape(out)}"
        raise ValueError(f"expected a writable array of {scores.dtype} and shape {scores.shape}, found {found}")


def _form_of(array: Any) -> tuple[tuple[int, ...], bool]:
    """Shape of an array, or of nested lists, and True if it has numbers. () of lists of unequal lengths."""
    try:
        return np.shape(array), str(getattr(array, "dtype", None) or np.asarray(array).dtype) != "object"
    except ValueError:
        return (), False


def _text_of(array: Any, shape: tuple[int, ...], is_numbers: bool) -> str:
    if not is_numbers:
        return f"{type(array).__name__} of shape {shape}"
    on_device = type(array).__module__.partition(".")[0] == "cupy"
    return array_text(array if on_device else np.asarray(array))


OWN = tuple(one.name for one in OPTIONS.values() if not one.owner)
"""Options that an engine uses. The others describe data, model, optimizer and length of a training."""

OWNERS = {one.name: one.owner for one in OPTIONS.values() if one.owner}
OWNERS |= dict.fromkeys(("lr", "learning_rate", "weight_decay", "betas", "ema"), OPTIMIZER)
"""Owner of a value, by the value's name: argument of `Engine`, or the training program."""


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
        if name not in OWN and name not in OWNERS:
            near = get_close_matches(name, OWN, n=1)
            perhaps = f"perhaps {near[0]}" if near else f"they are {', '.join(OWN)}"
            raise ValueError(f"{name}: expected an option of engines; {perhaps}")
    # settings of the data or the optimizer would be ignored silently
    changed = [one for one in OWNERS if one != "optimizer" and getattr(settings, one, 0) != getattr(DEFAULTS, one, 0)]
    for name in (*(name for name in options if name in OWNERS), *changed):
        raise ValueError(f"{name}: expected an option of engines; {OWNERS[name]} has it")
    known = {kind: name for name, kind in OPTIMIZERS.items()}
    name = next((known[kind] for kind in type(optimizer).__mro__ if kind in known), settings.optimizer)
    return replace(settings, **options, optimizer=name)
