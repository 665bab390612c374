"""Exceptions that are both MPI.Exception and the matching Python exception.

They can be caught as ``MPI.Exception``, which has an error class, and as ``ValueError`` or ``TypeError``; also as the
``BufferError`` and ``KeyError`` that mpi4py raises for unusable memory and unknown datatypes.

>>> from mpi4py import MPI
>>> try:
...     raise InvalidArgument(MPI.ERR_ROOT, "root: expected 0 <= root < 4, found 7")
... except ValueError as error:
...     print(error, error.Get_error_class() == MPI.ERR_ROOT)
root: expected 0 <= root < 4, found 7 True
"""

from mpi4py import MPI


class InvalidInput(MPI.Exception):
    """Base of Chorus's errors for invalid calls: an MPI error class and a message.

    `error_class` is an MPI error class such as ``MPI.ERR_ROOT``; `message` names the argument, and what was expected
    and found.
    """

    def __init__(self, error_class: int, message: str) -> None:
        super().__init__(error_class)
        self.args = (error_class, message)  # int(self) reads the first, pickling passes both back in

    def __str__(self) -> str:
        return str(self.args[1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.args[1]!r})"


class InvalidArgument(InvalidInput, ValueError):
    """Argument of an invalid value: a root, a count, a displacement, an operation, a freed request."""


class InvalidType(InvalidInput, TypeError):
    """Argument of an invalid type: no buffer, no number, no datatype, no operation."""


class InvalidBuffer(InvalidArgument, BufferError):
    """Buffer in unusable memory: not contiguous, read-only, or too small."""


class OutOfRange(InvalidArgument, OverflowError):
    """Number too large for MPI: a root of more than 32 bits, a count or displacement of more than 64."""


class UnknownDatatype(InvalidType, KeyError, BufferError):
    """Unsupported elements: an unknown typecode, an object dtype, foreign byte order, or structs unlike MPI's pairs."""

    __str__ = InvalidInput.__str__  # KeyError would quote it


class InvalidDatatype(InvalidType, ValueError):
    """Invalid datatype: null, or different from the other buffer's. A ValueError too, as in mpi4py."""


class NotCopied(InvalidType, ValueError):
    """Attempt to copy or pickle a `Communicator`. A ValueError too, as in mpi4py."""


class OutOfMemory(InvalidInput, MemoryError):
    """Allocation that failed on one rank or more: raised on all ranks, with nothing allocated on any."""


class Mismatch(InvalidInput, ValueError):
    """Message of an unexpected size or call: ranks call different collectives, or one with different arguments.

    The rank that receives the message raises it, in the middle of its call; other ranks may not notice.
    """


def mismatch(rank: int, peer: int, expected: int | None, found: int) -> Mismatch:
    """`Mismatch` error of `rank` for a message of `found` bytes from `peer`, not of `expected` bytes (None: none)."""
    message = "no message" if expected is None else f"a message of {expected} bytes"
    what = f"{found} bytes" if found != expected else f"the {found} bytes of another call"
    return Mismatch(
        MPI.ERR_TRUNCATE,
        f"rank {rank} expected {message} from rank {peer}, found {what}: the two ranks call "
        f"different collectives, or count, dtype, operation, root or algorithm differ; "
        f"Communicator(..., debug=True) or CHORUS_DEBUG=1 names both calls",
    )


class RanksDisagree(InvalidInput, RuntimeError):
    """Call or request refused after an abort (by Ctrl-C, or an operation that raised): messages may still arrive."""


class Timeout(InvalidInput, TimeoutError):
    """Wait for other ranks that took longer than its `timeout`; the message names what was waited for."""


class PeerLeft(InvalidInput, ConnectionError):
    """Wait for a rank that has left the program: by an exception, `sys.exit` or its end, and will make no call."""


class PeerFailed(InvalidInput, ConnectionResetError):
    """Wait for a rank whose process has died. A ConnectionResetError, as of a socket."""


WAIT_ERRORS = (Timeout, PeerLeft, PeerFailed)
"""Errors of waits that other ranks would end in vain."""
