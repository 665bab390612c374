"""Cache keys of arguments: equal for buffers of the same shapes, counts and types at any addresses.

>>> import numpy as np
>>> describe(np.zeros(3))[1]
((3,), dtype('float64'))
>>> describe([np.zeros(3), [2, 1]])[1] == describe((np.zeros(3), [2, 1]))[1]
True
"""

from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI

_ndarray, _IN_PLACE = np.ndarray, MPI.IN_PLACE

_CONSTANTS = {id(value): value for value in vars(MPI).values() if isinstance(value, (MPI.Op, MPI.Datatype))}
"""MPI's predefined operations and datatypes by id. Held here, so that no other object gets their ids."""


def is_constant(number: int) -> bool:
    """True if this is the id of one of MPI's own operations or datatypes; others are freed, and their ids reused."""
    return number in _CONSTANTS


def describe(spec: Any) -> tuple[np.ndarray | None, tuple[Any, ...]]:
    """NumPy array of a buffer argument, None if it has none, and a key of all else; TypeError for other arguments."""
    if type(spec) is _ndarray:
        return spec, (spec.shape, spec.dtype)
    if spec is None or spec is _IN_PLACE:
        return None, ()
    if type(spec) not in (list, tuple) or not 2 <= len(spec) <= 4 or type(spec[0]) is not _ndarray:
        raise TypeError
    data = spec[0]
    if len(spec) == 2:
        return data, (data.nbytes, data.dtype, _part(spec[1]))
    return data, (data.nbytes, data.dtype, *map(_part, spec[1:]))


def _part(value: Any) -> Any:
    """Key of counts, displacements or a datatype."""
    kind = type(value)
    if kind is list or kind is tuple:
        if value and type(value[0]) is int and value[-1] is not None:
            return kind, *map(index, value)  # TypeError for a float, which is equal to an integer
        return kind, *map(_part, value)
    if kind is int or kind is str or value is None:
        return value
    if kind is _ndarray and value.dtype.kind in "iu":
        return value.dtype, value.shape, value.tobytes()
    if id(value) in _CONSTANTS:
        return id(value)
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError


def counts_key(counts: Any) -> Any:
    """Key of a root or counts; where there is none a list, which is unhashable, so that the call is not cached."""
    try:
        return [] if counts is None else _part(counts)
    except TypeError:
        return []
