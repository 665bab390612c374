"""Consistency of models, settings and parameters between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.nn.flat_params import FlatParams
from parallel.runtime.collective_errors import describe
from parallel.runtime.vector_memory import to_host


class RankMismatch(ValueError):
    """Ranks were given different models or settings."""


class ParameterMismatch(RuntimeError):
    """Parameters that should be the same on all ranks are not."""


class StepFailed(RuntimeError):
    """Some rank could not do its part of a step, so that no rank updated anything. Raised on all ranks.

    Attributes
    ----------
    elsewhere : bool
        The cause is known to another rank only.
    """

    elsewhere = False


def exits_on_all_ranks(kind: type[BaseException] | None) -> bool:
    """True if all ranks leave a ``with`` block together: no exception, or one that all ranks raise.

    Only then may the end of the block be collective; after another exception this rank does not wait for the others.
    """
    return kind is None or issubclass(kind, (StepFailed, ParameterMismatch))


def check_equal(comm: MPI.Intracomm, facts: Sequence[tuple[str, Any]]) -> None:
    """Raise on all ranks if their facts differ, naming the first difference. Collective.

    Parameters
    ----------
    facts : sequence of (what it is, value)
    """
    mine = [f"{what}: {value}" for what, value in facts]
    gathered = comm.allgather(_digest("\n".join(mine).encode()))
    if len(set(gathered)) == 1:
        return
    lists = comm.allgather(mine)
    for rank, theirs in enumerate(lists):
        for at in range(max(len(lists[0]), len(theirs))):
            here = lists[0][at] if at < len(lists[0]) else "nothing more"
            there = theirs[at] if at < len(theirs) else "nothing more"
            if here != there:
                raise RankMismatch(f"ranks differ: rank 0 has {here}; rank {rank} has {there}")


NOTHING = "nothing was updated"
"""Effect of most failed steps."""


def raise_step_failed(comm: MPI.Intracomm, problem: BaseException | None, left: str = NOTHING) -> None:
    """Raise on all ranks if one of them has a problem, naming each, and what is `left` behind. Collective."""
    text = None if problem is None else f"{type(problem).__name__}: {describe(problem)}"
    texts = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(text)) if text is not None]
    if texts:
        raise StepFailed(f"{left}; " + "; ".join(texts)) from problem


_MARKS = 1 << 48
"""Of so many ranks' as 2^15 the sum is an int64."""


@lru_cache
def index_hash(numbers: Sequence[int]) -> int:
    """Hash of a set of numbers: the sum of fifth powers, so that `joined` hashes of parts give that of their union.

    Ranks find missing or repeated numbers without exchanging them.

    >>> combine_hashes([index_hash((4, 1)), index_hash((0, 3, 2))]) == index_hash(range(5))
    True
    """
    return sum((number + 1) ** 5 for number in numbers) % _MARKS


def combine_hashes(marks: Iterable[int]) -> int:
    """The mark of a union."""
    return sum(marks) % _MARKS


def compare_parameters(comm: MPI.Intracomm, flat: FlatParams, step: int, whole: MPI.Intracomm | None = None) -> None:
    """Raise on all ranks if some parameter's bits differ, naming the first such tensor and the ranks. Collective.

    Parameters
    ----------
    whole
        The communicator that ranks are numbered by; by default `comm` itself.
    """
    digests = [_digest(_bytes(place.parameter.data)) for place in flat.places]
    gathered = comm.allgather(_digest(b"".join(digests)))
    if len(set(gathered)) == 1:
        return
    columns = comm.allgather(digests)
    for at, place in enumerate(flat.places):
        column = [digests[at] for digests in columns]
        if len(set(column)) > 1:
            ranks = list(range(len(column)))
            numbers = comm.Get_group().Translate_ranks(ranks, (whole or comm).Get_group())
            usual = max(column, key=column.count)
            others = [number for number, digest in zip(numbers, column) if digest != usual]
            who = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
            raise ParameterMismatch(
                f"after step {step} parameter {place.parameter.name} of {who} "
                f"differs from that of rank {numbers[column.index(usual)]}"
            )


def _bytes(array: Any) -> np.ndarray:
    return to_host(array).reshape(-1).view(np.uint8)


def _digest(data: Any) -> bytes:
    return blake2b(data, digest_size=16).digest()
