"""Exchange (one message out, one in, and a copy) as one compiled call; needs numba (the extra ``fast``).

It follows the mailbox protocol of the Python code exactly, so ranks with and without numba work together. Flags are
loaded with acquire and stored with release, on every processor.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import numpy as np

NO, DONE, LATE, ELSEWHERE, UNTAKEN = range(5)
"""Results of a compiled exchange: nothing was done; complete; sent, but no message has arrived yet; the incoming
message is not in the expected place, and Python code must receive it; received, but the peer is still reading ours."""

RENDEZVOUS_BYTES = 1 << 13
"""Bytes from which a message in shared memory is sent by its address, without a copy into the mailbox."""

SEND_BYTES, RECV_BYTES, OUT, OUT_COUNT, INTO, INTO_COUNT, MINE, OPERATION, MINE_FIRST, FROM, TO, COPIED, ONE = range(13)
OUT_LABEL, INTO_LABEL, ADDRESS_LABEL = range(13, 16)
"""Places in a plan, which describes a compiled exchange by numbers: the bytes of both arrays; first element and count
of the message out of sendbuf and of the message into recvbuf (count 0 for none); first element of sendbuf that is
reduced with it, the operation, and whether it is the left operand; the range of sendbuf that is copied to recvbuf;
whether both are one array; and the labels of the messages: out, in, and in by its address."""

OPERATIONS = (None, np.add, np.multiply, np.maximum, np.minimum)
"""Reduction of the incoming message with sendbuf, by number; None if it is copied."""

DTYPES = frozenset(np.dtype(name) for name in ("float32", "float64", "int32", "int64", "uint8"))
"""Dtypes of the 1-D arrays that are supported."""


@cache
def available() -> bool:
    """True if numba is installed."""
    return find_spec("numba") is not None


@cache
def swap(dtype: np.dtype) -> tuple[Callable[..., int], Callable[..., int]]:
    """Compile (begin, end) for 1-D arrays of `dtype`: `begin` runs an exchange until it would wait, `end` receives.

    ``begin(sendbuf, recvbuf, numbers, plan)`` runs the exchange, up to the point where it would have to wait; `end`
    with the same arguments receives a message that has arrived. Both return one of the results above. `numbers` are
    those of the edge. Arrays that are not contiguous, writeable and of this dtype raise TypeError.
    """
    from collectives.transport import exchange_kernels  # needs numba, which takes a while to load

    return exchange_kernels.compiled(dtype)
