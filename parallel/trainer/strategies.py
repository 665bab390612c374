"""Table of training strategies: for each layout, the engine class, checks of settings and automatic choices."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from collectives import Communicator
from parallel.asynchronous.decentralized import styles
from parallel.asynchronous.decentralized.styles import STYLES
from parallel.data.sampler import Batch, Dataset, OnDemandSampler, Sampler, StepBatches
from parallel.engine.compression import resolve_compression
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel_engine import DataParallelEngine, check_settings, workers
from parallel.engine.model_on_mesh import mesh_of
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import FlatParams
from parallel.optim.optimizer import Optimizer
from parallel.optim.optimizers import OPTIMIZERS
from parallel.pipeline import config as pipeline_config
from parallel.pipeline.config import Take
from parallel.pipeline.schedule.schedules import SCHEDULES
from parallel.trainer.samplers import batch_sampler

if TYPE_CHECKING:
    from parallel.asynchronous.decentralized.replica_engine import ReplicaEngine
    from parallel.asynchronous.server.server_engine import ParameterServer
    from parallel.pipeline.pipeline_engine import Pipeline

TrainableEngine: TypeAlias = "DataParallelEngine | Pipeline | ParameterServer | ReplicaEngine"
"""Engines of a training loop. With `Settings.pool`, the method `step` also takes `drawn`."""


class TrainJob(NamedTuple):
    """Model, loss, communicator and optimizer: the arguments of every engine's constructor before the settings."""

    model: Sequential
    loss: Any
    comm: Communicator
    optimizer: Optimizer


class Resolved(NamedTuple):
    """Result of `Strategy.resolve`: settings with all automatic choices made, and remarks on them for the user."""

    settings: Settings
    remarks: tuple[str, ...] = ()


class Strategy(NamedTuple):
    """Row of `STRATEGIES`: engine class, settings check, number of workers and properties of a kind of layout.

    `check` raises ValueError, with the field's name, for settings that the engine cannot use on this number of
    ranks, and `check_batch` for a `batch` that it cannot use. `workers` is the number of ranks, or pipelines, that
    share the samples of a step, `trains` is True for a rank that computes gradients. `resolve` decides open fields
    (collective). If it `measures` the model, ``take(n)`` returns n samples for its trials.
    """

    engine_class: Callable[[Settings], Any]
    check: Callable[[Settings, int], None]
    workers: Callable[[Settings, int], int] = lambda settings, ranks: ranks
    check_batch: Callable[[Settings, int], None] = lambda settings, ranks: None
    resolve: Callable[[TrainJob, Settings, Take], Resolved] = lambda job, settings, take: Resolved(settings)
    measures: bool = False  # `resolve` needs samples
    has_variants: bool = False  # the layout may have a suffix after a colon
    pulls_work: bool = False  # ranks request micro-batches one by one, and must be able to load any of a step
    survives_failures: bool = False  # training continues after the death of a rank, if the MPI does
    trains: Callable[[Settings, int], bool] = lambda settings, rank: True
    sampler: Callable[..., Sampler] = batch_sampler  # from settings, data, workers, shuffle=True, window=None
    has_clients: bool = False  # a step is a round, and a micro-batch has the samples of a client


def _choose_compression(job: TrainJob, settings: Settings, take: Take) -> Resolved:
    mesh = mesh_of(settings, job.comm.Get_size())
    return Resolved(*resolve_compression(settings, job.comm, mesh, FlatParams(job.model).length))


def _engine(path: str) -> Any:
    """Class of another engine, from ``module:Class``, imported when a training needs it."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _pipeline_class(settings: Settings) -> Any:
    has_versions = SCHEDULES[pipeline_config.schedule_of(settings)].version is not None
    name = "asynchronous_pipeline:AsynchronousPipeline" if has_versions else "pipeline_engine:Pipeline"
    return _engine(f"parallel.pipeline.{name}")


def _choose_cuts(job: TrainJob, settings: Settings, take: Take) -> Resolved:
    mesh = pipeline_config.mesh_of(settings, job.comm.Get_size())
    settings, remarks = resolve_compression(settings, job.comm, mesh, FlatParams(job.model).length)
    return Resolved(pipeline_config.resolve(settings, job.comm, job.model, job.loss, job.optimizer, take), remarks)


def _check_servers(settings: Settings, ranks: int) -> None:
    from parallel.asynchronous.server.server_settings import refuse_servers

    refuse_servers(settings, ranks, OPTIMIZERS[settings.optimizer])


STRATEGIES = {
    name: Strategy(lambda settings: DataParallelEngine, check_settings, workers, resolve=_choose_compression)
    for name in LAYOUTS
}
STRATEGIES["pp"] = Strategy(
    _pipeline_class,
    pipeline_config.check,
    pipeline_config.workers,
    pipeline_config.check_batch,
    _choose_cuts,
    measures=True,
    has_variants=True,
)
STRATEGIES["ps"] = Strategy(
    lambda settings: _engine("parallel.asynchronous.server.server_engine:ParameterServer"),
    _check_servers,
    workers=lambda settings, ranks: ranks - settings.servers,
    trains=lambda settings, rank: rank >= settings.servers,
    pulls_work=True,
    survives_failures=True,
)
STRATEGIES |= {
    name: Strategy(
        lambda settings: _engine(STYLES[settings.layout].engine),
        styles.refuse,
        sampler=style.sampler or batch_sampler,
        has_clients=style.sampler is not None,
    )
    for name, style in STYLES.items()
}


def batches_of(strategy: Strategy, engine: TrainableEngine, step: StepBatches, data: Dataset) -> Sequence[Batch]:
    """This rank's micro-batches of a training step, loaded from the data set at once, or when ranks request them.

    An error of the loading is raised where the batches are used: in the step, on all ranks.
    """
    if strategy.pulls_work:
        return OnDemandSampler(step, data)
    return loaded(step, data, engine.train_share(len(step.parts)))


def loaded(step: StepBatches, data: Dataset, numbers: Iterable[int]) -> Sequence[Batch]:
    """Micro-batches of a step or evaluation by number. An error of the loading is raised where they are used."""
    try:
        return list(step.batches(data, numbers))
    except BaseException as error:
        return FailedBatches(error)


class FailedBatches(Sequence[Batch]):
    """Micro-batches that could not be loaded: raises the error when they are used."""

    def __init__(self, error: BaseException):
        self._error = error

    def __len__(self) -> int:
        raise self._error

    def __getitem__(self, index: Any) -> Any:
        raise self._error

    def __iter__(self) -> Any:
        """Raise the error: an IndexError of `__getitem__` would end an iteration."""
        raise self._error


def strategy_of(settings: Settings) -> Strategy:
    """Strategy for `settings.layout`. ValueError if unknown, or if an option of other layouts is not at its default.

    >>> strategy_of(Settings(layout="zero3")).workers(Settings(), 4)
    4
    """
    name = settings.layout.partition(":")[0]
    if name not in STRATEGIES or (":" in settings.layout and not STRATEGIES[name].has_variants):
        raise ValueError(f"layout: expected one of {', '.join(STRATEGIES)}, found {settings.layout!r}")
    settings.expect_used()
    return STRATEGIES[name]
