"""Training loop: data, model and engine of `Settings`.

    for record in training.run():
        ...

The caller may save, print or stop between two steps; nothing is printed here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.checkpoint import checkpoint_files
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError
from parallel.checkpoint.tensor_slices import TensorSlice
from parallel.data import datasets
from parallel.data.datasets import LearningTask
from parallel.data.sampler import Batch, Dataset, OnDemandSampler, Sampler, StepBatches, prefetch
from parallel.data.work_queue import WorkQueue
from parallel.engine.memory_ledger import Workload
from parallel.engine.settings import NAMES, RUN_FIELDS, Settings
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import FlatParams
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.models import MODELS, build
from parallel.nn.operator import ArraySpec
from parallel.optim.lr_schedules import LRSchedule
from parallel.optim.optimizers import OPTIMIZERS, Optimizer
from parallel.optim.precision import PRECISIONS
from parallel.runtime import resources
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.step_report import Evaluation, StepReport
from parallel.runtime.validation import expect_integer, expect_mapping
from parallel.trainer.strategies import TrainJob, strategy_of

AT_ONCE = 16
"""Micro-batches of each worker that are tested before all of them say how far they are."""

BACKWARD = 2
"""A backward computes twice what its forward does. What is computed again for want of memory does not count."""

FLOOR = 0.1
"""Share of the highest rate that the schedule ends at."""


@dataclass(frozen=True)
class StepRecord:
    """One step as the loop saw it.

    Attributes
    ----------
    report : StepReport
        The engine's.
    epoch : int
        Which one the step belongs to, from 0.
    samples : int
        Of the step, over all ranks.
    seconds : float
        Since the step before it had ended, without what was done between the two: the step and waiting for its data.
    """

    report: StepReport
    epoch: int
    samples: int
    seconds: float

    @property
    def communication(self) -> float:
        """Seconds that this rank has spent in communication."""
        return self.report.communication

    def line(self) -> dict[str, Any]:
        """For a file of metrics; `TIMED` are the fields that differ from run to run."""
        report = self.report
        fields: dict[str, Any] = {
            "step": report.step + 1,
            "epoch": self.epoch,
            "loss": report.loss,
            "rate": report.rate,
        }
        fields |= {"norm": report.norm, "skipped": report.skipped, "samples": self.samples}
        return fields | {"seconds": self.seconds, "communication": self.communication}


TIMED = ("seconds", "communication")


@dataclass(frozen=True)
class EvalScore:
    """Test score: mean loss and, by kind of task, accuracy or bits per byte."""

    loss: float
    accuracy: float | None
    bits_per_byte: float | None

    @classmethod
    def of(cls, found: Evaluation, task: LearningTask) -> EvalScore:
        """An evaluation in the words of a task."""
        return cls(found.loss, found.measure, found.loss / math.log(2) if task.kind == "bytes" else None)

    def line(self) -> dict[str, Any]:
        """For a file of metrics."""
        fields = {"test_loss": self.loss, "test_accuracy": self.accuracy, "bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in fields.items() if value is not None}


def loss_of(task: LearningTask) -> Any:
    """The loss function."""
    return MSE() if task.kind == "values" else SoftmaxCrossEntropy()


def measure_of(task: LearningTask) -> Any:
    """Number of correct predictions, or None for regression."""
    return None if task.kind == "values" else SoftmaxCrossEntropy().correct


class _Spread:
    """So many samples of a data set, at even distances."""

    def __init__(self, data: Dataset, count: int):
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        return self._data.take(indices * len(self._data) // self._count)


class TrainingPlan:
    """Everything about a training that is known before its engine exists. The constructor is collective.

    Parameters
    ----------
    settings : Settings
        From `parallel.engine.settings.complete`.
    comm : Communicator
        Ranks that train together.

    Attributes
    ----------
    task : LearningTask
    settings, resolved : Settings
        As given, and with the fields decided that a layout leaves open (partition, compression).
    fault_tolerant : bool
        The training goes on after the death of a rank: the MPI and the strategy can. Only methods that are documented
        as collective may be called on all ranks then, and `MPI_Finalize` may not be waited for.
    sampler : Sampler
    steps : int
        Number of steps, with those before a restart.
    parameters : int
        Number of parameters of the model.
    flops_per_sample : float
    forecast : MemoryLedger
        Memory of this rank after all steps, computed from the settings alone.
    remarks : tuple of str
        Decisions that a user should see.

    Raises
    ------
    ValueError
        On all ranks, if the settings contradict each other or do not fit the ranks.
    """

    def __init__(self, settings: Settings, comm: Communicator):
        self._comm = comm
        self.task, model, optimizer = collective_call(
            comm, lambda: prepare(settings, comm.Get_size()), "this cannot be trained"
        )
        self._strategy = strategy = strategy_of(settings)
        self.fault_tolerant = settings.fault_tolerant and strategy.survives_failures
        self.settings = settings = replace(settings, fault_tolerant=self.fault_tolerant)
        self._optimizer = optimizer
        self._loss = loss_of(self.task)
        self._job = TrainJob(model, self._loss, comm, optimizer)
        data, ranks = self.task.train, comm.Get_size()
        take = lambda count: data.take(np.arange(count) % len(data))  # noqa: E731
        self.resolved, remarks = strategy.resolve(self._job, settings, take)
        self.sampler = _sampler(self.resolved, self.task, ranks)
        self.steps = steps_of(settings, self.task)
        self.parameters = sum(place.size for place in FlatParams(model).places)
        self.flops_per_sample = flops(model, self.task, settings.precision)
        workload = Workload(comm.Get_rank(), ranks, self._shapes, self.sampler.sizes(self.steps), settings.pool)
        self.forecast = strategy.forecast(self._job, self.resolved, workload)
        self.remarks = (*remarks, *self._idle(strategy.workers(self.resolved, ranks)))

    def _idle(self, workers: int) -> list[str]:
        """A remark if a step has fewer micro-batches than there are ranks, or pipelines, that share them."""
        parts = max(map(len, self.sampler.sizes(self.steps)), default=0)
        if not 0 < parts < workers:
            return []
        count = "micro-batch" if parts == 1 else "micro-batches"
        batch = f"a batch of {self.resolved.batch} is {parts} {count} of up to {self.sampler.micro_batch}"
        return [f"{workers - parts} of {workers} workers have nothing to do in a step: {batch}"]

    def _shapes(self, samples: int) -> tuple[ArraySpec, ArraySpec]:
        return specs(self.task, self.settings.precision, samples)


class Training(TrainingPlan):
    """A training that can be iterated, saved and resumed. The constructor is collective.

    Attributes
    ----------
    engine : TrainableEngine
        Of the strategy that `Settings.layout` names.

    Raises
    ------
    ValueError
        As `TrainingPlan`, and if the node has too little memory.
    """

    def __init__(self, settings: Settings, comm: Communicator):
        super().__init__(settings, comm)
        if self.settings.device == "cpu":
            resources.check_memory(comm, self.forecast.needed)
        self.engine = self._strategy.engine(self._job, self.resolved)
        self.remarks = (*self.remarks, *self.engine.remarks)
        self._pool = WorkQueue(comm) if self.settings.pool else None

    @property
    def is_reporter(self) -> bool:
        """True on the rank that reports progress: rank 0; of a fault-tolerant training, the first live worker."""
        return self.engine.is_reporter

    @property
    def done(self) -> int:
        """Steps that were made, those before a restart among them."""
        return self.engine.steps

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[StepRecord]:
        """Train up to the last step. Collective; all ranks iterate to the same end.

        Parameters
        ----------
        stop : callable
            Whether this rank wants to end: asked in every step, which is then the last one, on all ranks.

        Raises
        ------
        StepFailed, ParameterMismatch
            As `Engine.step`.
        """
        pool = self._pool
        batches: Iterator[Any] = prefetch(self._ahead()) if pool is None else self._drawn(pool)
        how = {} if pool is None else {"drawn": True}
        try:
            while self.done < self.steps:
                began = time.perf_counter()
                step, mine = next(batches)
                report = self.engine.step(mine, stop=stop(), **how)
                self.sampler.done(step)
                yield StepRecord(report, step.epoch, step.samples, time.perf_counter() - began)
                if report.stop:
                    break
            self.engine.quiesce()
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _ahead(self) -> Iterator[tuple[StepBatches, Sequence[Batch]]]:
        for step in self.sampler.ahead():
            if self._strategy.pulls_work:
                yield step, OnDemandSampler(step, self.task.train)
            else:
                yield step, list(step.batches(self.task.train, self.engine.share(len(step.parts))))

    def _drawn(self, pool: WorkQueue) -> Iterator[tuple[StepBatches, Iterator[Batch]]]:
        """A micro-batch is made when it was drawn, not in advance: that would deal work out before anyone is ready."""
        for step in self.sampler.ahead():
            yield step, step.batches(self.task.train, pool.draw(len(step.parts)))

    def score(self, most: int | None = None, tell: Callable[[int, int], None] = lambda done, count: None) -> EvalScore:
        """Put the model to the test. Collective.

        Parameters
        ----------
        most : int, optional
            On so many samples from all over the test set; by default on all of it.
        tell : callable (samples that were done, samples)
            Called on all ranks, now and then and at the end.
        """
        count = len(self.task.test) if most is None else min(most, len(self.task.test))
        spread = _Spread(self.task.test, count)
        sampler = Sampler(count, max(1, count), self.sampler.micro_batch, shuffle=False)
        parts = [part for step in sampler.steps(0) for part in step.parts]
        each = AT_ONCE * self._comm.Get_size()  # the same parts with every layout, so that means round alike
        found: list[Evaluation] = []
        for start in range(0, max(1, len(parts)), each):
            some = StepBatches(0, 0, tuple(parts[start : start + each]))
            mine = list(some.batches(spread, self.engine.share(len(some.parts))))
            found.append(self.engine.evaluate(mine, measure_of(self.task)))
            tell(sum(map(len, parts[: start + each])), count)
        return EvalScore.of(together_of(found), self.task)

    # ------------------------------------------------------------------------------------------ restart

    def save(self, directory: Path, *, keep: int = 3) -> Path:
        """Write a checkpoint after so many steps as were `done`: where it is. Collective; raises `CheckpointError`."""
        facts = {
            "settings": asdict(self.settings),
            "engine": self.engine.state(),
            "sampler": self.sampler.position(),
            "random": {"seed": self.settings.seed, "step": self.done},
            "optimizer": self._optimizer.describe(),
            "ranks": self._comm.Get_size(),
        }

        def write(comm: MPI.Intracomm, slices: Iterable[TensorSlice]) -> None:
            checkpoint_files.save(comm, directory, self.done, slices, facts, keep=keep)

        self.engine.save(write)
        return directory / checkpoint_files.name_of(self.done)

    def resume(self, found: Checkpoint) -> None:
        """Go on from a checkpoint, written on any number of ranks in any layout and precision. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if it is of another model, optimiser or data, before anything is changed.
        """
        for name in ("engine", "sampler"):
            if name not in found.facts:
                raise CheckpointError(f"{found.path} is no training's: it has no {name}")
        sampler = _sampler(self.settings, self.task, self._comm.Get_size())
        try:
            sampler.load(found.facts["sampler"])
        except ValueError as error:
            raise CheckpointError(f"{found.path} is of another training: {error}") from error
        self._expect_optimizer(found)
        found.fit(self.engine.tensor_slices())
        if found.step > self.steps:
            raise CheckpointError(
                f"{found.path}: {found.step} steps were made already, and this training is to have {self.steps}; "
                f"expected {found.step} or more, since steps and epochs count from the beginning"
            )
        try:
            if (steps := expect_integer(expect_mapping(found.facts["engine"], "state"), "steps")) != found.step:
                raise ValueError(f"steps: expected {found.step}, as the checkpoint's own, found {steps}")
            self.engine.load(found.facts["engine"])
        except ValueError as error:
            raise CheckpointError(f"{found.path} cannot be used: its engine's {error}") from error
        found.restore(self.engine.tensor_slices())
        self.sampler.load(found.facts["sampler"])
        self.engine.refresh()

    def _expect_optimizer(self, found: Checkpoint) -> None:
        """Raise CheckpointError if the optimiser that has made a checkpoint keeps other vectors than this one."""
        there = {name.split("/")[1] for name in found.entries if name.startswith("optimizer/")}
        here = set(self._optimizer.states())
        if there != here and self.engine.flat.places:
            before = found.facts.get("optimizer")
            name = before.get("name", "another one") if isinstance(before, dict) else "another one"
            kept = [", ".join(sorted(some)) or "none" for some in (there, here)]
            raise CheckpointError(
                f"{found.path} is of another optimiser: it was made by {name}, which keeps vectors {kept[0]}; this "
                f"training has {self._optimizer.describe()['name']}, which keeps {kept[1]}"
            )

    def close(self) -> None:
        """Give back what the engine and the pool hold. Collective."""
        self.engine.close()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # a rank that failed does not wait for the others
            self._pool = None
            self.engine.__exit__(kind, error, traceback)


def together_of(found: Sequence[Evaluation]) -> Evaluation:
    """The means over the targets of several evaluations.

    >>> together_of([Evaluation(1.0, 0.5, 2), Evaluation(4.0, 1.0, 1)])
    Evaluation(loss=2.0, measure=0.6666666666666666, count=3)
    """
    some = [one for one in found if one.count]
    if len(some) <= 1:
        return (some or list(found))[0]
    count = sum(one.count for one in some)
    loss = math.fsum(one.loss * one.count for one in some) / count
    measured = [one.measure * one.count for one in some if one.measure is not None]
    return Evaluation(loss, math.fsum(measured) / count if measured else None, count)


# ---------------------------------------------------------------------------------------------- from the settings


def prepare(settings: Settings, ranks: int) -> tuple[LearningTask, Sequential, Optimizer]:
    """Data, model and optimiser of complete settings.

    Raises
    ------
    ValueError
        If a setting has no meaning, or they do not fit each other; it names the setting.
    """
    check(settings, ranks)
    task = datasets.load(settings.data, seed=settings.seed, length=settings.length)
    family = settings.model.partition(":")[0]
    if (task.kind == "bytes") != (family == "gpt"):
        fits = "gpt" if task.kind == "bytes" else ", ".join(name for name in MODELS if name != "gpt")
        raise ValueError(f"model: {task.name} is for {fits}, found {settings.model}")
    if ranks > len(task.train):
        raise ValueError(f"more ranks ({ranks}) than samples ({len(task.train)}) in {task.name}")
    if task.kind != "bytes":
        task = _in_numbers(task)
    if family == "convnet" and len(task.inputs) == 2:
        task = _with_channel(task)
    options = {"dropout": settings.dropout, "recompute": settings.recompute}
    model = build(settings.model, task.inputs, task.outputs, **options)  # type: ignore[arg-type]
    return task, model, optimizer_of(settings, steps_of(settings, task))


def check(settings: Settings, ranks: int) -> None:
    """Raise ValueError for a setting out of range."""
    for name, table in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
        if getattr(settings, name) not in table:
            raise ValueError(f"{name}: expected one of {', '.join(table)}, found {getattr(settings, name)!r}")
    strategy_of(settings).check(settings, ranks)


def _in_numbers(task: LearningTask) -> LearningTask:
    parts = [datasets.ArrayDataset(part.x.astype(np.float32, copy=False), part.y) for part in (task.train, task.test)]  # type: ignore[attr-defined]
    return replace(task, train=parts[0], test=parts[1])


def _with_channel(task: LearningTask) -> LearningTask:
    parts = [datasets.ArrayDataset(part.x[:, None], part.y) for part in (task.train, task.test)]  # type: ignore[attr-defined]
    return LearningTask(task.name, parts[0], parts[1], task.kind, (1, *task.inputs), task.outputs)


def _sampler(settings: Settings, task: LearningTask, ranks: int) -> Sampler:
    workers = strategy_of(settings).workers(settings, ranks)
    return Sampler(len(task.train), settings.batch, settings.micro(workers), settings.seed)


def steps_of(settings: Settings, task: LearningTask) -> int:
    """Steps of the whole training."""
    if settings.steps is not None:
        return settings.steps
    return math.ceil(settings.epochs * -(-len(task.train) // settings.batch))


def optimizer_of(settings: Settings, steps: int) -> Optimizer:
    """The optimiser with its schedule."""
    rate, warm_up = settings.rate, min(settings.warm_up, steps)
    schedule = LRSchedule("warm_up_cosine", rate=rate, warm_up=warm_up, steps=steps, floor=FLOOR * rate)
    options = {"rate": schedule, "decay": settings.decay}
    options |= {"momentum": settings.momentum} if settings.optimizer == "sgd" else {"beta2": settings.beta2}
    return OPTIMIZERS[settings.optimizer](**options)  # type: ignore[arg-type]


def specs(task: LearningTask, precision: str, rows: int) -> tuple[ArraySpec, ArraySpec]:
    """Specs of inputs and targets of so many samples, in the engine's types."""
    kinds = PRECISIONS[precision].storage, PRECISIONS[precision].wide
    shown = task.train.take(np.zeros(1, np.int64))
    made = [
        ArraySpec((rows, *array.shape[1:]), array.dtype if array.dtype.kind in "iub" else kind)
        for array, kind in zip(shown, kinds)
    ]
    return made[0], made[1]


def flops(model: Sequential, task: LearningTask, precision: str) -> float:
    """Multiplications and additions of matrix products, forward and backward, for one sample."""
    return float((1 + BACKWARD) * model.outline(specs(task, precision, 1)[0]).flops)


def settings_in(found: Checkpoint) -> dict[str, Any]:
    """The settings of the training that a checkpoint is of; raises CheckpointError if they are none."""
    try:
        there = dict(expect_mapping(found.facts.get("settings"), "settings"))
        Settings(**{name: value for name, value in there.items() if name in NAMES})
    except ValueError as error:
        raise CheckpointError(f"{found.path} is no training's: {error}") from error
    return there


def changed(found: Checkpoint, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from those of the checkpoint: {name: (there, here)}."""
    there, here = settings_in(found), asdict(settings)
    names = [name for name in here if name not in RUN_FIELDS and there.get(name) != here[name]]
    return {name: (there.get(name), here[name]) for name in names}
