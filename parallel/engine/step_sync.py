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
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.fingerprint import Fingerprint, array_text
from parallel.nn.kernels.deferred import DeferredNumbers
from parallel.runtime import consistency_check
from parallel.runtime.collective_errors import raise_shared
from parallel.runtime.consistency_check import Facts, RankMismatch
from parallel.runtime.meeting_point import ROW, MeetingPoint
from parallel.runtime.validation import real_number, widened

Losses = list[tuple[int, float]]
"""Numbers of micro-batches and terms of the sum of their losses."""


class CheckedBatches(NamedTuple):
    """Micro-batches on the device, sorted by number, and the counts of their targets; or none, and an error.

    `content` has digests of their arrays, if other ranks have to load the same micro-batches.
    """

    mine: list[Batch]
    counts: list[float]
    problem: BaseException | None
    content: Facts = ()


def count_of(loss: Any, targets: Any) -> float:
    """Number of targets that count: any real number from 0 on, such as a sum of weights; ValueError for others."""
    found = loss.count(targets)
    try:
        count = real_number(found)
    except (TypeError, ValueError) as error:
        raise type(error)(f"count of {type(loss).__name__}: {error}") from None
    if not 0 <= count < math.inf:
        raise ValueError(f"count of {type(loss).__name__}: expected a finite number from 0 on, found {found!r}")
    return count


def checked(batches: Iterable[Any], xp: ModuleType, loss: Any, hashes: bool = False) -> CheckedBatches:
    """Convert and check micro-batches; if `hashes`, make digests of their arrays.

    Targets are counted, and arrays hashed, where they are given: on the host, without a wait.
    """
    try:
        mine, counts, content = list[Batch](), list[float](), list[tuple[str, Any]]()
        for at, some in enumerate(batches):
            batch = batch_of(some, at, xp)
            mine.append(batch)
            x, y = (_as_given(array, made) for array, made in zip(some[1:3], batch[1:3]))
            counts.append(count_of(loss, widened(y, "targets")))
            if hashes:
                named = (("inputs", x), ("targets", y), ("sample numbers", np.asarray(batch.samples)))
                content += ((f"{name} of micro-batch {batch.number}", array_text(array)) for name, array in named)
        for batch in mine:
            if len(batch.x) != len(batch.y) or len(batch.x) != len(batch.samples):
                lengths = f"{len(batch.x)} inputs, {len(batch.y)} targets, {len(batch.samples)} sample numbers"
                raise ValueError(f"micro-batch {batch.number} has {lengths}")
        order = sorted(range(len(mine)), key=lambda at: mine[at].number)
        return CheckedBatches([mine[at] for at in order], [counts[at] for at in order], None, content)
    except BaseException as error:  # raised by `begin` on all ranks, which wait there
        return CheckedBatches([], [], error)


def _as_given(array: Any, made: Any) -> Any:
    """Array of a micro-batch where it was given: on the device, as `made` of it, or on the host."""
    return made if isinstance(array, type(made)) else np.asarray(array)


def read_losses(
    numbers: DeferredNumbers, losses: Losses, problem: BaseException | None
) -> tuple[Losses, BaseException | None]:
    """Losses as floats, with a single wait for the device, and the first error: `problem`, or one found by reading."""
    values, late = numbers.read([loss for _, loss in losses])
    return [(number, value) for (number, _), value in zip(losses, values)], problem or late


SAME_BATCHES = "micro-batches: ranks that run parts of one model and must have the same differ"


class StepSync:
    """Communication between all ranks at the beginning and the end of a step.

    `comm` has all of them, which have equal fingerprints, and so has `point`. `teams` are the ranks that have the same
    micro-batches, in the order in which micro-batches are assigned.
    """

    def __init__(
        self,
        context: RunContext,
        comm: Communicator,
        point: MeetingPoint,
        teams: Sequence[Sequence[int]],
        fingerprint: Fingerprint,
    ):
        self._context, self._comm, self._point, self._fingerprint = context, comm, point, fingerprint
        self._heads = [team[0] for team in teams]
        self._teams = [list(team) for team in teams if len(team) > 1]
        self._rows = np.zeros(0, ROW)

    @property
    def compares_batches(self) -> bool:
        """True if several ranks have the same micro-batches."""
        return bool(self._teams)

    def begin(
        self, given: CheckedBatches, moment: Facts, stop: bool = False, call: str = "step"
    ) -> tuple[list[tuple[int, ...]], float, bool]:
        """Synchronise: (micro-batches per team of ranks, targets of all ranks, True if any set `stop`). Collective.

        `moment` has facts that must be equal on all ranks, such as the number of the step; `call` is the engine's
        method.

        In reproducible training the micro-batches have their numbers; otherwise only how many they are is correct.

        Raises
        ------
        StepFailed
            On all ranks, if one of them has a problem, or calls another method; `RankLeft` if one has left.
        RankMismatch
            On all ranks, if their fingerprints or moments differ, or the micro-batches in a team.
        ValueError
            On all ranks, if the numbers are not those from 0 on, each once.
        """
        mine, counts, problem, content = given
        with self._context.recorder("communication", "meet"):
            numbers = tuple(batch.number for batch in mine)
            digest = self._fingerprint.digest(moment)
            self._rows = self._point.meet(
                call,
                batches=len(mine),
                targets=math.fsum(counts),
                stop=stop,
                failed=problem is not None,
                numbers=consistency_check.index_hash(numbers),
                largest=max((len(batch.x) for batch in mine), default=0),
                fingerprint=digest,
                content=consistency_check.facts_digest(content),
            )
            if self._rows["failed"].any():
                consistency_check.raise_step_failed(self._comm, problem)
            if (self._rows["fingerprint"] != digest).any():
                self._fingerprint.raise_difference(self._comm, moment)
            self._compare(content)
            heads = self._rows[self._heads]
            lengths, targets = heads["batches"].tolist(), heads["targets"].tolist()
            assignment = [tuple(range(length)) for length in lengths]
            # The hashes save an exchange; reproducible training needs the numbers themselves.
            if self._context.plan.reproducible or consistency_check.index_hash(
                range(sum(lengths))
            ) != consistency_check.combine_hashes(heads["numbers"].tolist()):
                exchanged = self._comm.allgather((numbers, counts))
                assignment = [exchanged[head][0] for head in self._heads]
                targets = [count for head in self._heads for count in exchanged[head][1]]
                if sorted(chain.from_iterable(assignment)) != list(range(sum(lengths))):
                    wanted = f"each of the numbers 0 to {sum(lengths) - 1} on one rank"
                    raise_shared(ValueError(f"micro-batches: expected {wanted}, found {assignment}"), None)
        return assignment, math.fsum(targets), bool(self._rows["stop"].any())

    @property
    def largest(self) -> int:
        """Samples of the largest micro-batch of all ranks, after `begin`."""
        return int(self._rows["largest"].max())

    def _compare(self, content: Facts) -> None:
        """Raise RankMismatch on all ranks if those of a team, which run parts of one model, have other batches."""
        for team in self._teams:
            rows = self._rows[["batches", "targets", "numbers", "content"]][team]
            if (rows != rows[0]).any():
                consistency_check.raise_difference(self._comm, content, self._teams, SAME_BATCHES)
                raise_shared(RankMismatch(f"{SAME_BATCHES}: found others on ranks {', '.join(map(str, team))}"), None)

    def losses(
        self, losses: Losses, problem: BaseException | None, step: int, left: str = consistency_check.NOTHING
    ) -> float:
        """Sum of the losses of all ranks; raises StepFailed on all ranks if any has an error or a non-finite loss.

        `left`, the beginning of the message, says what was updated.
        """
        odd = [number for number, loss in losses if not math.isfinite(loss)]
        if problem is None and odd:
            numbers = ", ".join(map(str, dict.fromkeys(odd)))
            problem = FloatingPointError(f"the loss of micro-batch {numbers} is not a finite number in step {step}")
        with self._context.recorder("communication", "losses"):
            if self._context.plan.reproducible:  # all terms: sums of ranks would be rounded
                gathered = self._comm.allgather((problem is not None, losses))
                total, failed = math.fsum(loss for _, some in gathered for _, loss in some), any(f for f, _ in gathered)
            else:
                pair = np.array([math.fsum(loss for _, loss in losses), problem is not None])
                self._comm.Allreduce(MPI.IN_PLACE, pair)
                total, failed = float(pair[0]), bool(pair[1] != 0)
            if failed:
                consistency_check.raise_step_failed(self._comm, problem, left)
        return total
