"""The engine in use: the compiled one, if a C compiler was at hand at the installation, or else the interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from collectives.engine import interpreter, plain, row_operands
from collectives.engine.recorder import recorder

engine: Any
"""The extension, or None."""

try:
    engine = import_module("collectives.engine._engine")
except ModuleNotFoundError:  # other errors are those of an engine that does not fit
    engine = None

MPI_FUNCTIONS = "MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Get_count"


def available() -> bool:
    """True if this installation has the compiled engine."""
    return engine is not None


def copy_object(value: Any) -> Any:
    """Copy of an object of Python's own types, as pickle would make one. NotImplemented for others."""
    return NotImplemented


def write_object(frame: np.ndarray, value: Any) -> bytes | None:
    """Write an object of Python's own types into a frame. Its bytes, which follow if too long. None for others."""
    return None


def write_all(frames: np.ndarray, values: Any) -> bool:
    """`write_object` of a list with a value for each frame. False for all else, and longer ones."""
    return False


def read_frames(frames: np.ndarray, loads: Callable[[bytes], Any]) -> list[Any] | None:
    """Objects of all frames, unpickled by `loads`. None if a frame does not hold all of its object, or an error."""
    return None


read_plain = plain.read_plain

if available():
    copy_object, write_object, read_plain = engine.copy_object, engine.write_object, engine.read_plain
    write_all, read_frames = engine.write_all, engine.read_frames


def engine_class(name: str) -> Any:
    """Class `RowProgram` or `CallTable` of the engine in use."""
    return getattr(engine if available() else interpreter, name)


def set_record(words: np.ndarray, entries: np.ndarray) -> None:
    """Note calls in this memory: the number of the last one in the first of `words`, and `CALL_RECORD` in `entries`."""
    (engine if available() else recorder).set_record(words, entries)


@cache
def use_mpi() -> None:
    """Give the compiled engine the functions of the MPI that this process has loaded."""
    from mpi4py import MPI  # initializes MPI, which other users of this module do not need

    library = ctypes.CDLL(MPI.__file__)  # whose functions include those of the MPI that it is linked to
    engine.set_mpi(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in MPI_FUNCTIONS))


def reduction_number(function: Callable[..., Any], ufunc: Any, dtype: np.dtype[Any]) -> int:
    """Number of the reduction ``function(left, right, out=out)`` for rows. -1 if the engine in use does not have it.

    `ufunc` is the function of NumPy that it has the values of.
    """
    if not available():
        return row_operands.reduction(function, dtype)
    number = -1
    if isinstance(ufunc, np.ufunc) and dtype.isnative and (dtype.isbuiltin == 1 or dtype.name == "bfloat16"):
        number = int(engine.reduction(ufunc.__name__, dtype.kind, dtype.itemsize))
    if number >= 0:
        row_operands.reductions[number] = function, dtype
    return number
