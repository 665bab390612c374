"""A short call as one compiled call: a message out, one in, and a copy, where numba is installed (the extra ``fast``).

On the mailboxes it does just what Python does there, so a rank that runs this and one that does not understand each
other. Flags are loaded with acquire and stored with release, which every processor understands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np

NO, DONE, LATE, ELSEWHERE, UNTAKEN = range(5)
"""What a compiled swap says: it has done nothing at all; it is done; it has sent, but nothing has come so far; what has
come lies where only Python finds it; all has come, but the peer still reads what was sent."""

SEEN = 1 << 13
"""Bytes from which a message out of memory that the receiver sees is told by its address: it need not be copied."""

SEND_BYTES, RECV_BYTES, OUT, OUT_COUNT, INTO, INTO_COUNT, MINE, OPERATION, MINE_FIRST, FROM, TO, COPIED, ONE = range(13)
OUT_LABEL, INTO_LABEL, TOLD_LABEL = range(13, 16)
"""What a compiled swap does, as numbers, by place: the bytes of its two arrays; what it sends, out of sendbuf, and
where what comes goes, in recvbuf (first element and count; a count of 0 for none); the first element of sendbuf that is
combined with it, with which operation, and whether one's own stands on the left; what is copied from sendbuf to
recvbuf; whether the two are one array; and the labels of its messages."""

OPERATIONS = (None, np.add, np.multiply, np.maximum, np.minimum)
"""What joins the message that comes with sendbuf, by number; None where it just arrives."""

DTYPES = frozenset(np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint8"))
"""Of 1-D arrays; whatever else is done in Python."""


@cache
def available() -> bool:
    """True if numba is installed."""
    return find_spec("numba") is not None


@cache
def swap(dtype: np.dtype) -> tuple[Callable[..., int], Callable[..., int]]:
    """(begin, end) for 1-D arrays of the dtype.

    ``begin(sendbuf, recvbuf, numbers, plan)`` does it all, or up to where it would have to wait, as its result says;
    ``end`` with the same arguments goes on when the message has come. `numbers` are those of the edge, `plan`
    says what to do. Other arrays than contiguous and writeable ones of this dtype raise TypeError.
    """
    from collectives.transport import exchange_kernels  # needs numba, which takes a while to load

    return exchange_kernels.compiled(dtype)
