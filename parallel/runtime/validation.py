"""Validation of values from users and from checkpoint metadata: nothing is rounded or cut in silence."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from quant.types import Array


def real_number(value: Any) -> float:
    """Float of a real number, also of an array of one element. TypeError for others, such as complex numbers.

    >>> real_number(np.float32(0.5)), real_number(3)
    (0.5, 3.0)
    """
    one = value.item() if getattr(value, "size", 0) == 1 and hasattr(value, "item") else value
    if not isinstance(one, Real):
        raise TypeError(f"expected a real number, found {value!r}")
    return float(one)


def is_real(array: Array) -> bool:
    """True for an array of floats (NumPy has no kind for bfloat16), integers or bools: not of complex numbers."""
    return array.dtype.kind in "fiub" or array.dtype.name == "bfloat16"


def widened(array: Array, what: str) -> Array:
    """The array, of int64 if its elements are integers of any other type. ValueError for numbers beyond int64.

    Sums and differences of narrow integers wrap around.

    >>> widened(np.uint8([200]), "targets") + 100
    array([300])
    """
    if array.dtype.kind not in "iu" or array.dtype == np.int64:
        return array
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{what}: expected integers that int64 can hold, found {array.max()}")
    return array.astype(np.int64)


def exact_integers(array: Any, what: str) -> np.ndarray:
    """Array of int64 of integers in any form. ValueError for elements that are no integers.

    >>> exact_integers([3, 1], "samples")
    array([3, 1])
    """
    found = np.asarray(array)
    if found.dtype.kind not in "iu" and found.size:
        raise ValueError(f"{what}: expected integers, found {found.dtype}")
    whole: np.ndarray = widened(found, what).astype(np.int64, copy=False)
    return whole


def expect_mapping(facts: Any, what: str) -> Mapping[str, Any]:
    """Return `facts`. ValueError, beginning with the name `what`, if it is not a mapping."""
    if not isinstance(facts, Mapping):
        raise ValueError(f"{what}: expected values by name, found {facts!r}")
    return facts


def expect_integer(facts: Mapping[str, Any], name: str) -> int:
    """Return ``facts[name]``. ValueError, with the name, if it is missing or not an integer from 0 on.

    >>> expect_integer({"steps": 3}, "steps")
    3
    """
    if name not in facts:
        raise ValueError(f"{name} is missing")
    value = facts[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: expected a whole number from 0 on, found {value!r}")
    return value
