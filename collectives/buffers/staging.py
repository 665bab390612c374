"""Staging of device and non-contiguous arguments: a collective works on copies in contiguous host memory.

`load` copies the user's elements to `host`, a vector of bytes, before the collective; `store` copies them back
afterwards. In between only `host` is accessed. `loading` and `storing` are the same as calls and waits, so that a
non-blocking collective can progress while a device copies.

`DeviceMemory` is also the interface to device memory that is used without staging.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.buffers.arguments import Buffer
from collectives.buffers.datatypes import element_of
from collectives.buffers.memory import cuda_interface
from collectives.types import Wait

Calls = Sequence[Callable[[], object] | Wait]
"""Calls and waits in order; a `Wait` may be tested until it is complete instead."""


class Staging:
    """Base class of staged arguments: a contiguous copy in host memory, and the steps that fill it and copy it back.

    Attributes
    ----------
    host : numpy.ndarray
        Bytes, one-dimensional. Contiguous elements keep their places: the blocks of a v-form are at their
        displacements, with undefined bytes between them. All others are packed, block after block, so that the
        displacements of a v-form become the running sum of its counts.
    loading, storing : sequence of calls and waits
        The steps of `load` and `store`; empty if the collective only writes, or only reads, the argument.
    """

    __slots__ = ("host", "loading", "storing")

    host: np.ndarray
    loading: Calls
    storing: Calls

    def load(self) -> None:
        """Copy the user's memory to `host`, on a device in stream order; no-op if the collective only writes to it."""
        _run(self.loading)

    def store(self) -> None:
        """Copy `host` to the user's memory, on a device in stream order; no-op if the collective only reads from it.

        Gaps between elements stay unchanged.
        """
        _run(self.storing)

    def free(self) -> None:
        """Free MPI resources; also happens when the object is collected."""


def _run(calls: Calls) -> None:
    for call in calls:
        if isinstance(call, Wait):
            call.wait()
        else:
            call()


def stage(buffer: Buffer, load: bool, store: bool) -> Staging:
    """Create the staging of a device or non-contiguous buffer that is read (`load`), written (`store`), or both."""
    return (DeviceStaging if buffer.device else PackedStaging)(buffer, load, store)


class PackedStaging(Staging):
    """Staging of host memory whose elements have gaps or another order, by MPI's Pack and Unpack.

    One datatype covers the whole argument, blocks and all, so loading and storing are one call each. Its extent is one
    byte, whatever it spans: mpi4py divides the memory it is given by the extent.
    """

    __slots__ = ("_at", "_keep", "_whole")

    def __init__(self, buffer: Buffer, load: bool, store: bool, host: np.ndarray | None = None) -> None:
        self.host = np.empty(buffer.nbytes, np.uint8) if host is None else host
        busy = buffer.nbytes > 0
        self.loading = [self._pack] if load and busy else []
        self.storing = [self._unpack] if store and busy else []
        self._keep = buffer.owner, np.zeros(1, np.uint8)
        at = buffer.address or MPI.Get_address(self._keep[1])  # MPI.BOTTOM: absolute displacements from any address
        self._at = MPI.buffer.fromaddress(at, 1)
        assert buffer.datatype is not None, "elements without a datatype are contiguous"
        datatype = MPI.Datatype(buffer.datatype)  # mpi4py creates datatypes of the same class: not of a subclass
        counts = (buffer.count,) if buffer.counts is None else buffer.counts
        displs = (0,) * len(counts) if buffer.displs is None else buffer.displs
        places = [buffer.address - at + displ * buffer.extent for displ in displs]
        blocks = datatype.Create_hindexed(list(counts), places)
        self._whole = OwnedDatatype(blocks.Create_resized(0, 1).Commit())
        blocks.Free()

    def _pack(self) -> None:
        self._whole.Pack(self._at, self.host, 0, MPI.COMM_SELF)

    def _unpack(self) -> None:
        self._whole.Unpack(self.host, 0, self._at, MPI.COMM_SELF)

    def free(self) -> None:
        self._whole.free()


class OwnedDatatype(MPI.Datatype):
    """MPI datatype that is freed with its last reference: ``OwnedDatatype(datatype)`` takes ownership."""

    def __del__(self) -> None:
        if not MPI.Is_finalized():
            self.free()


def with_own_datatype(buffer: Buffer | None) -> Buffer | None:
    """Buffer with a duplicate of its derived datatype, so that the user may free the original; else unchanged."""
    if buffer is None or buffer.datatype is None or buffer.datatype.is_predefined:
        return buffer
    return replace(buffer, datatype=OwnedDatatype(buffer.datatype.Dup()))


class DeviceStaging(Staging):
    """Staging of device memory through pinned host memory, in the order of the array's CUDA stream.

    Consecutive blocks are one copy. Elements with gaps are packed on the host, from a copy of all that they span;
    storing them fetches the span again, so that the gaps come back unchanged. Pinned memory is freed with this object.
    """

    __slots__ = ("_address", "_device", "_mirror", "_packed", "_runs")

    def __init__(self, buffer: Buffer, load: bool, store: bool) -> None:
        self._device = DeviceMemory(buffer.owner)
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
            mirrored = replace(buffer, address=MPI.Get_address(self._mirror) - low, owner=self._mirror)
            self._packed = PackedStaging(mirrored, load, store)
            self.host = self._packed.host
        inner, busy = self._packed, buffer.nbytes > 0
        follow, ended = partial(self._device.follow, buffer.owner), self._device.ended
        fetch: Calls = [follow, self._fetch, ended]
        self.loading = [*fetch, *(inner.loading if inner else ())] if load and busy else []
        before: Calls = [follow] if inner is None else [*fetch, *inner.storing]
        self.storing = [*before, self._send_back, ended] if store and busy else []

    def free(self) -> None:
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


def _runs(buffer: Buffer) -> list[tuple[int, int]]:
    """Contiguous byte ranges (offset, length) of a buffer's blocks; adjacent blocks are one range."""
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
    """Range [low, high) of the bytes that a buffer's elements occupy, relative to its address."""
    assert buffer.datatype is not None, "elements without a datatype are contiguous"
    element, extent = element_of(buffer.datatype), buffer.extent
    if buffer.counts is None or buffer.displs is None:
        ranges = [(0, buffer.count)]
    else:
        ranges = list(zip(buffer.displs, buffer.counts, strict=True))
    ends = [(displ * extent, (displ + count - 1) * extent) for displ, count in ranges if count]
    if not ends:
        return 0, 0
    return min(map(min, ends)) + element.low, max(map(max, ends)) + element.high


_LEGACY = 1
"""Number of CUDA's default stream in DLPack and the CUDA array interface; CuPy's is 0."""


class DeviceMemory:
    """Access to the CUDA device of an array through CuPy: allocations, views, and copies in the order of its stream.

    Neither the host nor the stream waits for other streams, except for those that `follow` names. `number` is the
    device's, `namespace` the array library, with NumPy's names; `ended` waits for the work before the last `mark`.
    """

    __slots__ = ("_cuda", "_device", "_event", "_others", "_stream", "ended", "namespace", "number")

    def __init__(self, array: Any) -> None:
        try:
            self.namespace = import_module("cupy")
        except ImportError as error:
            raise ImportError(
                f"an array of type {type(array).__name__!r} is on a device; access to it needs CuPy: "
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
        """True if the array is on this device."""
        return self._number(array) == self.number

    def follow(self, *arrays: Any) -> None:
        """Use the first array's stream from now on, and let it wait for the work now on the other arrays' streams."""
        with self._device:
            self._stream, *others = [self._stream_of(array) for array in arrays]
            self._others = [other for other in others if other != self._stream] if others else []
            for other in self._others:
                self._stream.wait_event(other.record())

    def join(self) -> None:
        """Let the streams of the other arrays that `follow` named wait for the work now on the first one's."""
        if self._others:
            self.mark()
            for other in self._others:
                other.wait_event(self._event)

    def record(self, event: Any) -> None:
        """Record an event after the work that is now on the stream."""
        with self._device:
            event.record(self._stream)

    @property
    def is_idle(self) -> bool:
        """True if all work on the stream has ended."""
        with self._device:
            return bool(self._stream.done)

    def wait_for(self, event: int) -> None:
        """Let later work on the stream wait for the latest record of an event, which is given by CUDA's number."""
        with self._device:
            self._cuda.runtime.streamWaitEvent(self._stream.ptr, event)

    def _stream_of(self, array: Any) -> Any:
        """CUDA stream of `__cuda_array_interface__`, else CuPy's current one, made to wait for a DLPack array."""
        current = self._cuda.get_current_stream()
        if isinstance(array, self.namespace.ndarray):
            return current
        interface = cuda_interface(array)
        if interface is None:
            array.__dlpack__(stream=current.ptr or _LEGACY)  # the array's library makes our stream wait for its own
            return current
        pointer = interface.get("stream")
        if pointer is None or pointer == (current.ptr or _LEGACY):
            return current
        return self._cuda.ExternalStream(pointer)

    def mark(self) -> None:
        """Record an event after the work that is now on the stream; `ended` waits for it."""
        self.record(self._event)  # on this device, as stream 0 is that of the current one

    def capture(self) -> Callable[[], AbstractContextManager[None]]:
        """Factory of contexts in which any thread uses this device and the CuPy stream that is current here and now."""
        with self._device:
            stream = self._cuda.get_current_stream()

        @contextmanager
        def captured() -> Iterator[None]:
            with self._device, stream:
                yield

        return captured

    def launch(self, calls: Sequence[Callable[[], object]], event: Any = None) -> None:
        """Run CuPy's work of `calls` on this device and `follow`'s latest stream; then record an event, if any."""
        with self._device, self._stream:
            for call in calls:
                call()
            if event is not None:
                event.record(self._stream)

    def working(self, call: Callable[[], object]) -> Callable[[], object]:
        """Wrapper that runs CuPy's work in `call` on this device and `follow`'s latest stream, and returns None."""

        def run() -> None:
            with self._device, self._stream:
                call()

        return run

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        with self._device:
            return self.namespace.empty(count, dtype)

    def view(self, address: int, count: int, dtype: np.dtype[Any]) -> Any:
        """One-dimensional CuPy array over device memory; the caller keeps the memory alive."""
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return self.empty(0, dtype)
        memory = self._cuda.UnownedMemory(address, nbytes, None, self.number)
        return self.namespace.ndarray((count,), dtype, self._cuda.MemoryPointer(memory, 0))

    def pinned(self, nbytes: int) -> np.ndarray:
        """Allocate pinned host memory, as an array of bytes."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def to_host(self, host: np.ndarray, address: int) -> None:
        """Start a copy of device memory at `address` into `host`."""
        self._copy(MPI.Get_address(host), address, host.nbytes, self._cuda.runtime.memcpyDeviceToHost)

    def to_device(self, address: int, host: np.ndarray) -> None:
        """Start a copy of `host` into device memory at `address`."""
        self._copy(address, MPI.Get_address(host), host.nbytes, self._cuda.runtime.memcpyHostToDevice)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy within the device's memory."""
        self._copy(target, source, nbytes, self._cuda.runtime.memcpyDeviceToDevice)

    def _copy(self, target: int, source: int, nbytes: int, direction: int) -> None:
        with self._device:
            self._cuda.runtime.memcpyAsync(target, source, nbytes, direction, self._stream.ptr)
