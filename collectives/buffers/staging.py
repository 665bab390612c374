"""Staging of device and non-contiguous arguments: a collective works on copies in contiguous host memory.

`load` copies the user's elements to `host`, a vector of bytes, before the collective. `store` copies them back
afterwards. In between only `host` is accessed. `loading` and `storing` are the same as calls and waits, so that a
non-blocking collective can progress while a device copies.

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
from dataclasses import replace
from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.buffers.arguments import Buffer
from collectives.buffers.datatypes import OwnedDatatype, element_of
from collectives.buffers.device_memory import DeviceMemory
from collectives.types import Wait

Calls = Sequence[Callable[[], object] | Wait]
"""Calls and waits in order. A `Wait` may be tested until it is complete instead."""


class Staging:
    """Base class of staged arguments: a contiguous copy in host memory, and the steps that fill it and copy it back.

    Attributes
    ----------
    host : numpy.ndarray
        Bytes, one-dimensional. Contiguous elements keep their places: the blocks of a v-form are at their
        displacements, with undefined bytes between them. All others are packed, block after block, so that the
        displacements of a v-form become the running sum of its counts.
    loading, storing : sequence of calls and waits
        The steps of `load` and `store`. Empty if the collective only writes, or only reads, the argument.
    """

    __slots__ = ("_loads", "_stores", "host")

    host: np.ndarray

    def __init__(self, buffer: Buffer, load: bool, store: bool) -> None:
        self._loads, self._stores = load and buffer.nbytes > 0, store and buffer.nbytes > 0

    @property
    def loading(self) -> Calls:
        return self._load_steps() if self._loads else []

    @property
    def storing(self) -> Calls:
        return self._store_steps() if self._stores else []

    def _load_steps(self) -> Calls:
        raise NotImplementedError

    def _store_steps(self) -> Calls:
        raise NotImplementedError

    def load(self) -> None:
        """Copy the user's memory to `host`, on a device in stream order. No-op if the collective only writes to it."""
        _run(self.loading)

    def store(self) -> None:
        """Copy `host` to the user's memory, on a device in stream order. No-op if the collective only reads from it.

        Gaps between elements stay unchanged.
        """
        _run(self.storing)

    def free(self) -> None:
        """Free MPI resources. Also happens when the object is collected."""


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
    byte, independent of its span: mpi4py divides the memory it is given by the extent.
    """

    __slots__ = ("_at", "_keep", "_span", "_whole")

    def __init__(self, buffer: Buffer, load: bool, store: bool, host: np.ndarray | None = None) -> None:
        super().__init__(buffer, load, store)
        self._span = _span(buffer)
        self.host = np.empty(buffer.nbytes, np.uint8) if host is None else host
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

    def _load_steps(self) -> Calls:
        return [self._pack]

    def _store_steps(self) -> Calls:
        return [self._unpack]

    def _pack(self) -> None:
        self._whole.Pack(self._at, self.host, 0, MPI.COMM_SELF)

    def _unpack(self) -> None:
        self._whole.Unpack(self.host, 0, self._at, MPI.COMM_SELF)

    def loading_from(self, memory: np.ndarray) -> Callable[[], object]:
        """Load step for the same buffer layout at the address of `memory`."""
        return partial(self._whole.Pack, _at_address(memory), self.host, 0, MPI.COMM_SELF)

    def storing_to(self, memory: np.ndarray) -> Callable[[], object]:
        """Store step for the same buffer layout at the address of `memory`."""
        return partial(self._whole.Unpack, self.host, 0, _at_address(memory), MPI.COMM_SELF)

    def free(self) -> None:
        self._whole.free()


def _at_address(memory: np.ndarray) -> MPI.buffer:
    return MPI.buffer.fromaddress(MPI.Get_address(memory), 1)


def with_own_datatype(buffer: Buffer | None) -> Buffer | None:
    """Buffer with a duplicate of its derived datatype, so that the user may free the original. Otherwise unchanged."""
    if buffer is None or buffer.datatype is None or buffer.datatype.is_predefined:
        return buffer
    return replace(buffer, datatype=OwnedDatatype(MPI.Datatype(buffer.datatype).Dup()))  # not of a subclass


class DeviceStaging(Staging):
    """Staging of device memory through pinned host memory, in the order of the array's CUDA stream.

    Consecutive blocks are one copy. Elements with gaps are packed on the host, from a copy of all that they span.
    Storing them fetches the span again, so that the gaps come back unchanged. Pinned memory is freed with this object.
    """

    __slots__ = ("_address", "_device", "_mirror", "_owner", "_packed", "_runs")

    def __init__(self, buffer: Buffer, load: bool, store: bool) -> None:
        super().__init__(buffer, load, store)
        self._owner, self._device = buffer.owner, DeviceMemory(buffer.owner)
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

    def _fetch_steps(self) -> list[Callable[[], object] | Wait]:
        return [partial(self._device.follow, self._owner), self._fetch, self._device.ended]

    def _load_steps(self) -> Calls:
        return [*self._fetch_steps(), *(self._packed.loading if self._packed else ())]

    def _store_steps(self) -> Calls:
        fetch = self._fetch_steps()
        before = fetch[:1] if self._packed is None else [*fetch, *self._packed.storing]
        return [*before, self._send_back, self._device.ended]

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
    """Contiguous byte ranges (offset, length) of a buffer's blocks. Adjacent blocks are one range."""
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
