"""Synchronisation of ranks, twice per step: check micro-batch numbers, then sum losses; both exchange errors."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.data.sampler import Batch, batch_of
from parallel.data_parallel.run_context import RunContext
from parallel.nn.kernels.deferred import DeferredNumbers
from parallel.runtime import consistency_check

Losses = list[tuple[int, float]]
"""Numbers of micro-batches and terms of the sum of their losses."""


class CheckedBatches(NamedTuple):
    """Micro-batches on the device, sorted by number, and how many of their targets count; or none, and an error."""

    mine: list[Batch]
    targets: int
    problem: Exception | None


def checked(batches: Iterable[Any], xp: ModuleType, loss: Any) -> CheckedBatches:
    """Convert and check micro-batches. Targets are counted where they are given: on the host, without a wait."""
    try:
        mine, targets = list[Batch](), 0
        for at, some in enumerate(batches):
            batch = batch_of(some, at, xp)
            mine.append(batch)
            targets += int(loss.count(batch.y if isinstance(some[2], type(batch.y)) else np.asarray(some[2])))
        for batch in mine:
            if len(batch.x) != len(batch.y) or len(batch.x) != len(batch.samples):
                lengths = f"{len(batch.x)} inputs, {len(batch.y)} targets, {len(batch.samples)} sample numbers"
                raise ValueError(f"micro-batch {batch.number} has {lengths}")
        mine.sort(key=lambda batch: batch.number)
        return CheckedBatches(mine, targets, None)
    except Exception as error:
        return CheckedBatches([], 0, error)


def read_losses(numbers: DeferredNumbers, losses: Losses, problem: Exception | None) -> tuple[Losses, Exception | None]:
    """Losses as floats, with a single wait for the device, and the first error: `problem`, or one found by reading."""
    values, late = numbers.read([loss for _, loss in losses])
    return [(number, value) for (number, _), value in zip(losses, values)], problem or late


class StepSync:
    """Communication between all ranks at the beginning and the end of a step.

    `comm` has all of them. `teams` are the ranks that have the same micro-batches, in the order in which micro-batches
    are assigned.
    """

    def __init__(self, context: RunContext, comm: Communicator, teams: Sequence[Sequence[int]]):
        self._context, self._comm = context, comm
        self._heads = [team[0] for team in teams]
        self._teams = [list(team) for team in teams if len(team) > 1]
        self._header = np.empty((self._comm.Get_size(), 6), np.int64)

    def begin(
        self, mine: Sequence[Batch], count: int, stop: bool, problem: Exception | None
    ) -> tuple[list[tuple[int, ...]], int, bool]:
        """Synchronise: (micro-batches per team of ranks, targets of all ranks, True if any set `stop`). Collective.

        `count` is the number of targets of `mine`.

        In reproducible training the micro-batches have their numbers; otherwise only how many they are is correct.

        Raises
        ------
        StepFailed
            On all ranks, if one of them has a problem.
        ValueError
            On all ranks, if the numbers are not those from 0 on, each once, or not the same in a team.
        """
        with self._context.recorder("communication", "meet"):
            numbers = tuple(batch.number for batch in mine)
            failed, hashed = problem is not None, consistency_check.index_hash(numbers)
            largest = max((len(batch.x) for batch in mine), default=0)
            header = np.array([len(mine), count, stop, failed, hashed, largest], np.int64)
            self._comm.Allgather(header, self._header)
            if self._header[:, 3].any():
                consistency_check.raise_step_failed(self._comm, problem)
            self._compare()
            heads = self._header[self._heads]
            lengths = heads[:, 0].tolist()
            assignment = [tuple(range(length)) for length in lengths]
            if self._context.plan.reproducible or consistency_check.index_hash(
                range(sum(lengths))
            ) != consistency_check.combine_hashes(heads[:, 4].tolist()):
                exchanged = self._comm.allgather(numbers)
                assignment = [exchanged[head] for head in self._heads]
                if sorted(chain.from_iterable(assignment)) != list(range(sum(lengths))):
                    wanted = f"each of the numbers 0 to {sum(lengths) - 1} on one rank"
                    raise ValueError(f"micro-batches: expected {wanted}, found {assignment}")
        return assignment, int(heads[:, 1].sum()), bool(self._header[:, 2].any())

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch of all ranks, after `begin`."""
        return int(self._header[:, 5].max())

    def _compare(self) -> None:
        for team in self._teams:
            rows = self._header[team][:, [0, 1, 4]]
            for rank, row in zip(team, rows):
                if (row != rows[0]).any():
                    pair = f"ranks {team[0]} and {rank}"
                    raise ValueError(f"micro-batches: {pair} run parts of one model and must have the same")

    def losses(
        self, losses: Losses, problem: Exception | None, step: int, left: str = consistency_check.NOTHING
    ) -> float:
        """Sum of the losses of all ranks; raises StepFailed on all ranks if any has an error or a non-finite loss.

        `left`, the beginning of the message, says what was updated.
        """
        odd = [number for number, loss in losses if not math.isfinite(loss)]
        if problem is None and odd:
            numbers = ", ".join(map(str, dict.fromkeys(odd)))
            problem = FloatingPointError(f"the loss of micro-batch {numbers} is not a finite number in step {step}")
        with self._context.recorder("communication", "losses"):
            if self._context.plan.reproducible:
                gathered = self._comm.allgather((problem is not None, losses))
                total, failed = math.fsum(loss for _, some in gathered for _, loss in some), any(f for f, _ in gathered)
            else:
                pair = np.array([math.fsum(loss for _, loss in losses), problem is not None])
                self._comm.Allreduce(MPI.IN_PLACE, pair)
                total, failed = float(pair[0]), bool(pair[1] != 0)
            if failed:
                consistency_check.raise_step_failed(self._comm, problem, left)
        return total
