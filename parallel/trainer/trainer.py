"""A training from its settings to its last step: data, model and engine put together, and the loop around them.

    for record in training.run():
        ...

Whoever iterates sees every step, and may save, show or end between two of them; nothing is printed here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from parallel.checkpoint import checkpoint_files as checkpoint
from parallel.data import datasets
from parallel.runtime import resources as machine
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError
from parallel.data.sampler import Batch, Dataset, OnDemand, Sampler, Step, prefetch
from parallel.data.datasets import Task
from parallel.runtime.validation import named, whole
from parallel.nn.compose import Sequential
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.models import MODELS, build
from parallel.nn.operator import Spec
from parallel.optim.optimizers import OPTIMIZERS, Optimizer
from parallel.data.work_queue import Pool
from parallel.optim.precision import PRECISIONS
from parallel.runtime.step_report import Evaluation, Report
from parallel.optim.lr_schedules import Schedule
from parallel.settings import NAMES, Settings
from parallel.checkpoint.tensor_slices import Stretch
from parallel.runtime.collective_errors import together
from parallel.ways import Job, way_of

BACKWARD = 2
"""A backward computes twice what its forward does. What is computed again for want of memory does not count."""

FLOOR = 0.1
"""Share of the highest rate that the schedule ends at."""


@dataclass(frozen=True)
class Record:
    """One step as the loop saw it.

    Attributes
    ----------
    report : Report
        The engine's.
    epoch : int
        Which one the step belongs to, from 0.
    samples : int
        Of the step, over all ranks.
    seconds : float
        Since the step before it had ended, without what was done between the two: the step and waiting for its data.
    """

    report: Report
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
        said: dict[str, Any] = {"step": report.step + 1, "epoch": self.epoch, "loss": report.loss, "rate": report.rate}
        said |= {"norm": report.norm, "skipped": report.skipped, "samples": self.samples}
        return said | {"seconds": self.seconds, "communication": self.communication}


TIMED = ("seconds", "communication")


@dataclass(frozen=True)
class Score:
    """What the model makes of the test set: the mean loss, and by kind of task the share that is right, or bits."""

    loss: float
    accuracy: float | None
    bits_per_byte: float | None

    @classmethod
    def of(cls, found: Evaluation, task: Task) -> Score:
        """An evaluation in the words of a task."""
        return cls(found.loss, found.measure, found.loss / math.log(2) if task.kind == "bytes" else None)

    def line(self) -> dict[str, Any]:
        """For a file of metrics."""
        said = {"test_loss": self.loss, "test_accuracy": self.accuracy, "bits_per_byte": self.bits_per_byte}
        return {name: value for name, value in said.items() if value is not None}


def loss_of(task: Task) -> Any:
    """What is made small."""
    return MSE() if task.kind == "values" else SoftmaxCrossEntropy()


def measure_of(task: Task) -> Any:
    """How many targets are met, where they can be met."""
    return None if task.kind == "values" else SoftmaxCrossEntropy().correct


class _Spread:
    """So many samples of a data set, at even distances."""

    def __init__(self, data: Dataset, count: int):
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        return self._data.take(indices * len(self._data) // self._count)


class Training:
    """A training that can be iterated, saved and resumed. Making one is collective.

    Parameters
    ----------
    settings : Settings
        As `parallel.settings.complete` makes them.
    comm : Communicator
        Of ours; its ranks train together.
    device : "cpu" or "cuda"
    trace : bool
        Whether the engine keeps events.
    mortal : bool
        Whether this MPI goes on after the death of a rank.

    Attributes
    ----------
    mortal : bool
        Whether the training goes on then, too: one with servers does. Nothing may be asked of all ranks any more but by
        what is said here to be collective, and `MPI_Finalize` is not to be waited for.
    task : Task
    settled : Settings
        With what the settings leave open, where the layout leaves something open.
    engine : Trains
        As the layout has it: `parallel.ways`.
    sampler : Sampler
    steps : int
        How many there will be.

    Raises
    ------
    ValueError
        On all ranks, if the settings fit neither each other nor the ranks, nor the model the machine's memory.
    """

    def __init__(
        self,
        settings: Settings,
        comm: Communicator,
        *,
        device: str = "cpu",
        trace: bool = False,
        mortal: bool = False,
    ):
        self._comm = comm
        self.settings = said = settings
        self.task, model, optimizer = together(comm, lambda: prepare(said, comm.Get_size()), "this cannot be trained")
        self._optimizer = optimizer
        self._loss = loss_of(self.task)
        self.mortal = mortal and way_of(said).outlives
        job = Job(model, self._loss, comm, optimizer, device, trace, self.mortal)
        data = self.task.train
        self.settled = way_of(said).settle(job, said, lambda count: data.take(np.arange(count) % len(data)))
        self.sampler = _sampler(self.settled, self.task, comm.Get_size())
        self.steps = steps_of(said, self.task)
        self.flops_per_sample = flops(model, self.task, said.precision)
        way = way_of(said)
        if device == "cpu":
            parts = -(-said.batch // self.sampler.micro_batch)
            rows = min(self.sampler.micro_batch, said.batch, len(self.task.train))
            machine.expect_room(comm, way.forecast(job, said, *specs(self.task, said.precision, rows), parts))
        self.engine = way.engine(job, self.settled)
        self._pool = Pool(comm) if said.pool else None

    @property
    def speaks(self) -> bool:
        """Whether this rank tells of the training: rank 0; of a mortal one, the first worker that lives."""
        return way_of(self.settings).speaks(self.engine, self._comm)

    @property
    def done(self) -> int:
        """Steps that were made, those before a restart among them."""
        return self.engine.steps

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Record]:
        """Train up to the last step. Collective; all ranks iterate to the same end.

        Parameters
        ----------
        stop : callable
            Whether this rank wants to end: asked in every step, which is then the last one, on all ranks.

        Raises
        ------
        StepFailed, Diverged
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
                yield Record(report, step.epoch, step.samples, time.perf_counter() - began)
                if report.stop:
                    break
            way_of(self.settings).meet(self.engine)
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _ahead(self) -> Iterator[tuple[Step, Sequence[Batch]]]:
        draws = way_of(self.settings).draws
        for step in self.sampler.ahead():
            if draws:
                yield step, OnDemand(step, self.task.train)
            else:
                yield step, list(step.batches(self.task.train, self.engine.share(len(step.parts))))

    def _drawn(self, pool: Pool) -> Iterator[tuple[Step, Iterator[Batch]]]:
        """A micro-batch is made when it was drawn, not in advance: that would deal work out before anyone is ready."""
        for step in self.sampler.ahead():
            yield step, step.batches(self.task.train, pool.draw(len(step.parts)))

    def score(self, most: int | None = None) -> Score:
        """Put the model to the test, on all of the test set or on `most` samples from all over it. Collective."""
        count = len(self.task.test) if most is None else min(most, len(self.task.test))
        spread = _Spread(self.task.test, count)
        sampler = Sampler(count, max(1, count), self.sampler.micro_batch, shuffle=False)
        mine: list[Batch] = []
        for step in sampler.steps(0):
            mine += step.batches(spread, self.engine.share(len(step.parts)))
        return Score.of(self.engine.evaluate(mine, measure_of(self.task)), self.task)

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

        def write(comm: MPI.Intracomm, stretches: Iterable[Stretch]) -> None:
            checkpoint.save(comm, directory, self.done, stretches, facts, keep=keep)

        way_of(self.settings).save(self.engine, self._comm, write)
        return directory / checkpoint.name_of(self.done)

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
        found.fit(self.engine.stretches())
        try:
            if (steps := whole(named(found.facts["engine"], "state"), "steps")) != found.step:
                raise ValueError(f"steps: expected {found.step}, as the checkpoint's own, found {steps}")
            self.engine.load(found.facts["engine"])
        except ValueError as error:
            raise CheckpointError(f"{found.path} cannot be used: its engine's {error}") from error
        found.restore(self.engine.stretches())
        self.sampler.load(found.facts["sampler"])
        self.engine.refresh()

    def close(self) -> None:
        """Give back what the engine and the pool hold. Collective."""
        self.engine.close()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # a rank that failed does not wait for the others
            self._pool = None
        self.close()


# ---------------------------------------------------------------------------------------------- from the settings


def prepare(said: Settings, ranks: int) -> tuple[Task, Sequential, Optimizer]:
    """Data, model and optimiser of complete settings.

    Raises
    ------
    ValueError
        If a setting has no meaning, or they do not fit each other; it names the setting.
    """
    check(said, ranks)
    task = datasets.load(said.data, seed=said.seed, length=said.length)
    family = said.model.partition(":")[0]
    if (task.kind == "bytes") != (family == "gpt"):
        fits = "gpt" if task.kind == "bytes" else ", ".join(name for name in MODELS if name != "gpt")
        raise ValueError(f"model: {task.name} is for {fits}, found {said.model}")
    if ranks > len(task.train):
        raise ValueError(f"more ranks ({ranks}) than samples ({len(task.train)}) in {task.name}")
    if task.kind != "bytes":
        task = _in_numbers(task)
    if family == "convnet" and len(task.inputs) == 2:
        task = _with_channel(task)
    options = {"dropout": said.dropout, "recompute": said.recompute}
    model = build(said.model, task.inputs, task.outputs, **options)  # type: ignore[arg-type]
    return task, model, optimizer_of(said, steps_of(said, task))


def check(said: Settings, ranks: int) -> None:
    """Raise ValueError for a setting out of range."""
    for name, table in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS)):
        if getattr(said, name) not in table:
            raise ValueError(f"{name}: expected one of {', '.join(table)}, found {getattr(said, name)!r}")
    for name, least in LEAST.items():
        value = getattr(said, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"{name}: expected a number from {least:g} on, found {value:g}")
    for name in ("dropout", "momentum", "beta2"):
        if getattr(said, name) >= 1:
            raise ValueError(f"{name}: expected a number from 0 to below 1, found {getattr(said, name):g}")
    way_of(said).check(said, ranks)


NONE_BELOW = "rate decay momentum beta2 clip epochs steps warm_up dropout seed check_every"
ONE = "batch micro_batch accumulate length bucket_bytes stages microbatches virtual memory"
LEAST = dict.fromkeys(ONE.split(), 1)
LEAST |= dict.fromkeys(NONE_BELOW.split(), 0)
"""The smallest value that a setting can have."""


def _in_numbers(task: Task) -> Task:
    """Integers are as good as float32, where no embedding takes them: images of bytes, say."""
    parts = [datasets.Arrays(part.x.astype(np.float32, copy=False), part.y) for part in (task.train, task.test)]  # type: ignore[attr-defined]
    return replace(task, train=parts[0], test=parts[1])


def _with_channel(task: Task) -> Task:
    """Images of one channel."""
    parts = [datasets.Arrays(part.x[:, None], part.y) for part in (task.train, task.test)]  # type: ignore[attr-defined]
    return Task(task.name, parts[0], parts[1], task.kind, (1, *task.inputs), task.outputs)


def _sampler(said: Settings, task: Task, ranks: int) -> Sampler:
    workers = way_of(said).workers(said, ranks)
    return Sampler(len(task.train), said.batch, said.micro(workers), said.seed)


def steps_of(said: Settings, task: Task) -> int:
    """Steps of the whole training."""
    if said.steps is not None:
        return said.steps
    return math.ceil(said.epochs * -(-len(task.train) // (said.batch)))


def optimizer_of(said: Settings, steps: int) -> Optimizer:
    """The optimiser with its schedule."""
    rate, warm_up = said.rate, min(said.warm_up, steps)
    schedule = Schedule("warm_up_cosine", rate=rate, warm_up=warm_up, steps=steps, floor=FLOOR * rate)
    options = {"rate": schedule, "decay": said.decay}
    options |= {"momentum": said.momentum} if said.optimizer == "sgd" else {"beta2": said.beta2}
    return OPTIMIZERS[said.optimizer](**options)  # type: ignore[arg-type]


def specs(task: Task, precision: str, rows: int) -> tuple[Spec, Spec]:
    """What so many of the task's samples are, as the engine hands them to a model: inputs and targets."""
    kinds = PRECISIONS[precision].storage, PRECISIONS[precision].wide
    shown = task.train.take(np.zeros(1, np.int64))
    made = [
        Spec((rows, *array.shape[1:]), array.dtype if array.dtype.kind in "iub" else kind)
        for array, kind in zip(shown, kinds)
    ]
    return made[0], made[1]


def flops(model: Sequential, task: Task, precision: str) -> float:
    """Multiplications and additions of matrix products, forward and backward, for one sample."""
    return float((1 + BACKWARD) * model.outline(specs(task, precision, 1)[0]).flops)


def settings_in(found: Checkpoint) -> dict[str, Any]:
    """The settings of the training that a checkpoint is of; raises CheckpointError if they are none."""
    try:
        there = dict(named(found.facts.get("settings"), "settings"))
        Settings(**{name: value for name, value in there.items() if name in NAMES})
    except ValueError as error:
        raise CheckpointError(f"{found.path} is no training's: {error}") from error
    return there


def changed(found: Checkpoint, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Settings that are other than in the checkpoint: {name: (there, here)}."""
    there = settings_in(found)
    return {name: (there.get(name), here) for name, here in asdict(settings).items() if there.get(name) != here}
