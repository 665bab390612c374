"""Training loop: builds data, model and engine from `Settings`, trains, evaluates, saves and resumes.

    for record in training.run():
        ...

The caller may save, print or stop between two steps. The loop prints nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from collectives import Communicator
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError, Kept, Owner, new_run
from parallel.data.sampler import Batch, Dataset, Sampler, StepBatches, prefetch
from parallel.data.work_queue import WorkQueue
from parallel.engine.memory_ledger import MemoryLedger, Workload
from parallel.engine.settings import OPTIONS, RUN_FIELDS, Settings
from parallel.nn.flat_params import FlatParams
from parallel.optim.plateau import EarlyStop, ReduceLROnPlateau
from parallel.runtime import resources
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.consistency_check import check_equal
from parallel.runtime.step_report import Evaluation
from parallel.runtime.validation import expect_mapping
from parallel.trainer.engine_checkpoint import fit_engine, restore_engine, save_engine, score_facts
from parallel.trainer.records import EvalScore, StepRecord, combine_evaluations
from parallel.trainer.samplers import sized
from parallel.trainer.strategies import Resolved, TrainableEngine, TrainJob, batches_of, loaded, strategy_of
from parallel.trainer.task_setup import flops, loss_of, measure_of, prepare, sampler_of, specs, steps_of

PARTS_PER_EVALUATION = 16
"""Most test micro-batches of each worker between two updates of the progress."""

BYTES_PER_EVALUATION = 64 << 20
"""Bytes of inputs that a worker loads between two updates of the progress, unless one micro-batch has more."""


class _EvenSubset:
    """Subset of `count` samples of a data set at even distances."""

    def __init__(self, data: Dataset, count: int):
        self._data, self._count = data, count

    def __len__(self) -> int:
        return self._count

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        return self._data.take(indices * len(self._data) // self._count)


class TrainingPlan:
    """Data, model, final settings and memory forecast of a training run, without an engine. Construction is collective.

    It raises ValueError on all ranks if the settings contradict each other, do not fit the ranks, or differ.

    `settings` are a result of `parallel.trainer.recipes.complete`. `resolved` is the attribute of an earlier start of
    the same training, whose decisions are then taken.

    Attributes
    ----------
    task, model, sampler
    flops_per_sample, executed_flops_per_sample : without and with recomputation
    settings, resolved : as given (except `fault_tolerant`, and `batch` of `batch_tokens`), and with all open fields
        decided
    trains : True if this rank computes gradients. Servers do not
    fault_tolerant : True if MPI and strategy continue after the death of a rank. Then only methods documented as
        collective may be called on all ranks, and nothing may wait for `MPI_Finalize`.
    steps : number of steps, including steps before a restart
    parameters : number of parameters of the model
    forecast : predicted peak memory of this rank, from the settings alone
    remarks : decisions that a user should see
    """

    def __init__(self, settings: Settings, comm: Communicator, resolved: Settings | None = None):
        self._comm = comm
        self.task, model, optimizer = collective_call(
            comm, lambda: prepare(settings, comm.Get_size()), "this cannot be trained"
        )
        check_equal(comm, list(settings.shared().items()))
        self._strategy = strategy = strategy_of(settings)
        self.fault_tolerant = settings.fault_tolerant and strategy.survives_failures
        self.settings = settings = replace(sized(settings, self.task.train), fault_tolerant=self.fault_tolerant)
        self.model = model
        self._job = TrainJob(model, loss_of(self.task, settings), comm, optimizer)
        data, ranks = self.task.train, comm.Get_size()
        self.resolved, remarks = (
            strategy.resolve(self._job, settings, lambda count: data.take(np.arange(count) % len(data)))
            if resolved is None
            else Resolved(resolved)
        )
        self.trains = strategy.trains(self.resolved, comm.Get_rank())
        self.sampler = sampler_of(self.resolved, self.task, ranks)
        self.steps = steps_of(settings, self.task)
        self.parameters = sum(place.size for place in FlatParams(model).places)
        self.flops_per_sample, self.executed_flops_per_sample = flops(model, self.task, settings.precision)
        shapes, sizes = partial(specs, self.task, settings.precision), self.sampler.sizes(self.steps)
        workload = Workload(comm.Get_rank(), ranks, shapes, sizes, settings.pool)
        self._engine_class = strategy.engine_class(self.resolved)
        forecast = self._engine_class.forecast(model, self._job.loss, optimizer, workload, self.resolved)
        self.forecast: MemoryLedger = forecast
        self.remarks = (*remarks, *self._idle_workers(strategy.workers(self.resolved, ranks), sizes))

    def _idle_workers(self, workers: int, sizes: Sequence[tuple[int, ...]]) -> list[str]:
        """List of one remark if a step has fewer micro-batches than `workers` (ranks or pipelines), else empty."""
        parts = max(map(len, sizes), default=0)
        if not 0 < parts < workers:
            return []
        count = "micro-batch" if parts == 1 else "micro-batches"
        batch = f"a batch of {self.resolved.batch} is {parts} {count} of up to {self.sampler.micro_batch}"
        return [f"{workers - parts} of {workers} workers have nothing to do in a step: {batch}"]


class Training(TrainingPlan):
    """Training run with its engine: `run`, `score`, `save`, `resume`. Construction is collective.

    It raises ValueError as `TrainingPlan` does, and if the node or container has too little memory (on the CPU).
    `engine` belongs to the strategy that `Settings.layout` names. `run_id` identifies the run in its checkpoints.
    """

    def __init__(self, settings: Settings, comm: Communicator, resolved: Settings | None = None):
        super().__init__(settings, comm, resolved)
        if self.settings.device == "cpu":
            resources.check_memory(comm, self.forecast.needed)
        self.engine: TrainableEngine = self._engine_class(*self._job, self.resolved)
        self.remarks = (*self.remarks, *self.engine.remarks)
        self._pool = WorkQueue(comm) if self.settings.pool else None
        rate, patience = self._job.optimizer.rate, self.settings.early_stop
        self._plateau = rate if isinstance(rate, ReduceLROnPlateau) else None
        self._early_stop = None if patience is None else EarlyStop(patience)
        self.run_id = new_run(comm)  # now, while all ranks are alive

    @property
    def is_reporter(self) -> bool:
        """True on the rank that reports progress: rank 0, or the first live worker of a fault-tolerant run."""
        return self.engine.is_reporter

    @property
    def done(self) -> int:
        return self.engine.steps

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[StepRecord]:
        """Train to the last step or a true `stop()`, yielding each step's record. Collective. Raises as `Engine.step`.

        Every rank calls `stop` in each step. After a true result anywhere that step, or with parameter servers and
        decentralised styles a later one, is the last on all ranks.
        """
        pool = self._pool
        batches: Iterator[Any] = prefetch(self._ahead()) if pool is None else self._drawn(pool)
        options = {} if pool is None else {"drawn": True}
        try:
            while self.done < self.steps:
                began = time.perf_counter()
                step, mine = next(batches)
                report = self.engine.step(mine, stop=stop(), **options)
                self.sampler.done(step)
                samples = step.samples * self.sampler.passes
                yield StepRecord(report, step.epoch, samples, time.perf_counter() - began)
                if report.stop:
                    break
            self.engine.quiesce()
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _ahead(self) -> Iterator[tuple[StepBatches, Sequence[Batch]]]:
        for step in self.sampler.ahead():
            yield step, batches_of(self._strategy, self.engine, step, self.task.train)

    def _drawn(self, pool: WorkQueue) -> Iterator[tuple[StepBatches, Iterator[Batch]]]:
        """Yield each step with an iterator that takes micro-batches from the shared queue only when they are needed."""
        for step in self.sampler.ahead():
            yield step, step.batches(self.task.train, pool.draw(len(step.parts)))

    def score(self, most: int | None = None, tell: Callable[[int, int], None] = lambda done, count: None) -> EvalScore:
        """Evaluate the model on the test set, or on at most `most` samples spread evenly over it. Collective.

        Calls ``tell(samples done, samples)`` on all ranks after each part.
        """
        count = len(self.task.test) if most is None else min(most, len(self.task.test))
        subset = _EvenSubset(self.task.test, count)
        sampler = Sampler(count, max(1, count), self.sampler.micro_batch, shuffle=False)
        parts = [part for step in sampler.steps(0) for part in step.parts]
        # Every layout evaluates the same parts, so that rounding of the means is equal.
        nbytes = specs(self.task, self.settings.precision, self.sampler.micro_batch)[0].nbytes
        each = max(1, min(PARTS_PER_EVALUATION, BYTES_PER_EVALUATION // max(1, nbytes))) * self._comm.Get_size()
        found: list[Evaluation] = []
        for start in range(0, max(1, len(parts)), each):
            some = StepBatches(0, 0, tuple(parts[start : start + each]))
            mine = loaded(some, subset, self.engine.share(len(some.parts)))
            found.append(self.engine.evaluate(mine, measure_of(self.task, self.settings)))
            tell(sum(map(len, parts[: start + each])), count)
        return EvalScore.of(combine_evaluations(found), self.task)

    def observe(self, score: EvalScore) -> bool:
        """Apply a score, the same on all ranks, to `plateau` and `early_stop`. True to end the training."""
        if self._plateau is not None:
            self._plateau.observe(score.loss)
        return self._early_stop is not None and self._early_stop.observe(score.loss)

    def save(
        self,
        directory: Path,
        *,
        keep: int = 3,
        keep_best: int = 0,
        score: float | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write a checkpoint of the current step, and keep the newest `keep` of this run. Collective.

        Also the `keep_best` with the lowest `score`, of those that have one. Returns its folder. CheckpointError if it
        cannot be written, or if the directory has checkpoints of another run: with `overwrite`, these are removed
        afterwards.
        """
        facts = self.facts() | score_facts(score)
        return save_engine(self.engine, directory, facts, Kept(keep, keep_best), Owner(self.run_id, overwrite))

    def facts(self) -> dict[str, Any]:
        """State of a checkpoint besides the engine's: settings, position in the data, and what they belong to."""
        return {
            "settings": asdict(self.settings),
            "sampler": self.sampler.position(),
            "random": {"seed": self.settings.seed, "step": self.done},
            "optimizer": self._job.optimizer.describe(),
            "watched": {name: one.state() for name, one in self._watched.items()},
            "ranks": self._comm.Get_size(),
            "task": {"inputs": self.task.inputs, "outputs": self.task.outputs, "steps": self.steps},
        }

    @property
    def _watched(self) -> dict[str, Any]:
        """Watches of scores, by setting."""
        every = {"plateau": self._plateau, "early_stop": self._early_stop}
        return {name: one for name, one in every.items() if one is not None}

    def _load_watched(self, found: Checkpoint) -> None:
        states = expect_mapping(found.facts.get("watched", {}), "watched")
        for name, one in self._watched.items():
            if name in states:
                one.load(states[name])

    def resume(self, found: Checkpoint) -> None:
        """Load a checkpoint, written with any number of ranks and layout, to continue from it. Collective.

        Raises CheckpointError on all ranks for another model, optimizer, number of samples, batch size or seed, and if
        it has more steps than this training, before anything is changed. The precision may be another, but not fp64 on
        one side only.
        """
        for name in ("engine", "sampler"):
            if name not in found.facts:
                raise CheckpointError(f"{found.path} is no training's: it has no {name}")
        sampler = sampler_of(self.settings, self.task, self._comm.Get_size())
        try:
            sampler.load(found.facts["sampler"])
        except ValueError as error:
            raise CheckpointError(f"{found.path} is of another training: {error}") from error
        fit_engine(found, self.engine, self._job.optimizer)
        if found.step > self.steps:
            raise CheckpointError(
                f"{found.path}: {found.step} steps were made already, and this training is to have {self.steps}; "
                f"expected {found.step} or more, since steps and epochs count from the beginning"
            )
        try:
            self._load_watched(found)
        except ValueError as error:
            raise CheckpointError(f"{found.path} is no training's: {error}") from error
        restore_engine(found, self.engine, lambda: self.sampler.load(found.facts["sampler"]))
        self.run_id = found.run

    def close(self) -> None:
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
            if self._pool is not None:
                self._pool.leave()
            self.engine.__exit__(kind, error, traceback)


def settings_in(found: Checkpoint, name: str = "settings") -> dict[str, Any]:
    """Settings, as a dict, of the run that wrote a checkpoint. CheckpointError if they are invalid."""
    try:
        there = dict(expect_mapping(found.facts.get(name), name))
        Settings(**{name: value for name, value in there.items() if name in OPTIONS})
    except ValueError as error:
        raise CheckpointError(f"{found.path} is no training's: {error}") from error
    return there


def changed(found: Checkpoint, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Settings, except `RUN_FIELDS`, that differ from a checkpoint's: {name: (checkpoint's value, new value)}."""
    there, here = settings_in(found), asdict(settings)
    names = [name for name in here if name not in RUN_FIELDS and there.get(name) != here[name]]
    return {name: (there.get(name), here[name]) for name in names}
