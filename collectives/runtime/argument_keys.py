"""Cache keys of calls: equal for buffers of the same shapes, counts and types, of NumPy at any addresses.

>>> import numpy as np
>>> describe(np.zeros(3))[1]
((3,), dtype('float64'))
>>> describe([np.zeros(3), [2, 1]])[1] == describe((np.zeros(3), [2, 1]))[1]
True
"""

import sys
from operator import index
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

_ndarray, _IN_PLACE = np.ndarray, MPI.IN_PLACE

NO_ARRAY = np.empty(0, np.uint8)
"""Array of a call that has none."""

DENSE = 0x3
"""NumPy's flags of an array without gaps, in C or Fortran order."""

_CONSTANTS = {id(value): value for value in vars(MPI).values() if isinstance(value, (MPI.Op, MPI.Datatype))}
"""MPI's predefined operations and datatypes by id. Held here, so that no other object gets their ids."""


def is_constant(value: Any) -> bool:
    """True for items of lists that always mean the same: strings, None, NumPy's and other integers, MPI's constants."""
    return type(value) in (int, bool, str, type(None)) or isinstance(value, np.integer) or id(value) in _CONSTANTS


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


class CallKey(NamedTuple):
    """Cache key of a call, by its arguments without addresses of NumPy arrays, and its arrays: a single one twice.

    The arrays are NumPy's or CuPy's; the arguments have the addresses of the latter. `given` are the arguments
    themselves: send buffer, receive buffer, operation, root, algorithm and segments.
    """

    arguments: tuple[Any, ...]
    sendbuf: Any
    recvbuf: Any
    given: tuple[Any, ...] = ()

    @property
    def addresses(self) -> tuple[Any, ...]:
        return with_addresses(self.arguments, self.sendbuf, self.recvbuf)

    def identifies(self, memories: tuple[int | None, int | None]) -> bool:
        """True if calls with this key are like the one with these memories, which has an operation of MPI's own.

        They are not if memory begins outside of the arrays: other arrays may have none there. Operations of users are
        freed, and their ids reused.
        """
        ends = zip(memories, (self.sendbuf, self.recvbuf))
        inside = all(at is None or 0 <= at - place_of(array)[0] <= array.nbytes for at, array in ends)
        return inside and self.arguments[1] in _CONSTANTS

    @property
    def is_current(self) -> bool:
        """False if lists among the arguments have changed since: another thread may do that while the call runs."""
        try:
            arguments, s, r = key_fields(self.arguments[0], *self.given)
        except TypeError:
            return False
        return arguments == self.arguments and s is self.sendbuf and r is self.recvbuf

    @property
    def has_addresses(self) -> bool:
        """True if the arguments alone have the addresses: all arrays are CuPy's."""
        return type(self.sendbuf) is not _ndarray and type(self.recvbuf) is not _ndarray

    @property
    def plain(self) -> bool:
        """True if each buffer is an array without counts, displacements or datatype."""
        return len(self.arguments) == 9 or max(map(len, self.arguments[5:])) <= 2


UNCACHEABLE = CallKey((), NO_ARRAY, NO_ARRAY)
"""Key of calls whose arguments cannot be looked up; compared by identity."""


def with_addresses(arguments: tuple[Any, ...], s: Any, r: Any) -> tuple[Any, ...]:
    """Key that includes the addresses of two arrays; TypeError if they have gaps."""
    return arguments, *place_of(s), *place_of(r)


def key_fields(
    name: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: Any, algorithm: Any, segments: Any
) -> tuple[tuple[Any, ...], Any, Any]:
    """Fields of a `CallKey`, as a tuple: a lookup needs no more. TypeError for buffers that `describe` refuses."""
    if type(root) is not int:
        root = counts_key(root)
    if segments is not None and type(segments) is not int:  # 1.0 and True are equal to 1
        segments = counts_key(segments)
    if type(sendbuf) is _ndarray and type(recvbuf) is _ndarray:
        s, r = sendbuf, recvbuf
        arguments = name, id(op), root, algorithm, segments, s.shape, s.dtype, r.shape, r.dtype
        return arguments, s, r
    (send, sent), (recv, received) = describe(sendbuf), describe(recvbuf)
    if send is None:
        send = NO_ARRAY if recv is None else recv
    return (name, id(op), root, algorithm, segments, sent, received), send, send if recv is None else recv
