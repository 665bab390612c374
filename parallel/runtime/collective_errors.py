"""What may fail on one rank fails on all: nobody is left waiting for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

Result = TypeVar("Result")

EXPECTED = (OSError, ValueError, ImportError, MemoryError)
"""What the world or a user may have done; all else is a mistake of ours and ends the program as such."""


def agree(comm: MPI.Intracomm, problem: BaseException | None, trouble: str, kind: type[Exception] = ValueError) -> None:
    """Raise on all ranks if one of them has a problem, and say whose it is. Collective.

    Parameters
    ----------
    problem
        This rank's, or None.
    trouble : str
        What has failed, for the message: ``"{trouble}: {problem} (rank 3)"``.
    kind
        The exception's class.
    """
    text = None if problem is None else str(problem) or type(problem).__name__
    told: dict[str, list[int]] = {}
    everyone = comm.allgather(text)
    for rank, said in enumerate(everyone):
        if said is not None:
            told.setdefault(said, []).append(rank)
    if told:
        raise kind(f"{trouble}: {'; '.join(f'{said}{_whose(who, len(everyone))}' for said, who in told.items())}")


def _whose(ranks: list[int], size: int) -> str:
    return "" if len(ranks) == size else f" (rank {', '.join(map(str, ranks))})"


def together(
    comm: MPI.Intracomm,
    function: Callable[[], Result],
    trouble: str,
    kind: type[Exception] = ValueError,
    root: int | None = None,
) -> Result:
    """Do what may fail, and knows no MPI, on all ranks, or on one whose result all get. Collective.

    Examples
    --------
    >>> together(MPI.COMM_SELF, lambda: int("seven"), "the answer is missing")
    Traceback (most recent call last):
    ValueError: the answer is missing: invalid literal for int() with base 10: 'seven'
    """
    result, problem = None, None
    if root is None or comm.Get_rank() == root:
        try:
            result = function()
        except EXPECTED as error:
            problem = error
    agree(comm, problem, trouble, kind)
    return result if root is None else comm.bcast(result, root)  # type: ignore[return-value]
