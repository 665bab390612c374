"""Memory that all ranks of a node see: arrays of one rank that its neighbours read where they lie.

The memory of every rank comes in segments, each a file without a name (Linux's memfd) that the rank makes and its
neighbours map. A file without a name is gone with the last process that maps it, however that ends. Where there is no
such thing, or ranks may not map each other's, the heap gives ordinary memory: all works, with one more copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.errors import OutOfMemory
from collectives.transport.reduced import reduced

MOST = 1 << 48
"""Bytes that no node has, and that add up to a 64-bit number on any number of ranks."""

LINE = 128
"""Arrays begin at multiples of this many bytes: no two of them share a cache line, or a pair that is fetched as one."""

PAGE = 1 << 21
"""Segments are multiples of a huge page."""

AHEAD = 1 << 28
"""Bytes up to which a new segment may be as large as all before it, so that there are few."""

F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
SEALS = 1 | 2 | 4
"""Linux's F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW: no process can change the length of a segment."""

POPULATE = 23
"""Linux's MADV_POPULATE_WRITE: get all pages now, or say that there are not enough."""


class HeapSegment(NamedTuple):
    """A run of a rank's shared memory as this process sees it: where it begins in its owner's address space, and it."""

    base: int
    memory: np.ndarray

    def view(self, address: int, nbytes: int) -> np.ndarray | None:
        """The bytes that their owner has at this address; None if they are not all in here."""
        start = address - self.base
        return self.memory[start : start + nbytes] if 0 <= start <= self.memory.size - nbytes else None


class _FreeList:
    """Free list of a segment: sorted ranges (start, stop), first fit, adjacent ranges merged."""

    def __init__(self, nbytes: int) -> None:
        self._runs = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """The start of a run of so many bytes, now taken; None if there is none."""
        for index, (start, stop) in enumerate(self._runs):
            if stop - start >= nbytes:
                self._runs[index : index + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """The run is free again."""
        joined: list[tuple[int, int]] = []
        for low, high in sorted([*self._runs, (start, start + nbytes)]):
            if joined and joined[-1][1] == low:
                joined[-1] = (joined[-1][0], high)
            else:
                joined.append((low, high))
        self._runs = joined


def _available() -> int | None:
    """Bytes of memory that the system could still give, or None where it does not say."""
    limits = []
    try:
        with open("/proc/meminfo") as lines:
            limits = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
        group = Path("/sys/fs/cgroup")
        most, used, kinds = (group.joinpath(f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        counts = dict(line.split() for line in kinds.splitlines())
        cached = int(counts["active_file"]) + int(counts["inactive_file"])  # of files, which gives way
        limits.append(int(most) - int(used) + cached)
    except (OSError, ValueError, KeyError):
        return min(limits, default=None)  # no limit for this container, or not a system with such files
    return min(limits)


def _populate(memory: mmap.mmap, descriptor: int, nbytes: int) -> None:
    """Have all pages there, so that none can be missing later.

    Raises
    ------
    OSError
        If there are too few.
    """
    try:
        memory.madvise(POPULATE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: a kernel that does not know it
            raise
        os.posix_fallocate(descriptor, 0, nbytes)


class SharedHeap:
    """The shared memory that arrays of this rank lie in, and its neighbours' as this rank sees it.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks that allocate together.
    neighbours : MPI.Intracomm or None
        Those of them that are on this node; None where nothing is to be shared.
    """

    def __init__(self, comm: MPI.Intracomm, neighbours: MPI.Intracomm | None) -> None:
        self._comm, self._neighbours = comm, neighbours
        self._place = 0 if neighbours is None else neighbours.Get_rank()
        self._mine: list[HeapSegment] = []
        self._gaps: list[_FreeList] = []
        self._seen: list[list[HeapSegment]] = [[] for _ in range(1 if neighbours is None else neighbours.Get_size())]
        self._arrays: dict[tuple[int, int], weakref.ref[np.ndarray]] = {}  # by segment and start in it
        self._back: deque[tuple[int, int, int]] = deque()  # what was given back, at any moment, and is not yet free

    def seen(self, place: int, address: int, nbytes: int) -> np.ndarray | None:
        """Local view of a peer's address, or None outside of mapped memory."""
        for segment in self._seen[place]:
            view = segment.view(address, nbytes)
            if view is not None:
                return view
        return None

    def segments(self, place: int) -> list[HeapSegment]:
        """Mapped segments of a peer, or, for this rank, the segments that peers have mapped."""
        return self._seen[place]

    def shows(self, address: int, nbytes: int) -> bool:
        """True if the peers have this memory of this rank mapped."""
        return self.seen(self._place, address, nbytes) is not None

    def allocate(self, nbytes: int) -> np.ndarray:
        """`nbytes` bytes of this rank, free again when the last array on them is gone. Collective.

        Ranks may ask for different numbers of bytes.

        Raises
        ------
        OutOfMemory
            On all ranks, if one of them cannot have its share.
        """
        room = max(1, -(-nbytes // LINE)) * LINE
        while self._back:
            index, start, length = self._back.popleft()
            self._gaps[index].give(start, length)
        found = self._fit(room)
        if reduced(self._comm, found is None, MPI.LOR):
            try:
                self._grow(room if found is None else 0)
            except OutOfMemory:
                if found is not None:
                    self._gaps[found[0]].give(found[1], room)
                raise
            found = found or self._fit(room)
        assert found is not None
        index, start = found
        array: np.ndarray = np.frombuffer(self._mine[index].memory.data[start : start + nbytes], np.uint8)
        self._arrays[found] = weakref.ref(array, partial(self._gone, index, start, room))
        return array

    def _fit(self, room: int) -> tuple[int, int] | None:
        for index, gaps in enumerate(self._gaps):
            start = gaps.take(room)
            if start is not None:
                return index, start
        return None

    def _gone(self, index: int, start: int, room: int, _: object) -> None:
        if self._arrays.pop((index, start), None) is not None:  # not after `free`
            self._back.append((index, start, room))

    def _grow(self, room: int) -> None:
        """A segment more for every rank that lacks room; a generous one, or else one that is just large enough."""
        lacking = -(-room // PAGE) * PAGE
        generous = max(lacking, min(sum(segment.memory.size for segment in self._mine), AHEAD)) if room else 0
        troubles: list[tuple[int, str | None]] = []
        for nbytes in (generous, lacking):
            descriptor, memory, trouble = -1, None, self._too_much(nbytes)
            if trouble is None and nbytes:
                try:
                    descriptor, memory = _make(nbytes)
                except (OSError, MemoryError, OverflowError, ValueError) as error:
                    trouble = str(error)
            troubles = self._comm.allgather((nbytes, trouble))
            if not any(trouble for _, trouble in troubles):
                self._share(descriptor, memory)
                return
            if descriptor >= 0:
                os.close(descriptor)
        rank, nbytes, trouble = next((rank, *told) for rank, told in enumerate(troubles) if told[1])
        raise OutOfMemory(MPI.ERR_NO_MEM, f"rank {rank} cannot have {nbytes} bytes of shared memory: {trouble}")

    def _too_much(self, nbytes: int) -> str | None:
        """Error message if the requested bytes of all ranks exceed the limits, else None."""
        together = nbytes if self._neighbours is None else reduced(self._neighbours, min(nbytes, MOST))
        available = _available()
        if available is None or together <= available or not nbytes:
            return None
        return f"its node has {available} bytes left, and {together} are asked for"

    def _share(self, descriptor: int, memory: mmap.mmap | None) -> None:
        """Take the memory as a segment, let the neighbours map it, and map theirs: all of them, or nobody's."""
        token, mine = secrets.token_bytes(16), None
        if memory is not None:
            whole: np.ndarray = np.frombuffer(memory, np.uint8)
            mine = HeapSegment(MPI.Get_address(whole), whole)
            self._mine.append(mine)
            self._gaps.append(_FreeList(whole.size))
            whole[:16] = np.frombuffer(token, np.uint8)
        if self._neighbours is not None:
            base, nbytes = (0, 0) if mine is None else (mine.base, mine.memory.size)
            told = self._neighbours.allgather((os.getpid(), descriptor, base, nbytes, token))
            theirs = [segment(*one) if one[3] else None for one in told]
            able = all(one is not None or not nbytes for one, (*_, nbytes, _) in zip(theirs, told, strict=True))
            if reduced(self._neighbours, able, MPI.LAND):
                for seen, other in zip(self._seen, theirs, strict=True):
                    seen.extend([] if other is None else [other])
        if descriptor >= 0:
            os.close(descriptor)

    def free(self) -> None:
        """Give the memory back; what arrays still lie in stays until they are gone. Not collective."""
        self._gaps, self._mine = [], []
        self._seen = [[] for _ in self._seen]
        self._arrays.clear()
        self._back.clear()


def _make(nbytes: int) -> tuple[int, mmap.mmap]:
    """New memory that others can map by the descriptor, all of it there; -1 where there is no such thing."""
    descriptor, memory = fileless(nbytes)
    try:
        if descriptor >= 0:
            _populate(memory, descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def fileless(nbytes: int) -> tuple[int, mmap.mmap]:
    """New memory that others can map by the descriptor; -1 where there is no such thing."""
    if not hasattr(os, "memfd_create"):
        return -1, mmap.mmap(-1, nbytes)
    descriptor = os.memfd_create("chorus", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)  # neighbours open it by /proc, which asks for the file's mode
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, F_ADD_SEALS, SEALS)  # a rank that reads what was cut off would be killed by SIGBUS
        memory = mmap.mmap(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def segment(pid: int, number: int, base: int, nbytes: int, token: bytes) -> HeapSegment | None:
    """Another process's segment, known by the token at its beginning; None if it may not be had."""
    mapped = _map(pid, number, nbytes) if number >= 0 else None
    return None if mapped is None or mapped[:16].tobytes() != token else HeapSegment(base, mapped)


def _map(pid: int, number: int, nbytes: int) -> np.ndarray | None:
    """The memory behind another process's descriptor; None if it may not be had."""
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
