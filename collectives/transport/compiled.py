"""A short message for a message as one compiled call, where numba is installed (the extra ``fast``).

It does what `swap.Swap` does in Python, word for word on the same mailboxes, so that a rank that runs this and one that
does not understand each other. Flags are loaded with acquire and stored with release, which every processor
understands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np

DONE, LATE, NO = 0, 1, 2
"""What a compiled swap says: it is done; it has sent, but nothing has come so far; it has done nothing at all."""

SENDS, RECEIVES, MINE_FIRST = 1, 2, 4
"""What it does, added up: send all of sendbuf; receive into all of recvbuf; one's own term stands on the left."""

OPERATIONS = (None, np.add, np.multiply, np.maximum, np.minimum)
"""What joins the message that comes with sendbuf, by number; None where it just arrives."""

DTYPES = frozenset(np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint8"))
"""Of 1-D arrays; whatever else is done in Python."""


def describe(does: int, operation: int, nbytes: int) -> int:
    """The three in one number, which is passed on faster."""
    return does | operation << 3 | nbytes << 8


@cache
def available() -> bool:
    """Whether there is numba."""
    return find_spec("numba") is not None


@cache
def swap(dtype: np.dtype) -> tuple[Callable[..., int], Callable[..., int]]:
    """(begin, end) for 1-D arrays of the dtype.

    ``begin(sendbuf, recvbuf, numbers, how)`` does it all, or up to where it would have to wait, as its result says;
    ``end`` with the same arguments goes on when the message has come. `numbers` are those of the edge, `how` comes
    from `describe`. Other arrays than contiguous and writeable ones of this dtype raise TypeError.
    """
    from collectives.transport import kernels  # needs numba, which takes a while to load

    return kernels.compiled(dtype)
