"""Memory fence for Python code that shares memory with other processes."""

from __future__ import annotations

import atexit
import platform
from collections.abc import Callable
from functools import cache

from mpi4py import MPI


def is_ordered() -> bool:
    """True on processors that keep stores in order and loads in order, so that flags need no fence (x86)."""
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


@cache
def memory_fence() -> Callable[[], object]:
    """Function that orders loads and stores before and after it: nothing, or the MPI's synchronization of a window."""
    if is_ordered():
        return lambda: None
    window = MPI.Win.Allocate_shared(8, 1, comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)

    def free() -> None:
        if not MPI.Is_finalized():
            window.Unlock_all()
            window.Free()

    atexit.register(free)
    return window.Sync
