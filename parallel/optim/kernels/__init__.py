"""Optimizer updates of vectors: `reference_updates`, and others with the same bits.

`compiled_updates` are the host's, in C, `device_updates` kernels of CuPy.
"""

from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np

from parallel.optim.kernels import device_updates, reference_updates

host: ModuleType = reference_updates
"""Module of update functions for NumPy arrays: in C, where the extension was built."""

with suppress(ImportError):
    from parallel.optim.kernels import compiled_updates as host


def kernels(x: Any) -> ModuleType:
    """Module of update functions to use for arrays like `x`."""
    return host if isinstance(x, np.ndarray) else device_updates
