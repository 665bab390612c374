"""Whatever a user hands to a collective, as one small description: where it lies, how many elements, of what.

The rules are mpi4py's own. Where mpi4py would read past the end of an array, or leave it to MPI to abort,
these functions raise and name the argument; beyond mpi4py they take arrays of element types that MPI lacks
(bfloat16, float8, ...) and structured arrays laid out like MPI's pair types.

>>> import numpy as np
>>> from mpi4py import MPI
>>> vector(np.arange(6.0), "sendbuf").count
6
>>> vector([np.arange(6.0), (2, 3), MPI.DOUBLE], "sendbuf").count  # two elements, from the third on
2
>>> blocks(np.arange(6.0), 3, "recvbuf", writable=True).block
2
>>> blocks_v([np.zeros(6), [3, 1, 2]], 3, "recvbuf", writable=True).displs
(0, 3, 4)
"""

import operator
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

from collectives.buffers import dlpack
from collectives.errors import (
    InvalidArgument,
    InvalidBuffer,
    InvalidType,
    UnknownDatatype,
)

__all__ = [
    "PAIRS",
    "Buffer",
    "Element",
    "blocks",
    "blocks_v",
    "cuda_interface",
    "element_of",
    "kind",
    "numbers",
    "numpy_dtype",
    "vector",
    "view",
]


class Buffer:
    """One argument of a collective: `count` elements from `address` on.

    Attributes
    ----------
    address : int
        Of the first element (the displacement of a ``(count, displ)`` pair is in it already). Zero is
        ``MPI.BOTTOM``. A device pointer when `device`.
    nbytes : int
        Payload: ``count * itemsize``, the size when packed.
    count : int
        Elements of `datatype` in all blocks together.
    block : int
        Elements in each block: ``count`` for `vector`, ``count / size`` for `blocks`, 0 for `blocks_v` (see
        `counts`).
    dtype : numpy.dtype or None
        Type of one packed element, with ``dtype.itemsize == itemsize``; None for derived datatypes.
    datatype : mpi4py.MPI.Datatype or None
        What the user gave or what the array holds; None where MPI has none for it (bfloat16).
    itemsize : int
        Bytes of one packed element. Equal on ranks that describe the same data differently.
    extent : int
        Bytes from one element to the next in the user's memory; the unit of `displs`.
    counts, displs : tuple of int, or None
        Per block, in the v-forms.
    readonly, device : bool
        Whether the memory must not be written to; whether the CPU cannot reach it.
    contiguous : bool
        Whether the elements lie packed in memory: a run of n elements is n * itemsize bytes as they go on the
        wire (the blocks of a v-form may still lie apart). If not, or on a device, the data needs staging.
    owner : object
        Keeps the memory alive; on a device, the user's array.
    """

    __slots__ = (
        "address",
        "block",
        "contiguous",
        "count",
        "counts",
        "datatype",
        "device",
        "displs",
        "dtype",
        "extent",
        "itemsize",
        "nbytes",
        "owner",
        "readonly",
    )

    def __init__(
        self,
        address: int,
        nbytes: int,
        count: int,
        block: int,
        dtype: np.dtype[Any] | None,
        datatype: MPI.Datatype | None,
        itemsize: int,
        extent: int,
        counts: tuple[int, ...] | None,
        displs: tuple[int, ...] | None,
        readonly: bool,
        device: bool,
        contiguous: bool,
        owner: object,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.count = count
        self.block = block
        self.dtype = dtype
        self.datatype = datatype
        self.itemsize = itemsize
        self.extent = extent
        self.counts = counts
        self.displs = displs
        self.readonly = readonly
        self.device = device
        self.contiguous = contiguous
        self.owner = owner

    def __repr__(self) -> str:
        of = self.dtype if self.dtype is not None else _called(self.datatype)
        where = "device" if self.device else "host"
        apart = "" if self.counts is None else f" in blocks {self.counts} at {self.displs}"
        return f"<Buffer of {self.count} {of}{apart}, {'' if self.contiguous else 'strided '}{where} memory>"


# --- element types ------------------------------------------------------------------------------------------


class Element(NamedTuple):
    """One element in memory: `itemsize` bytes packed, lying in [low, high), the next `extent` bytes on."""

    dtype: np.dtype[Any] | None
    datatype: MPI.Datatype | None
    itemsize: int
    extent: int
    low: int
    high: int
    dense: bool


#: MPI's pair types, by name: the type of the value, the type of the location. MPI pads some of them in
#: memory, like a C struct, and never on the wire; their NumPy dtype here is the packed one.
PAIRS = {
    "FLOAT_INT": (np.single, np.intc),
    "DOUBLE_INT": (np.double, np.intc),
    "LONG_INT": (np.long, np.intc),
    "TWOINT": (np.intc, np.intc),
    "SHORT_INT": (np.short, np.intc),
    "LONG_DOUBLE_INT": (np.longdouble, np.intc),
}

_SMALL = frozenset(
    np.dtype(scalar)
    for scalar in vars(ml_dtypes).values()
    if isinstance(scalar, type) and issubclass(scalar, np.generic)
)

_by_handle: dict[int, Element] = {}  # predefined datatypes; a handle means the same for the life of the process
_by_code: dict[str, Element] = {}
_by_dtype: dict[np.dtype[Any], Element] = {}
_plain: dict[np.dtype[Any], Element] = {}  # those of _by_dtype that lie dense in memory: the fast path


def numpy_dtype(datatype: MPI.Datatype) -> np.dtype[Any] | None:
    """NumPy's dtype for one packed element of a predefined datatype (or a duplicate of one).

    Returns
    -------
    numpy.dtype or None
        ``MPI.INT -> int32``, ``MPI.BYTE -> uint8``, ``MPI.CHAR -> S1``, ``MPI.DOUBLE_INT`` -> fields ``val``
        and ``loc`` in 12 bytes; None for derived datatypes.

    >>> numpy_dtype(MPI.FLOAT)
    dtype('float32')
    """
    return element_of(datatype).dtype


def kind(dtype: np.dtype[Any]) -> str:
    """Return ``dtype.kind``, seeing what ml_dtypes' types are: ``"f"`` for bfloat16, ``"i"`` for int4.

    >>> kind(np.dtype(ml_dtypes.bfloat16)), kind(np.dtype("u2"))
    ('f', 'u')
    """
    if dtype not in _SMALL:
        return dtype.kind
    if "int" in dtype.name:
        return "u" if dtype.name.startswith("u") else "i"
    return "c" if "complex" in dtype.name else "f"


def element_of(datatype: MPI.Datatype, name: str = "datatype") -> Element:
    """Describe one element of any datatype."""
    element = _by_handle.get(datatype.handle)
    if element is not None:
        return element
    if datatype == MPI.DATATYPE_NULL:
        raise InvalidType(MPI.ERR_TYPE, f"{name}: the datatype is MPI.DATATYPE_NULL (never made, or freed)")
    if not datatype.is_predefined:
        return _of_derived(datatype, name)
    element = _of_predefined(datatype, name)
    _by_handle[datatype.handle] = element
    return element


def _of_predefined(datatype: MPI.Datatype, name: str) -> Element:
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
        raise InvalidType(MPI.ERR_TYPE, f"{name}: this MPI library has no {_called(datatype)}")
    true_low, true_extent = datatype.Get_true_extent()
    return Element(
        dtype if dtype.itemsize == size else None,
        datatype,
        size,
        extent,
        true_low,
        true_low + true_extent,
        low == 0 and size == extent,
    )


def _of_derived(datatype: MPI.Datatype, name: str) -> Element:
    """Look through duplicates and contiguous runs; all other derived types need packing.

    A type without gaps may still list its parts in another order than memory does, so sizes alone prove
    nothing.
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
    return Element(dtype, datatype, size, extent, true_low, true_low + true_extent, dense)


def _of_code(code: object, name: str) -> Element:
    """Find what a typecode or a buffer's format string names: 'f', 'i8', 'Zd'."""
    element = _by_code.get(code) if isinstance(code, str) else None
    if element is not None:
        return element
    try:
        datatype = MPI.Datatype.fromcode(code)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: {code!r} names no MPI datatype") from None
    element = _by_code[str(code)] = element_of(datatype, name)
    return element


def _of_format(form: str, name: str) -> Element:
    native, foreign = "<>" if np.little_endian else "><"
    if form[:1] == foreign:
        raise InvalidType(MPI.ERR_TYPE, f"{name}: elements {form!r} are not in native byte order; convert a copy")
    return _of_code(form[1:] if form[:1] in ("@", native) else form, name)


def _of_dtype(dtype: np.dtype[Any], name: str) -> Element:
    element = _by_dtype.get(dtype)
    if element is not None:
        return element
    element = _by_dtype[dtype] = _new_dtype(dtype, name)
    if element.dense:
        _plain[dtype] = element
    return element


def _new_dtype(dtype: np.dtype[Any], name: str) -> Element:
    size = dtype.itemsize
    if dtype in _SMALL:
        return Element(dtype, None, size, size, 0, size, True)
    if dtype.names is not None:
        return _of_pair(dtype, name)
    if not dtype.isnative:
        raise InvalidType(
            MPI.ERR_TYPE,
            f"{name}: dtype {dtype.str!r} is not in native byte order; convert with "
            f"x.astype(x.dtype.newbyteorder('='))",
        )
    if dtype.kind in "biufc" or dtype.str[1:] in ("S1", "U1"):
        try:
            datatype = MPI.Datatype.fromcode(dtype.char)
            known = datatype.Get_size() == size
        except ValueError:
            known = False
        return Element(dtype, datatype if known else None, size, size, 0, size, True)
    hint = "; send its integers, x.view('i8')" if dtype.kind in "mM" else ""
    raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: dtype {_dtype_name(dtype)} has no MPI datatype{hint}")


def _of_pair(dtype: np.dtype[Any], name: str) -> Element:
    for pair, (value, location) in PAIRS.items():
        aligned = np.dtype([("val", value), ("loc", location)], align=True)
        parts = [(field[0], field[1]) for field in (dtype.fields or {}).values()]
        if dtype.itemsize == aligned.itemsize and parts == [(f[0], f[1]) for f in (aligned.fields or {}).values()]:
            return element_of(getattr(MPI, pair), name)
    raise UnknownDatatype(
        MPI.ERR_TYPE,
        f"{name}: structured dtype {dtype} is laid out like no MPI pair type ({', '.join(PAIRS)}, as "
        f"align=True lays them out); pass [array, datatype] with one from MPI.Datatype.Create_struct",
    )


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return f"{dtype.name} ({dtype.str!r})"


def _called(datatype: MPI.Datatype | None) -> str:
    if datatype is None:
        return "elements"
    return datatype.name if datatype.is_predefined else datatype.name or "elements of a derived datatype"


# --- memory -------------------------------------------------------------------------------------------------


class _Memory(NamedTuple):
    address: int
    nbytes: int
    element: Element
    readonly: bool
    device: bool
    owner: object


_ndarray = np.ndarray
_InPlace = type(MPI.IN_PLACE)
_address = MPI.Get_address


def _memory(obj: Any, datatype: object, name: str, writable: bool) -> _Memory:
    """Find the memory of `obj` and the type of its elements: `datatype` unless that is None."""
    if obj is None or obj is MPI.BOTTOM:
        if datatype is None:
            raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: MPI.BOTTOM or None as the array needs an explicit datatype")
        return _Memory(0, 0, _element(datatype, name), False, False, None)
    if isinstance(obj, _InPlace):  # it offers a buffer of no bytes
        raise InvalidType(MPI.ERR_BUFFER, f"{name}: MPI.IN_PLACE is not allowed here")
    element = None if datatype is None else _element(datatype, name)
    if isinstance(obj, _ndarray):
        if obj.dtype.hasobject:
            raise UnknownDatatype(
                MPI.ERR_TYPE,
                f"{name}: an array of Python objects (dtype {obj.dtype}) has no bytes that could be sent",
            )
        if not obj.flags.forc:
            raise _not_contiguous(name, obj.shape, obj.strides)
        if writable and not obj.flags.writeable:
            raise _read_only(name, "the array")
        found = _of_dtype(obj.dtype, name) if element is None else element
        return _Memory(_address(obj), obj.nbytes, found, not obj.flags.writeable, False, obj)
    try:
        memory = memoryview(obj)
    except TypeError:
        pass  # offers no buffer: another protocol, or none
    except (ValueError, BufferError) as error:  # offers one, but not of this
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: {error}") from error
    else:
        if not memory.contiguous:
            raise _not_contiguous(name, memory.shape or (), memory.strides or ())
        if writable and memory.readonly:
            raise _read_only(name, f"an object of type {type(obj).__name__!r}")
        found = _of_format(memory.format, name) if element is None else element
        return _Memory(_address(memory), memory.nbytes, found, memory.readonly, False, memory)
    interface = cuda_interface(obj)
    if interface is not None:
        return _cuda_array(obj, interface, element, name, writable)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _dlpack(obj, element, name, writable)
    raise InvalidType(
        MPI.ERR_BUFFER,
        f"{name}: expected an array, a buffer, or [array, count, datatype], found {type(obj).__name__!r}",
    )


def cuda_interface(obj: Any) -> dict[str, Any] | None:
    """An object's ``__cuda_array_interface__``, if it has one."""
    try:
        interface: dict[str, Any] = obj.__cuda_array_interface__
    except (AttributeError, TypeError, RuntimeError, ValueError):  # absent, or refused for this very array
        return None
    return interface


def _element(datatype: object, name: str) -> Element:
    return element_of(datatype, name) if isinstance(datatype, MPI.Datatype) else _of_code(datatype, name)


def _cuda_array(obj: Any, interface: dict[str, Any], element: Element | None, name: str, writable: bool) -> _Memory:
    dtype = getattr(obj, "dtype", None)
    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(interface["typestr"])
    if interface.get("mask") is not None:
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: masked device arrays cannot be sent")
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    if strides is not None and not _dense(shape, tuple(strides), dtype.itemsize):
        raise _not_contiguous(name, shape, tuple(strides))
    pointer, readonly = interface["data"]
    if writable and readonly:
        raise _read_only(name, "the device array")
    found = _of_dtype(dtype, name) if element is None else element
    return _Memory(int(pointer or 0), prod(shape) * dtype.itemsize, found, bool(readonly), True, obj)


def _dlpack(obj: Any, element: Element | None, name: str, writable: bool) -> _Memory:
    try:
        tensor = dlpack.read(obj)
    except (BufferError, TypeError, RuntimeError, ValueError) as error:
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: {error}") from error
    if tensor.strides is not None and not _dense(tensor.shape, tensor.strides, 1):
        raise _not_contiguous(name, tensor.shape, tuple(s * tensor.itemsize for s in tensor.strides))
    if writable and tensor.readonly:
        raise _read_only(name, f"an object of type {type(obj).__name__!r}")
    if element is None:
        if tensor.dtype is None:
            raise UnknownDatatype(MPI.ERR_TYPE, f"{name}: elements of {type(obj).__name__!r} have no MPI datatype")
        element = _of_dtype(tensor.dtype, name)
    nbytes = prod(tensor.shape) * tensor.itemsize
    owner = (obj, tensor.capsule) if tensor.host else obj
    return _Memory(tensor.address, nbytes, element, tensor.readonly, not tensor.host, owner)


def _dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether the array is one run of memory, in C or in Fortran order."""

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
    """One-dimensional view of `count` elements of host memory; the caller keeps the memory alive.

    >>> x = np.arange(4, dtype="i4")
    >>> view(MPI.Get_address(x) + 4, 2, x.dtype).tolist()
    [1, 2]
    """
    if count == 0:
        return np.empty(0, dtype)
    memory: Any = MPI.buffer.fromaddress(address, count * dtype.itemsize)
    return np.frombuffer(memory, dtype)


# --- specifications -----------------------------------------------------------------------------------------


def vector(spec: Any, name: str, writable: bool = False) -> Buffer:
    """Describe one vector: the argument of Bcast, Reduce, Allreduce, and a rank's own block elsewhere.

    Parameters
    ----------
    spec
        ``array``; ``[array, datatype]``; ``[array, count]``; ``[array, (count, displ)]``; ``[array, count,
        datatype]``; ``[array, (count, displ), datatype]``; ``[array, count, displ, datatype]``. The array is
        any object with the buffer protocol, DLPack or the CUDA array interface; the datatype an
        ``MPI.Datatype`` or a typecode such as ``"f"`` or ``"i8"``. A count of None means all there is.
    name
        What to call the argument in messages: ``"sendbuf"``.
    writable
        Whether the call will write to it.

    Raises
    ------
    InvalidArgument, InvalidBuffer
        For negative numbers, memory that is too small, read-only or not contiguous (ValueError).
    InvalidType, UnknownDatatype
        For what is no buffer and no count, and for elements without a datatype (TypeError).
    """
    if type(spec) is _ndarray:
        element = _plain.get(spec.dtype)
        if element is not None:
            flags = spec.flags
            readonly = not flags.writeable
            if flags.forc and not (readonly and writable):
                dtype, datatype, itemsize, extent, _, _, _ = element
                n = spec.size
                address = _address(spec)
                return Buffer(
                    address,
                    spec.nbytes,
                    n,
                    n,
                    dtype,
                    datatype,
                    itemsize,
                    extent,
                    None,
                    None,
                    readonly,
                    False,
                    True,
                    spec,
                )
    return _blocks(spec, 1, name, writable)


def blocks(spec: Any, size: int, name: str, writable: bool = False) -> Buffer:
    """Describe `size` equal blocks: the long side of Scatter, Gather, Allgather, Reduce_scatter_block.

    Takes the forms of `vector`. Without a count the blocks share all there is; a count is that of one block,
    as in MPI.

    Returns
    -------
    Buffer
        With ``count == size * block``.
    """
    if type(spec) is _ndarray:
        element = _plain.get(spec.dtype)
        if element is not None:
            flags = spec.flags
            readonly = not flags.writeable
            block, rest = divmod(spec.size, size)
            if not rest and flags.forc and not (readonly and writable):
                dtype, datatype, itemsize, extent, _, _, _ = element
                n = spec.size
                address = _address(spec)
                return Buffer(
                    address,
                    spec.nbytes,
                    n,
                    block,
                    dtype,
                    datatype,
                    itemsize,
                    extent,
                    None,
                    None,
                    readonly,
                    False,
                    True,
                    spec,
                )
    return _blocks(spec, size, name, writable)


def blocks_v(spec: Any, size: int, name: str, writable: bool = False) -> Buffer:
    """Describe `size` blocks, each of its own length and place: the long side of Scatterv, Gatherv,
    Allgatherv.

    Parameters
    ----------
    spec
        ``array``; ``[array, datatype]``; ``[array, counts]``; ``[array, (counts, displs)]``; ``[array,
        counts, datatype]``; ``[array, (counts, displs), datatype]``; ``[array, counts, displs, datatype]``.
        Counts of None share the array out, the first blocks one longer where it does not divide; a single
        number holds for all. Displacements, in elements, of None follow the counts without gaps; a single
        number is the distance between blocks. As in mpi4py a *tuple* after the array is a pair ``(counts,
        displs)``: give plain counts as a list or an array.
    size, name, writable
        As in `blocks`.
    """
    obj, counts, displs, datatype = _parts(spec, name, tuple)
    memory = _memory(obj, datatype, name, writable)
    element = memory.element
    if counts is None:
        total = _all(memory.nbytes, element, name)
        lengths = tuple(total // size + (i < total % size) for i in range(size))
    else:
        lengths = numbers(counts, size, f"{name}: counts")
    if displs is None:
        places = (0, *accumulate(lengths[:-1]))[:size]
    elif _single(displs):
        step = _integer(displs, MPI.ERR_ARG, f"{name}: displacement")
        places = tuple(step * i for i in range(size))
    else:
        places = _integers(displs, size, MPI.ERR_ARG, f"{name}: displs")
    if obj is None and any(lengths):
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: the array is None but the counts are {lengths}")
    if obj is not None and obj is not MPI.BOTTOM:
        for i, (count, displ) in enumerate(zip(lengths, places, strict=True)):
            _fits(
                count,
                displ * element.extent,
                memory,
                name,
                f"block {i} (count {count}, displacement {displ})",
            )
    return _buffer(memory, memory.address, sum(lengths), 0, lengths, places)


def numbers(values: Any, size: int, name: str) -> tuple[int, ...]:
    """Read `size` counts, none negative; one number stands for all of them.

    >>> numbers([1, 2, 0], 3, "recvcounts")
    (1, 2, 0)
    """
    if _single(values):
        counts = (_integer(values, MPI.ERR_COUNT, name),) * size
    else:
        counts = _integers(values, size, MPI.ERR_COUNT, name)
    if counts and min(counts) < 0:
        raise InvalidArgument(MPI.ERR_COUNT, f"{name}: expected no negative number, found {counts}")
    return counts


def _blocks(spec: Any, size: int, name: str, writable: bool) -> Buffer:
    obj, count, displ, datatype = _parts(spec, name, (tuple, list))
    memory = _memory(obj, datatype, name, writable)
    element = memory.element
    offset = 0
    if displ is not None:
        displ = _integer(displ, MPI.ERR_ARG, f"{name}: displacement")
        if displ < 0:
            raise InvalidArgument(MPI.ERR_ARG, f"{name}: negative displacement {displ}")
        if displ > 0:
            offset = displ * _step(element, name)
            if offset > memory.nbytes:
                raise InvalidBuffer(
                    MPI.ERR_BUFFER,
                    f"{name}: displacement {displ} lies behind the end of {memory.nbytes // element.extent} "
                    f"{_called(element.datatype)}",
                )
    if count is None:
        total = _all(memory.nbytes - offset, element, name)
        block, rest = divmod(total, size)
        if rest:
            raise InvalidArgument(
                MPI.ERR_COUNT,
                f"{name}: {total} elements cannot be divided into {size} equal blocks, one per rank",
            )
    else:
        block = _integer(count, MPI.ERR_COUNT, f"{name}: count")
        if block < 0:
            raise InvalidArgument(MPI.ERR_COUNT, f"{name}: negative count {block}")
        if block > 0 and obj is None:
            raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: the array is None but the count is {block}")
    if obj is not None and obj is not MPI.BOTTOM:  # inferred counts too: a datatype may reach beyond its extent
        what = f"count {block}" if size == 1 else f"{size} blocks of {block}"
        _fits(block * size, offset, memory, name, what)
    return _buffer(memory, memory.address + offset, block * size, block, None, None)


def _parts(spec: Any, name: str, pair: Any) -> tuple[Any, Any, Any, Any]:
    """Split a specification into array, count(s), displacement(s), datatype; None for what it leaves out."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    if len(spec) == 2:
        obj, counts = spec
        if isinstance(counts, (MPI.Datatype, str)):
            return obj, None, None, counts
        return obj, *_split(counts, name, pair), None
    if len(spec) == 3:
        obj, counts, datatype = spec
        return obj, *_split(counts, name, pair), datatype
    if len(spec) == 4:
        return spec[0], spec[1], spec[2], spec[3]
    raise InvalidArgument(
        MPI.ERR_ARG,
        f"{name}: expected [array, ...] of 2 to 4 items, such as [array, count, datatype], found {len(spec)}",
    )


def _split(counts: Any, name: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(counts, pair):
        return counts, None
    if len(counts) != 2:
        hint = "; give counts alone as a list" if pair is tuple else ""
        raise InvalidArgument(
            MPI.ERR_ARG,
            f"{name}: expected a pair (count, displacement) after the array, found {counts!r}{hint}",
        )
    return counts[0], counts[1]


def _all(nbytes: int, element: Element, name: str) -> int:
    """How many elements there are in `nbytes`."""
    if nbytes == 0:
        return 0
    total, rest = divmod(nbytes, _step(element, name))
    if rest:
        raise InvalidArgument(
            MPI.ERR_COUNT,
            f"{name}: no count given, and {nbytes} bytes are no multiple of the datatype's extent of "
            f"{element.extent} bytes",
        )
    return total


def _step(element: Element, name: str) -> int:
    if element.extent <= 0:
        raise InvalidArgument(
            MPI.ERR_TYPE,
            f"{name}: a datatype of extent {element.extent} needs an explicit count and no displacement",
        )
    return element.extent


def _fits(count: int, offset: int, memory: _Memory, name: str, what: str) -> None:
    """Check that `count` elements from byte `offset` on lie within the memory."""
    if count == 0:
        return
    element = memory.element
    span = (count - 1) * element.extent
    low = offset + min(0, span) + element.low
    high = offset + max(0, span) + element.high
    if low < 0:
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: {what} begins {-low} bytes before the buffer")
    if high > memory.nbytes:
        have = f" ({memory.nbytes // element.extent} elements)" if element.extent > 0 else ""
        raise InvalidBuffer(
            MPI.ERR_TRUNCATE,
            f"{name}: {what} of {_called(element.datatype)} needs {high} bytes, the buffer has "
            f"{memory.nbytes} bytes{have}",
        )


def _buffer(
    memory: _Memory,
    address: int,
    count: int,
    block: int,
    counts: tuple[int, ...] | None,
    displs: tuple[int, ...] | None,
) -> Buffer:
    dtype, datatype, itemsize, extent, _, _, dense = memory.element
    return Buffer(
        address,
        count * itemsize,
        count,
        block,
        dtype,
        datatype,
        itemsize,
        extent,
        counts,
        displs,
        memory.readonly,
        memory.device,
        dense,
        memory.owner,
    )


def _single(values: Any) -> bool:
    """Whether this is one number (a 0-d array too), not a sequence of them."""
    try:
        len(values)
    except TypeError:
        return hasattr(type(values), "__index__")
    return False


def _integer(value: Any, error_class: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidType(error_class, f"{name}: expected an integer, found {value!r}") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise InvalidArgument(error_class, f"{name}: {number} does not fit in 64 bits")
    return number


def _integers(values: Any, size: int, error_class: int, name: str) -> tuple[int, ...]:
    try:
        found = len(values)
    except TypeError:
        raise InvalidType(error_class, f"{name}: expected {size} integers, found {values!r}") from None
    if found != size:
        raise InvalidArgument(error_class, f"{name}: expected {size} items, one per rank, found {found}")
    return tuple(_integer(values[i], error_class, f"{name}[{i}]") for i in range(size))
