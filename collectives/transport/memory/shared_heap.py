"""Shared-memory arrays: memory of one rank that the other ranks of its node read directly.

Every rank's memory consists of segments: anonymous files (Linux's memfd) that it creates and its neighbours map. An
anonymous file vanishes with the last process that maps it, however that ends. Where these are not available, or ranks
may not map each other's, the heap returns ordinary memory: everything works, with one more copy.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.instructions import LINE
from collectives.errors import OutOfMemory
from collectives.transport.memory.memory_file import REFUSALS, FreeList, create_file, map_file, open_file
from collectives.transport.memory.memory_limits import available_memory
from collectives.transport.mpi.reduced import gathered, reduced

MOST = 1 << 48
"""More bytes than any node has. Sums over ranks fit in 64 bits."""

PAGE, OWN_PAGE = 1 << 21, 1 << 16
"""Segments are multiples of a huge page. Longer ones that no other rank maps are multiples of 64 KiB."""

AHEAD = 1 << 28
"""Most bytes of a new segment in advance: it doubles the heap up to this, to keep the number of segments small."""

POPULATE = 23
"""Linux's MADV_POPULATE_WRITE: allocate all pages now, or fail."""


class HeapSegment(NamedTuple):
    """Mapped segment of a shared heap: its address in the owner's process, and its bytes in this process."""

    base: int
    memory: np.ndarray

    def view(self, address: int, nbytes: int) -> np.ndarray | None:
        """Local view of `nbytes` bytes at the owner's `address`. None if they are not all in the segment."""
        start = address - self.base
        return self.memory[start : start + nbytes] if 0 <= start <= self.memory.size - nbytes else None


def _populate(memory: mmap.mmap, descriptor: int, nbytes: int) -> None:
    """Allocate all pages, so that no later access can fail. OSError if there are too few."""
    try:
        memory.madvise(POPULATE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: not supported by this kernel
            raise
        os.posix_fallocate(descriptor, 0, nbytes)


class SharedHeap:
    """Heap of one rank in shared memory, and the heaps of the node's other ranks mapped in this process.

    All ranks of `comm` allocate together. `neighbours` are the ranks of this node, none to share nothing.
    """

    def __init__(self, comm: MPI.Intracomm, neighbours: Sequence[int] = ()) -> None:
        self._comm, self._neighbours = comm, neighbours
        self._place = neighbours.index(comm.Get_rank()) if neighbours else 0
        self._mine: list[HeapSegment] = []
        self._gaps: list[FreeList] = []
        self._mapped: list[list[HeapSegment]] = [[] for _ in neighbours or [0]]
        self._arrays: dict[tuple[int, int], weakref.ref[np.ndarray]] = {}  # by segment and start in it
        self._returned: deque[tuple[int, int, int]] = deque()  # ranges of collected arrays, not yet in a free list

    def peer_view(self, place: int, address: int, nbytes: int) -> np.ndarray | None:
        """Local view of `nbytes` bytes at `address` of the peer with node rank `place`. None if not mapped."""
        for segment in self._mapped[place]:
            view = segment.view(address, nbytes)
            if view is not None:
                return view
        return None

    def segments(self, place: int) -> list[HeapSegment]:
        """Mapped segments of the peer with node rank `place`.

        For this rank, the segments that its peers have mapped.
        """
        return self._mapped[place]

    def add(self, place: int, segment: HeapSegment) -> None:
        """Add a segment, mapped already, of the rank with node rank `place`. `allocate` takes no arrays from it."""
        self._mapped[place].append(segment)

    def is_shared(self, address: int, nbytes: int) -> bool:
        """True if the peers have this memory of this rank mapped."""
        return any(segment.view(address, nbytes) is not None for segment in self._mapped[self._place])

    def allocate(self, nbytes: int) -> np.ndarray:
        """Allocate `nbytes` uninitialised bytes, shared if possible, freed with the last array on them. Collective.

        `nbytes` may differ between ranks. Raises `OutOfMemory` on all of them if one cannot allocate its share.
        """
        room = max(1, -(-nbytes // LINE)) * LINE
        while self._returned:
            index, start, length = self._returned.popleft()
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
        self._arrays[found] = weakref.ref(array, partial(self._release, index, start, room))
        return array

    def _fit(self, room: int) -> tuple[int, int] | None:
        for index, gaps in enumerate(self._gaps):
            start = gaps.take(room)
            if start is not None:
                return index, start
        return None

    def _release(self, index: int, start: int, room: int, _: object) -> None:
        if self._arrays.pop((index, start), None) is not None:  # not after `free`
            self._returned.append((index, start, room))

    def _grow(self, room: int) -> None:
        """Add a segment of at least `room` bytes (none if 0). Collective. `OutOfMemory` on all ranks if one cannot."""
        unit = PAGE if len(self._mapped) > 1 or room < PAGE else OWN_PAGE
        lacking = -(-room // unit) * unit
        generous = max(lacking, min(sum(segment.memory.size for segment in self._mine), AHEAD)) if room else 0
        outcomes: list[tuple[int, str | None]] = []
        # memory may suffice for the request but not for the segment in advance
        for nbytes in (generous, lacking):
            descriptor, memory, error = -1, None, self._over_limit(nbytes)
            if error is None and nbytes:
                try:
                    descriptor, memory = _make(nbytes)
                except (OSError, MemoryError, OverflowError, ValueError) as reason:
                    error = str(reason) or type(reason).__name__
            outcomes = self._comm.allgather((nbytes, error))
            if not any(error for _, error in outcomes):
                self._share(descriptor, memory)
                return
            if descriptor >= 0:
                os.close(descriptor)
        rank, nbytes, error = next((rank, *outcome) for rank, outcome in enumerate(outcomes) if outcome[1])
        raise OutOfMemory(MPI.ERR_NO_MEM, f"rank {rank} cannot have {nbytes} bytes of shared memory: {error}")

    def _over_limit(self, nbytes: int) -> str | None:
        """Error message if the bytes of all ranks of the node exceed the available memory, else None. Collective."""
        requests = gathered(self._comm, min(nbytes, MOST))
        total = sum(requests[rank] for rank in self._neighbours) if self._neighbours else nbytes
        available = available_memory()
        if available is None or total <= available or not nbytes:
            return None
        return f"its node has {available} bytes left, and {total} are requested"

    def _share(self, descriptor: int, memory: mmap.mmap | None) -> None:
        """Add new memory as a segment, and map the new segments of all ranks of the node, or none. Collective."""
        mine = None
        if memory is not None:
            whole: np.ndarray = np.frombuffer(memory, np.uint8)
            mine = HeapSegment(MPI.Get_address(whole), whole)
            self._mine.append(mine)
            self._gaps.append(FreeList(whole.size))
        theirs = map_segments(self._comm, self._neighbours, descriptor, mine) if self._neighbours else None
        for mapped, other in zip(self._mapped, theirs or ()):
            mapped.extend([] if other is None else [other])
        if descriptor >= 0:
            os.close(descriptor)

    def free(self) -> None:
        """Free the memory. Arrays in it remain valid. Not collective."""
        self._gaps, self._mine = [], []
        self._mapped = [[] for _ in self._mapped]
        self._arrays.clear()
        self._returned.clear()


def _make(nbytes: int) -> tuple[int, mmap.mmap]:
    """Create memory as `anonymous_memory` does, and allocate all its pages. OSError if there are too few."""
    descriptor, memory = anonymous_memory(nbytes)
    try:
        if descriptor >= 0:
            _populate(memory, descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def anonymous_memory(nbytes: int) -> tuple[int, mmap.mmap]:
    """Create memory that other processes can map: (file descriptor, memory). (-1, private memory) if not supported."""
    try:
        descriptor = create_file(nbytes)
    except AttributeError:
        return -1, mmap.mmap(-1, nbytes)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return -1, mmap.mmap(-1, nbytes)
    try:
        memory = mmap.mmap(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, memory


def map_segments(
    comm: MPI.Intracomm, ranks: Sequence[int], descriptor: int, mine: HeapSegment | None
) -> list[HeapSegment | None] | None:
    """Map the segments of all `ranks` that have one. None on all of them if one cannot map another's. `ranks`

    are the ranks of a node in `comm`. Collective over `comm`. Overwrites the first 16 bytes of each segment with a
    token that identifies it.
    """
    token = os.urandom(16)
    base, nbytes = (0, 0) if mine is None else (mine.base, mine.memory.size)
    if mine is not None:
        mine.memory[:16] = np.frombuffer(token, np.uint8)  # identifies the segment to its readers
    everyone = comm.allgather((os.getpid(), descriptor, base, nbytes, token))
    offers = [everyone[rank] for rank in ranks]
    segments = [_segment(*offer) for offer in offers]
    able = all(segment is not None or not offer[3] for segment, offer in zip(segments, offers, strict=True))
    abilities = gathered(comm, able)
    return segments if all(abilities[rank] for rank in ranks) else None


def map_all(comm: MPI.Intracomm, ranks: Sequence[int], nbytes: int) -> list[np.ndarray]:
    """Create `nbytes` bytes on every rank of a node, and map the memory of all. Empty list if one of `ranks` cannot.

    `ranks` are the ranks of the node in `comm`. Collective over `comm`. Zero except for the first 16 bytes. Unlike
    shared windows of MPI, the memory is freed by each rank on its own, in any order.
    """
    mine, descriptor = None, -1
    if nbytes:
        with suppress(OSError, ValueError):
            descriptor, memory = anonymous_memory(nbytes)
            mine = HeapSegment(0, np.frombuffer(memory, np.uint8))
    segments = map_segments(comm, ranks, descriptor, mine) or []
    if descriptor >= 0:
        os.close(descriptor)
    views = [segment.memory for segment in segments if segment is not None]
    return views if len(views) == len(ranks) else []


def _segment(pid: int, descriptor: int, base: int, nbytes: int, token: bytes) -> HeapSegment | None:
    mapped = _map(pid, descriptor, nbytes) if descriptor >= 0 and nbytes else None
    return None if mapped is None or mapped[:16].tobytes() != token else HeapSegment(base, mapped)


def _map(pid: int, number: int, nbytes: int) -> np.ndarray | None:
    """Map the memory behind file descriptor `number` of process `pid`. None if that fails."""
    try:
        descriptor = open_file(pid, number)
    except OSError:
        return None
    try:
        return map_file(descriptor, 0, nbytes)
    except OSError:
        return None
    finally:
        os.close(descriptor)
