"""Checks that models, settings and parameters are equal on all ranks."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.nn.flat_params import ParamSpan
from parallel.runtime.collective_errors import describe
from parallel.runtime.vector_memory import to_host


class RankMismatch(ValueError):
    """Raised on all ranks if they were given different models or settings."""


class ParameterMismatch(RuntimeError):
    """Raised on all ranks if replicated parameters are not bitwise equal."""


class StepFailed(RuntimeError):
    """Raised on all ranks if a step or evaluation failed on any; if sure of it, its text has "nothing was updated"."""

    elsewhere = False
    """Set by the parameter server: True if only another rank knows the cause."""


def exits_on_all_ranks(kind: type[BaseException] | None) -> bool:
    """True if exception class `kind` (or None) ends a ``with`` block on all ranks, so its exit may be collective."""
    return kind is None or issubclass(kind, (StepFailed, ParameterMismatch))


def check_equal(comm: MPI.Intracomm, facts: Sequence[tuple[str, Any]]) -> None:
    """Raise RankMismatch on all ranks if their (name, value) pairs differ, naming the first difference. Collective."""
    mine = [f"{name}: {value}" for name, value in facts]
    if len(set(comm.allgather(_digest("\n".join(mine).encode())))) == 1:
        return
    first, *others = comm.allgather(mine)
    for rank, theirs in enumerate(others, 1):
        for here, there in zip_longest(first, theirs, fillvalue="nothing more"):
            if here != there:
                raise RankMismatch(f"ranks differ: rank 0 has {here}; rank {rank} has {there}")


NOTHING = "nothing was updated"
"""Effect of most failed steps."""


def raise_step_failed(comm: MPI.Intracomm, problem: BaseException | None, left: str = NOTHING) -> None:
    """Raise StepFailed on all ranks if any has a `problem`; its message is `left` and the problems. Collective."""
    text = None if problem is None else f"{type(problem).__name__}: {describe(problem)}"
    texts = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(text)) if text is not None]
    if texts:
        raise StepFailed(f"{left}; " + "; ".join(texts)) from problem


_MODULUS = 1 << 48
"""The sum of 2^15 ranks' hashes is an int64."""


@lru_cache
def index_hash(numbers: Sequence[int]) -> int:
    """Hash of a set of numbers (sum of fifth powers); `combine_hashes` of disjoint sets gives that of their union.

    Ranks find missing or repeated numbers without exchanging them.

    >>> combine_hashes([index_hash((4, 1)), index_hash((0, 3, 2))]) == index_hash(range(5))
    True
    """
    return sum((number + 1) ** 5 for number in numbers) % _MODULUS


def combine_hashes(hashes: Iterable[int]) -> int:
    return sum(hashes) % _MODULUS


def compare_parameters(
    comm: MPI.Intracomm, places: Sequence[ParamSpan], step: int, whole: MPI.Intracomm | None = None
) -> None:
    """Raise ParameterMismatch on all ranks if a parameter is not bitwise equal on all that have it. Collective.

    The message names the first. Ranks are numbered as in `whole`, by default as in `comm` itself.
    """
    digests = {one.parameter.name: _digest(to_host(one.parameter.data).reshape(-1).view(np.uint8)) for one in places}
    if len(set(comm.allgather(_digest(b"".join(digests.values()))))) == 1:
        return
    every = comm.allgather(digests)
    for name in dict.fromkeys(name for some in every for name in some):
        ranks = [rank for rank, some in enumerate(every) if name in some]
        column = [every[rank][name] for rank in ranks]
        if len(set(column)) > 1:
            numbers = comm.Get_group().Translate_ranks(ranks, (whole or comm).Get_group())
            usual = max(column, key=column.count)
            others = [number for number, digest in zip(numbers, column) if digest != usual]
            raise ParameterMismatch(
                f"after step {step} parameter {name} of rank{'s' * (len(others) > 1)} "
                f"{', '.join(map(str, others))} differs from that of rank {numbers[column.index(usual)]}"
            )


def compare_copies(
    copies: Iterable[tuple[MPI.Intracomm, Sequence[ParamSpan]]], step: int, whole: MPI.Intracomm
) -> None:
    """Make `compare_parameters` for each pair (ranks, parameters); errors are raised on all ranks of `whole`."""
    problem: ParameterMismatch | None = None
    for comm, places in copies:
        try:
            compare_parameters(comm, places, step, whole)
        except ParameterMismatch as error:
            problem = problem or error
    for text in whole.allgather(problem and str(problem)):
        if text is not None:
            raise ParameterMismatch(text) from problem


def _digest(data: Any) -> bytes:
    return blake2b(data, digest_size=16).digest()
