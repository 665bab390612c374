"""A replica on every rank: an engine of one rank each, and a style in which the replicas meet after each step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.runtime import consistency_check as guard
from parallel.runtime import collective_errors as together
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import Engine
from parallel.nn.flat_params import Span, shards
from parallel.layouts import LAYOUTS
from parallel.nn.operator import Array, Operator
from parallel.optim.optimizers import Optimizer
from parallel.runtime.profiler import Event
from parallel.replicas.style import Seen
from parallel.decentralized.styles import STYLES, Options, refuse
from parallel.runtime.step_report import Evaluation, Report
from parallel.checkpoint.tensor_slices import Stretch, stretches

OWN = "dp-naive"
"""The layout of an engine of one rank."""


class Replicas:
    """A model in training, with a replica on every rank of a communicator. Making one is collective.

    Its methods are those of `parallel.engine.data_parallel_engine.Engine`, so that trainings, checkpoints and meters take either. A step is
    the rank's own: forward, backward and update with its own micro-batches, then what the style exchanges. Moments and
    velocities stay with their rank.

    Parameters
    ----------
    model, loss, comm, optimizer
        As `Engine` has them.
    style : str
        A name of `parallel.decentralized.styles.STYLES`.
    options : Options
        What the style is told.
    seed, precision, clip, device, trace
        As `Engine` has them. The norm that `clip` limits is that of the rank's own gradient.
    reproducible, check_every
        Refused, unless they are False and 0.

    Attributes
    ----------
    style : Style
    steps : int
        That this rank has made.
    flat, ledger
        As `Engine` has them.

    Raises
    ------
    ValueError
        On all ranks, if an argument has no meaning, or the style is not for these ranks.
    Disagreement
        On all ranks, if their models or settings differ.

    Notes
    -----
    `evaluate`, `state`, `stretches` and `close` are collective. `step` is as collective as the style is.
    """

    remarks: Sequence[str] = ()

    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Optimizer,
        *,
        style: str,
        options: Options = Options(),  # noqa: B008
        seed: int = 0,
        precision: str = "fp32",
        clip: float | None = None,
        reproducible: bool = False,
        check_every: int = 0,
        device: str = "cpu",
        trace: bool = False,
    ) -> None:
        refuse(style, options, comm.Get_size(), precision, reproducible, check_every)
        line = STYLES[style]
        if device not in line.devices:
            raise ValueError(f"device: {style} is for {' and '.join(line.devices)}, found {device}")
        self._comm = comm
        self._alone = Communicator(MPI.COMM_SELF, shared=False)
        settings: dict[str, Any] = {"seed": seed, "precision": precision, "clip": clip, "trace": trace}
        memory = line.memory(comm, device)
        self._engine = Engine(model, loss, self._alone, optimizer, layout=OWN, memory=memory, **settings)
        told = [(f"style {style}'s {name}", value) for name, value in options._asdict().items()]
        guard.agree(comm, [("style", style), *told, *self._engine.facts])
        self.flat, self.ledger, self.steps = self._engine.flat, self._engine.ledger, 0
        self._recorder = self._engine.context.recorder
        self._piece = next(iter(self._engine.pieces), None)
        vector = memory.own("parameters", 0, self._engine.context.wide) if self._piece is None else self._piece.weights
        self.style = line.make(replace(self._engine.context, comm=comm), vector, options)
        self.ledger.predicted["buffers"] += line.buffers(vector.nbytes, options)
        self._stash = vector if self._piece is None else self._piece.gradient  # of use within a step only
        self._problem: Exception | None = None
        self.style.begin()

    # ------------------------------------------------------------------------------------------ training

    def share(self, micro_batches: int) -> range:
        """The numbers of this rank's micro-batches, of so many in the step."""
        return LAYOUTS["dp"].share(micro_batches, self._comm.Get_rank(), self._comm.Get_size())

    def step(self, batches: Sequence[Batch], *, stop: bool = False) -> Report:
        """An update from this rank's micro-batches, if it has any, and whatever meeting is due.

        Loss, count and norm of the report are this rank's own; where ranks have met, loss and count are of all who did.
        If a rank wants to stop, `stop` is reported on all ranks after the same step, some steps later.

        Raises
        ------
        StepFailed
            On all ranks after the same step, if one of them has raised an exception some steps ago, or had a loss or a
            gradient that is no finite number: from then on it has learned nothing.
        """
        began, spent = time.perf_counter(), self._recorder.seconds["communication"]
        report = self._own(batches)
        step, self.steps = self.steps, self.steps + 1
        with self._recorder("communication", "mix"):
            if stop or self._problem is not None:
                self.style.wish(step)
            seen = self.style.mix(step, Seen(report.loss * report.count if report.count else 0.0, report.count))
        ends = self.style.last <= step
        if ends:
            self.style.rest()
        self._engine.refresh()
        if ends:
            self._tell()
        return replace(
            report,
            step=step,
            loss=seen.loss / seen.targets if seen.targets else float("nan"),
            count=seen.targets,
            stop=ends,
            seconds=time.perf_counter() - began,
            communication=self._recorder.seconds["communication"] - spent,
        )

    def evaluate(self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None = None) -> Evaluation:
        """Mean loss of the mean of all replicas, which stay as they are.

        Parameters
        ----------
        batches, measure
            As of `Engine.evaluate`.
        """
        self._tell()
        found, problem = Evaluation(0.0, 0.0, 0), None
        with self._averaged():
            try:
                found = self._engine.evaluate(_numbered(batches), measure)
            except Exception as error:
                problem = error
        together.agree(self._comm, _cause(problem), "the model was not tested", guard.StepFailed)
        means = found.loss, found.measure or 0.0
        sums = np.array([mean * found.count if found.count else 0.0 for mean in means] + [float(found.count)])
        self._comm.Allreduce(MPI.IN_PLACE, sums)
        loss, measured = (sums[:2] / sums[2]).tolist() if sums[2] else (float("nan"), float("nan"))
        return Evaluation(loss, None if measure is None else measured, int(sums[2]))

    def consensus(self) -> float:
        """How far replicas are from each other: the root of the mean square of their distances to their mean."""
        with self._averaged() as (own, mean):
            squares = float(((own - mean) ** 2).sum(dtype=np.float64))
        return float(np.sqrt(self._comm.allreduce(squares) / self._comm.Get_size()))

    # ------------------------------------------------------------------------------------------ its state

    def stretches(self) -> Iterator[Stretch]:
        """As of `Engine`, after a meeting of all: the mean replica, and the mean of the optimisers' states.

        All ranks go on from these, so what goes on is what a restart would make of it.
        """
        self._tell()
        self.style.meet(Seen(0.0, 0))
        for piece in self._engine.pieces:
            for vector in piece.state.values():
                self._comm.Allreduce(MPI.IN_PLACE, vector)
                vector /= self._comm.Get_size()
        self._engine.refresh()
        mine = shards(Span(0, self.flat.length), self._comm.Get_size())[self._comm.Get_rank()]
        return stretches(self._engine.pieces, [mine])

    def refresh(self) -> None:
        """As of `Engine`."""
        self._engine.refresh()
        self.style.begin()

    def state(self) -> dict[str, Any]:
        """As of `Engine`: that of the rank with the most updates, from which all go on."""
        everyone = self._comm.allgather(self._engine.state())
        self._engine.load(max(everyone, key=lambda state: state["updates"]))
        return self._engine.state()

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self._engine.load(state)
        self.steps = self._engine.steps

    @property
    def updates(self) -> int:
        """Of this rank's replica."""
        return self._engine.updates

    @property
    def events(self) -> list[Event]:
        """As of `Engine`."""
        return self._engine.events

    def close(self) -> None:
        """Let go of the memory."""
        if sys.exception() is None:
            self.style.close()
        else:  # a rank that failed does not wait for the others
            self.style.abandon()
        self._engine.close()
        self._alone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ parts

    def _own(self, batches: Sequence[Batch]) -> Report:
        """The rank's own step; if it has failed, one without micro-batches, for the others' sake."""
        if self._problem is None:
            try:
                return self._engine.step(_numbered(batches))
            except Exception as error:
                self._problem = error
        return self._engine.step(())

    def _tell(self) -> None:
        """Raise on all ranks if one of them has failed."""
        problem, self._problem = self._problem, None
        together.agree(self._comm, _cause(problem), "a rank has failed", guard.StepFailed)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[tuple[Array, Array]]:
        """Meanwhile the mean of all replicas is in the place of this rank's; (this rank's, the mean)."""
        self.style.drain()
        vector = self.style.vector
        self._stash[...] = vector
        self.style.mean(vector)
        self._engine.refresh()
        try:
            yield self._stash, vector
        finally:
            vector[...] = self._stash
            self._engine.refresh()


def _numbered(batches: Sequence[Batch]) -> list[Batch]:
    """The same micro-batches, by the numbers that they have on this rank."""
    ordered = sorted(batches, key=lambda batch: batch[0])
    return [Batch(number, *rest) for number, (_, *rest) in enumerate(ordered)]


def _cause(problem: Exception | None) -> Exception | None:
    """What an engine's `StepFailed` came from, with its kind."""
    if problem is None:
        return None
    cause = problem.__cause__ if isinstance(problem, guard.StepFailed) and problem.__cause__ else problem
    return RuntimeError(f"{type(cause).__name__}: {cause}")
