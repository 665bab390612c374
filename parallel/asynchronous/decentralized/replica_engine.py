"""Engine of decentralised training: each rank trains its own replica, then exchanges weights by an averaging style."""

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.asynchronous.decentralized.averaging_style import ReplicaSums
from parallel.asynchronous.decentralized.styles import STYLES, refuse
from parallel.checkpoint.tensor_slices import TensorSlice, tensor_slices
from parallel.data.sampler import Batch, batch_of, overlapping
from parallel.engine.base import BaseEngine, check, frees_on_error
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.fingerprint import agreed
from parallel.engine.memory_ledger import MemoryLedger, Workload
from parallel.engine.model_on_mesh import plan_of
from parallel.engine.model_ownership import expect_free
from parallel.engine.operator_records import refuse_buffers
from parallel.engine.settings import Settings
from parallel.nn.flat_params import Span, shards
from parallel.nn.operator import Operator
from parallel.optim.optimizer import EMA, Optimizer
from parallel.runtime.collective_errors import describe, raise_on_all, written
from parallel.runtime.consistency_check import StepFailed
from parallel.runtime.step_report import Evaluation, StepReport, in_units
from quant.types import Array

OWN = "dp-naive"  # layout of the single-rank engine


class LocalEngine(DataParallelEngine):
    """Single-rank engine of a replica.

    The learning rate follows the step, equal on all replicas, not the updates: a replica without samples makes fewer.
    """

    @property
    def _clock(self) -> int:
        return self.steps


class ReplicaEngine(BaseEngine):
    """Engine of decentralised training, with a replica on every rank of a communicator. Construction is collective.

    A step consists of forward, backward and update with the rank's own micro-batches, and of the style's exchange.
    Optimizer state is not exchanged. `evaluate`, `consensus`, `state`, `tensor_slices`, `refresh` and `close` are
    collective.

    Parameters
    ----------
    model, loss, comm, optimizer : see `DataParallelEngine`
    settings : `layout` is a key of `parallel.asynchronous.decentralized.styles.STYLES`. `clip` limits the norm of the
    rank's own
        gradient. `reproducible` and `check_every` are refused.

    Attributes
    ----------
    steps, updates : steps of this rank, and updates of its replica
    flat, ledger : see `DataParallelEngine`

    Raises
    ------
    ValueError
        On all ranks, if a setting is invalid or the style does not support these ranks.
    RankMismatch
        On all ranks, if their models or settings differ.
    """

    _engine_class: type[DataParallelEngine] = LocalEngine

    @frees_on_error
    def __init__(
        self, model: Operator, loss: Any, comm: Communicator, optimizer: Optimizer, settings: Settings
    ) -> None:
        check(comm, settings)
        refuse(settings, comm.Get_size())
        refuse_buffers(model, settings.layout)
        expect_free(comm, model)
        self._fingerprint = agreed(comm, model, loss, optimizer, settings.seed)
        self.settings, self._comm, entry = settings, comm, STYLES[settings.layout]
        self._alone = Communicator(MPI.COMM_SELF, shared=False)
        self.resources.callback(self._alone.close)
        memory = entry.memory(comm, settings.device)
        self.resources.callback(memory.leave)
        self._engine = self._engine_class(
            model, loss, self._alone, optimizer, replace(settings, layout=OWN), memory=memory
        )
        self.resources.callback(self._engine.close)
        self._engine._ownership.name(settings.layout)
        self.remarks, self.parameters = self._engine.remarks, self._engine.parameters
        self.flat, self.ledger, self.steps = self._engine.flat, self._engine.ledger, 0
        self._recorder = self._engine.context.recorder
        vector = self._stash = memory.private("parameters", 0, self._engine.context.wide)
        for piece in self._engine.pieces:  # none if there are no parameters
            vector, self._stash = piece.weights, piece.gradient  # the gradient is used within a step only
        if entry.shares_weights:
            self._make_read_only()
        self.style = entry.make(replace(self._engine.context, comm=comm), vector, settings)
        self.point = self.style.point
        self.resources.callback(self.point.leave, "the engine's constructor")
        self.ledger.expect(Counter(buffers=entry.buffers(vector.nbytes, settings)), part=settings.layout)
        self._problem: BaseException | None = None
        self._is_closed = self._shows_average = False
        self.style.begin()

    def _make_read_only(self) -> None:
        """Refuse changes of `Parameter.data`: made on all ranks, each would count once for every rank."""
        for parameter in self.parameters:
            values = parameter.data.view()
            values.flags.writeable = False
            parameter.bind(values)

    @classmethod
    def forecast(
        cls, model: Operator, loss: Any, optimizer: Optimizer, workload: Workload, settings: Settings
    ) -> MemoryLedger:
        """Forecast of this rank's memory: a single-rank `DataParallelEngine` and the averaging style's buffers."""
        alone, own = replace(settings, layout=OWN), cls._own_steps(workload, settings)
        ledger = DataParallelEngine.forecast(
            model, loss, optimizer, workload._replace(rank=0, ranks=1, steps=own), alone
        )
        plan = plan_of(model, 1, 0, alone)
        buffers = STYLES[settings.layout].buffers(plan.flat.length * plan.precision.wide.itemsize, settings)
        ledger.expect(Counter(buffers=buffers), part=settings.layout)
        return ledger

    @classmethod
    def _own_steps(cls, workload: Workload, settings: Settings) -> list[tuple[int, ...]]:
        """Sizes of the micro-batches on the workload's rank in each kind of step."""
        rank, ranks, overlap = workload.rank, workload.ranks, settings.overlap or 0
        return [tuple(step[at] for at in overlapping(len(step), rank, ranks, overlap)) for step in workload.steps]

    def share(self, micro_batches: int) -> range:
        return LAYOUTS["dp"].share(micro_batches, self._comm.Get_rank(), self._comm.Get_size())

    def train_share(self, micro_batches: int) -> Sequence[int]:
        overlap = self.settings.overlap or 0
        return overlapping(micro_batches, self._comm.Get_rank(), self._comm.Get_size(), overlap)

    def step(self, batches: Sequence[Batch], *, stop: bool = False) -> StepReport:
        """Update the replica with this rank's micro-batches, if any, and exchange weights. Returns the step's report.

        Loss, count and norm of the report are this rank's own. After an average, loss and count cover the ranks that
        averaged. A request to stop is reported on all ranks after the same step, some steps later.

        Raises
        ------
        StepFailed
            On all ranks after the same step, if one of them raised an exception some steps ago, or had a loss or
            gradient that is not finite. From then on that rank makes no updates.
        """
        began, spent = time.perf_counter(), self._recorder.seconds["communication"]
        self.style.begin_step()
        self._take_changes()
        report = self._own(batches)
        step, self.steps = self.steps, self.steps + 1
        mine = ReplicaSums(report.loss * report.count if report.count else 0.0, report.count)
        with self.point.taking_part(reports_errors=False, meets=False):
            with self._recorder("communication", "mix"):
                if stop or self._problem is not None:
                    self.style.request_stop(step)
                sums = self.style.mix(step, mine)
            stops = self.style.last <= step
            if stops:
                self.style.finish()
            self._engine.refresh()
            if stops:
                self._raise_failures()
        return replace(
            report,
            step=step,
            loss=sums.loss / sums.targets if sums.targets else math.nan,
            count=in_units(sums.targets),
            stop=stops,
            seconds=time.perf_counter() - began,
            communication=self._recorder.seconds["communication"] - spent,
        )

    def evaluate(self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None = None) -> Evaluation:
        """Evaluate the mean of all replicas on all ranks' batches, see `TrainEngine.evaluate`. Replicas are unchanged.

        But messages in flight (sgp with `tau`) are received first, so the training differs from one without
        evaluation.
        """
        self._raise_failures()
        found = Evaluation(0.0, 0.0, 0)
        problem: BaseException | None = None
        with self._averaged():
            try:
                found = self._engine.evaluate(_numbered(batches), measure)
            except BaseException as error:
                problem = error
        raise_on_all(self._comm, _cause(problem), "the model was not tested", StepFailed)
        sums = np.array([found.loss, found.measure or 0.0, 1.0]) * found.count if found.count else np.zeros(3)
        self._comm.Allreduce(MPI.IN_PLACE, sums)
        loss, measured = (sums[:2] / sums[2]).tolist() if sums[2] else (math.nan, math.nan)
        return Evaluation(loss, None if measure is None else measured, in_units(float(sums[2])))

    def quiesce(self) -> None:
        """Raise StepFailed on all ranks, after the same step, if one of them has failed. Collective."""
        self._raise_failures()

    def consensus(self) -> float:
        """Root mean square over ranks of the distance between replica and mean of all replicas. Collective."""
        with self.call("consensus"):
            with self._averaged() as (own, mean):
                squares = float(((own - mean) ** 2).sum(dtype=np.float64))
            return float(np.sqrt(self._comm.allreduce(squares) / self._comm.Get_size()))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Slices for a checkpoint. First averages replicas and optimizer states.

        All ranks continue from the average.
        """
        pieces = self.weight_slices()
        for piece in self._engine.pieces:
            for vector in piece.state.values():
                self._comm.Allreduce(MPI.IN_PLACE, vector)
                vector /= self._comm.Get_size()
        return pieces

    def weight_slices(self) -> Iterator[TensorSlice]:
        """Slices to write weights into, and optimizer states of this rank. First averages replicas."""
        self._raise_failures()
        self._take_changes()
        self.style.average_all(ReplicaSums(0.0, 0))
        self._engine.refresh()
        return self._slices()

    def read(self, take: Callable[[MPI.Intracomm, Iterator[TensorSlice]], Any]) -> Any:
        """Call `take` with slices of the mean of all replicas, like `save`. The replicas are unchanged."""
        self._raise_failures()
        with self._averaged():
            taken = written(self._comm, take, self._slices())
        self.style.drain()  # no rank trains on while another restores weights that they share
        return taken

    def _slices(self) -> Iterator[TensorSlice]:
        """This rank's part of the slices of weights and optimizer state. All ranks have the same state."""
        mine = shards(Span(0, self.flat.length), self._comm.Get_size())[self._comm.Get_rank()]
        return tensor_slices(self._engine.pieces, [mine])

    def _take_changes(self) -> None:
        """Train on from weights that a user has changed since the last step."""
        self._engine.take_changes()
        self.style.take_changes()

    def refresh(self) -> None:
        self._engine.refresh()
        self.style.begin()

    def state(self) -> dict[str, Any]:
        """Engine state for a checkpoint, from the rank with the most updates. All ranks continue from it."""
        self._engine.load(max(self._comm.allgather(self._engine.state()), key=lambda state: state["updates"]))
        return self._engine.state()

    def load(self, state: dict[str, Any]) -> None:
        self._engine.load(state)
        self.steps = self._engine.steps

    @property
    def updates(self) -> int:
        return self._engine.updates

    def close(self) -> None:
        """Free all resources. The model keeps the mean of the replicas, or after an exception this rank's weights."""
        if self._is_closed:
            return
        self._is_closed = True
        if sys.exception() is None:
            with self.call("close"):
                self._take_changes()
                self.style.drain()
                self.style.mean(self.style.vector)
                self._engine.refresh()
                self._engine.keep_values()
            self.style.close()
            self.point.free()
        else:  # a rank that failed does not wait for the others
            self._engine.leaves_values = False
            self.style.abandon()
        self.resources.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.leave(error)
        self.close()

    def _own(self, batches: Sequence[Batch]) -> StepReport:
        """Train this rank's replica for a step. Nothing after a failure, so that exchanges continue."""
        if self._problem is None:
            try:
                return self._engine.step(_numbered(batches))
            except BaseException as error:
                self._problem = error
        self._engine.steps += 1
        scale = self._engine.scaling.value
        return StepReport(self.steps, math.nan, 0, None, True, scale, math.nan, False, 0.0, 0.0)

    def _raise_failures(self) -> None:
        self.meet("failures")
        problem, self._problem = self._problem, None
        raise_on_all(self._comm, _cause(problem), "a rank has failed", StepFailed)
        self._fingerprint.compare(self._comm)

    @contextlib.contextmanager
    def moving_average(self) -> Iterator[None]:
        """Context in which the mean of all replicas is the mean of their moving averages."""
        self._shows_average = True
        try:
            yield
        finally:
            self._shows_average = False

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[tuple[Array, Array]]:
        """Context in which the mean of all replicas replaces this rank's. Yields (replica, mean). Collective."""
        self._take_changes()
        self.style.drain()
        vector, self._stash[...] = self.style.vector, self.style.vector
        if self._shows_average:  # a replica without updates has its weights
            self.style.show_mean(next((one.state[EMA] for one in self._engine.pieces if self.updates), vector))
        else:
            self.style.mean(vector)
        self._engine.refresh()
        try:
            yield self._stash, vector
        finally:
            if self._shows_average:
                self.style.drain()
            vector[...] = self._stash
            self._engine.refresh()


def _numbered(batches: Sequence[Batch]) -> list[Batch]:
    ordered = sorted((batch_of(some, at) for at, some in enumerate(batches)), key=lambda batch: batch.number)
    return [Batch(number, *rest) for number, (_, *rest) in enumerate(ordered)]


def _cause(problem: BaseException | None) -> BaseException | None:
    """RuntimeError that names an exception's type and text, or, for a `StepFailed`, its cause's type and text.

    None for None.

    SystemExit and similar exceptions are returned unchanged.
    """
    if not isinstance(problem, Exception):
        return problem
    cause = problem.__cause__ if isinstance(problem, StepFailed) and problem.__cause__ else problem
    named = RuntimeError(f"{type(cause).__name__}: {describe(cause)}")
    named.__cause__ = cause
    return named
