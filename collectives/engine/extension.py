"""The compiled engine, if this installation has it: it is built where a C compiler is at hand (``setup.py``)."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

engine: Any
"""The extension, or None."""

try:
    engine = import_module("collectives.engine._engine")
except ImportError:
    engine = None

MPI_FUNCTIONS = "MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Get_count"


def available() -> bool:
    """True if this installation has the compiled engine."""
    return engine is not None


@cache
def use_mpi() -> None:
    """Give the engine the functions of the MPI that this process has loaded."""
    from mpi4py import MPI  # initializes MPI, which other users of this module do not need

    library = ctypes.CDLL(MPI.__file__)  # whose functions include those of the MPI that it is linked to
    engine.set_mpi(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in MPI_FUNCTIONS))


def reduction_number(ufunc: np.ufunc, dtype: np.dtype[Any]) -> int:
    """Number of a reduction for rows; -1 if the engine does not have it for the dtype."""
    if dtype.isbuiltin != 1 or dtype.char in "gG" or not dtype.isnative:  # of other packages; long double
        return -1
    return int(engine.reduction(ufunc.__name__, dtype.kind, dtype.itemsize))
