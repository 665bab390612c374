"""Element types: size and layout of one element of an MPI datatype, a NumPy dtype or a buffer format."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

from collectives.errors import InvalidArgument, InvalidDatatype, InvalidType, UnknownDatatype


class Identity:
    """Hashable key that compares objects by identity; keeps them alive, so that their ids are not reused."""

    __slots__ = ("_ids", "_objects")

    def __init__(self, *objects: object) -> None:
        self._objects, self._ids = objects, tuple(map(id, objects))

    def __hash__(self) -> int:
        return hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._ids == other._ids


class OwnedDatatype(MPI.Datatype):
    """MPI datatype that is freed with its last reference: ``OwnedDatatype(datatype)`` takes ownership."""

    def __del__(self) -> None:
        if not MPI.Is_finalized():
            self.free()


class ElementType(NamedTuple):
    """Layout of one element: `itemsize` bytes packed.

    In memory bytes [low, high), and the next element at `extent`.
    """

    dtype: np.dtype[Any] | None
    datatype: MPI.Datatype | None
    itemsize: int
    extent: int
    low: int
    high: int
    dense: bool


PAIRS = {
    "FLOAT_INT": (np.single, np.intc),
    "DOUBLE_INT": (np.double, np.intc),
    "LONG_INT": (np.long, np.intc),
    "TWOINT": (np.intc, np.intc),
    "SHORT_INT": (np.short, np.intc),
    "LONG_DOUBLE_INT": (np.longdouble, np.intc),
}
"""MPI's pair types by name: types of value and location.

MPI pads some of them in memory, like a C struct, but never on the wire. This table has their packed NumPy dtype.
"""

_ML_DTYPES = frozenset(
    np.dtype(scalar)
    for scalar in vars(ml_dtypes).values()
    if isinstance(scalar, type) and issubclass(scalar, np.generic)
)

# Predefined datatypes alone are cached: their handles are never reused during the life of the process.
_elements_by_handle: dict[int, ElementType] = {}
_elements_by_code: dict[str, ElementType] = {}
_elements_by_dtype: dict[np.dtype[Any], ElementType] = {}
dense_elements: dict[np.dtype[Any], ElementType] = {}
"""Entries of `_elements_by_dtype` without padding, for the fast path of `arguments.vector`."""


def shape_and_dtype(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Validate shape and dtype of an array to be allocated. Return a tuple of lengths and a NumPy dtype."""
    try:
        element = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise InvalidType(MPI.ERR_TYPE, f"dtype: {error}") from None
    # references would be sent as addresses, and subarrays change the shape
    if element.hasobject or not element.itemsize or element.subdtype is not None:
        message = f"dtype: expected elements of one known size, without references, found {element}"
        raise InvalidType(MPI.ERR_TYPE, message)
    try:
        lengths = tuple(map(operator.index, shape if isinstance(shape, Iterable) else [shape]))
    except TypeError:
        raise InvalidType(MPI.ERR_ARG, f"shape: expected a number or several, found {shape!r}") from None
    if min(lengths, default=0) < 0:
        raise InvalidArgument(MPI.ERR_ARG, f"shape: expected no negative lengths, found {lengths}")
    return lengths, element


def kind(dtype: np.dtype[Any]) -> str:
    """``dtype.kind``, with the numeric kind of ml_dtypes' types: ``"f"`` for bfloat16, ``"i"`` for int4.

    >>> kind(np.dtype(ml_dtypes.bfloat16)), kind(np.dtype("u2"))
    ('f', 'u')
    """
    if dtype not in _ML_DTYPES:
        return dtype.kind
    if "int" in dtype.name:
        return "u" if dtype.name.startswith("u") else "i"
    return "c" if "complex" in dtype.name else "f"


def element_of(datatype: MPI.Datatype, name: str = "datatype") -> ElementType:
    """Element type of a predefined or derived MPI datatype. Error if it is null or missing in this MPI.

    >>> element_of(MPI.FLOAT).dtype
    dtype('float32')
    """
    element = _elements_by_handle.get(datatype.handle)
    if element is not None:
        return element
    if datatype == MPI.DATATYPE_NULL:
        raise InvalidDatatype(MPI.ERR_TYPE, f"{name}: the datatype is MPI.DATATYPE_NULL (not created, or freed)")
    if not datatype.is_predefined:
        return _of_derived(datatype, name)
    handle = datatype.handle
    # A copy of the handle object, as the caller may free theirs.
    element = _elements_by_handle[handle] = _of_predefined(MPI.Datatype(datatype), name)
    return element


def _of_predefined(datatype: MPI.Datatype, name: str) -> ElementType:
    size, (low, extent) = datatype.Get_size(), datatype.Get_extent()
    for pair, (value, location) in PAIRS.items():
        if datatype == getattr(MPI, pair):
            dtype = np.dtype([("val", value), ("loc", location)])
            break
    else:
        try:
            dtype = np.dtype(datatype.typestr)
        except TypeError:
            dtype = np.dtype(np.void)
    if size == 0:
        raise InvalidType(MPI.ERR_TYPE, f"{name}: this MPI library has no {datatype_name(datatype)}")
    true_low, true_extent = datatype.Get_true_extent()
    packed = dtype if dtype.itemsize == size else None
    dense = low == 0 and size == extent
    return ElementType(packed, datatype, size, extent, true_low, true_low + true_extent, dense)


def _of_derived(datatype: MPI.Datatype, name: str) -> ElementType:
    """Element type of a derived datatype: dense only if it is Dup or Create_contiguous of a dense type.

    A type without gaps may still list its parts in another order than memory does, so sizes alone prove nothing.
    """
    size, (_, extent) = datatype.Get_size(), datatype.Get_extent()
    true_low, true_extent = datatype.Get_true_extent()
    dtype, dense = None, False
    combiner = datatype.Get_envelope()[-1]
    if combiner in (MPI.COMBINER_DUP, MPI.COMBINER_CONTIGUOUS):
        base = datatype.Get_contents()[-1][0]
        inner = element_of(base, name)
        base.free()
        dense = inner.dense
        dtype = inner.dtype if combiner == MPI.COMBINER_DUP else None
    return ElementType(dtype, datatype, size, extent, true_low, true_low + true_extent, dense)


def element_of_code(code: object, name: str) -> ElementType:
    """Element type of a typecode or a buffer's format string: 'f', 'i8', 'Zd'. UnknownDatatype if it names none."""
    element = _elements_by_code.get(code) if isinstance(code, str) else None
    if element is not None:
        return element
    try:
        datatype = MPI.Datatype.fromcode(code)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: {code!r} names no MPI datatype") from None
    element = _elements_by_code[str(code)] = element_of(datatype, name)
    return element


def element_of_format(form: str, name: str) -> ElementType:
    """Element type of a buffer-protocol format string. UnknownDatatype if in foreign byte order."""
    native, foreign = "<>" if np.little_endian else "><"
    if form[:1] == foreign:
        raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: elements {form!r} are not in native byte order; convert a copy")
    return element_of_code(form[1:] if form[:1] in ("@", native) else form, name)


def element_of_dtype(dtype: np.dtype[Any], name: str) -> ElementType:
    """Element type of a numeric, bool or one-character NumPy dtype, or of one laid out like an MPI pair.

    Otherwise error.
    """
    element = _elements_by_dtype.get(dtype)
    if element is not None:
        return element
    element = _elements_by_dtype[dtype] = _new_dtype(dtype, name)
    if element.dense:
        dense_elements[dtype] = element
    return element


def _new_dtype(dtype: np.dtype[Any], name: str) -> ElementType:
    size = dtype.itemsize
    if dtype in _ML_DTYPES:
        return ElementType(dtype, None, size, size, 0, size, True)
    if dtype.names is not None:
        return _of_pair(dtype, name)
    if not dtype.isnative:
        hint = "convert with x.astype(x.dtype.newbyteorder('='))"
        raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: dtype {dtype.str!r} is not in native byte order; {hint}")
    # NumPy's codes may name an MPI type of another size on this platform
    if dtype.kind in "biufc" or dtype.str[1:] in ("S1", "U1"):
        try:
            datatype = MPI.Datatype.fromcode(dtype.char)
            known = datatype.Get_size() == size
        except ValueError:
            known = False
        return ElementType(dtype, datatype if known else None, size, size, 0, size, True)
    hint = "; send its integers, x.view('i8')" if dtype.kind in "mM" else ""
    raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: dtype {dtype.name} ({dtype.str!r}) has no MPI datatype{hint}")


def _of_pair(dtype: np.dtype[Any], name: str) -> ElementType:
    for pair, (value, location) in PAIRS.items():
        aligned = np.dtype([("val", value), ("loc", location)], align=True)
        if _layout(dtype) == _layout(aligned):
            return element_of(getattr(MPI, pair), name)
    raise UnknownDatatype(
        MPI.ERR_TYPE,
        f"{name}: structured dtype {dtype} is laid out like no MPI pair type ({', '.join(PAIRS)}, as "
        f"align=True lays them out); pass [array, datatype] with one from MPI.Datatype.Create_struct",
    )


def _layout(dtype: np.dtype[Any]) -> list[Any]:
    """Layout of a structured dtype, for comparison: its size, and each field's type and offset without the name."""
    return [dtype.itemsize, *(field[:2] for field in (dtype.fields or {}).values())]


MOST_STRUCTS = 256

_structs: dict[tuple[Identity, tuple[int, ...], tuple[int, ...]], OwnedDatatype] = {}


def struct_of(types: Sequence[MPI.Datatype], counts: tuple[int, ...], places: tuple[int, ...]) -> MPI.Datatype:
    """Datatype of blocks, each of a datatype, at places in bytes; the same one for the same arguments."""
    key = Identity(*types), counts, places
    found = _structs.pop(key, None)
    if found is None:
        while len(_structs) >= MOST_STRUCTS:
            _structs.pop(next(iter(_structs)), None)
        found = OwnedDatatype(MPI.Datatype.Create_struct(counts, places, [MPI.Datatype(one) for one in types]).Commit())
    _structs[key] = found
    return found


def datatype_name(datatype: MPI.Datatype | None) -> str:
    """Name of a datatype for error messages."""
    if datatype is None:
        return "elements"
    return datatype.name if datatype.is_predefined else datatype.name or "elements of a derived datatype"
