"""Data that is no dense host memory, made so while a collective runs, and put back after it.

`load` brings the user's elements into `host`, a plain vector of bytes, before the collective starts; `store`
returns them when it has ended. Between the two only `host` is touched. Each is a list of calls and waits too, so that
a non-blocking collective need not stand still while a device copies.

Device memory that need not be staged is worked on where it is, by way of the same `DeviceMemory`.

>>> import numpy as np
>>> from mpi4py import MPI
>>> from collectives.buffers.arguments import vector
>>> table = np.arange(12, dtype="i4").reshape(3, 4)
>>> column = MPI.INT.Create_vector(3, 1, 4).Commit()
>>> staged = stage(vector([table, 1, column], "sendbuf"), load=True, store=False)
>>> staged.load()
>>> staged.host.view("i4").tolist()
[0, 4, 8]
>>> staged.free(), column.Free()
(None, None)
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives.buffers.arguments import Buffer
from collectives.buffers.datatypes import element_of
from collectives.buffers.memory import cuda_interface
from collectives.types import Wait

__all__ = ["DeviceMemory", "DeviceStaging", "HostStaging", "PackedStaging", "Staging", "device_of", "stage"]

Calls = Sequence[Callable[[], object] | Wait]
"""What is done one after another; a `Wait` may be tested until it is over instead."""


class Staging(Protocol):
    """Interface of a staged argument to the executor.

    Attributes
    ----------
    host : numpy.ndarray
        Bytes, one-dimensional. Elements that lie dense keep their places: the blocks of a v-form are where their
        displacements say, and what is between them means nothing. All others are packed, block after block, so
        that the displacements of a v-form become the running sum of its counts.
    loading, storing : sequence of calls and waits
        What `load` and `store` do.
    """

    host: np.ndarray
    loading: Calls
    storing: Calls

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
    return (DeviceStaging if buffer.device else PackedStaging)(buffer, load, store)


class PackedStaging:
    """Elements with gaps or in another order, packed by MPI itself.

    One datatype covers the whole argument, blocks and all, so loading and storing are one call each. Its
    extent is one byte, whatever it spans: mpi4py divides the memory it is given by the extent.
    """

    __slots__ = ("_at", "_keep", "_whole", "host", "loading", "storing")

    def __init__(self, buffer: Buffer, load: bool, store: bool, host: np.ndarray | None = None) -> None:
        self.host = np.empty(buffer.nbytes, np.uint8) if host is None else host
        busy = buffer.nbytes > 0
        self.loading: Calls = [self._pack] if load and busy else []
        self.storing: Calls = [self._unpack] if store and busy else []
        self._keep = buffer.owner, np.zeros(1, np.uint8)
        at = buffer.address or MPI.Get_address(self._keep[1])  # MPI.BOTTOM: absolute places, seen from anywhere
        self._at = MPI.buffer.fromaddress(at, 1)
        assert buffer.datatype is not None, "elements without a datatype lie dense"
        datatype = MPI.Datatype(buffer.datatype)  # mpi4py makes new ones of the same class: not of a subclass
        counts = (buffer.count,) if buffer.counts is None else buffer.counts
        displs = (0,) * len(counts) if buffer.displs is None else buffer.displs
        places = [buffer.address - at + displ * buffer.extent for displ in displs]
        blocks = datatype.Create_hindexed(list(counts), places)
        self._whole = HostStaging(blocks.Create_resized(0, 1).Commit())
        blocks.Free()

    def load(self) -> None:
        """Pack into `host`."""
        _do(self.loading)

    def store(self) -> None:
        """Unpack from `host`; bytes in the gaps stay what they were."""
        _do(self.storing)

    def _pack(self) -> None:
        self._whole.Pack(self._at, self.host, 0, MPI.COMM_SELF)

    def _unpack(self) -> None:
        self._whole.Unpack(self.host, 0, self._at, MPI.COMM_SELF)

    def free(self) -> None:
        """Give back the datatype."""
        self._whole.free()


def _do(calls: Calls) -> None:
    for call in calls:
        if isinstance(call, Wait):
            call.wait()
        else:
            call()


class HostStaging(MPI.Datatype):
    """A datatype that is freed when nothing refers to it any more: ``HostStaging(datatype)`` takes it over."""

    def __del__(self) -> None:
        if not MPI.Is_finalized():
            self.free()


def lasting(buffer: Buffer | None) -> Buffer | None:
    """The same buffer with a datatype of its own, which stays when the user frees theirs: for binding later."""
    if buffer is None or buffer.datatype is None or buffer.datatype.is_predefined:
        return buffer
    lasts = Buffer(*(getattr(buffer, slot) for slot in _FIELDS))
    lasts.datatype = HostStaging(buffer.datatype.Dup())
    return lasts


class DeviceStaging:
    """Device memory, copied through pinned host memory, in the order of the stream that the user's library works on.

    Blocks that follow each other travel as one copy. Elements with gaps are packed on the host, from a copy
    of all that they span; storing them fetches the span again, so that the gaps come back unchanged.
    """

    __slots__ = ("_address", "_device", "_mirror", "_packed", "_runs", "host", "loading", "storing")

    def __init__(self, buffer: Buffer, load: bool, store: bool) -> None:
        self._device = device_of(buffer.owner)
        self._packed: PackedStaging | None = None
        if buffer.contiguous:
            self._address = buffer.address
            self._runs = _runs(buffer)
            self.host = self._mirror = self._device.pinned(max(map(sum, self._runs), default=0))
        else:
            low, high = _span(buffer)
            self._address = buffer.address + low
            self._mirror = self._device.pinned(high - low)
            self._runs = [(0, high - low)]
            mirrored = Buffer(*(getattr(buffer, slot) for slot in _FIELDS))
            mirrored.address = MPI.Get_address(self._mirror) - low
            mirrored.owner = self._mirror
            self._packed = PackedStaging(mirrored, load, store)
            self.host = self._packed.host
        inner, busy = self._packed, buffer.nbytes > 0
        follow, ended = partial(self._device.follow, buffer.owner), self._device.ended
        fetch: Calls = [follow, self._fetch, ended]
        self.loading: Calls = [*fetch, *(inner.loading if inner else ())] if load and busy else []
        before: Calls = [follow] if inner is None else [*fetch, *inner.storing]
        self.storing: Calls = [*before, self._send_back, ended] if store and busy else []

    def load(self) -> None:
        """Copy to the host, after all that goes on with the array."""
        _do(self.loading)

    def store(self) -> None:
        """Copy to the device, before all that the array is used for afterwards."""
        _do(self.storing)

    def free(self) -> None:
        """Give back the datatype, if there is one; pinned memory goes with this object."""
        if self._packed is not None:
            self._packed.free()

    def _fetch(self) -> None:
        for start, nbytes in self._runs:
            self._device.to_host(self._mirror[start : start + nbytes], self._address + start)
        self._device.mark()

    def _send_back(self) -> None:
        for start, nbytes in self._runs:
            self._device.to_device(self._address + start, self._mirror[start : start + nbytes])
        self._device.mark()


_FIELDS = (
    *("address", "nbytes", "count", "block", "dtype", "datatype", "itemsize", "extent"),
    *("counts", "displs", "readonly", "device", "contiguous", "owner"),
)


def _runs(buffer: Buffer) -> list[tuple[int, int]]:
    """Copies that bring all blocks over: (offset, bytes)."""
    if buffer.counts is None or buffer.displs is None:
        return [(0, buffer.nbytes)]
    runs: list[tuple[int, int]] = []
    for count, displ in zip(buffer.counts, buffer.displs, strict=True):
        start, nbytes = displ * buffer.itemsize, count * buffer.itemsize
        if runs and sum(runs[-1]) == start:
            start, nbytes = runs[-1][0], runs.pop()[1] + nbytes
        if nbytes:
            runs.append((start, nbytes))
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


class DeviceMemory(Protocol):
    """One device, and the stream on it that all that is begun here is put on, one piece after another.

    No other stream is waited for: neither by the host, nor by the stream, but for those that `follow` names.

    Attributes
    ----------
    number : int
        Which device it is.
    namespace : module
        The array library, with functions by NumPy's names.
    ended : Wait
        For all that was on the stream at the last `mark`.
    """

    number: int
    namespace: Any
    ended: Wait

    def holds(self, array: Any) -> bool:
        """True if the array is on this device."""

    def follow(self, *arrays: Any) -> None:
        """Take the stream that the first array is on, behind what those of the others hold now."""

    def mark(self) -> None:
        """Remember what the stream holds now."""

    def working(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call, what it has the array library begin put on the stream."""

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """A new array on the device."""

    def view(self, address: int, count: int, dtype: np.dtype[Any]) -> Any:
        """Array over device memory; the caller keeps the memory alive."""

    def pinned(self, nbytes: int) -> np.ndarray:
        """Bytes of host memory that the device can copy to and from by itself."""

    def to_host(self, host: np.ndarray, address: int) -> None:
        """Begin to copy device memory at `address` into `host`."""

    def to_device(self, address: int, host: np.ndarray) -> None:
        """Begin to copy `host` into device memory at `address`."""


def device_of(array: Any) -> DeviceMemory:
    """The device that an array lies on, and the array's stream there."""
    return _Cuda(array)


_LEGACY = 1
"""The name by which other libraries are told of CUDA's default stream, which CuPy calls 0."""


class _Cuda:
    """A CUDA device, by way of CuPy, which is imported here and nowhere else."""

    __slots__ = ("_cuda", "_device", "_event", "_stream", "ended", "namespace", "number")

    def __init__(self, array: Any) -> None:
        try:
            self.namespace = import_module("cupy")
        except ImportError as error:
            raise ImportError(
                f"an array of type {type(array).__name__!r} lies on a device; reaching it needs CuPy: "
                f"pip install cupy-cuda12x (or cupy-cuda13x)"
            ) from error
        self._cuda = self.namespace.cuda
        self.number = self._number(array)
        self._device = self._cuda.Device(self.number)
        with self._device:
            self._event = self._cuda.Event(disable_timing=True)
        self.ended = Wait(self._event.synchronize, lambda: self._event.done)
        self.follow(array)

    def _number(self, array: Any) -> int:
        if isinstance(array, self.namespace.ndarray):
            return int(array.device.id)
        interface = cuda_interface(array)
        if interface is None:
            return int(array.__dlpack_device__()[1])
        pointer = interface["data"][0]
        return int(self._cuda.runtime.pointerGetAttributes(pointer).device if pointer else self._cuda.Device().id)

    def holds(self, array: Any) -> bool:
        return self._number(array) == self.number

    def follow(self, *arrays: Any) -> None:
        with self._device:
            self._stream, *others = [self._stream_of(array) for array in arrays]
            for other in others:
                if other != self._stream:
                    self._stream.wait_event(other.record())

    def _stream_of(self, array: Any) -> Any:
        """Stream named by the array, or else CuPy's current one."""
        current = self._cuda.get_current_stream()
        interface = cuda_interface(array)
        if interface is None:
            array.__dlpack__(stream=current.ptr or _LEGACY)  # whose library has our stream wait for its own
            return current
        pointer = interface.get("stream")
        if pointer is None or pointer == (current.ptr or _LEGACY):
            return current
        return self._cuda.ExternalStream(pointer)

    def mark(self) -> None:
        with self._device:  # stream 0 is that of the current device
            self._event.record(self._stream)

    def working(self, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with self._device, self._stream:
                call()

        return run

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        with self._device:
            return self.namespace.empty(count, dtype)

    def view(self, address: int, count: int, dtype: np.dtype[Any]) -> Any:
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return self.empty(0, dtype)
        memory = self._cuda.UnownedMemory(address, nbytes, None, self.number)
        return self.namespace.ndarray((count,), dtype, self._cuda.MemoryPointer(memory, 0))

    def pinned(self, nbytes: int) -> np.ndarray:
        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def to_host(self, host: np.ndarray, address: int) -> None:
        self._copy(MPI.Get_address(host), address, host.nbytes, self._cuda.runtime.memcpyDeviceToHost)

    def to_device(self, address: int, host: np.ndarray) -> None:
        self._copy(address, MPI.Get_address(host), host.nbytes, self._cuda.runtime.memcpyHostToDevice)

    def _copy(self, target: int, source: int, nbytes: int, direction: int) -> None:
        with self._device:
            self._cuda.runtime.memcpyAsync(target, source, nbytes, direction, self._stream.ptr)
