"""Memory of every rank of a node that all of them have mapped, freed by each rank on its own, in any order.

MPI's shared windows are freed collectively: two ranks that free two of them in different orders deadlock. So the memory
is anonymous files (see `shared_heap`), which vanish with the last process that maps them. Where ranks may not map each
other's files, it is a window after all, which is only *retired* when it is freed: MPI frees it when all of its ranks
have retired it and meet again, to create another one or at the end of the program.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.transport.shared_heap import HeapSegment, anonymous_memory, map_segments

_retired: dict[bytes, tuple[int, MPI.Win]] = {}
"""Windows that this rank has retired, and the number of their ranks, by a key that is equal on these."""

_freeing = Lock()


def free_retired() -> None:
    """Free all retired windows, at the end of the program. Collective over all ranks."""
    for key in sorted(_retired):  # the same order on all ranks, or they would deadlock
        _, window = _retired.pop(key)
        window.Free()


def _free_common(comm: MPI.Intracomm) -> None:
    """Free the windows that all of their ranks have retired, if these are all in `comm`. Collective."""
    with _freeing:  # another thread may offer the others to its ranks
        offered = dict(_retired)
        _retired.clear()
    offers = Counter(key for keys in comm.allgather(sorted(offered)) for key in keys)
    for key, (size, window) in sorted(offered.items()):
        if offers[key] == size:
            window.Free()
        else:
            _retired[key] = size, window


def _mapped(comm: MPI.Intracomm, nbytes: int) -> list[np.ndarray] | None:
    """Map `nbytes` bytes of every rank; None on all ranks if one cannot map another's. Collective."""
    mine, descriptor = None, -1
    with suppress(OSError, ValueError):
        descriptor, memory = anonymous_memory(nbytes)
        mine = HeapSegment(0, np.frombuffer(memory, np.uint8))
    try:
        segments = map_segments(comm, descriptor, mine)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if segments is None or None in segments:
        return None
    segments[comm.Get_rank()] = mine
    return [segment.memory for segment in segments if segment is not None]


class Memories:
    """Memory of every rank of a node, as mapped by this rank. Creation is collective, `free` is not.

    `views` are `nbytes` uninitialised bytes of every rank; `fence` is None on processors that keep stores and loads in
    order.
    """

    def __init__(self, comm: MPI.Intracomm, nbytes: int) -> None:
        views = _mapped(comm, nbytes)
        self._size = comm.Get_size()
        self._key: bytes | None = None
        self._window: MPI.Win | None = None
        ordered = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
        if views is None:
            _free_common(comm)
            self._key = comm.bcast(secrets.token_bytes(16))
            self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=comm)
            memories: list[Any] = [self._window.Shared_query(place)[0] for place in range(self._size)]
            views = [np.frombuffer(memory, np.uint8) for memory in memories]
        elif not ordered:
            self._window = MPI.Win.Allocate_shared(8, 1, comm=MPI.COMM_SELF)  # only for its Sync
        self.views = views
        if self._window is not None:
            self._window.Lock_all(MPI.MODE_NOCHECK)
        self.fence: Callable[[], object] | None = None
        if not ordered and self._window is not None:
            self.fence = self._window.Sync

    def free(self) -> None:
        """Free the memory. Arrays in it remain valid, unless it is a window."""
        self.views = []
        if self._window is None:
            return
        self._window.Unlock_all()
        if self._key is None:
            self._window.Free()
        else:
            _retired[self._key] = self._size, self._window
