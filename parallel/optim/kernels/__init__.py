"""Optimizer updates of vectors: `reference_updates`, and others with the same bits.

`compiled_updates` are numba's for the host, `device_updates` kernels of CuPy.
"""

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from parallel.optim.kernels import device_updates, reference_updates
from quant.kernels.availability import has_compiler


def kernels(x: Any) -> ModuleType:
    """Module of update functions to use for arrays like `x`: for host arrays those of numba, if it is installed."""
    return _host() if isinstance(x, np.ndarray) else device_updates


@cache
def _host() -> ModuleType:
    if not has_compiler():
        return reference_updates
    from parallel.optim.kernels import compiled_updates  # numba takes a while to load

    return compiled_updates
