"""The arithmetic of optimisers on plain vectors: one function an idea, in NumPy or CuPy, and compiled where it can be.

`kernels(x)` is the module whose functions suit an array: `reference` for any, `compiled` for host arrays where numba is
installed. Both give the same bits.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from parallel.optim.kernels import reference_updates

__all__ = ["kernels", "reference"]


def kernels(x: Any) -> ModuleType:
    """The module with the fastest `sgd`, `momentum`, `adam`, `adamw`, `lamb...` and `squares` for arrays like `x`."""
    return _host() if isinstance(x, np.ndarray) else reference_updates


@cache
def _host() -> ModuleType:
    if find_spec("numba") is None:
        return reference_updates
    from parallel.optim.kernels import compiled_updates  # numba takes a while to load

    return compiled_updates
