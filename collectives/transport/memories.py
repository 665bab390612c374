"""Memory of every rank of a node that all of them see, given back by each rank on its own, in any order.

MPI's shared windows are freed by all ranks together: two ranks that free two of them in different orders wait for each
other for ever. So the memory is files without names (see `heap`), which are gone with the last process that maps them.
Where ranks may not map each other's, it is a window after all, which is *buried* when it is given back: it is freed
when all of its ranks have buried it and meet again, to make another or at the end of the program.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.transport.shared_heap import fileless, segment

_buried: dict[bytes, tuple[int, MPI.Win]] = {}
"""Windows that this rank has given back, and the number of their ranks, by a key that these have in common."""

_digging = Lock()


def free_buried() -> None:
    """Free all windows that were given back, at the end of the program, when all other ranks do so too."""
    for key in sorted(_buried):  # the same order on all ranks, so that none waits for one that waits for it
        _, window = _buried.pop(key)
        window.Free()


def _free_common(comm: MPI.Intracomm) -> None:
    """Free the windows that all of their ranks have given back, if these are all in `comm`. Collective."""
    with _digging:  # what another thread offers to other ranks is not to be had
        offered = dict(_buried)
        _buried.clear()
    offers = Counter(key for keys in comm.allgather(sorted(offered)) for key in keys)
    for key, (size, window) in sorted(offered.items()):
        if offers[key] == size:
            window.Free()
        else:
            _buried[key] = size, window


def _mapped(comm: MPI.Intracomm, nbytes: int) -> list[np.ndarray] | None:
    """`nbytes` bytes of every rank, as each sees them; None on all if one cannot map another's. Collective."""
    token = secrets.token_bytes(16)
    try:
        descriptor, memory = fileless(nbytes)
    except (OSError, ValueError):
        descriptor, mine = -1, np.empty(0, np.uint8)
    else:
        mine = np.frombuffer(memory, np.uint8)
        mine[:16] = np.frombuffer(token, np.uint8)
    try:
        told = comm.allgather((os.getpid(), descriptor, nbytes, token))
        seen = [segment(pid, number, 0, length, token) for pid, number, length, token in told]
        # Not comm.allreduce: mpi4py's reduction of objects duplicates the communicator, collectively and lazily.
        able = all(comm.allgather(descriptor >= 0 and None not in seen))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if not able:
        return None
    place = comm.Get_rank()
    return [mine if other == place else one.memory for other, one in enumerate(seen) if one is not None]


class Memories:
    """Memory of every rank of a node, as this rank sees it. Making it is collective, `free` is not.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks of the node.
    nbytes : int
        Bytes of every rank's memory, the same on all.

    Attributes
    ----------
    views : list of numpy.ndarray
        The bytes of every rank, with whatever values.
    fence : callable or None
        What keeps loads and stores before it from being done after it, where the processor does not keep their order.
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
            self._window = MPI.Win.Allocate_shared(8, 1, comm=MPI.COMM_SELF)  # only to have its Sync
        self.views = views
        if self._window is not None:
            self._window.Lock_all(MPI.MODE_NOCHECK)
        self.fence: Callable[[], object] | None = None
        if not ordered and self._window is not None:
            self.fence = self._window.Sync

    def free(self) -> None:
        """Give the memory back. What arrays still lie in it stay until they are gone, unless it is a window's."""
        self.views = []
        if self._window is None:
            return
        self._window.Unlock_all()
        if self._key is None:
            self._window.Free()
        else:
            _buried[self._key] = self._size, self._window
