"""Memory of one argument: address, size and element type of an array, a buffer, or a device array."""

import os
import sys
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.buffers import dlpack
from collectives.buffers.datatypes import ElementType, element_of, element_of_code, element_of_dtype, element_of_format
from collectives.errors import InvalidBuffer, InvalidType, UnknownDatatype


class MemoryView(NamedTuple):
    """Memory of an object: `nbytes` bytes from `address`, and the type of its elements."""

    address: int
    nbytes: int
    element: ElementType
    readonly: bool
    device: bool
    owner: object


InPlace = type(MPI.IN_PLACE)


def memory_of(obj: Any, datatype: object, name: str, writable: bool) -> MemoryView:
    """Describe contiguous memory, on host or device. Elements are of `datatype`, or inferred if that is None."""
    if obj is None or obj is MPI.BOTTOM:
        if datatype is None:
            raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: MPI.BOTTOM or None as the array needs an explicit datatype")
        return MemoryView(0, 0, _element_or_code(datatype, name), False, False, None)
    if isinstance(obj, InPlace):  # supports the buffer protocol, with no bytes
        raise InvalidType(MPI.ERR_BUFFER, f"{name}: MPI.IN_PLACE is not allowed here")
    element = None if datatype is None else _element_or_code(datatype, name)
    if isinstance(obj, np.ndarray):
        if obj.dtype.hasobject:
            message = f"{name}: an array of Python objects (dtype {obj.dtype}) has no bytes that could be sent"
            raise UnknownDatatype(MPI.ERR_TYPE, message)
        if not obj.flags.forc:
            raise _not_contiguous(name, obj.shape, obj.strides)
        if writable and not obj.flags.writeable:
            raise _read_only(name, "the array")
        found = element_of_dtype(obj.dtype, name) if element is None else element
        return MemoryView(MPI.Get_address(obj), obj.nbytes, found, not obj.flags.writeable, False, obj)
    try:
        memory = memoryview(obj)
    except TypeError:
        pass  # no buffer protocol: try the others
    except (ValueError, BufferError) as error:  # supports the protocol, but not for this object
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: {error}") from error
    else:
        if not memory.contiguous:
            raise _not_contiguous(name, memory.shape or (), memory.strides or ())
        if writable and memory.readonly:
            raise _read_only(name, f"an object of type {type(obj).__name__!r}")
        found = element_of_format(memory.format, name) if element is None else element
        return MemoryView(MPI.Get_address(memory), memory.nbytes, found, memory.readonly, False, memory)
    interface = cuda_interface(obj)
    if interface is not None:
        return _cuda_array(obj, interface, element, name, writable)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _dlpack(obj, element, name, writable)
    expected = "expected an array, a buffer, or [array, count, datatype]"
    raise InvalidType(MPI.ERR_BUFFER, f"{name}: {expected}, found {type(obj).__name__!r}")


def bytes_before(memory: MemoryView) -> int:
    """Bytes before an array's first element that belong to the array of which it is a part.

    Negative displacements and lower bounds reach them, like a pointer to the middle of an array in C.
    """
    whole = memory.owner
    while isinstance(whole, np.ndarray) and isinstance(whole.base, np.ndarray):
        whole = whole.base
    if not isinstance(whole, np.ndarray) or not whole.size:
        return 0
    return memory.address - np.lib.array_utils.byte_bounds(whole)[0]


def cuda_interface(obj: Any) -> dict[str, Any] | None:
    """``__cuda_array_interface__`` of an object, or None."""
    try:
        interface: dict[str, Any] = obj.__cuda_array_interface__
    except (AttributeError, TypeError, RuntimeError, ValueError):  # absent, or not supported for this array
        return None
    return interface


def on_gpu(like: Any) -> bool:
    """True for the module ``cupy``, and for arrays with a CUDA array interface."""
    return like is not None and (like is sys.modules.get("cupy") or cuda_interface(like) is not None)


def _element_or_code(datatype: object, name: str) -> ElementType:
    return element_of(datatype, name) if isinstance(datatype, MPI.Datatype) else element_of_code(datatype, name)


def _cuda_array(
    obj: Any, interface: dict[str, Any], element: ElementType | None, name: str, writable: bool
) -> MemoryView:
    # the interface has no code for bfloat16, but the array's own dtype has it
    dtype = getattr(obj, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(interface["typestr"])
    if interface.get("mask") is not None:
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: masked device arrays cannot be sent")
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    if strides is not None and not _is_dense(shape, tuple(strides), dtype.itemsize):
        raise _not_contiguous(name, shape, tuple(strides))
    pointer, readonly = interface["data"]
    if writable and readonly:
        raise _read_only(name, "the device array")
    found = element_of_dtype(dtype, name) if element is None else element
    address, nbytes = int(pointer or 0), prod(shape) * dtype.itemsize
    return MemoryView(address, nbytes, found, bool(readonly), _on_device(obj, address, nbytes), obj)


_UNREGISTERED = 0
"""CUDA's number (cudaMemoryTypeUnregistered) of memory that it does not know: of the host, and not pinned."""


def _on_device(obj: Any, address: int, nbytes: int) -> bool:
    """False if memory with a CUDA array interface is ordinary host memory: CUDA does not know it, or the CPU reads it.

    mpi4py passes any address to the MPI, so programs also give it host memory by this interface.
    """
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        if isinstance(obj, cupy.ndarray) or not nbytes:
            return True
        with suppress(RuntimeError):  # no CUDA driver
            return bool(cupy.cuda.runtime.pointerGetAttributes(address).type != _UNREGISTERED)
    return nbytes > 0 and not _readable(address)


def _readable(address: int) -> bool:
    """True if the CPU can read the byte at an address: the kernel refuses to copy any other into a pipe."""
    reader, writer = os.pipe()
    try:
        return os.write(writer, view(address, 1, np.dtype(np.uint8)).data) == 1
    except OSError:  # EFAULT
        return False
    finally:
        os.close(reader)
        os.close(writer)


def _dlpack(obj: Any, element: ElementType | None, name: str, writable: bool) -> MemoryView:
    try:
        tensor = dlpack.read(obj)
    except (BufferError, TypeError, RuntimeError, ValueError) as error:
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: {error}") from error
    if tensor.strides is not None and not _is_dense(tensor.shape, tensor.strides, 1):
        raise _not_contiguous(name, tensor.shape, tuple(s * tensor.itemsize for s in tensor.strides))
    if writable and tensor.readonly:
        raise _read_only(name, f"an object of type {type(obj).__name__!r}")
    if element is None:
        if tensor.dtype is None:
            raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: elements of {type(obj).__name__!r} have no MPI datatype")
        element = element_of_dtype(tensor.dtype, name)
    nbytes = prod(tensor.shape) * tensor.itemsize
    # the capsule owns host memory, the array device memory
    owner = (obj, tensor.capsule) if tensor.host else obj
    return MemoryView(tensor.address, nbytes, element, tensor.readonly, not tensor.host, owner)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """True if the array is contiguous in C or in Fortran order."""

    def run(dims: Any) -> bool:
        step = itemsize
        for length, stride in dims:
            if length > 1 and stride != step:
                return False
            step *= length
        return True

    pairs = list(zip(shape, strides, strict=True))
    return run(reversed(pairs)) or run(pairs)


def _not_contiguous(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> InvalidBuffer:
    return InvalidBuffer(
        MPI.ERR_BUFFER,
        f"{name}: array of shape {tuple(shape)}, strides {tuple(strides)} is not contiguous; pass "
        f"numpy.ascontiguousarray(...), or the array it is a part of and a derived datatype",
    )


def _read_only(name: str, what: str) -> InvalidBuffer:
    return InvalidBuffer(MPI.ERR_BUFFER, f"{name}: {what} is read-only and cannot receive")


def view(address: int, count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """One-dimensional array over `count` elements of host memory. The caller keeps the memory alive.

    >>> x = np.arange(4, dtype="i4")
    >>> view(MPI.Get_address(x) + 4, 2, x.dtype).tolist()
    [1, 2]
    """
    if count == 0:
        return np.empty(0, dtype)
    memory: Any = MPI.buffer.fromaddress(address, count * dtype.itemsize)
    return np.frombuffer(memory, dtype)
