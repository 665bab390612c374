"""What a user did wrong, as an exception that is both MPI's and Python's.

Code written for mpi4py catches ``MPI.Exception`` and asks for the error class; code written for Python
catches ``ValueError`` or ``TypeError``. The exceptions here answer to both, and to the ``BufferError`` and
``KeyError`` that mpi4py itself raises for unusable memory and for unknown datatypes.

>>> from mpi4py import MPI
>>> try:
...     raise InvalidArgument(MPI.ERR_ROOT, "root: expected 0 <= root < 4, found 7")
... except ValueError as error:
...     print(error, error.Get_error_class() == MPI.ERR_ROOT)
root: expected 0 <= root < 4, found 7 True
"""

from mpi4py import MPI

__all__ = ["Invalid", "InvalidArgument", "InvalidBuffer", "InvalidType", "OutOfMemory", "OutOfStep", "UnknownDatatype"]


class Invalid(MPI.Exception):
    """A call that was refused before anything was sent.

    Parameters
    ----------
    error_class
        An MPI error class: ``MPI.ERR_ROOT``, ``MPI.ERR_COUNT``, ``MPI.ERR_TYPE``, ``MPI.ERR_OP``, ...
    message
        Names the argument, what was expected and what was found; it is what ``str`` gives.
    """

    def __init__(self, error_class: int, message: str) -> None:
        super().__init__(error_class)
        self.args = (error_class, message)  # int(self) reads the first, pickling passes both back in

    def __str__(self) -> str:
        return str(self.args[1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.args[1]!r})"


class InvalidArgument(Invalid, ValueError):
    """A value that the call cannot use: a root, a count, a displacement, an operation, a freed request."""


class InvalidType(Invalid, TypeError):
    """An object of a kind that the call cannot use: no buffer, no number, no datatype, no operation."""


class InvalidBuffer(InvalidArgument, BufferError):
    """Memory that the call cannot use: not contiguous, read-only, too small."""


class UnknownDatatype(InvalidType, KeyError):
    """An element type that has no meaning here: an unknown typecode, an object or structured dtype."""

    __str__ = Invalid.__str__  # KeyError would quote it


class OutOfMemory(Invalid, MemoryError):
    """Memory that cannot be had; nothing was taken on any rank."""


class OutOfStep(Invalid, RuntimeError):
    """A call after one that was broken off, by Ctrl-C or an operation that raised: what comes may be of that one."""
