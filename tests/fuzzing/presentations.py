"""Objects that present an array's memory to a call: those of other protocols and libraries, and in Fortran order."""

from array import array as plain_array
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

HAS_TORCH = find_spec("torch") is not None


class DLPackOnly:
    """Wrapper of an array that supports no array protocol but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def tensor(array: np.ndarray) -> Any:
    """PyTorch tensor of an array's memory; the array itself without PyTorch."""
    return import_module("torch").from_numpy(array) if HAS_TORCH else array


def fortran(array: np.ndarray) -> np.ndarray:
    """Matrix of an array's elements in Fortran order."""
    return array.reshape(-1).reshape((2 - array.size % 2, -1) if array.size else (0, 2), order="F")


def allocate_plain(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Array of `count` zeros in the memory of an `array.array`, which `plain` finds."""
    return np.frombuffer(plain_array(dtype.char, bytes(count * dtype.itemsize)), dtype)


def plain(array: np.ndarray) -> Any:
    """The `array.array` that a view of an array from `allocate_plain` is all of."""
    return array.base.base.obj  # type: ignore[union-attr]  # of the array, and of the memoryview that it is made from


class Presentation(NamedTuple):
    """Function that presents an array, and the typecodes of the arrays that it is for."""

    typecodes: str
    present: Callable[[np.ndarray], Any]
    read_only: bool = True
    """It takes arrays that are read-only."""


NUMBERS = "bhilqBHILQfd"
PRESENTATIONS = {
    "array.array": Presentation(NUMBERS, plain),
    "DLPack": Presentation("ilfd", DLPackOnly, read_only=False),
    "memoryview": Presentation(NUMBERS, memoryview),
    "tensor": Presentation("bhilBfdFD?", tensor, read_only=False),
    "Fortran": Presentation(NUMBERS + "gFD?", fortran),
}
"""Presentations by the flag of a step that asks for them; the first one whose flag is set counts."""


def presented(array: np.ndarray, flags: frozenset[str]) -> Any:
    """Present an array as the flags of a step name it; the array itself if they name none for its dtype."""
    for name, (typecodes, present, read_only) in PRESENTATIONS.items():
        if name in flags and array.dtype.char in typecodes and (read_only or array.flags.writeable):
            return present(array)
    return array


def is_plain(flags: frozenset[str], dtype: np.dtype[Any]) -> bool:
    """True if `presented` presents arrays from `allocate_plain`, which have no other elements around them."""
    return "array.array" in flags and dtype.char in NUMBERS
