"""Checks that models, settings and parameters are equal on all ranks."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
from mpi4py import MPI

from parallel.nn.flat_params import ParamSpan
from parallel.runtime.collective_errors import describe, mark_shared, raise_shared
from parallel.runtime.vector_memory import to_host

Result = TypeVar("Result")


class RankMismatch(ValueError):
    """Raised on all ranks if they have different models, losses, optimizers, settings, values or batches."""


class ParameterMismatch(RuntimeError):
    """Raised on all ranks if replicated parameters are not bitwise equal."""

    on_all_ranks = True


class StepFailed(RuntimeError):
    """Raised on all ranks if a step or evaluation failed on any. If certain, its text has "nothing was updated"."""

    on_all_ranks = True
    elsewhere = False
    """Set by the parameter server: True if only another rank knows the cause."""


class RankLeft(StepFailed):
    """Raised where a rank waits for one that has left the engine, by an exception or the end of its program."""

    on_all_ranks = of_death = False
    """`of_death`: since a rank has died or does not answer."""


class TrainingFailed(RuntimeError):
    """The training has failed on all ranks. The text is the reason, or empty if another rank failed."""


def cause_of(error: BaseException) -> BaseException | None:
    """This rank's cause of the end of the training. None if only another rank knows it."""
    if not isinstance(error, TrainingFailed):
        return error
    if not isinstance(error.__cause__, Exception | None):
        return error.__cause__  # SystemExit and the like
    return error if str(error) else None


Facts = Sequence[tuple[str, Any]]
"""Names and values of what must be equal on several ranks, in an order that is too."""


def check_equal(comm: MPI.Intracomm, facts: Facts) -> None:
    """Raise RankMismatch on all ranks if their facts differ, naming the first difference. Collective."""
    if len(set(comm.allgather(facts_digest(facts)))) > 1:
        raise_difference(comm, facts, [range(comm.Get_size())])


def facts_digest(facts: Facts) -> int:
    """Digest of names and values, below 2^32."""
    return digest("\n".join(f"{name}: {value}" for name, value in facts).encode())


def raise_difference(
    comm: MPI.Intracomm, facts: Facts, teams: Iterable[Sequence[int]], what: str = "ranks differ"
) -> None:
    """Raise RankMismatch on all ranks if facts differ in one of the `teams` of ranks. Collective.

    The error begins with `what`, and has the first difference: the values, and the ranks that have each.
    """
    every = [dict(mine) for mine in comm.allgather([(name, str(value)) for name, value in facts])]
    for team in teams:
        for name in dict.fromkeys(name for rank in team for name in every[rank]):  # ordered: one error on all ranks
            owners: dict[str, list[int]] = {}
            for rank in team:
                owners.setdefault(every[rank].get(name, "absent"), []).append(rank)
            if len(owners) > 1:
                parts = (f"{_named(ranks)} {name}: {text}" for text, ranks in owners.items())
                raise_shared(RankMismatch(f"{what}: {'; '.join(parts)}"), None)


def raise_together(comm: MPI.Intracomm, problem: BaseException | None) -> None:
    """Raise `problem` on the ranks that have one, and on the others a RankMismatch that names it. Collective."""
    texts = comm.allgather(None if problem is None else f"{type(problem).__name__}: {describe(problem)}")
    if problem is not None:
        mark_shared(problem)
        raise problem
    ranks = [rank for rank, text in enumerate(texts) if text is not None]
    if ranks:
        here = _named([comm.Get_rank()])
        raise_shared(RankMismatch(f"ranks differ: {_named(ranks)} {texts[ranks[0]]}; {here} no error"), None)


def call_together(comm: MPI.Intracomm, function: Callable[[], Result]) -> Result:
    """Result of non-MPI `function` on every rank. Errors are raised by `raise_together`. Collective."""
    try:
        result = function()
    except BaseException as error:
        raise_together(comm, error)
        raise
    raise_together(comm, None)
    return result


MOST_NAMED = 8
"""Number of ranks that an error lists. It has the number of the others."""


def _named(ranks: Sequence[int]) -> str:
    """Beginning of a sentence about some ranks, such as ``"ranks 0, 2 have"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - MOST_NAMED} others" if len(ranks) > MOST_NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))}{more} have"


NOTHING = "nothing was updated"
"""Effect of most failed steps."""


def raise_step_failed(comm: MPI.Intracomm, problem: BaseException | None, left: str = NOTHING) -> None:
    """Raise StepFailed on all ranks if any has a `problem`. Its message is `left` and the problems. Collective.

    Like `raise_shared`, raises SystemExit itself on its rank.
    """
    text = None if problem is None else f"{type(problem).__name__}: {describe(problem)}"
    texts = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(text)) if text is not None]
    if texts:
        raise_shared(StepFailed(f"{left}; " + "; ".join(texts)), problem)


_MODULUS = 1 << 48
"""The sum of 2^15 ranks' hashes is an int64."""


@lru_cache
def index_hash(numbers: Sequence[int]) -> int:
    """Hash of a set of numbers (sum of fifth powers). `combine_hashes` of disjoint sets gives the hash of their union.

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
    """Raise ParameterMismatch on all ranks if a parameter is not bitwise equal on all ranks that have it. Collective.

    The message names the first. Ranks have their numbers in `whole`, by default in `comm` itself.
    """
    digests = {one.parameter.label: array_digest(one.parameter.data) for one in places}
    if len(set(comm.allgather(digest(repr([*digests.values()]).encode())))) == 1:  # one number a rank usually suffices
        return
    every = comm.allgather(digests)
    for name in dict.fromkeys(name for some in every for name in some):
        ranks = [rank for rank, some in enumerate(every) if name in some]
        column = [every[rank][name] for rank in ranks]
        if len(set(column)) > 1:
            every_rank = (comm if whole is None else whole).Get_group()
            numbers = comm.Get_group().Translate_ranks(ranks, every_rank)
            usual = max(column, key=column.count)
            others = [number for number, digest in zip(numbers, column) if digest != usual]
            raise ParameterMismatch(
                f"after step {step} parameter {name} of rank{'s' * (len(others) > 1)} "
                f"{', '.join(map(str, others))} differs from that of rank {numbers[column.index(usual)]}"
            )


def compare_copies(
    copies: Iterable[tuple[MPI.Intracomm, Sequence[ParamSpan]]], step: int, whole: MPI.Intracomm
) -> None:
    """Make `compare_parameters` for each pair (ranks, parameters). Errors are raised on all ranks of `whole`."""
    problem: ParameterMismatch | None = None
    for comm, places in copies:
        try:
            compare_parameters(comm, places, step, whole)
        except ParameterMismatch as error:
            problem = problem or error
    for text in whole.allgather(problem and str(problem)):
        if text is not None:
            raise_shared(ParameterMismatch(text), problem)


def array_digest(array: Any) -> int:
    """Digest of an array's elements, in C order, on the host or a device."""
    return digest(np.ascontiguousarray(to_host(array)).reshape(-1).view(np.uint8).data)


digest = crc32
"""Digest of bytes, below 2^32. It finds accidental differences at several GB/s, and costs a step little."""
