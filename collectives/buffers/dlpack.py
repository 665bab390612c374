"""Reader of DLPack capsules: address, shape and dtype of the memory, without taking ownership.

NumPy's reader knows neither bfloat16 nor devices. mpi4py's reports unknown types as bytes. The structures follow
dlpack.h, version 1.1. Version 0 lacks the leading fields.
"""

import ctypes
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

CPU = 1
HOST_ACCESSIBLE = frozenset({CPU, 3, 11, 13})  # CUDA pinned, ROCm pinned, CUDA managed
_READ_ONLY = 1

FLOAT, COMPLEX = 2, 5
_KINDS = {0: "i", 1: "u", FLOAT: "f", COMPLEX: "c"}  # code -> NumPy kind, sized by bits
_NAMED = {
    (4, 16): "bfloat16",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}


class DLPackTensor(NamedTuple):
    """Array described by a DLPack capsule, valid as long as `capsule` lives."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  #: in elements, None: C order
    dtype: np.dtype[Any] | None  #: None where NumPy and ml_dtypes have none
    itemsize: int
    device_type: int
    readonly: bool
    capsule: Any

    @property
    def host(self) -> bool:
        """True if the CPU can address the memory."""
        return self.device_type in HOST_ACCESSIBLE


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def read(obj: Any) -> DLPackTensor:
    """Describe the memory of an object with ``__dlpack__``. BufferError if that needs a copy or an unknown version."""
    device_type, _ = obj.__dlpack_device__()
    device_type = int(device_type)
    stream = {} if device_type == CPU else {"stream": -1}  # the caller orders its streams itself
    try:
        capsule = obj.__dlpack__(max_version=(1, 0), copy=False, **stream)
    except TypeError:  # DLPack before 1.0
        capsule = obj.__dlpack__(**stream)
    readonly = False
    if '"dltensor_versioned"' in repr(capsule):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise BufferError(f"DLPack version {versioned.major}.{versioned.minor} is not supported")
        readonly, tensor = bool(versioned.flags & _READ_ONLY), versioned.tensor
    elif '"dltensor"' in repr(capsule):
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    else:
        raise BufferError("__dlpack__ returned no DLPack capsule")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else None
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    address, itemsize = (tensor.data or 0) + tensor.byte_offset, (bits * lanes + 7) // 8
    return DLPackTensor(address, shape, strides, _dtype(code, bits, lanes), itemsize, device_type, readonly, capsule)


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any] | None:
    if (code, lanes) == (FLOAT, 2):  # long double complex, whose bits do not fit the field
        code, bits, lanes = COMPLEX, 2 * bits, 1
    if lanes != 1:
        return None
    if code == 6 and bits == 8:
        return np.dtype(np.bool_)
    named: Any = getattr(ml_dtypes, _NAMED.get((code, bits), ""), None)
    if named is not None:
        dtype: np.dtype[Any] = np.dtype(named)
        return dtype
    try:
        return np.dtype(f"{_KINDS[code]}{bits // 8}")
    except (KeyError, TypeError):
        return None
