"""Reuse of freed memory by the C library's allocator."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of glibc's malloc.h
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, for the whole process; True if supported (glibc's mallopt(3)).

    Otherwise large arrays are mapped anew each time, at the cost of a fault per page: a product of 1024 x 256 and 256 x
    1024 elements takes a quarter longer. A training step allocates the same arrays repeatedly, so the peak of a step is
    kept. For programs, once before training.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(what, _LARGE) == 1 for what in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
