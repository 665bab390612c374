"""Optimizer updates of vectors: `reference_updates` for NumPy and CuPy; `compiled_updates`, bitwise equal, by numba."""

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from parallel.optim.kernels import reference_updates


def kernels(x: Any) -> ModuleType:
    """Module of update functions to use for arrays like `x`: compiled for host arrays if numba is installed."""
    return _host() if isinstance(x, np.ndarray) else reference_updates


@cache
def _host() -> ModuleType:
    if find_spec("numba") is None:
        return reference_updates
    from parallel.optim.kernels import compiled_updates  # numba takes a while to load

    return compiled_updates
