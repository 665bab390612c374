"""A step as all engines make it: ranks meet, go through the micro-batches, add up, and update together.

How micro-batches go through the model is what engines differ in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from collectives import Communicator
from parallel.runtime import consistency_check as guard
from parallel.data_parallel.run_context import Context
from parallel.data.sampler import Batch
from parallel.runtime.validation import named, whole
from parallel.nn.flat_params import Flat, Span
from parallel.data_parallel.sharded_optimizer import Holdings, Part
from parallel.engine.step_sync import Losses, Meeting, checked
from parallel.nn.compose import Sequential
from parallel.nn.operator import Array, Operator, Run
from parallel.optim.optimizers import Optimizer, Piece
from parallel.optim.precision import PRECISIONS
from parallel.runtime.profiler import Event
from parallel.runtime.step_report import Evaluation, Report
from parallel.optim.loss_scaling import LossScale
from parallel.optim.lr_schedules import rate_at
from parallel.checkpoint.tensor_slices import Stretch
from parallel.data_parallel.reducers import Moment, Numbers

Measure = Callable[[Array, Array], float]
"""From scores and targets."""


class Passed(NamedTuple):
    """What has come of the forwards and backwards.

    Attributes
    ----------
    early : int
        Exchanges of gradients that were started on this rank before its last backward had ended.
    losses : list of (number, sum of losses)
        Of this rank's micro-batches, or of those of which it has the loss.
    problem : Exception or None
    """

    early: int
    losses: Losses
    problem: Exception | None


class Scored(NamedTuple):
    """What has come of forwards alone; `measured` is the sum of what was measured."""

    losses: Losses
    measured: float
    problem: Exception | None


class Stepping:
    """What engines have in common.

    Parameters
    ----------
    context : Context
        Of the whole vector and all ranks.
    parts : sequence of Part
        What this rank has of the vector.
    spans : sequence of sequence of Span
        Rank by rank, what each looks after; together they make up the vector.
    loss : loss operator
    optimizer : Optimizer
    teams : sequence of sequence of int, optional
        Ranks that have the same micro-batches; by default each rank has its own.
    seed : int
        Of first values and of dropout.
    clip : float or None
    check_every : int
        Compare the parameters of ranks that should have the same after every so many steps; 0 for never.

    Attributes
    ----------
    steps, updates : int
        Steps that were made, skipped ones included; those that changed the weights.
    remarks : sequence of str
        What was decided when the engine was made and is worth telling.
    """

    remarks: Sequence[str] = ()
    _left = guard.NOTHING

    def __init__(
        self,
        context: Context,
        parts: Sequence[Part],
        spans: Sequence[Sequence[Span]],
        loss: Any,
        optimizer: Optimizer,
        *,
        teams: Sequence[Sequence[int]] | None = None,
        seed: int = 0,
        clip: float | None = None,
        check_every: int = 0,
    ):
        teams = [[rank] for rank in range(context.plan.ranks)] if teams is None else teams
        self._context, self._comm, self._recorder = context, context.comm, context.recorder
        self._parts, self._loss, self._optimizer = parts, loss, optimizer
        self._seed, self._check_every = seed, check_every
        self._meeting = Meeting(context, loss, teams)
        self._holdings = Holdings(context, parts, spans, optimizer, seed, clip)
        self.steps = self.updates = 0

    # ------------------------------------------------------------------------------------------ what engines differ in

    def _foresee(self, mine: list[Batch]) -> None:
        """Raise what is wrong with micro-batches, as far as it shows before ranks meet."""

    def _passes(self, mine: list[Batch], everyone: Numbers, moment: Moment) -> Passed:
        """All forwards and backwards, and the sum of gradients."""
        raise NotImplementedError

    def _scores(self, mine: list[Batch], everyone: Numbers, measure: Measure | None) -> Scored:
        """Forwards alone, without dropout."""
        raise NotImplementedError

    @property
    def _clock(self) -> int:
        """What learning rates go by."""
        return self.updates

    # ------------------------------------------------------------------------------------------ training

    def step(self, batches: Iterable[Batch], *, stop: bool = False) -> Report:
        """One update from the micro-batches of all ranks.

        Parameters
        ----------
        batches : iterable of Batch, or of tuples like it
            This rank's. It may have none. `share` says which a rank should have.
        stop : bool
            Whether this rank wants to end, after a Ctrl-C say: all ranks learn it from the report.

        Raises
        ------
        ValueError
            On all ranks, if the numbers of their micro-batches are not those from 0 on, each once.
        StepFailed
            On all ranks, if one of them has raised an exception, or has a loss or a gradient that is no finite number
            (in fp16 the latter makes a skipped step, unless the loss scale cannot go lower). Nothing was updated then.
        Diverged
            On all ranks, if parameters that should be the same are not.
        """
        return self._step(lambda scale: self._shared(batches, stop, scale))

    def _shared(self, batches: Iterable[Batch], stop: bool, scale: float) -> tuple[int, bool, Passed]:
        """The passes of micro-batches that all ranks know of beforehand, how many targets, and whether to stop."""
        mine, problem = self._checked(batches)
        everyone, count, stop = self._meeting.begin(mine, stop, problem)
        return count, stop, self._passes(mine, everyone, Moment(self.steps, count, scale))

    def _step(self, go: Callable[[float], tuple[int, bool, Passed]]) -> Report:
        """A step, whose passes are what `go` makes of the loss scale."""
        began, spent = time.perf_counter(), self._recorder.seconds["communication"]
        scale, rate = self.scaling.value, rate_at(self._optimizer.rate, self._clock)
        with np.errstate(over="ignore", invalid="ignore"):  # found below, on all ranks together
            count, stop, (early, losses, problem) = go(scale)
        loss = self._meeting.losses(losses, problem, self.steps, self._left) / count if count else math.nan
        norm, finite = self._update(count) if count else (None, False)
        step, self.steps = self.steps, self.steps + 1
        if self._check_every and self.steps % self._check_every == 0:
            self._compare(step)
        seconds, communication = time.perf_counter() - began, self._recorder.seconds["communication"] - spent
        return Report(step, loss, count, norm, not finite, scale, rate, stop, seconds, communication, early)

    def _compare(self, step: int) -> None:
        """Raise on all ranks if those that should have the same weights do not."""
        problem: guard.Diverged | None = None
        for part in self._parts:
            if part.weights.replicated:
                try:
                    guard.compare(part.context.comm, part.context.flat, step, self._comm)
                except guard.Diverged as error:
                    problem = problem or error
        for told in self._comm.allgather(problem and str(problem)):
            if told is not None:
                raise guard.Diverged(told) from problem

    def _update(self, count: int) -> tuple[float | None, bool]:
        """Change the weights: the gradient's norm, and whether it was finite, so that they have changed."""
        norm, factor, finite = self._holdings.norm(count, self.steps)
        if finite:
            self._holdings.update(self.updates, factor)
            self.updates += 1
        return norm, finite

    def evaluate(self, batches: Sequence[Batch], measure: Measure | None = None) -> Evaluation:
        """Mean loss without training.

        Parameters
        ----------
        batches : sequence of Batch
            This rank's, which may be none.
        measure : callable (scores, targets) -> float, optional
            Summed over all batches: how many are right, say.
        """
        mine, problem = self._checked(batches)
        everyone, count, _ = self._meeting.begin(mine, False, problem)
        losses, measured, problem = self._scores(mine, everyone, measure)
        loss = self._meeting.losses(losses, problem, self.steps)
        if measure:
            measured = self._comm.allreduce(measured)
        mean = 1 / count if count else math.nan
        return Evaluation(loss * mean, measured * mean if measure else None, count)

    def _checked(self, batches: Iterable[Batch]) -> tuple[list[Batch], Exception | None]:
        mine, problem = checked(batches, self._context.memory.xp)
        if problem is None:
            try:
                self._foresee(mine)
            except Exception as error:
                problem = error
        return mine, problem

    def _run(self, batch: Batch, training: bool) -> Run:
        return Run(training, self._seed, self.steps, np.asarray(batch.samples, np.int64))

    def _typed(self, batch: Batch) -> tuple[Array, Array]:
        """Inputs and targets as the model takes them: integers as they are."""
        precision = self._context.plan.precision
        return tuple(
            array.astype(type_of(array, dtype), copy=False)
            for array, dtype in ((batch.x, precision.storage), (batch.y, precision.wide))
        )  # type: ignore[return-value]

    # ------------------------------------------------------------------------------------------ its state

    @property
    def context(self) -> Context:
        """Of the whole vector and all ranks."""
        return self._context

    @property
    def pieces(self) -> list[Piece]:
        """What this rank updates."""
        return self._holdings.pieces

    @property
    def flat(self) -> Flat:
        """The vector of parameters."""
        return self._context.flat

    @property
    def scaling(self) -> LossScale:
        """What the loss is multiplied with; 1 but in fp16."""
        return self._holdings.scaling

    @scaling.setter
    def scaling(self, scaling: LossScale) -> None:
        self._holdings.scaling = scaling

    def stretches(self) -> Iterator[Stretch]:
        """All that a checkpoint has of parameters and optimiser, as far as this rank holds it; in a fixed order."""
        return self._holdings.stretches()

    def refresh(self) -> None:
        """Make what was assigned to the stretches count, after all of them were, on all ranks."""
        self._holdings.refresh()

    def state(self) -> dict[str, Any]:
        """Besides the stretches: steps, updates, the loss scale; numbers that are the same on all ranks."""
        return {"steps": self.steps, "updates": self.updates, "scaling": self.scaling.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`; raises ValueError, with nothing changed, if it is none."""
        said = named(state, "state")
        steps, updates = whole(said, "steps"), whole(said, "updates")
        if updates > steps:
            raise ValueError(f"updates: expected at most {steps}, one for each step, found {updates}")
        self.scaling.load(said.get("scaling", {}))
        self.steps, self.updates = steps, updates

    @property
    def events(self) -> list[Event]:
        """What has happened since the engine was made, or since the list was cleared; empty without `trace`."""
        return self._recorder.events

    def close(self) -> None:
        """Give back requests and let go of the memory; the engine is of no use afterwards."""
        for part in self._parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check(comm: Any, *, precision: str, clip: float | None, check_every: int) -> None:
    """Raise what is wrong with the arguments that all engines have."""
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm: expected a collectives.Communicator, found {comm!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}; found {precision!r}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: expected a positive limit, found {clip}")
    if check_every < 0:
        raise ValueError(f"check_every: expected a number of steps, or 0 for never; found {check_every}")


def facts_of(flat: Flat, optimizer: Optimizer) -> list[tuple[str, Any]]:
    """What ranks must have alike, for `guard.agree`."""
    tensors = [(f"parameter {place.parameter.name}", place.parameter.shape) for place in flat.places]
    return [*tensors, *((f"optimizer's {what}", value) for what, value in optimizer.describe().items())]


def type_of(array: Array, dtype: np.dtype) -> np.dtype:
    """What an array of a batch is turned to: integers stay."""
    return array.dtype if array.dtype.kind in "iub" else dtype


def units_of(model: Operator) -> tuple[Operator, ...]:
    """What weights come and go with: a `Sequential`'s items; any other operator is one unit."""
    return tuple(model.items) if isinstance(model, Sequential) else (model,)
