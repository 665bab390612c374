"""Training engine for every strategy: the settings choose data parallelism, pipelines, servers or local replicas."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import Mismatch
from parallel.checkpoint.checkpoint_files import Checkpoint, CheckpointError, Kept, Owner, latest, new_run
from parallel.checkpoint.step_folders import NAME
from parallel.data.sampler import Batch, Dataset, prefetch
from parallel.data.work_queue import WorkQueue
from parallel.engine.base import check
from parallel.engine.memory_ledger import MemoryLedger
from parallel.engine.microbatch_pass import Measure, Prediction
from parallel.engine.model_ownership import expect_free
from parallel.engine.settings import DEFAULTS, Settings
from parallel.nn.array_checks import whole_number
from parallel.nn.operator import Operator
from parallel.nn.rewrite import unlink
from parallel.optim.optimizer import Optimizer
from parallel.runtime.collective_errors import collective_call, is_shared
from parallel.runtime.consistency_check import call_together, check_equal
from parallel.runtime.left_windows import free_left
from parallel.runtime.profiler import ProfilerEvent
from parallel.runtime.step_report import Evaluation, StepReport
from parallel.trainer import engine_checkpoint
from parallel.trainer.engine_arguments import expect_data, expect_parts, expect_room, expect_same, with_options
from parallel.trainer.model_transforms import with_transforms
from parallel.trainer.samplers import sized
from parallel.trainer.strategies import FailedBatches, TrainableEngine, TrainJob, batches_of, strategy_of
from quant.types import Array


class Engine:
    """Engine that trains a model on all ranks of a communicator, by the strategy of its settings.

    `step` and `evaluate` take whole batches, the same on all ranks. Each rank computes its share. Everything but
    `batches` and the attributes is collective. Methods of a closed engine raise RuntimeError.

    Parameters
    ----------
    model : Operator
        The items of a `Sequential` are the units that ZeRO gathers and pipelines divide.
    loss : see `parallel.nn.loss.Loss`
    comm : Communicator or MPI.Intracomm
        Not closed by the engine.
    optimizer : Optimizer
    settings : Settings
    example : (inputs, targets), optional
        Samples by which a pipeline is cut into stages of equal time. Without them, stages have equally many units.
    **options
        Settings by name (`parallel.trainer.engine_arguments.OWN`) that replace fields of `settings`, such as
        ``layout="zero2"``. With ``prune``, `steps` counts the whole training.

    Attributes
    ----------
    inner : engine of the strategy
    settings : with all open choices made
    model, optimizer

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid or would be ignored, such as a learning rate among the settings, or if
        ranks differ in it.

    Examples
    --------
    >>> from parallel import AdamW, nn
    >>> x, y = np.eye(8, dtype=np.float32), np.arange(8)
    >>> model, loss = nn.mlp([8, 16, 8]), nn.SoftmaxCrossEntropy()
    >>> with Engine(model, loss, MPI.COMM_SELF, AdamW(lr=0.05), layout="zero1") as engine:
    ...     losses = [engine.step(x, y).loss for _ in range(30)]
    ...     engine.evaluate(x, y, loss.correct).measure
    1.0
    """

    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: MPI.Intracomm,
        optimizer: Optimizer,
        settings: Settings = DEFAULTS,
        *,
        example: tuple[Array, Array] | None = None,
        **options: Any,
    ) -> None:
        self._comm = comm if isinstance(comm, Communicator) else Communicator(comm)
        with ExitStack() as opened:  # freed again after an error
            if self._comm is not comm:
                opened.push(self._comm)
            settings = call_together(self._comm, lambda: _checked(model, loss, optimizer, settings, options))
            check(self._comm, settings)
            expect_free(self._comm, model)
            self.model, self.optimizer = model, optimizer
            self._strategy = strategy = strategy_of(settings)
            strategy.check(settings, self._comm.Get_size())
            if settings.batch != DEFAULTS.batch and settings.batch_tokens is None:
                strategy.check_batch(settings, self._comm.Get_size())
            opened.callback(unlink, model)
            model, remarks = call_together(self._comm, lambda: with_transforms(model, settings)), tuple[str, ...]()
            if not strategy.measures or example is not None:
                job = TrainJob(model, loss, self._comm, optimizer)  # type: ignore[arg-type]
                settings, remarks = strategy.resolve(job, settings, lambda count: _repeated(example, count))
            elif settings.layout.endswith(":auto"):
                raise ValueError(
                    f"example: {settings.layout} measures the model, and needs (inputs, targets); found None"
                )
            self.settings = settings
            self.inner: TrainableEngine = strategy.engine_class(settings)(model, loss, self._comm, optimizer, settings)
            self._remarks = (*remarks, *self.inner.remarks)
            self._pool = WorkQueue(self._comm, partial(self.inner.meet, "draw")) if settings.pool else None
            self._run_id = new_run(self._comm)
            self._workers = strategy.workers(settings, self._comm.Get_size())
            self._is_checked = self._is_closed = self._is_left = False
            self._opened = opened.pop_all()

    if not TYPE_CHECKING:  # which knows the attributes without it

        def __setattr__(self, name: str, value: Any) -> None:
            """AttributeError for attributes of an engine that is made: another value would not be used.

            Derived classes may have attributes of their own.
            """
            is_own = type(self).__module__ != __name__ and not hasattr(self, name)
            if "_opened" in vars(self) and not name.startswith("_") and not is_own:
                raise AttributeError(
                    f"{name}: expected it in the constructor of an engine; those of `optimizer` can be assigned"
                )
            object.__setattr__(self, name, value)

    # ------------------------------------------------------------------------------------------ training

    def step(self, x: Any, y: Any = None, *, samples: Array = None, stop: bool = False) -> StepReport:
        """Run one training step on a batch: forward, backward, and one update of the weights.

        Parameters
        ----------
        x, y : arrays with an axis of samples first, of equal lengths
            Inputs and targets of the whole step, the same on all ranks. They are cut into micro-batches of equal size,
            but for the last, by their number and the settings (`micro_batch`, `accumulate`, `microbatches`). Without
            `y`: this rank's micro-batches (from `batches`). Federated: micro-batch k has the samples of client k.
        samples : array of int, optional
            Numbers of the samples in the data set, for dropout. By default 0, 1, ...
        stop : bool
            True to end the training: the reports of all ranks have it after this or a later step.

        Raises
        ------
        RankMismatch
            On all ranks, with nothing updated, if they have other batches in the first step, or in any step along axes
            that share them (tp, cp, pp). Also if a property was changed on some ranks only, such as ``optimizer.lr``.
            Asynchronous layouts compare properties when they evaluate, and before checkpoints.
        StepFailed, ParameterMismatch
            See `parallel.engine.base.TrainEngine.step`.
        """
        self._expect_open("step")
        if y is None:
            mine: Any = x
        elif self._strategy.has_clients:
            raise ValueError(f"y: a step of {self.settings.layout} takes the samples of its clients, as from `batches`")
        else:
            if not self._is_checked:
                self.inner.meet("step")
                expect_same(self._comm, x, y, samples)
                self._is_checked = True
            try:
                mine = self._cut(x, y, samples, training=True)
            except BaseException as error:
                if is_shared(error):
                    raise
                mine = FailedBatches(error)
        options: dict[str, Any] = {} if self._pool is None else {"drawn": True}
        return self.inner.step(mine, stop=stop, **options)

    def evaluate(self, x: Any, y: Any = None, measure: Measure | None = None, *, ema: bool = False) -> Evaluation:
        """Evaluate without training, and without dropout: mean loss and `measure` per target.

        Parameters
        ----------
        x, y : see `step`
            Cut like a step with this number of samples.
        measure : function of (scores, targets), optional
            Summed over micro-batches, such as ``loss.correct``.
        ema : bool
            True to evaluate the moving average of the weights.
        """
        with self._call("evaluate"), self._average(ema):
            if y is None:
                return self.inner.evaluate(x, measure)
            expect_same(self._comm, x, y)
            return self.inner.evaluate(list(self._cut(x, y, None, training=False)), measure)

    def predict(self, x: Any, out: np.ndarray | None = None, *, ema: bool = False) -> np.ndarray:
        """Scores of the model for all inputs, without dropout, on all ranks.

        Parameters
        ----------
        x : array with an axis of samples first, the same on all ranks
            Cut into micro-batches as large as those of a step.
        out : array, optional
            Of the shape of the scores, which are written into it and not returned in an array of their own.
        ema : bool
            True to predict by the moving average of the weights.

        Returns
        -------
        array, of the length of x, in the order of x
            float64, or float32 of float32 and half types.
        """
        with self._call("predict"), self._average(ema):
            prediction = Prediction(x)
            expect_same(self._comm, x, prediction.places)
            mine = self._cut(x, prediction.places, None, training=False, batch=self.settings.batch)
            self.inner.evaluate(list(mine), prediction)
            scores = prediction.gathered(self._comm)
            collective_call(self._comm, lambda: None if out is None else expect_room(out, scores), "out")
            if out is None:
                return scores
            out[...] = scores
            return out

    def model_on_one_rank(self, *, ema: bool = False) -> Operator:
        """Copy of the model with whole weights, or with `ema` their moving average, in any layout; on every rank.

        No engine has the copy: ``model_on_one_rank()(x)`` returns its scores on this rank alone. Its weights are those
        of `state_dict`, of which pruned ones are 0.
        """
        state = self.state_dict(ema=ema)
        return engine_checkpoint.model_with(self.model, state, self.settings, self.steps)

    def batches(
        self, data: Dataset, batch: int | None = None, *, epoch: int = 0, shuffle: bool = True
    ) -> Iterator[Sequence[Batch]]:
        """Iterate over an epoch of a data set: this rank's micro-batches of each step, for `step`. Not collective.

        Only this rank's share is loaded, ahead of its use. `batch` is the number of samples of a step over all ranks,
        by default the settings' `batch`. The order depends on the settings' seed and `epoch`. With `batch_tokens`,
        data with `lengths` (`parallel.data.sequences`) are cut by tokens. Federated: the rounds of an epoch.
        ValueError for a `batch` beside `batch_tokens`, or that does not divide into the `microbatches` of a pipeline.
        """
        self._expect_open("batches")
        expect_data(data)
        whole_number("epoch", epoch)
        settings = self.settings if batch is None else replace(self.settings, batch=batch)
        if batch is not None and settings.batch_tokens is not None:
            raise ValueError(f"batch: expected none beside batch_tokens={settings.batch_tokens}, found {batch}")
        if settings.batch_tokens is None or not hasattr(data, "lengths"):
            self._strategy.check_batch(sized(settings, data), self._comm.Get_size())
        sampler = self._strategy.sampler(settings, data, self._workers, shuffle=shuffle)
        if self._pool is not None:
            pool = self._pool  # a draw calls MPI, which the thread of `prefetch` must not
            return (step.batches(data, pool.draw(len(step.parts))) for step in sampler.steps(epoch))  # type: ignore
        return prefetch(batches_of(self._strategy, self.inner, step, data) for step in sampler.steps(epoch))

    def _cut(self, x: Any, y: Any, samples: Array, training: bool, batch: int | None = None) -> Iterable[Batch]:
        """Micro-batches of this rank, as of a step of `batch` samples, by default all.

        Errors come in the iteration, where the step shares them with all ranks.
        """
        micro = replace(self.settings, batch=max(1, min(batch or len(x), len(x)))).micro(self._workers)
        starts = range(0, len(x), micro)
        share = self.inner.train_share if training else self.inner.share
        numbers: Iterable[int] = share(len(starts))
        if training and self._pool is not None:
            numbers = self._pool.draw(len(starts))
        elif training and self._strategy.pulls_work:
            numbers = range(len(starts))

        # a generator: errors in the user's arrays are raised in the step, where all ranks exchange them
        def made() -> Iterator[Batch]:
            all_samples = np.arange(len(x)) if samples is None else np.asarray(samples)
            if not len(x) == len(y) == len(all_samples):
                found = f"{len(x)} inputs, {len(y)} targets, {len(all_samples)} sample numbers"
                raise ValueError(f"x, y, samples: expected equal lengths, found {found}")
            if not len(x):
                raise ValueError("x, y: expected at least one sample, found none")
            for number in numbers:
                here = slice(starts[number], starts[number] + micro)
                places = all_samples[here]
                yield Batch(number, x[here], y[here], places)

        return list(made()) if training and self._strategy.pulls_work else made()

    # ------------------------------------------------------------------------------------------ state

    @property
    def remarks(self) -> tuple[str, ...]:
        """Choices that were made, and what else the user should know."""
        return self._remarks

    @property
    def steps(self) -> int:
        """Number of steps, skipped ones included."""
        return self.inner.steps

    @property
    def updates(self) -> int:
        """Number of updates of the weights."""
        return self.inner.updates

    @property
    def ledger(self) -> MemoryLedger:
        """Predicted and allocated bytes of this rank by kind."""
        return self.inner.ledger

    @property
    def events(self) -> list[ProfilerEvent]:
        """Profiler events since the list was last cleared. Empty unless `settings.trace`."""
        return self.inner.events

    @property
    def is_reporter(self) -> bool:
        """True on the one rank that reports progress."""
        return self.inner.is_reporter

    def state_dict(self, *, ema: bool = False) -> dict[str, np.ndarray]:
        """Weights, or with `ema` their moving average, as whole tensors by parameter name, on all ranks.

        New arrays of float32 or float64, as updated by the optimizer. They do not depend on layout and ranks. Buffers,
        such as ``"1.1.inner.1.router.bias"``, are the last.
        """
        with self._call("state_dict"), self._average(ema):
            return engine_checkpoint.state_dict(self.inner)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Set the weights to whole tensors by parameter name, the same on all ranks. Optimizer state is unchanged.

        With `strict`, ValueError unless these are all names of `state_dict`. Otherwise some may be missing, or
        unknown. Arrays of another shape are always a ValueError, others on some ranks a RankMismatch. Nothing is
        changed then.
        """
        with self._call("load_state_dict"):
            engine_checkpoint.load_state_dict(self.inner, self._comm, state, strict)

    def save(
        self,
        directory: str | Path,
        *,
        keep: int = 3,
        keep_best: int = 0,
        score: float | None = None,
        overwrite: bool = False,
        **facts: Any,
    ) -> Path:
        """Write a checkpoint into a directory that all ranks see, keep the newest `keep`. Returns its folder.

        A directory belongs to one run. Engines that `load` its checkpoints continue the run. CheckpointError if
        it has checkpoints of another run, unless `overwrite`: these are removed after the new one is written. A
        checkpoint of the same step is replaced. The `keep_best` with the lowest `score`, such as a loss of a test, stay
        too. After `load` of an earlier step the new checkpoints are the newest.

        `facts`, such as ``epoch=3``, are values for JSON, equal on all ranks, that `load` returns. ValueError for
        others. CheckpointError if the checkpoint cannot be written.
        """
        with self._call("save"):
            collective_call(self._comm, lambda: engine_checkpoint.expect_json(facts), "facts")
            scored = collective_call(self._comm, lambda: engine_checkpoint.score_facts(score), "score")
            kept = Kept(whole_number("keep", keep, 1), whole_number("keep_best", keep_best))
            facts |= scored
            check_equal(self._comm, [("keep", kept), *((name, json.dumps(facts[name])) for name in sorted(facts))])
            about: dict[str, Any] = {"settings": asdict(self.settings), "optimizer": self.optimizer.describe()}
            about |= {"ranks": self._comm.Get_size(), "user": facts} | scored
            return engine_checkpoint.save_engine(
                self.inner, Path(directory), about, kept, Owner(self._run_id, overwrite)
            )

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a checkpoint, or the newest in a directory, written in any layout. Returns the facts given to `save`.

        CheckpointError, with nothing changed, if there is none, it is damaged, or of another model or state vectors. A
        remark if the state vectors are of another optimizer.
        """
        with self._call("load"):
            folder: Path | None = Path(path)
            check_equal(self._comm, [("path", Path(path).name)])
            if not NAME.fullmatch(Path(path).name):
                folder = latest(self._comm, Path(path))
            if folder is None:
                raise CheckpointError(f"{path} has no checkpoints")
            found = Checkpoint(self._comm, folder)
            self.inner.quiesce()
            engine_checkpoint.fit_engine(found, self.inner, self.optimizer)
            engine_checkpoint.restore_engine(found, self.inner)
            self._run_id = found.run
            self._remarks = (*self._remarks, *engine_checkpoint.other_optimizer(found, self.optimizer))
            return dict(found.facts.get("user", {}))

    def _average(self, ema: bool) -> Any:
        if not self.settings.fault_tolerant:  # there ranks may be dead
            check_equal(self._comm, [("ema", ema)])
        if not ema:
            return nullcontext()
        if not self.optimizer.ema:
            raise ValueError("ema: expected an optimizer with a moving average, such as AdamW(ema=0.999), found none")
        return engine_checkpoint.exchanged_average(self.inner)

    def close(self) -> None:
        """Free memory and MPI requests. The engine cannot be used afterwards. No-op if it is closed.

        The model keeps the trained values, in their storage precision, if the layout has them whole on every rank: in
        dp, zero1, zero2, and decentralised layouts, whose ranks keep the mean. Another engine continues from them.

        An exception in a ``with`` block frees what this rank can free alone. `close` on all ranks frees the rest.
        """
        if not self._is_closed:
            self._is_closed = True
            try:
                self.inner.close()
            except BaseException as error:  # as if a block around it had raised it
                self._leave(type(error), error, error.__traceback__)
                raise
            if self._pool is not None:
                self._pool.close()
            self._opened.close()
        elif self._is_left:
            self._is_left = False
            free_left(MPI.Intracomm(self._comm))

    def _expect_open(self, method: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"{method}: expected an open engine, found one that is closed")

    def _call(self, method: str) -> AbstractContextManager[None]:
        """Context of a method in which all ranks take part."""
        self._expect_open(method)
        return self.inner.call(method)

    def __enter__(self) -> Self:
        self._expect_open("with")
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: Any) -> None:
        if self._is_closed:  # by the block
            return
        if kind is None:
            try:
                self.inner.quiesce()
            except BaseException as error:  # as if the block had raised it
                self._leave(type(error), error, error.__traceback__)
                raise
            self.close()
        else:  # a rank that failed does not wait for the others
            self._leave(kind, *others)

    def _leave(self, kind: type[BaseException], *others: Any) -> None:
        """Free what this rank can free without the others, after an exception."""
        self._is_closed = self._is_left = True
        if self._pool is not None:
            self._pool.leave()
        with suppress(Mismatch):  # messages of the others may be unread
            try:
                self.inner.__exit__(kind, *others)
            finally:
                self._opened.close()


def _checked(model: Any, loss: Any, optimizer: Any, settings: Settings, options: Mapping[str, Any]) -> Settings:
    """Settings of an engine, with its options. TypeError or ValueError if an argument is invalid."""
    expect_parts(model, loss, optimizer)
    return with_options(settings, options, optimizer)


def _repeated(example: tuple[Array, Array] | None, count: int) -> tuple[Array, Array]:
    """`count` samples of the example, repeated in turn."""
    if example is None or not len(example[0]):
        raise ValueError("example: expected (inputs, targets) with at least one sample, found none")
    places = np.arange(count) % len(example[0])
    return np.asarray(example[0])[places], np.asarray(example[1])[places]
