"""Collective errors: an error on one rank is raised on all ranks, so that none hangs in a collective."""

import os
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from mpi4py import MPI

Result = TypeVar("Result")

PLAIN = (OSError, ValueError, TypeError, ImportError, MemoryError, RuntimeError)
"""Errors whose message is enough. Others are reported with the name of their class."""


def describe(problem: BaseException) -> str:
    """Text of an exception: its message (or class name if empty), of a file its name first, and its notes."""
    notes = getattr(problem, "__notes__", ())
    is_of_file = isinstance(problem, OSError) and problem.filename is not None and problem.strerror is not None
    text = f"{os.fsdecode(problem.filename)}: {problem.strerror}" if is_of_file else str(problem)  # type: ignore
    return (text or type(problem).__name__) + "".join(f" ({note})" for note in notes)


def _message(problem: BaseException) -> str:
    text = describe(problem)
    return text if isinstance(problem, PLAIN) else f"{type(problem).__name__}: {text}"


def raise_shared(error: Exception, problem: BaseException | None) -> NoReturn:
    """Raise `error`, equal on all ranks of this call, from this rank's `problem`, if any.

    A problem that ends programs, such as SystemExit or KeyboardInterrupt, is raised itself on its rank.
    """
    if problem is None or isinstance(problem, Exception):
        mark_shared(error)
        raise error from problem
    mark_shared(problem)
    raise problem from error


def mark_shared(error: BaseException) -> None:
    """Note that all ranks raise an exception in this call, so that what follows it may be collective."""
    error.on_all_ranks = True  # type: ignore[attr-defined]


def is_shared(error: BaseException | None) -> bool:
    """True for an exception that all ranks raise in the same call (`mark_shared`), and for None."""
    return error is None or getattr(error, "on_all_ranks", False)


def raise_on_all(
    comm: MPI.Intracomm, problem: BaseException | None, trouble: str, kind: type[Exception] = ValueError
) -> None:
    """Raise `kind` with the text ``"{trouble}: {problem} (rank 3)"`` on all ranks if any has a problem. Collective.

    Like `raise_shared`, raises SystemExit itself on its rank.
    """
    messages = comm.allgather(None if problem is None else _message(problem))
    ranks_of: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        if message is not None:
            ranks_of.setdefault(message, []).append(rank)
    if ranks_of:
        texts = [
            message if len(ranks) == len(messages) else f"{message} (rank {', '.join(map(str, ranks))})"
            for message, ranks in ranks_of.items()
        ]
        raise_shared(kind(f"{trouble}: {'; '.join(texts)}"), problem)


def collective_call(
    comm: MPI.Intracomm,
    function: Callable[[], Result],
    trouble: str,
    kind: type[Exception] = ValueError,
    root: int | None = None,
) -> Result:
    """Call non-MPI `function` on all ranks, or on `root` and broadcast the result. Errors become `kind` on all ranks.

    Collective. SystemExit and KeyboardInterrupt are raised themselves on their own rank.

    Examples
    --------
    >>> collective_call(MPI.COMM_SELF, lambda: int("seven"), "the answer is missing")
    Traceback (most recent call last):
    ValueError: the answer is missing: invalid literal for int() with base 10: 'seven'
    """
    result: Any = None
    problem: BaseException | None = None
    if root is None or comm.Get_rank() == root:
        try:
            result = function()
        except BaseException as error:
            problem = error
    raise_on_all(comm, problem, trouble, kind)
    return result if root is None else comm.bcast(result, root)  # type: ignore[no-any-return]


def written(comm: MPI.Intracomm, write: Callable[..., Result], *arguments: Any) -> Result:
    """Result of the collective function ``write(comm, *arguments)``. An error on some ranks is raised on all.

    On the others it is a RuntimeError. They must not wait for the failed ranks within `write`. After an interrupt (not
    exchanged) they do wait: `MeetingPoint.taking_part` ends their waits. Collective.
    """
    result: Any = None
    problem: BaseException | None = None
    try:
        result = write(comm, *arguments)
    except BaseException as error:
        if is_shared(error) or isinstance(error, KeyboardInterrupt):
            raise
        problem = error
    try:
        raise_on_all(comm, problem, "the function was not completed", RuntimeError)
    except RuntimeError as error:
        if problem is None:
            raise
        mark_shared(problem)
        raise problem from error
    return result  # type: ignore[no-any-return]
