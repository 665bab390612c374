"""Formulas of optimizers, element by element: in NumPy or CuPy, or compiled from `updates.h` with the same bits.

Every operation rounds by itself, so that results do not depend on where a vector is cut.
"""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from parallel.optim.kernels import device_updates
from parallel.optim.kernels.scalars import RunScalars, Scalars
from quant.types import Array

host: ModuleType | None = None
"""Extension module of the formulas for NumPy arrays. None where it was not built."""

with suppress(ModuleNotFoundError):
    host = import_module("parallel.optim.kernels._updates")

Formula = Callable[..., None]
"""Function of vectors of equal length (it updates some in place) and of `Scalars`, the last argument."""

COMPILED: set[Formula] = set()
"""Formulas that `updates.h` has as well."""


def compiled(formula: Formula) -> Formula:
    """Decorator of a formula that `updates.h` has by the same name, for the same arrays in the same order."""
    COMPILED.add(formula)
    return formula


def runs_compiled(formula: Formula, vector: Array) -> bool:
    """True if `run` takes the compiled formula for arrays like `vector`."""
    return formula in COMPILED and (host is not None or not isinstance(vector, np.ndarray))


def run(formula: Formula, scalars: Any, *arrays: Array) -> None:
    """Run a formula with `Scalars`, or on a device with scalars of several runs of elements (`RunScalars`)."""
    if isinstance(scalars, RunScalars):
        device_updates.run(formula.__name__, scalars, *arrays)
    elif isinstance(arrays[0], np.ndarray) and runs_compiled(formula, arrays[0]):
        getattr(host, formula.__name__)(*arrays, *scalars)
    else:
        formula(*arrays, scalars)


def decayed(step: Array, weights: Array, s: Scalars) -> Array:
    """Add the weight decay to a gradient or a step."""
    return step + s.decay * weights if s.decay else step


@compiled
def average(weights: Array, ema: Array, s: Scalars) -> None:
    """Update a moving average of the weights."""
    ema[...] = s.keep * ema + s.gain1 * weights
