"""Memory that the ranks of a node share, made once and used by all communicators of them.

Every rank has one memory file that the others map. A communicator has a range in the file of each of its ranks. A
rank allocates its own, and they exchange the offsets in one allgather. Ranks then map the segments that they have not
mapped, and all agree whether that worked.

A rank writes into the ranges of others (offers of `mailbox.c`), and reads them after their owners have freed the
communicator. So its last access to a range is to mark its departure in it. The owner allocates the range again when
all ranks of the communicator have departed.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.engine.cross_memory import CrossMemoryAttach, permitted
from collectives.transport.memory.copy_speed import SCRATCH, MessageSpeed, copies_past_caches, measure
from collectives.transport.memory.memory_file import UNIT, MemoryFile, map_file, open_file
from collectives.transport.memory.memory_limits import available_addresses, longest_file
from collectives.transport.mpi.reduced import gathered, gathered_rows, reduced

FILE = 1 << 34
"""Bytes of a memory file: addresses, not memory."""

SHARE = 64
"""A communicator gets at most the inverse of this of the addresses that are left, as long as its flags fit."""

SMALLEST = 12
"""Halvings of the bounce buffers at most."""

PAGE = mmap.PAGESIZE

TOKEN = 16
"""Bytes at the start of a file that identify it."""

open_nodes: weakref.WeakValueDictionary[bytes, SharedNode] = weakref.WeakValueDictionary()
"""Nodes that this process has made and uses, by name."""


class NodeRange(NamedTuple):
    """Range of bytes in the file of every rank of a communicator.

    Attributes
    ----------
    views : bytes of the ranges, by rank on the node
    start, nbytes : place in this rank's file
    halvings : how often bounce buffers were halved to make it so short. Equal on all ranks of the communicator
    """

    views: list[np.ndarray]
    start: int
    nbytes: int
    halvings: int


class _Retired(NamedTuple):
    """Ranges of a freed communicator, and the marks of the ranks that have departed from them."""

    departures: np.ndarray
    ranges: list[NodeRange]


class SharedNode:
    """Memory files of the ranks of `comm`, all on one machine. Collective. OSError on all if one cannot map another's.

    Lists are indexed by rank in `comm`. `comm` is not kept.

    Attributes
    ----------
    name : random bytes, equal on all ranks
    place, size : rank in `comm`, and its size
    readers : access to the memory of the ranks' processes
    reads, writes : all ranks may read, and write, each other's memory
    speed : of messages, as measured by this rank. Zeros if `measures` is False
    far, any_far : copies into shared memory take this rank, or any rank, long
    past_caches : all ranks copy by non-temporal stores
    """

    def __init__(self, comm: MPI.Intracomm, measures: bool) -> None:
        self.place, self.size = comm.Get_rank(), comm.Get_size()
        self._lock = threading.RLock()  # a signal handler may close a communicator
        self._retired: list[_Retired] = []
        self._mapped: list[dict[int, np.ndarray]] = [{} for _ in range(self.size)]
        self._file, scratch = self._connect(comm)
        pids = comm.allgather(os.getpid())
        self._pids, self.readers = pids, [CrossMemoryAttach(pid) for pid in pids]
        self.reads, self.writes = self._reads_and_writes(comm)
        self.far, self.speed = False, MessageSpeed()
        if self.size > 1 and measures:
            self.far, self.speed = measure(comm, scratch, self.readers if self.reads else None)
        self.any_far = bool(reduced(comm, self.far, MPI.LOR))
        self.past_caches = bool(reduced(comm, copies_past_caches(), MPI.LAND))
        self.name: bytes = comm.bcast(os.urandom(TOKEN))
        self._file.give(UNIT, SCRATCH)
        open_nodes[self.name] = self

    # -------------------------------------------------------------------------------- creation

    def _connect(self, comm: MPI.Intracomm) -> tuple[MemoryFile, list[np.ndarray]]:
        """Create this rank's file, and map the first segment of all. Return it, and bytes in each. Collective."""
        file, descriptor, token = None, -1, os.urandom(TOKEN)
        try:
            longest = longest_file()
            file = MemoryFile(FILE if longest is None else min(FILE, longest // UNIT * UNIT))
            file.take(UNIT + SCRATCH)  # the first segment
            self._mapped[self.place][0] = file.segments[0].memory
            file.segments[0].memory[:TOKEN] = np.frombuffer(token, np.uint8)
            descriptor = file.descriptor
        except (OSError, AttributeError, MemoryError):
            file = None
        found = True
        for place, (pid, number, expected) in enumerate(comm.allgather((os.getpid(), descriptor, token))):
            try:
                self._map(place, pid, number, 0, UNIT + SCRATCH)
                found &= self._mapped[place][0][:TOKEN].tobytes() == expected
            except OSError:
                found = False
        if not reduced(comm, found and file is not None, MPI.LAND) or file is None:
            raise OSError(errno.EPERM, "the ranks of a node may not map each other's memory")
        file.segments[0].users.update(range(self.size))
        return file, [maps[0][UNIT : UNIT + SCRATCH] for maps in self._mapped]

    def _reads_and_writes(self, comm: MPI.Intracomm) -> tuple[bool, bool]:
        """If all ranks may read, and may write, each other's memory (cross-memory attach). Collective."""
        mine, found = np.array([self.place + 1, 0], np.int64), np.zeros(1, np.int64)
        addresses = gathered(comm, MPI.Get_address(mine))
        peer, here = (self.place + 1) % self.size, MPI.Get_address(found)
        reads = permitted(self.readers[peer].read, here, addresses[peer], 8) and found[0] == peer + 1
        writes = permitted(self.readers[peer].write, here, addresses[peer] + 8, 8)
        both = reduced(comm, reads | (reads and writes) << 1, MPI.BAND)
        intact = reduced(comm, int(mine[1]) == self.place + 1, MPI.LAND)  # what the neighbour read and wrote back
        return bool(both & 1), bool(both & 2 and intact)

    def _map(self, place: int, pid: int, number: int, start: int, nbytes: int) -> None:
        """Map a segment of a rank's file, unless it is mapped. OSError if that fails."""
        if start in self._mapped[place]:
            return
        descriptor = open_file(pid, number)
        try:
            self._mapped[place][start] = map_file(descriptor, start, nbytes)
        finally:
            os.close(descriptor)

    # -------------------------------------------------------------------------------- ranges

    def allocate(
        self,
        comm: MPI.Intracomm,
        places: Mapping[int, int],
        length: Callable[[int], int],
        halvings: int | None = None,
        traits: int = 0,
    ) -> tuple[NodeRange | None, list[int]]:
        """Allocate a zeroed range in the files of ranks of `comm`, and gather the bits of `traits` of all. Collective.

        `places` has the places of the ranks on this node, by rank in `comm`. `length` gives the bytes of a range by
        number of halvings. If `halvings` is not given, the free addresses decide. The range is None on all
        ranks of `comm`, of all nodes, if one of them cannot allocate or map.
        """
        row, mine = [-1, 0, 0, 0, 0, traits], comm.Get_rank()
        with self._lock:
            chosen = self._halvings(length) if halvings is None else halvings
            try:
                start = self._take(_pages(length(chosen)))
                segment = self._file.segment_of(start)
                self._mapped[self.place][segment.start] = segment.memory
                is_known = segment.users | {self.place} >= set(places.values())
                row[:5] = start, chosen, segment.start, segment.memory.nbytes << 1 | is_known, self._file.descriptor
            except OSError:
                pass
        # exchanged even after an error: the other ranks wait in this call
        rows = gathered_rows(comm, row)
        common = max(rows[rank][1] for rank in places)
        nbytes, found = _pages(length(common)), all(one[0] >= 0 for one in rows)
        if found and not all(one[3] & 1 for one in rows):
            found = bool(reduced(comm, self._map_missing(places, rows), MPI.LAND))
        start = row[0]
        with self._lock:
            if start >= 0:
                excess = nbytes if found else 0
                self._file.give(start + excess, _pages(length(row[1])) - excess)
            if found:
                self._file.segment_of(start).users.update(places.values())
        traits_of_all = [one[5] for one in rows]
        if not found:
            return None, traits_of_all
        views = [self._mapped[place][rows[rank][2]][rows[rank][0] - rows[rank][2] :] for rank, place in places.items()]
        return NodeRange([view[:nbytes] for view in views], rows[mine][0], nbytes, common), traits_of_all

    def _halvings(self, length: Callable[[int], int]) -> int:
        """Number of halvings by which a range is a small part of the addresses that are left."""
        left = available_addresses()
        room = min(self._file.unmapped, FILE if left is None else left // self.size) // SHARE
        return next((number for number in range(SMALLEST) if length(number) <= room), SMALLEST)

    def _take(self, nbytes: int) -> int:
        """Allocate a range in this rank's file. OSError without room."""
        left_by_all = [bool(one.departures.all()) for one in self._retired]
        for each in (each for one, is_free in zip(self._retired, left_by_all) if is_free for each in one.ranges):
            self._file.give(each.start, each.nbytes)
        self._retired = [one for one, is_free in zip(self._retired, left_by_all) if not is_free]
        left = available_addresses()
        return self._file.take(nbytes, FILE if left is None else left // self.size // (SHARE // 4))

    def _map_missing(self, places: Mapping[int, int], rows: Sequence[Sequence[int]]) -> bool:
        """Map the segments of the ranges that were exchanged. False if that fails."""
        with self._lock:
            try:
                for rank, place in places.items():
                    _, _, start, nbytes, number, _ = rows[rank]
                    self._map(place, self._pids[place], number, start, nbytes >> 1)
            except OSError:
                return False
        return True

    def retire(self, departures: np.ndarray, ranges: Iterable[NodeRange]) -> None:
        """Give ranges back once `departures`, in one of them, has no zeros."""
        with self._lock:
            self._retired.append(_Retired(departures, list(ranges)))


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
