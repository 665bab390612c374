"""Cache keys of arguments: equal for buffers of the same shapes, counts and types, of NumPy at any addresses.

>>> import numpy as np
>>> describe(np.zeros(3))[1]
((3,), dtype('float64'))
>>> describe([np.zeros(3), [2, 1]])[1] == describe((np.zeros(3), [2, 1]))[1]
True
"""

import sys
from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI

_ndarray, _IN_PLACE = np.ndarray, MPI.IN_PLACE

DENSE = 0x3
"""NumPy's flags of an array without gaps, in C or Fortran order."""

_CONSTANTS = {id(value): value for value in vars(MPI).values() if isinstance(value, (MPI.Op, MPI.Datatype))}
"""MPI's predefined operations and datatypes by id. Held here, so that no other object gets their ids."""


def is_constant(number: int) -> bool:
    """True if this is the id of one of MPI's own operations or datatypes; others are freed, and their ids reused."""
    return number in _CONSTANTS


def is_cupy(array: Any) -> bool:
    """True for CuPy's own arrays."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and type(array) is cupy.ndarray


def place_of(array: Any) -> tuple[Any, ...]:
    """Address and layout of an array of NumPy or CuPy; TypeError if it has gaps."""
    if type(array) is _ndarray:
        flags = array.flags.num
        if flags & DENSE:
            return MPI.Get_address(array), flags, array.strides
    elif array.flags.c_contiguous or array.flags.f_contiguous:
        return array.data.ptr, array.device.id, array.strides
    raise TypeError


def describe(spec: Any) -> tuple[Any, tuple[Any, ...]]:
    """Array of NumPy or CuPy of an argument, None if it has none, and a key of all else; TypeError for other ones.

    The key of an array of CuPy includes its place, as programs run on the arrays that they were bound to.
    """
    if type(spec) is _ndarray:
        return spec, (spec.shape, spec.dtype)
    if spec is None or spec is _IN_PLACE:
        return None, ()
    if is_cupy(spec):
        memory = spec.data
        return spec, (spec.shape, spec.dtype, spec.strides, memory.ptr, memory.device_id)
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
