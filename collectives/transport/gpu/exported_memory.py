"""Device memory and events that other processes open: CUDA's interprocess handles.

CUDA has rules that nothing enforces. A handle names a whole allocation of cudaMalloc, so memory inside it is a handle
and an offset. Memory of a pool is not exported: its library may free it at any time, but an importer must close an
allocation before its owner frees it. An event that was never recorded does not delay the stream that waits for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

GRAIN = 1 << 21
"""Bytes that allocations are multiples of: CUDA puts smaller ones together, and would export them together."""

HANDLE = 64
"""Bytes of a handle."""


class Exported(NamedTuple):
    """Place in the exported memory of a process: the allocation's handle, and an offset in bytes."""

    handle: bytes
    offset: int


class ExportedBlock(NamedTuple):
    """An allocation of this process, and its handle."""

    memory: Any
    address: int
    nbytes: int
    handle: bytes


class ExportedMemory:
    """Exported allocations of this process on one device, and allocations of other processes that it has opened.

    An allocation is freed by `release` only, after all other processes have closed it. `changes` counts allocations
    and releases: what `find` has returned holds until the next one.
    """

    def __init__(self, cupy: ModuleType, device: int) -> None:
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self.device = device
        self.blocks: list[ExportedBlock] = []
        self.changes = 0
        self._opened: dict[bytes, int] = {}
        self._events: dict[bytes, int] = {}
        self._unused: deque[ExportedBlock] = deque()  # of collected arrays, appended by finalizers at any moment

    def allocate(self, nbytes: int) -> ExportedBlock:
        """Allocate and export memory. RuntimeError or MemoryError if CUDA refuses."""
        nbytes = -(-max(nbytes, 1) // GRAIN) * GRAIN
        with self._cupy.cuda.Device(self.device):
            memory = self._cupy.cuda.Memory(nbytes)
        block = ExportedBlock(memory, int(memory.ptr), nbytes, self._runtime.ipcGetMemHandle(memory.ptr))
        self.blocks.append(block)
        self.changes += 1
        return block

    def array(self, block: ExportedBlock, shape: tuple[int, ...], dtype: Any) -> Any:
        """Array at the start of a block. The block is `unused` after its last array is collected."""
        lease = _Lease()
        weakref.finalize(lease, self._unused.append, block).atexit = False
        memory = self._cupy.cuda.UnownedMemory(block.address, block.nbytes, lease, self.device)
        return self._cupy.ndarray(shape, dtype, self._cupy.cuda.MemoryPointer(memory, 0))

    def view(self, address: int, nbytes: int) -> Any:
        """Array of bytes over device memory that this process has allocated or opened."""
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, None, self.device)
        return self._cupy.ndarray((nbytes,), "u1", self._cupy.cuda.MemoryPointer(memory, 0))

    def find(self, address: int, nbytes: int) -> Exported | None:
        """Handle and offset of this process's memory, or None if it is not all in one exported allocation."""
        for block in self.blocks:
            if block.address <= address and address + nbytes <= block.address + block.nbytes:
                return Exported(block.handle, address - block.address)
        return None

    def unused(self) -> list[ExportedBlock]:
        """Blocks without arrays since the last call. They stay allocated until they are released."""
        return [self._unused.popleft() for _ in range(len(self._unused))]

    def release(self, blocks: list[ExportedBlock]) -> None:
        """Free blocks that no other process has open. Empties the list."""
        handles = {block.handle for block in blocks}
        blocks.clear()
        self.blocks = [block for block in self.blocks if block.handle not in handles]
        self.changes += 1

    def open(self, handle: bytes) -> int:
        """Local address of another process's allocation. It stays open until `close`."""
        if handle not in self._opened:
            with self._cupy.cuda.Device(self.device):
                self._opened[handle] = self._runtime.ipcOpenMemHandle(handle)
        return self._opened[handle]

    def close(self, handles: Iterable[bytes] | None = None) -> None:
        """Close allocations of other processes (all by default), after this process's work on them."""
        found = [handle for handle in (list(self._opened) if handles is None else handles) if handle in self._opened]
        if found:
            with self._cupy.cuda.Device(self.device):
                self._runtime.deviceSynchronize()
                for handle in found:
                    self._runtime.ipcCloseMemHandle(self._opened.pop(handle))

    def new_event(self) -> tuple[Any, bytes]:
        """Event for other processes, and its handle."""
        with self._cupy.cuda.Device(self.device):
            event = self._cupy.cuda.Event(disable_timing=True, interprocess=True)
            return event, self._runtime.ipcGetEventHandle(event.ptr)

    def open_event(self, handle: bytes) -> int:
        """Event of another process, as CUDA's number. It must have been recorded before a stream waits for it."""
        if handle not in self._events:
            with self._cupy.cuda.Device(self.device):
                self._events[handle] = self._runtime.ipcOpenEventHandle(handle)
        return self._events[handle]

    def is_reached(self, event: int) -> bool:
        """True if the latest record of another process's event was reached. Nothing is put on the GPU."""
        return bool(self._runtime.eventQuery(event) == 0)

    def close_events(self) -> None:
        while self._events:
            self._runtime.eventDestroy(self._events.popitem()[1])


class _Lease:
    """Owner of an array's memory, collected with the last array."""
