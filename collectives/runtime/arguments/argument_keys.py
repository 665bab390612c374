"""Cache keys of calls: equal for buffers of the same shapes, counts and types, of NumPy at any addresses.

>>> import numpy as np
>>> describe(np.zeros(3))[1]
((3,), dtype('float64'))
>>> describe([np.zeros(3), [2, 1]])[1] == describe((np.zeros(3), [2, 1]))[1]
True
"""

import sys
from array import array as _array
from operator import index
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.buffers import dlpack
from collectives.buffers.datatypes import Identity

_ndarray, _IN_PLACE = np.ndarray, MPI.IN_PLACE

NO_ARRAY = np.empty(0, np.uint8)
"""Array of a call that has none."""

CPU = 1
"""DLPack's number of host memory."""

NUMPY_DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}
"""Dtypes that NumPy reads by DLPack."""

DENSE = 0x3
"""NumPy's flags of an array without gaps, in C or Fortran order."""

_CONSTANTS = {id(value): value for value in vars(MPI).values() if isinstance(value, (MPI.Op, MPI.Datatype))}
"""MPI's predefined operations and datatypes by id. Held here, so that no other object gets their ids."""


def is_handle(value: Any) -> bool:
    """True for operations and datatypes of users."""
    return isinstance(value, MPI.Op | MPI.Datatype) and id(value) not in _CONSTANTS


def _handle_key(value: Any) -> Any:
    """Key of an operation or a datatype, which never changes its meaning until it is freed. TypeError if it was."""
    if id(value) in _CONSTANTS:
        return id(value)
    if isinstance(value, MPI.Op | MPI.Datatype) and value:
        return Identity(value)
    raise TypeError


def is_constant(value: Any) -> bool:
    """True for items of lists that always mean the same: strings, None, NumPy's and other integers, MPI's constants."""
    return type(value) in (int, bool, str, type(None)) or isinstance(value, np.integer) or id(value) in _CONSTANTS


def is_cupy(array: Any) -> bool:
    """True for CuPy's own arrays."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and type(array) is cupy.ndarray


def place_of(array: Any) -> tuple[Any, ...]:
    """Address and layout of an array of NumPy or CuPy. TypeError if it has gaps."""
    if type(array) is _ndarray:
        flags = array.flags.num
        if flags & DENSE:
            return MPI.Get_address(array), flags, array.strides
    elif array.flags.c_contiguous or array.flags.f_contiguous:
        return array.data.ptr, array.device.id, array.strides
    raise TypeError


def describe(spec: Any) -> tuple[Any, tuple[Any, ...]]:
    """Array of NumPy or CuPy of an argument, None if it has none, and a key of all else. TypeError for other ones.

    The key of an array of CuPy includes its place, as programs run on the arrays that they were bound to.
    """
    if type(spec) is _ndarray:
        return spec, (spec.shape, spec.dtype)
    if isinstance(spec, _ndarray):
        return np.asarray(spec), (type(spec), spec.shape, spec.dtype)
    if spec is None or spec is _IN_PLACE:
        return None, ()
    if is_cupy(spec):
        memory = spec.data
        return spec, (spec.shape, spec.dtype, spec.strides, memory.ptr, memory.device_id)
    if type(spec) not in (list, tuple):
        return view_of(spec)
    if not 2 <= len(spec) <= 4 or is_cupy(spec[0]):
        raise TypeError
    # beside counts only the bytes of an array matter, not its shape
    data, key = (spec[0], (spec[0].dtype,)) if type(spec[0]) is _ndarray else view_of(spec[0])
    if len(spec) == 2:
        return data, (data.nbytes, *key, _part(spec[1]))
    return data, (data.nbytes, *key, *map(_part, spec[1:]))


def view_of(obj: Any) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Array on the memory of another object, and its key. TypeError if it has none in host memory, or none at all."""
    if isinstance(obj, _ndarray):
        return np.asarray(obj), (type(obj), obj.shape, obj.dtype)
    if on_host(obj):
        if not _numpy_takes(obj):
            raise TypeError
        try:
            array = np.from_dlpack(obj)
        except (BufferError, RuntimeError, ValueError):
            raise TypeError from None
        return array, (type(obj), array.shape, array.dtype)
    memory = memoryview(obj)
    if not memory.nbytes or not memory.contiguous:
        raise TypeError
    return np.frombuffer(obj, np.uint8), (type(obj), memory.shape, memory.format)


_taken: dict[tuple[type, Any], bool] = {}
"""Classes of arrays and their dtypes, and if NumPy has such a dtype."""


def _numpy_takes(obj: Any) -> bool:
    """True if NumPy can read an object with DLPack, as a reader of ours finds out.

    As NumPy refuses a dtype, it lets go of the object's capsule during the exception, which not all libraries survive.
    """
    try:
        known = type(obj), obj.dtype
        if known not in _taken:
            dtype = dlpack.read(obj).dtype
            _taken[known] = dtype is not None and dtype.str[1:] in NUMPY_DTYPES
        return _taken[known]
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
        return False


def held(spec: Any) -> Any:
    """Object that keeps the memory of a buffer argument in its place: an array, or a view of another buffer.

    The user may replace the array in a list, or resize a bytearray.
    """
    obj = spec[0] if type(spec) is list else spec
    try:
        return obj if obj is None or obj is _IN_PLACE or isinstance(obj, _ndarray) else memoryview(obj)
    except (TypeError, ValueError):
        return obj


def on_host(obj: Any) -> bool:
    """True for objects with DLPack in host memory, as the tensors of PyTorch."""
    device = getattr(type(obj), "__dlpack_device__", None)
    return device is not None and device(obj)[0] == CPU


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
    if kind is _array and value.typecode in "bBhHiIlLqQ":
        return value.typecode, value.tobytes()
    if isinstance(value, np.integer):
        return int(value)
    return _handle_key(value)


def counts_key(counts: Any) -> Any:
    """Key of a root or counts. Where there is none a list, which is unhashable, so that the call is not cached."""
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
        """True if calls with this key are like the one with these memories.

        They are not if memory begins outside of the arrays: other arrays may have none there.
        """
        ends = zip(memories, (self.sendbuf, self.recvbuf))
        return all(at is None or 0 <= at - place_of(array)[0] <= array.nbytes for at, array in ends)

    def suits_any_length(self, length: int) -> bool:
        """True for a call that is not looked up, or whose arrays without counts grow with its length."""
        if self is UNCACHEABLE or not length:
            return bool(length)
        return self.plain and all(array.nbytes % length == 0 for array in (self.sendbuf, self.recvbuf))

    def offsets(self, memories: tuple[int | None, int | None]) -> tuple[int | None, ...] | None:
        """Offsets of these memories in the arrays, None for memory elsewhere. None for calls that cannot be found."""
        if self is UNCACHEABLE or not (type(self.sendbuf) is type(self.recvbuf) is _ndarray):
            return None
        pairs = zip(memories, (self.sendbuf, self.recvbuf))
        return tuple(None if at is None else at - MPI.Get_address(array) for at, array in pairs)

    @property
    def is_current(self) -> bool:
        """False if lists among the arguments have changed since: another thread may do that while the call runs."""
        try:
            arguments, s, r = key_fields(self.arguments[0], *self.given)
        except TypeError:
            return False
        return arguments == self.arguments and _same_memory(s, self.sendbuf) and _same_memory(r, self.recvbuf)

    @property
    def has_addresses(self) -> bool:
        """True if the arguments alone have the addresses: all arrays are CuPy's."""
        return type(self.sendbuf) is not _ndarray and type(self.recvbuf) is not _ndarray

    @property
    def plain(self) -> bool:
        """True if each buffer is an array without counts, displacements or datatype."""
        return len(self.arguments) == 9 or max(map(len, self.arguments[5:])) <= 2


def _same_memory(one: Any, other: Any) -> bool:
    """True for the same array, or two views of the same object with a buffer."""
    return one is other or (type(one) is type(other) is _ndarray and MPI.Get_address(one) == MPI.Get_address(other))


UNCACHEABLE = CallKey((), NO_ARRAY, NO_ARRAY)
"""Key of calls whose arguments cannot be looked up. Compared by identity."""


def with_addresses(arguments: tuple[Any, ...], s: Any, r: Any) -> tuple[Any, ...]:
    """Key that includes the addresses of two arrays. TypeError if they have gaps."""
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
        arguments = name, _handle_key(op), root, algorithm, segments, s.shape, s.dtype, r.shape, r.dtype
        return arguments, s, r
    (send, sent), (recv, received) = describe(sendbuf), describe(recvbuf)
    if send is None:
        send = NO_ARRAY if recv is None else recv
    return (name, _handle_key(op), root, algorithm, segments, sent, received), send, send if recv is None else recv
