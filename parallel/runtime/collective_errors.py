"""Collective errors: an error on one rank is raised on all ranks, so that none hangs in a collective."""

from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

Result = TypeVar("Result")

EXPECTED = (OSError, ValueError, ImportError, MemoryError)
"""Errors of the environment or the user; others are defects and end the program."""


def describe(problem: BaseException) -> str:
    """Text of an exception: its message (or class name if empty) and its notes."""
    notes = getattr(problem, "__notes__", ())
    return (str(problem) or type(problem).__name__) + "".join(f" ({note})" for note in notes)


def raise_on_all(
    comm: MPI.Intracomm, problem: BaseException | None, trouble: str, kind: type[Exception] = ValueError
) -> None:
    """Raise `kind` with the text ``"{trouble}: {problem} (rank 3)"`` on all ranks if any has a problem. Collective."""
    messages = comm.allgather(None if problem is None else describe(problem))
    ranks_of: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            ranks_of.setdefault(message, []).append(rank)
    if ranks_of:
        texts = [
            message if len(ranks) == len(messages) else f"{message} (rank {', '.join(map(str, ranks))})"
            for message, ranks in ranks_of.items()
        ]
        raise kind(f"{trouble}: {'; '.join(texts)}") from problem


def collective_call(
    comm: MPI.Intracomm,
    function: Callable[[], Result],
    trouble: str,
    kind: type[Exception] = ValueError,
    root: int | None = None,
) -> Result:
    """Call non-MPI `function` on all ranks, or on `root` and broadcast the result; errors become `kind` on all ranks.

    Collective. Only errors of `EXPECTED` do; any other is raised on its own rank alone.

    Examples
    --------
    >>> collective_call(MPI.COMM_SELF, lambda: int("seven"), "the answer is missing")
    Traceback (most recent call last):
    ValueError: the answer is missing: invalid literal for int() with base 10: 'seven'
    """
    result, problem = None, None
    if root is None or comm.Get_rank() == root:
        try:
            result = function()
        except EXPECTED as error:
            problem = error
    raise_on_all(comm, problem, trouble, kind)
    return result if root is None else comm.bcast(result, root)  # type: ignore[return-value]
