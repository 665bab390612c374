"""Training step of all synchronous engines: synchronise, forward, backward, sum of gradients, update."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, wraps
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import Mismatch, OutOfMemory
from parallel.checkpoint.tensor_slices import TensorSlice, taken_once
from parallel.data.sampler import Batch
from parallel.engine.data_parallel.error_feedback import ErrorFeedbackReducer
from parallel.engine.data_parallel.reducers import Assignment, StepScale
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.data_parallel.sharded_optimizer import ParamShard, ShardedOptimizer, copies
from parallel.engine.exchange_guard import PassErrors
from parallel.engine.fingerprint import Fingerprint
from parallel.engine.microbatch_pass import Measure, Prediction, counted_by
from parallel.engine.model_on_mesh import ModelOnMesh
from parallel.engine.model_ownership import ModelOwnership
from parallel.engine.operator_records import OperatorRecords
from parallel.engine.settings import Settings
from parallel.engine.step_sync import CheckedBatches, Losses, StepSync, checked, read_losses
from parallel.nn.flat_params import Span
from parallel.nn.kernels.deferred import deferred
from parallel.nn.operator import Operator, Parameter, PassMode, StateBuffer
from parallel.nn.own_arrays import changed_arrays
from parallel.nn.transforms.fake_quantized_input import MovingRanges, checked_ranges
from parallel.optim.optimizer import Optimizer
from parallel.optim.param_groups import RateClock, checked_missed, frozen_of
from parallel.runtime import consistency_check
from parallel.runtime.collective_errors import is_shared, written
from parallel.runtime.consistency_check import Facts
from parallel.runtime.left_windows import free_left
from parallel.runtime.meeting_point import MeetingPoint
from parallel.runtime.profiler import Profiler, ProfilerEvent
from parallel.runtime.signals import held
from parallel.runtime.step_report import Evaluation, StepReport, in_units
from parallel.runtime.validation import expect_integer, expect_mapping
from parallel.runtime.vector_memory import PoolLimit
from quant.types import Array


class PassResult(NamedTuple):
    """Results on this rank of the forward (and backward) passes of a step or evaluation: losses, error, metric sum."""

    losses: Losses
    problem: BaseException | None
    measured: float = 0.0


def frees_on_error(construct: Callable[..., None]) -> Callable[..., None]:
    """Decorator of an engine's constructor: after an error, resources that it has are freed on this rank.

    An interrupt takes effect at its end, when the other ranks do not wait for this one any more.
    """

    @wraps(construct)
    def constructor(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            with held():
                construct(self, *arguments, **options)
        except BaseException:
            with suppress(Mismatch):  # messages of the others may be unread
                self.resources.close()
            raise

    return constructor


class BaseEngine:
    """Base class of all training engines: the interface that a training loop uses; `remarks` are lines for the log."""

    buffers: Mapping[str, StateBuffer] = MappingProxyType({})  # of all ranks' operators, by name
    settings: Settings
    remarks: Sequence[str] = ()
    parameters: Sequence[Parameter]  # logical ones of the whole model, also those that this rank has no part of
    point: MeetingPoint
    _comm: Communicator
    _recorder: Profiler

    @cached_property
    def resources(self) -> ExitStack:
        """Functions that free resources of this rank, without a wait for others, in the order of the resources."""
        return ExitStack()

    def share(self, micro_batches: int) -> Sequence[int]:
        """Numbers of the micro-batches of this rank, of `micro_batches` in a step over all ranks."""
        raise NotImplementedError

    def train_share(self, micro_batches: int) -> Sequence[int]:
        """As `share`, of a training step: shares of the ranks may overlap there (`Settings.overlap`)."""
        return self.share(micro_batches)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Yield this rank's slices of the parameters and the optimizer state, in a fixed order."""
        raise NotImplementedError

    def save(self, write: Callable[[MPI.Intracomm, Iterator[TensorSlice]], Any]) -> Any:
        """Call ``write(comm of the ranks that hold state, slices of this rank)``; return its result. Collective.

        An error of `write` on one rank is raised on all ranks, once the others have returned from it.
        """
        return written(self._comm, write, self.tensor_slices())

    def weight_slices(self) -> Iterator[TensorSlice]:
        """As `tensor_slices`, to write weights into: the optimizer state is that of this rank, unchanged."""
        return self.tensor_slices()

    def read(self, take: Callable[[MPI.Intracomm, Iterator[TensorSlice]], Any]) -> Any:
        """As `save`, for the weights alone; the training is unchanged. Collective."""
        return self.save(take)

    def quiesce(self) -> None:
        """Wait until all ranks have finished the same number of steps; a no-op for engines with synchronous steps."""

    @property
    def is_reporter(self) -> bool:
        return self._comm.Get_rank() == 0

    @property
    def events(self) -> list[ProfilerEvent]:
        """Profiler events since the list was last cleared; empty unless `settings.trace`."""
        return self._recorder.events

    def close(self) -> None:
        """Free the engine's MPI requests and memory, parameter values too; it cannot be used afterwards. Collective."""
        raise NotImplementedError

    def meet(self, call: str) -> None:
        """Wait until all ranks make this call, one of `meeting_point.CALLS`; `RankLeft` if a rank has left."""
        self.point.meet(call)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Context of a call in which all ranks take part, one of `meeting_point.CALLS`; RankLeft if a rank has left.

        None waits for one that is interrupted; the call itself exchanges errors.
        """
        self.meet(name)
        with self.point.taking_part(reports_errors=False):
            yield

    def leave(self, error: BaseException | None) -> bool:
        """Leave the engine by an exception, or None; True if all ranks do. Else the others have a notice of it."""
        if error is None or is_shared(error):
            return True
        self.point.leave("the engine", error)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.leave(error):
            self.close()
        else:  # a rank that failed does not wait for the others, whose messages may be unread
            with suppress(Mismatch):
                self.resources.close()


class TrainEngine(BaseEngine):
    """Base class of engines with synchronous steps: all ranks take part in each step.

    `context` is of the whole vector and all ranks, `parts` are this rank's shards. `spans` are those that each rank
    adds to norms and writes to checkpoints; together they make up the vector. `teams` are ranks that have the same
    micro-batches; by default each rank has its own. `on_mesh`, of an engine whose model is cut, has all ranks: those of
    `context` then hold the same shards. `steps` counts skipped steps too, `updates` does not.
    """

    _unchanged = consistency_check.NOTHING
    _ownership: ModelOwnership
    _fingerprint: Fingerprint
    leaves_values = False
    """True if `close` leaves the model its values."""

    def __init__(
        self,
        context: RunContext,
        parts: Sequence[ParamShard],
        spans: Sequence[Sequence[Span]],
        loss: Any,
        optimizer: Optimizer,
        settings: Settings,
        teams: Sequence[Sequence[int]] | None = None,
        on_mesh: ModelOnMesh | None = None,
    ):
        teams = teams or [[rank] for rank in range(context.plan.ranks)]
        self.context, self._recorder = context, context.recorder
        self._comm = context.comm if on_mesh is None else on_mesh.comm
        self._counts = on_mesh is None or on_mesh.counts
        self._errors = PassErrors() if on_mesh is None else on_mesh.errors
        self._axis = None if on_mesh is None else on_mesh.axis
        self._shares_experts = on_mesh is not None and on_mesh.experts is not None
        self.parameters = [one.parameter for one in context.flat.places] if on_mesh is None else on_mesh.parameters
        self._parts, self._loss, self._optimizer = parts, loss, optimizer
        self.settings, self._workers = settings, len(teams)
        self.point = MeetingPoint(self._comm)
        self.resources.callback(self.point.leave, "the engine's constructor")  # no-op after any other end
        self._sync = StepSync(context, self._comm, self.point, teams, self._fingerprint)
        blocks, clip = None if on_mesh is None else on_mesh.blocks, settings.clip or None
        self._sharded = ShardedOptimizer(context, parts, spans, optimizer, settings.seed, clip, blocks)
        self.flat, self.pieces, self.scaling = context.flat, self._sharded.pieces, self._sharded.scaling
        self._hold_parameters()
        self.steps = self.updates = 0
        self._known_kinds: set[tuple[Any, ...]] = set()
        self._ranges = MovingRanges(context.plan.units)
        self._records = OperatorRecords(context.plan.units, self._comm)
        self.buffers = self._records.buffers
        self._runs: list[PassMode] = []  # of this step's micro-batches
        self._own_counts: list[float] = []  # numbers of targets of this step's micro-batches
        self._rates, self._own_groups = RateClock(0), optimizer.groups
        self._clock_problem: BaseException | None = None
        self._pool = PoolLimit(self._comm, context.memory.xp)
        self.resources.callback(self._pool.remove)

    def _hold_parameters(self) -> None:
        """Take the values of all logical parameters and shards; those that are not in memory have none."""
        bound = {place.parameter for part in self._parts for place in part.copied}
        held = {place.parameter for part in self._parts for place in part.context.flat.places}
        for parameter in {*self.parameters, *held} - bound:
            parameter.bind(None)

    # ------------------------------------------------------------------------------------------ methods of each engine

    def _foresee(self, mine: list[Batch]) -> None:
        """Hook of subclasses: raise an error, before communication, if this rank's micro-batches are invalid."""

    def _passes(self, mine: list[Batch], assignment: Assignment, step_scale: StepScale) -> PassResult:
        """Run forward and backward on this rank's micro-batches `mine` and sum gradients over the ranks."""
        raise NotImplementedError

    def _scores(self, mine: list[Batch], assignment: Assignment, measure: Measure | None) -> PassResult:
        """Run forward passes in evaluation mode (no dropout) on this rank's micro-batches `mine`."""
        raise NotImplementedError

    @property
    def _clock(self) -> int:
        """Step count used by the learning-rate schedule: steps with an update; asynchronous ones before had several."""
        return min(self.steps, self.updates)

    # ------------------------------------------------------------------------------------------ training

    def step(self, batches: Iterable[Batch], *, stop: bool = False) -> StepReport:
        """Run one training step: forward, backward, at most one update from the micro-batches of all ranks. Collective.

        `batches`, or tuples like them, are this rank's, perhaps none; `share` gives their numbers. If no rank has a
        target, nothing is updated. With `stop` on any rank, as after Ctrl-C, the reports of all ranks have it.

        Raises
        ------
        ValueError
            On all ranks, if the numbers of their micro-batches are not those from 0 on, each once.
        StepFailed
            On all ranks, if one has raised an exception or found a loss or gradient that is not finite; the message
            begins with what was updated, normally nothing. In fp16 such a gradient skips the step, unless too many
            steps in a row were skipped at the lowest loss scale.
        ParameterMismatch
            On all ranks, after the update, if parameters that should be the same are not (`settings.check_every`).
        """
        return self._step(lambda scale: self._assigned(batches, stop, scale))

    def _assigned(self, batches: Iterable[Batch], stop: bool, scale: float) -> tuple[float, bool, PassResult]:
        """Synchronise and run the passes of given micro-batches; return (number of targets, stop flag, result)."""
        given = self._checked(batches)
        self._own_counts = given.counts
        assignment, count, stop = self._sync.begin(*self._timed(given), stop)
        return count, stop, self._passes(given.mine, assignment, StepScale(self.steps, count, scale))

    def _timed(self, given: CheckedBatches) -> tuple[CheckedBatches, Facts]:
        """Micro-batches of a training step, and facts of its time that must be equal on all ranks."""
        given = given._replace(problem=self._clock_problem or given.problem)
        moment: list[tuple[str, Any]] = [("steps", self.steps), ("updates", self.updates)]
        moment += [("learning rates", self._rates.known), ("loss scale", self.scaling.value)]
        if self._axis is not None and self._axis.size > 1:  # for hooks, ranks exchange gradients
            hooks = {one.name: len(one.hooks) for one in self.parameters if one.hooks}
            moment.append(("numbers of gradient hooks", hooks))
        return given, moment

    def _step(self, run: Callable[[float], tuple[float, bool, PassResult]]) -> StepReport:
        """Run one step; if it makes no update, the state of compression is that from before it.

        ``run(loss scale)`` does forward and backward and returns (number of targets, stop, result).
        """
        updates = self.updates
        try:
            with self.point.taking_part(), self._sharded.passes():
                return self._stepped(run)
        except consistency_check.StepFailed:
            self._pool.free_unused()  # perhaps another rank of the GPU had no memory
            raise
        finally:
            self._runs.clear()
            for reducer in self._compressed():
                reducer.end_step(applied=self.updates > updates)

    def _stepped(self, run: Callable[[float], tuple[float, bool, PassResult]]) -> StepReport:
        began, spent = time.perf_counter(), self._recorder.seconds["communication"]
        scale = self.scaling.value
        self._set_rates()
        self._sharded.begin()
        with np.errstate(over="ignore", invalid="ignore"), deferred() as numbers:  # found below, on all ranks together
            try:
                count, stop, (losses, problem, _) = run(scale)
            except OutOfMemory as error:  # on all ranks: of a request, made in the first pass
                raise consistency_check.StepFailed(f"{consistency_check.NOTHING}; {error}") from error
        problem = self._errors.take() or problem or changed_arrays(self._runs)
        losses, problem = read_losses(numbers, losses if self._counts else [], problem)
        total = self._sync.losses(losses, problem, self.steps, self._unchanged)
        loss = total / count if count else math.nan
        norm, finite = self._update(count) if count else (None, False)
        self._ranges.end_step(self._runs, self._comm)
        noted = self._records.end_step(self._runs, self._counts, self._comm, count, finite)
        step, self.steps = self.steps, self.steps + 1
        if (every := self.settings.check_every) and self.steps % every == 0:
            consistency_check.compare_copies(copies(self._parts, self._axis), step, self._comm)
        seconds, communication = time.perf_counter() - began, self._recorder.seconds["communication"] - spent
        rate, count = self._rates.known[0], in_units(count)
        return StepReport(step, loss, count, norm, not finite, scale, rate, stop, seconds, communication, *noted)

    def _set_rates(self) -> None:
        """Call the schedules of this step; an error is exchanged at its beginning."""
        self._rates, self._clock_problem = RateClock(self._clock, known=(math.nan,)), None
        try:
            if self._own_groups is not self._optimizer.groups:  # assigned since the last step
                self._optimizer.check(self.parameters)
                self._own_groups = self._optimizer.groups
            self._rates = self._optimizer.clock_at(self._clock)
        except BaseException as error:
            self._clock_problem = error

    def _update(self, count: float) -> tuple[float | None, bool]:
        """Update weights by gradients of `count` targets; return (gradient norm, False if not finite: no update)."""
        norm, factor, finite = self._sharded.norm(count, self.steps, self._comm)
        if finite:
            self._sharded.update(self.updates, factor, self._rates)
            self._count_updates(1)
        return norm, finite

    def _count_updates(self, updates: int) -> None:
        self.updates += updates
        self._sharded.missed.count(frozen_of(self.parameters), updates)

    def evaluate(self, batches: Sequence[Batch], measure: Measure | None = None) -> Evaluation:
        """Evaluate without training: mean over all ranks' targets of loss and `measure(scores, targets)`. Collective.

        `measure` is summed over all batches, such as the number of correct predictions; this rank may have no batches.
        """
        with self.point.taking_part():
            return self._evaluated(batches, measure)

    def _evaluated(self, batches: Sequence[Batch], measure: Measure | None) -> Evaluation:
        given = self._checked(batches, measure)
        moment = [("steps", self.steps), ("updates", self.updates)]
        assignment, count, _ = self._sync.begin(given, moment, call="evaluate")
        with deferred() as numbers, self._sharded.passes():
            losses, problem, measured = self._scores(given.mine, assignment, measure)
        losses, problem = read_losses(numbers, losses if self._counts else [], self._errors.take() or problem)
        loss = self._sync.losses(losses, problem, self.steps)
        if isinstance(measure, Prediction) and not self._counts:
            measure.drop()
        if measure:
            measured = self._comm.allreduce(measured if self._counts else 0.0)
        if not count:
            return Evaluation(math.nan, math.nan if measure else None, 0)
        # Divided rather than multiplied by 1 / count, so that all engines round alike.
        return Evaluation(loss / count, measured / count if measure else None, in_units(count))

    def _checked(self, batches: Iterable[Batch], measure: Measure | None = None) -> CheckedBatches:
        loss = counted_by(self._loss, measure)
        found = checked(batches, self.context.memory.xp, loss, self._sync.compares_batches)
        try:
            self._foresee(found.mine)
        except BaseException as error:
            found = found._replace(problem=found.problem or error)
        return found

    def _is_new(self, kind: tuple[Any, ...]) -> bool:
        """True on the first call with this key (such as batch shapes), which is then remembered."""
        known = kind in self._known_kinds
        self._known_kinds.add(kind)
        return not known

    def _run(self, batch: Batch, training: bool) -> PassMode:
        run = self._mode(batch, training)
        if training:
            self._runs.append(run)
        return run

    def _mode(self, batch: Batch, training: bool) -> PassMode:
        passes = self._sync.largest if self._shares_experts and not training else 0
        scale, number = self.scaling.value, batch.number
        return PassMode(training, self.settings.seed, self.steps, batch.samples, scale, passes, number=number)

    def _typed(self, batch: Batch) -> tuple[Array, Array]:
        x, y = batch.x, batch.y
        storage, wide = type_of(x, self.context.storage), type_of(y, self.context.wide)
        return x.astype(storage, copy=False), y.astype(wide, copy=False)

    # ------------------------------------------------------------------------------------------ state

    def take_changes(self) -> None:
        """Take weights that a user has changed since the last update, before others are written into them."""
        self._sharded.take_changes()

    def _compressed(self) -> list[ErrorFeedbackReducer]:
        """Reducers of this rank that compress gradients."""
        whole = [part for part in self._parts if part.context.plan.compress is not None]
        return [reducer for part in whole for reducer in part.gradients.reducers]

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Yield slices of weights and optimizer state, then of buffers and of the state of compression."""
        yield from taken_once(self._sharded.tensor_slices(), self._axis)
        yield from self._records.tensor_slices(self._comm.Get_rank() == 0)
        for reducer in self._compressed():
            yield from taken_once(reducer.tensor_slices(), self._axis)

    def gradient_slices(self) -> Iterator[TensorSlice]:
        """Yield this rank's slices of the gradients of the last step: sums over targets, times the loss scale."""
        yield from taken_once(self._sharded.gradient_slices(), self._axis)

    def refresh(self) -> None:
        """Apply values written into the arrays of `tensor_slices`, as after loading a checkpoint. Collective."""
        self._sharded.refresh()

    def state(self) -> dict[str, Any]:
        """State to save besides the tensor slices, equal on all ranks: steps, updates, loss scale, moving ranges.

        If parameters were frozen, also the updates that they have missed.
        """
        state = {"steps": self.steps, "updates": self.updates, "scaling": self.scaling.state()}
        state |= {"ranges": self._ranges.state()} if self._ranges else {}
        return state | ({"missed": self._sharded.missed.state()} if self._sharded.missed else {})

    def load(self, state: dict[str, Any]) -> None:
        """Restore the counters and loss scale that `state` returned; ValueError, with nothing changed, if invalid."""
        values = expect_mapping(state, "state")
        steps, updates = expect_integer(values, "steps"), expect_integer(values, "updates")
        ranges = checked_ranges(values.get("ranges", {}))
        missed = checked_missed(values.get("missed", {}), self.parameters, updates)
        self.scaling.load(values.get("scaling", {}))
        self.steps, self.updates = steps, updates
        self._ranges.load(ranges)
        self._sharded.missed.load(missed, self.parameters)

    def _own(self, comm: Communicator, model: Operator, settings: Settings) -> None:
        """Take the parameters of a model, until the resources are freed. Collective."""
        self._ownership = ModelOwnership(comm, model, settings.layout)
        self.resources.callback(self._ownership.release)

    def _begin_ownership(self, comm: Communicator) -> None:
        """Own the parameters, which have their values now, and leave them these if all ranks have them. Collective."""
        self._ownership.begin()
        self.leaves_values = self._ownership.is_whole(comm)

    def close(self) -> None:
        """Free the engine's MPI requests and memory; it cannot be used afterwards. Collective.

        Parameters keep their values if all ranks have all of them: with replicated weights, and operators that are not
        cut. A rank that has left the engine frees what is its own.
        """
        if self.point.is_open:
            self.meet("close")
            self.point.free()
            self.keep_values()
        self.resources.close()

    def keep_values(self) -> None:
        """Copy the values that `close` is to leave the model, if it leaves any; once, as memory may be freed then."""
        if self.leaves_values:
            self._ownership.keep()
            self.leaves_values = False


def check(comm: Any, settings: Settings) -> None:
    """Check types, and that settings are equal on all ranks (`Settings.shared`). Collective.

    Afterwards what depends on settings alone raises on all ranks or on none.
    """
    if not isinstance(comm, Communicator):
        raise TypeError(f"comm: expected a collectives.Communicator, found {comm!r}")
    if not isinstance(settings, Settings):
        raise TypeError(f"settings: expected parallel.engine.settings.Settings, found {settings!r}")
    consistency_check.check_equal(comm, list(settings.shared().items()))
    free_left(comm)


def type_of(array: Array, dtype: np.dtype) -> np.dtype:
    """Dtype to cast a batch's array to: `dtype`, but integers and bools keep their own."""
    return array.dtype if array.dtype.kind in "iub" else dtype
