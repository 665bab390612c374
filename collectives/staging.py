"""Data that is no dense host memory, made so while a collective runs, and put back after it.

`load` brings the user's elements into `host`, a plain vector of bytes, before the collective starts; `store`
returns them when it has ended. Between the two only `host` is touched.

>>> import numpy as np
>>> from mpi4py import MPI
>>> from collectives.buffers import vector
>>> table = np.arange(12, dtype="i4").reshape(3, 4)
>>> column = MPI.INT.Create_vector(3, 1, 4).Commit()
>>> staged = stage(vector([table, 1, column], "sendbuf"), load=True, store=False)
>>> staged.load()
>>> staged.host.view("i4").tolist()
[0, 4, 8]
>>> staged.free(), column.Free()
(None, None)
"""

from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives.buffers import Buffer, element_of

__all__ = ["Device", "OnDevice", "Owned", "Packed", "Staging", "device_of", "register", "stage"]


class Staging(Protocol):
    """What the executor needs of a staged argument.

    Attributes
    ----------
    host : numpy.ndarray
        Bytes, one-dimensional, ``buffer.nbytes`` long: the packed elements without gaps, block after block
        (so the displacements of a v-form become the running sum of its counts).
    """

    host: np.ndarray

    def load(self) -> None:
        """Fill `host` from the user's memory; nothing, if the call only writes there."""

    def store(self) -> None:
        """Write `host` to the user's memory; nothing, if the call only reads there."""

    def free(self) -> None:
        """Give back what was allocated; also happens when the object is collected."""


def stage(buffer: Buffer, load: bool, store: bool) -> Staging:
    """Choose the staging for a buffer that is on a device or not contiguous.

    Parameters
    ----------
    load, store
        Whether the collective reads the argument, and whether it writes it.
    """
    return (OnDevice if buffer.device else Packed)(buffer, load, store)


class Packed:
    """Elements with gaps or in another order, packed by MPI itself.

    One datatype covers the whole argument, blocks and all, so loading and storing are one call each. Its
    extent is one byte, whatever it spans: mpi4py divides the memory it is given by the extent.
    """

    __slots__ = ("_at", "_keep", "_load", "_store", "_whole", "host")

    def __init__(self, buffer: Buffer, load: bool, store: bool, host: np.ndarray | None = None) -> None:
        self.host = np.empty(buffer.nbytes, np.uint8) if host is None else host
        busy = buffer.nbytes > 0
        self._load, self._store = load and busy, store and busy
        self._keep = buffer.owner, np.zeros(1, np.uint8)
        at = buffer.address or MPI.Get_address(self._keep[1])  # MPI.BOTTOM: absolute places, seen from anywhere
        self._at = MPI.buffer.fromaddress(at, 1)
        assert buffer.datatype is not None, "elements without a datatype lie dense"
        datatype = MPI.Datatype(buffer.datatype)  # mpi4py makes new ones of the same class: not of a subclass
        counts = (buffer.count,) if buffer.counts is None else buffer.counts
        displs = (0,) * len(counts) if buffer.displs is None else buffer.displs
        places = [buffer.address - at + displ * buffer.extent for displ in displs]
        blocks = datatype.Create_hindexed(list(counts), places)
        self._whole = Owned(blocks.Create_resized(0, 1).Commit())
        blocks.Free()

    def load(self) -> None:
        """Pack into `host`."""
        if self._load:
            self._whole.Pack(self._at, self.host, 0, MPI.COMM_SELF)

    def store(self) -> None:
        """Unpack from `host`; bytes in the gaps stay what they were."""
        if self._store:
            self._whole.Unpack(self.host, 0, self._at, MPI.COMM_SELF)

    def free(self) -> None:
        """Give back the datatype."""
        self._whole.free()


class Owned(MPI.Datatype):
    """A datatype that is freed when nothing refers to it any more: ``Owned(datatype)`` takes it over."""

    def __del__(self) -> None:
        if not MPI.Is_finalized():
            self.free()


class OnDevice:
    """Device memory, copied through pinned host memory on the stream that the user's library works on.

    Blocks that follow each other travel as one copy. Elements with gaps are packed on the host, from a copy
    of all that they span; storing them fetches the span again, so that the gaps come back unchanged.
    """

    __slots__ = ("_address", "_device", "_load", "_mirror", "_owner", "_packed", "_runs", "_store", "host")

    def __init__(self, buffer: Buffer, load: bool, store: bool) -> None:
        busy = buffer.nbytes > 0
        self._load, self._store = load and busy, store and busy
        self._owner = buffer.owner
        self._device = device_of(buffer.owner)
        self._packed: Packed | None = None
        if buffer.contiguous:
            self._address = buffer.address
            self.host = self._mirror = self._device.pinned(buffer.nbytes)
            self._runs = _runs(buffer)
        else:
            low, high = _span(buffer)
            self._address = buffer.address + low
            self._mirror = self._device.pinned(high - low)
            self._runs = [(0, 0, high - low)]
            mirrored = Buffer(*(getattr(buffer, slot) for slot in _FIELDS))
            mirrored.address = MPI.Get_address(self._mirror) - low
            mirrored.owner = self._mirror
            self._packed = Packed(mirrored, load, store)
            self.host = self._packed.host

    def load(self) -> None:
        """Copy to the host and wait for the stream that the copy ran on."""
        if self._load:
            self._fetch()
            if self._packed is not None:
                self._packed.load()

    def store(self) -> None:
        """Copy to the device and wait for the stream that the copy ran on."""
        if self._store:
            if self._packed is not None:
                self._fetch()
                self._packed.store()
            for there, here, nbytes in self._runs:
                self._device.to_device(self._address + there, self._mirror[here : here + nbytes])
            self._device.synchronize()

    def free(self) -> None:
        """Give back the datatype, if there is one; pinned memory goes with this object."""
        if self._packed is not None:
            self._packed.free()

    def _fetch(self) -> None:
        for there, here, nbytes in self._runs:
            self._device.to_host(self._mirror[here : here + nbytes], self._address + there)
        self._device.synchronize()


_FIELDS = (
    *("address", "nbytes", "count", "block", "dtype", "datatype", "itemsize", "extent"),
    *("counts", "displs", "readonly", "device", "contiguous", "owner"),
)


def _runs(buffer: Buffer) -> list[tuple[int, int, int]]:
    """Copies that bring all blocks together: (offset on the device, offset on the host, bytes)."""
    if buffer.counts is None or buffer.displs is None:
        return [(0, 0, buffer.nbytes)]
    runs: list[tuple[int, int, int]] = []
    size = buffer.itemsize
    for count, displ, start in zip(buffer.counts, buffer.displs, accumulate(buffer.counts, initial=0), strict=False):
        there, here, nbytes = displ * size, start * size, count * size
        if runs and runs[-1][0] + runs[-1][2] == there:
            there, here, nbytes = runs[-1][0], runs[-1][1], runs.pop()[2] + nbytes
        if nbytes:
            runs.append((there, here, nbytes))
    return runs


def _span(buffer: Buffer) -> tuple[int, int]:
    """First and last byte (exclusive) that any element touches, from the address on."""
    assert buffer.datatype is not None, "elements without a datatype lie dense"
    element, extent = element_of(buffer.datatype), buffer.extent
    if buffer.counts is None or buffer.displs is None:
        ranges = [(0, buffer.count)]
    else:
        ranges = list(zip(buffer.displs, buffer.counts, strict=True))
    ends = [(displ * extent, (displ + count - 1) * extent) for displ, count in ranges if count]
    if not ends:
        return 0, 0
    return min(map(min, ends)) + element.low, max(map(max, ends)) + element.high


# --- devices ------------------------------------------------------------------------------------------------


class Device(Protocol):
    """What staging asks of an array library: four things, on the stream that the library works on now."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Bytes of host memory that the device can copy to and from by itself."""

    def to_host(self, host: np.ndarray, address: int) -> None:
        """Begin to copy device memory at `address` into `host`."""

    def to_device(self, address: int, host: np.ndarray) -> None:
        """Begin to copy `host` into device memory at `address`."""

    def synchronize(self) -> None:
        """Wait for the copies begun, and for what ran before them on the same stream."""


_factories: dict[type, Callable[[Any], Device]] = {}


def register(array_type: type, factory: Callable[[Any], Device]) -> None:
    """Tell how to reach the memory of arrays of a type: `factory` takes one and gives its `Device`."""
    _factories[array_type] = factory


def device_of(array: Any) -> Device:
    """Find the device of an array by its type; CUDA through CuPy for those that are not registered."""
    for ancestor in type(array).__mro__:
        if ancestor in _factories:
            return _factories[ancestor](array)
    return _Cuda(array)


class _Cuda:
    """A CUDA device, by way of CuPy, which is imported here and nowhere else."""

    __slots__ = ("_array", "_cuda")

    def __init__(self, array: Any) -> None:
        try:
            cuda = import_module("cupy").cuda
        except ImportError as error:
            raise ImportError(
                f"an array of type {type(array).__name__!r} lies on a device; reaching it needs CuPy: "
                f"pip install cupy-cuda12x (or cupy-cuda13x)"
            ) from error
        self._array, self._cuda = array, cuda

    def _stream(self) -> Any:
        """The stream that the array asks its consumers to follow, or else CuPy's current one."""
        interface = getattr(self._array, "__cuda_array_interface__", None) or {}
        pointer = interface.get("stream")
        if pointer is None:
            return self._cuda.get_current_stream()
        return self._cuda.ExternalStream(pointer)

    def pinned(self, nbytes: int) -> np.ndarray:
        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def to_host(self, host: np.ndarray, address: int) -> None:
        self._copy(MPI.Get_address(host), address, host.nbytes, self._cuda.runtime.memcpyDeviceToHost)

    def to_device(self, address: int, host: np.ndarray) -> None:
        self._copy(address, MPI.Get_address(host), host.nbytes, self._cuda.runtime.memcpyHostToDevice)

    def _copy(self, target: int, source: int, nbytes: int, direction: int) -> None:
        self._cuda.runtime.memcpyAsync(target, source, nbytes, direction, self._stream().ptr)

    def synchronize(self) -> None:
        self._stream().synchronize()
