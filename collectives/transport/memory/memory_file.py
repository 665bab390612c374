"""Memory files: anonymous files (Linux's memfd) that other processes map through the owner's entry in /proc.

A file vanishes with the last process that maps it, however that ends. Unlike Python's `mmap`, these maps keep no
descriptor open: a process may map parts of the files of many others.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
SEALS = 1 | 2 | 4
"""Linux's F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW: no process can change the length of a file."""

REFUSALS = (errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EINVAL)
"""Errors of kernels and sandboxes that allow no memory of this kind. Others may be gone later."""

REMOVE = 9
"""Linux's MADV_REMOVE: free the pages. They are zero at their next use."""

UNIT = 1 << 16
"""Segments are multiples of this, and of every page size."""

AHEAD = 1 << 28
"""Most bytes of a new segment in advance: it doubles the mapped part of the file up to this."""


def create_file(nbytes: int, name: str = "chorus") -> int:
    """Create a memory file and return its descriptor. OSError if the system refuses. AttributeError without memfd."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)  # neighbours open it through /proc: the kernel checks the mode
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, F_ADD_SEALS, SEALS)  # a rank that reads a truncated range would be killed by SIGBUS
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(pid: int, number: int) -> int:
    """Open the file behind descriptor `number` of process `pid`. OSError if that is not permitted."""
    return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)


@cache
def _system_calls() -> Any:
    """The C library, with mmap, munmap and madvise."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


class _Map:
    """Owner of a map. The map ends with the last array on it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        end = weakref.finalize(self, _system_calls().munmap, address, nbytes)
        end.atexit = False  # other threads may use it until the process ends


def map_file(descriptor: int, start: int, nbytes: int) -> np.ndarray:
    """Map part of a file, beginning at a multiple of `UNIT`. OSError if the system refuses."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _system_calls().mmap(None, nbytes, access, mmap.MAP_SHARED, descriptor, start)
    if address in (None, ctypes.c_void_p(-1).value):
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {nbytes} bytes of a memory file: {os.strerror(error)}")
    return np.asarray(_Map(address, nbytes))


def clear(memory: np.ndarray) -> None:
    """Set whole pages of a map to zero, without memory if the system can free it."""
    if not memory.nbytes or not _system_calls().madvise(MPI.Get_address(memory), memory.nbytes, REMOVE):
        return
    memory[...] = 0


class FreeList:
    """Free list of a segment: sorted ranges (start, stop), first fit, adjacent ranges merged."""

    def __init__(self, nbytes: int) -> None:
        self._runs = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Allocate a range and return its start. None if there is no room."""
        for index, (start, stop) in enumerate(self._runs):
            if stop - start >= nbytes:
                self._runs[index : index + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Return `nbytes` bytes from `start` on to the free list."""
        joined: list[tuple[int, int]] = []
        for low, high in sorted([*self._runs, (start, start + nbytes)]):
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self._runs = joined


class Segment(NamedTuple):
    """Mapped part of a file: its place in the file, its bytes in this process, and its free ranges."""

    start: int
    memory: np.ndarray
    gaps: FreeList
    users: set[int]
    """Other processes that have mapped it, by numbers of the caller's."""

    def holds(self, start: int) -> bool:
        """True if the segment has the byte at an offset in the file."""
        return 0 <= start - self.start < self.memory.nbytes

    def view(self, start: int, nbytes: int) -> np.ndarray:
        """Bytes at an offset in the file."""
        return self.memory[start - self.start :][:nbytes]


class MemoryFile:
    """Memory file of this process with an allocator: segments are mapped as they are needed.

    A range that was given back is zero when it is allocated again.
    """

    def __init__(self, nbytes: int) -> None:
        self.descriptor, self._nbytes, self._end = create_file(nbytes), nbytes, 0
        weakref.finalize(self, os.close, self.descriptor)
        self.segments: list[Segment] = []

    @property
    def unmapped(self) -> int:
        """Bytes that are in no segment yet."""
        return self._nbytes - self._end

    def segment_of(self, start: int) -> Segment:
        """The segment of a range."""
        return next(segment for segment in self.segments if segment.holds(start))

    def take(self, nbytes: int, ahead: int = AHEAD) -> int:
        """Allocate zeroed bytes, a multiple of the page size, and return their offset. OSError without room.

        A new segment has at most `ahead` more bytes than that.
        """
        for segment in self.segments:
            found = segment.gaps.take(nbytes)
            if found is not None:
                return segment.start + found
        least = -(-nbytes // UNIT) * UNIT
        generous = max(least, min(self._end, ahead, AHEAD) // UNIT * UNIT)
        for length in (generous, least):
            if length > self.unmapped:
                continue
            try:
                memory = map_file(self.descriptor, self._end, length)
            except OSError:
                continue
            self.segments.append(Segment(self._end, memory, FreeList(length), set()))
            self._end += length
            return self.take(nbytes)
        raise OSError(errno.ENOMEM, f"no room for {nbytes} bytes more in a memory file")

    def give(self, start: int, nbytes: int) -> None:
        """Give a range back."""
        if not nbytes:
            return
        segment = self.segment_of(start)
        clear(segment.view(start, nbytes))
        segment.gaps.give(start - segment.start, nbytes)
