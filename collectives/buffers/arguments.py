"""Buffer arguments of collectives, described by address, element count and element type.

The rules are mpi4py's. Where mpi4py reads past the end of an array, or MPI aborts, these functions raise and name the
argument. They also accept element types that MPI lacks (bfloat16, float8, ...) and structured arrays with the layout of
MPI's pair types.

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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.buffers.datatypes import ElementType, datatype_name, dense_elements, element_of, struct_of
from collectives.buffers.memory import MemoryView, bytes_before, memory_of
from collectives.errors import InvalidArgument, InvalidBuffer, InvalidType, OutOfRange


@dataclass(slots=True, eq=False, repr=False)
class Buffer:
    """Parsed buffer argument of a collective: `count` elements starting at `address`."""

    address: int  #: first element, displacement included (0 for ``MPI.BOTTOM``, a device pointer if `device`)
    nbytes: int  #: packed size, ``count * itemsize``
    count: int  #: elements of `datatype` in all blocks together
    block: int  #: elements per block: `count` for `vector`, ``count / size`` for `blocks`, 0 for `blocks_v`
    dtype: np.dtype[Any] | None  #: one packed element, of size `itemsize` (None for derived datatypes)
    datatype: MPI.Datatype | None  #: given or inferred, None where MPI has none (bfloat16)
    itemsize: int  #: bytes of one packed element, equal on ranks that describe the same data differently
    extent: int  #: bytes from one element to the next in the user's memory, the unit of `displs`
    counts: tuple[int, ...] | None  #: per block, in the v-forms
    displs: tuple[int, ...] | None  #: per block, in the v-forms
    readonly: bool
    device: bool  #: memory that the CPU cannot access
    contiguous: bool  #: elements are packed, like in messages (v-form blocks may have gaps between). Otherwise needs
    # staging
    owner: object  #: keeps the memory alive (on a device, the user's array)

    def __repr__(self) -> str:
        element = self.dtype if self.dtype is not None else datatype_name(self.datatype)
        kind = f"{'' if self.contiguous else 'strided '}{'device' if self.device else 'host'}"
        layout = "" if self.counts is None else f" in blocks {self.counts} at {self.displs}"
        return f"<Buffer of {self.count} {element}{layout}, {kind} memory>"


def vector(spec: Any, name: str, writable: bool = False) -> Buffer:
    """Parse a buffer argument that is one vector: in Bcast, Reduce, Allreduce, and a rank's own block elsewhere.

    Parameters
    ----------
    spec
        ``array``; ``[array, datatype]``; ``[array, count]``; ``[array, (count, displ)]``; ``[array, count,
        datatype]``; ``[array, (count, displ), datatype]``; ``[array, count, displ, datatype]``. The array is any
        object with the buffer protocol, DLPack or the CUDA array interface; the datatype an ``MPI.Datatype`` or a
        typecode such as ``"f"`` or ``"i8"``. A count of None means all elements.
    name
        Name of the argument in error messages: ``"sendbuf"``.
    writable
        True if the call writes to it.
    """
    return blocks(spec, 1, name, writable)


def blocks(spec: Any, size: int, name: str, writable: bool = False) -> Buffer:
    """Parse a buffer of `size` equal blocks: root's sendbuf of Scatter, root's recvbuf of Gather, recvbuf of Allgather.

    Also the sendbuf of Reduce_scatter_block. Takes the forms of `vector`. A count is the count of one block (MPI's
    rule). Without one the blocks share all elements.
    """
    if type(spec) is np.ndarray:
        buffer = _dense_array(spec, size, writable)
        if buffer is not None:
            return buffer
    return _equal_blocks(spec, size, name, writable)


def _dense_array(array: np.ndarray, size: int, writable: bool) -> Buffer | None:
    """Fast path of `vector` and `blocks`: Buffer of a valid contiguous array whose dtype is in the cache.

    Otherwise None.
    """
    element = dense_elements.get(array.dtype)
    if element is None:
        return None
    flags, count = array.flags, array.size
    readonly = not flags.writeable
    block, rest = divmod(count, size)
    if rest or not flags.forc or (readonly and writable):
        return None
    dtype, datatype, itemsize, extent = element[:4]
    return Buffer(
        *(MPI.Get_address(array), array.nbytes, count, block, dtype, datatype, itemsize, extent),
        *(None, None, readonly, False, True, array),
    )


def blocks_v(spec: Any, size: int, name: str, writable: bool = False) -> Buffer:
    """Parse a buffer of `size` blocks with counts and displacements.

    It is root's sendbuf of Scatterv, root's recvbuf of Gatherv, or the recvbuf of Allgatherv.

    Parameters
    ----------
    spec
        ``array``; ``[array, datatype]``; ``[array, counts]``; ``[array, (counts, displs)]``; ``[array, counts,
        datatype]``; ``[array, (counts, displs), datatype]``; ``[array, counts, displs, datatype]``. Counts of None
        divide the array evenly, the first blocks one longer where it does not divide. A single number holds for all.
        Displacements (in elements) of None follow the counts without gaps. A single number is the distance between
        blocks. Like in mpi4py, a *tuple* after the array is a pair ``(counts, displs)``: pass plain counts as a list
        or an array.
    size, name, writable
        See `blocks`.
    """
    obj, counts, displs, datatype = _split_spec(spec, name, tuple)
    memory = memory_of(obj, datatype, name, writable)
    element = memory.element
    if counts is None:
        total = _element_count(memory.nbytes, element, name)
        lengths = tuple(total // size + (i < total % size) for i in range(size))
    else:
        lengths = numbers(counts, size, f"{name}: counts")
    if displs is None:
        places = (0, *accumulate(lengths[:-1]))[:size]
    elif _is_number(displs):
        step = _to_int(displs, MPI.ERR_ARG, f"{name}: displacement")
        places = tuple(step * i for i in range(size))
    else:
        places = _to_ints(displs, size, MPI.ERR_ARG, f"{name}: displs")
    if obj is None and any(lengths):
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: the array is None but the counts are {lengths}")
    if obj is not None and obj is not MPI.BOTTOM:
        for i, (count, displ) in enumerate(zip(lengths, places, strict=True)):
            what = f"block {i} (count {count}, displacement {displ})"
            _check_fits(count, displ * element.extent, memory, name, what)
    lowest = min([0, *(displ for count, displ in zip(lengths, places, strict=True) if count)])
    if lowest:  # so that all blocks are behind the address
        places = tuple(displ - lowest if count else 0 for count, displ in zip(lengths, places, strict=True))
    return _buffer(memory, lowest * element.extent, sum(lengths), 0, lengths, places)


def blocks_w(spec: Any, size: int, name: str, writable: bool = False) -> tuple[Buffer, tuple[int, ...]]:
    """Parse a buffer of `size` blocks, each of a datatype: buffers of Alltoallw. Returns it and the blocks' bytes.

    Parameters
    ----------
    spec
        ``[array, datatypes]``, of one element each at the beginning of the array; ``[array, (counts, displs),
        datatypes]``; ``[array, counts, displs, datatypes]``. Displacements are in bytes.
    size, name, writable
        As in `blocks`.
    """
    if not isinstance(spec, (list, tuple)) or not 2 <= len(spec) <= 4:
        raise InvalidArgument(MPI.ERR_ARG, f"{name}: expected [array, counts, displs, datatypes], found {spec!r}")
    obj, pair, types = spec[0], spec[1:-1], spec[-1]
    if len(pair) == 1:
        pair = _split_pair(pair[0], name, (tuple, list))
    counts, displs = (pair[0], pair[1]) if pair else (None, None)
    if obj is MPI.BOTTOM and (counts is None or displs is None):
        raise InvalidArgument(MPI.ERR_ARG, f"{name}: MPI.BOTTOM needs counts and displacements of all blocks")
    if isinstance(types, str) or not isinstance(types, Sequence) or len(types) != size:
        raise InvalidArgument(MPI.ERR_TYPE, f"{name}: expected {size} datatypes, one of each block, found {types!r}")
    if not all(isinstance(datatype, MPI.Datatype) for datatype in types):
        raise InvalidType(MPI.ERR_TYPE, f"{name}: expected datatypes, found {types!r}")
    if _is_number(counts):
        raise InvalidType(MPI.ERR_COUNT, f"{name}: counts: expected {size} integers, found {counts!r}")
    lengths = (1,) * size if counts is None else numbers(counts, size, f"{name}: counts")
    places = (0,) * size if displs is None else _to_ints(displs, size, MPI.ERR_ARG, f"{name}: displs")
    elements = [element_of(datatype, name) for datatype in types]
    nbytes = tuple(count * element.itemsize for count, element in zip(lengths, elements))
    if obj is MPI.BOTTOM and any(lengths):  # displacements are addresses
        ends = [
            (place + element.low, place + (count - 1) * element.extent + element.high)
            for count, place, element in zip(lengths, places, elements)
            if count
        ]
        base = min(low for low, _ in ends)
        obj = MPI.buffer.fromaddress(base, max(high for _, high in ends) - base)
        places = tuple(place - base for place in places)
    if all(element.dense or not count for count, element in zip(lengths, elements)):
        return blocks_v([obj, list(nbytes), list(places), MPI.BYTE], size, name, writable), nbytes
    memory = memory_of(obj, MPI.BYTE, name, writable)
    for i, (count, place, element) in enumerate(zip(lengths, places, elements, strict=True)):
        what = f"block {i} (count {count}, displacement {place})"
        _check_fits(count, place, memory._replace(element=element), name, what)
    whole = struct_of(types, lengths, places)
    return _buffer(memory._replace(element=element_of(whole)), 0, 1, 0), nbytes


def numbers(values: Any, size: int, name: str) -> tuple[int, ...]:
    """Convert an argument to `size` non-negative counts. A single number is repeated.

    >>> numbers([1, 2, 0], 3, "recvcounts")
    (1, 2, 0)
    """
    if _is_number(values):
        counts = (_to_int(values, MPI.ERR_COUNT, name),) * size
    else:
        counts = _to_ints(values, size, MPI.ERR_COUNT, name)
    if counts and min(counts) < 0:
        raise InvalidArgument(MPI.ERR_COUNT, f"{name}: expected no negative number, found {counts}")
    return counts


def _equal_blocks(spec: Any, size: int, name: str, writable: bool) -> Buffer:
    obj, count, displ, datatype = _split_spec(spec, name, (tuple, list))
    memory = memory_of(obj, datatype, name, writable)
    element = memory.element
    offset = 0
    if displ is not None:
        displ = _to_int(displ, MPI.ERR_ARG, f"{name}: displacement")
        if displ < 0:
            raise InvalidArgument(MPI.ERR_ARG, f"{name}: negative displacement {displ}")
        if displ > 0:
            offset = displ * _stride_of(element, name)
            if offset > memory.nbytes:
                end = f"{memory.nbytes // element.extent} {datatype_name(element.datatype)}"
                raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: displacement {displ} is behind the end of {end}")
    if count is None:
        total = _element_count(memory.nbytes - offset, element, name)
        block, rest = divmod(total, size)
        if rest:
            message = f"{name}: {total} elements cannot be divided into {size} equal blocks, one per rank"
            raise InvalidArgument(MPI.ERR_COUNT, message)
    else:
        block = _to_int(count, MPI.ERR_COUNT, f"{name}: count")
        if block < 0:
            raise InvalidArgument(MPI.ERR_COUNT, f"{name}: negative count {block}")
        if block > 0 and obj is None:
            raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: the array is None but the count is {block}")
    if obj is not None and obj is not MPI.BOTTOM:  # inferred counts too: a datatype may reach beyond its extent
        what = f"count {block}" if size == 1 else f"{size} blocks of {block}"
        _check_fits(block * size, offset, memory, name, what)
    return _buffer(memory, offset, block * size, block)


def _split_spec(spec: Any, name: str, pair: Any) -> tuple[Any, Any, Any, Any]:
    """Split an argument into (array, count(s), displacement(s), datatype). None for missing parts.

    `pair` is the type, or types, of a pair (count, displacement). Other sequences are counts.
    """
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    if len(spec) == 2:
        obj, counts = spec
        if isinstance(counts, (MPI.Datatype, str)):
            return obj, None, None, counts
        return obj, *_split_pair(counts, name, pair), None
    if len(spec) == 3:
        obj, counts, datatype = spec
        return obj, *_split_pair(counts, name, pair), datatype
    if len(spec) == 4:
        return tuple(spec)
    raise InvalidArgument(
        MPI.ERR_ARG,
        f"{name}: expected [array, ...] of 2 to 4 items, such as [array, count, datatype], found {len(spec)}",
    )


def _split_pair(counts: Any, name: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(counts, pair):
        return counts, None
    if len(counts) != 2:
        hint = "; give counts alone as a list" if pair is tuple else ""
        message = f"{name}: expected a pair (count, displacement) after the array, found {counts!r}{hint}"
        raise InvalidArgument(MPI.ERR_ARG, message)
    return counts[0], counts[1]


def _element_count(nbytes: int, element: ElementType, name: str) -> int:
    if nbytes == 0:
        return 0
    total, rest = divmod(nbytes, _stride_of(element, name))
    if rest:
        message = f"{name}: no count given, and {nbytes} bytes are no multiple of the datatype's extent of"
        raise InvalidArgument(MPI.ERR_COUNT, f"{message} {element.extent} bytes")
    return total


def _stride_of(element: ElementType, name: str) -> int:
    if element.extent <= 0:
        message = f"{name}: a datatype of extent {element.extent} needs an explicit count and no displacement"
        raise InvalidArgument(MPI.ERR_TYPE, message)
    return element.extent


def _check_fits(count: int, offset: int, memory: MemoryView, name: str, what: str) -> None:
    """Raise InvalidBuffer unless `count` elements starting at byte `offset` are within the memory."""
    if count == 0:
        return
    element = memory.element
    span = (count - 1) * element.extent
    low = offset + min(0, span) + element.low
    high = offset + max(0, span) + element.high
    if low < -bytes_before(memory):
        raise InvalidBuffer(MPI.ERR_BUFFER, f"{name}: {what} begins {-low} bytes before the buffer")
    if high > memory.nbytes:
        have = f" ({memory.nbytes // element.extent} elements)" if element.extent > 0 else ""
        needs = f"{name}: {what} of {datatype_name(element.datatype)} needs {high} bytes"
        raise InvalidBuffer(MPI.ERR_TRUNCATE, f"{needs}, the buffer has {memory.nbytes} bytes{have}")


def _buffer(
    memory: MemoryView,
    offset: int,
    count: int,
    block: int,
    counts: tuple[int, ...] | None = None,
    displs: tuple[int, ...] | None = None,
) -> Buffer:
    dtype, datatype, itemsize, extent, _, _, dense = memory.element
    return Buffer(
        *(memory.address + offset, count * itemsize, count, block, dtype, datatype, itemsize, extent, counts, displs),
        *(memory.readonly, memory.device, dense, memory.owner),
    )


def _is_number(values: Any) -> bool:
    """True for one integer (also a 0-d array), False for a sequence or a float."""
    try:
        len(values)
    except TypeError:
        return hasattr(type(values), "__index__")
    return False


def _to_int(value: Any, error_class: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidType(error_class, f"{name}: expected an integer, found {value!r}") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise OutOfRange(error_class, f"{name}: {number} does not fit in 64 bits")
    return number


def _to_ints(values: Any, size: int, error_class: int, name: str) -> tuple[int, ...]:
    try:
        found = len(values)
    except TypeError:
        raise InvalidType(error_class, f"{name}: expected {size} integers, found {values!r}") from None
    if found != size:
        raise InvalidArgument(error_class, f"{name}: expected {size} items, one per rank, found {found}")
    return tuple(_to_int(values[i], error_class, f"{name}[{i}]") for i in range(size))
