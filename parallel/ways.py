"""Ways to train: what a training needs of an engine, and which engine a layout's first word stands for; a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from collectives import Communicator
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import Engine, uncompressible
from parallel.nn.flat_params import Flat
from parallel.layouts import LAYOUTS
from parallel.engine.memory_ledger import Ledger, predict, predict_activations
from parallel.nn.compose import Sequential
from parallel.nn.operator import Array, Spec
from parallel.optim.optimizers import Optimizer
from parallel.pipeline import way as pipelines
from parallel.pipeline.engine import Pipeline
from parallel.pipeline.way import Take
from parallel.data_parallel.partition_spec import Plan
from parallel.optim.precision import PRECISIONS
from parallel.runtime.profiler import Event
from parallel.decentralized.replica_engine import OWN, Replicas
from parallel.decentralized.styles import STYLES, Options, refuse
from parallel.runtime.step_report import Evaluation, Report
from parallel.parameter_server.server_engine import ParameterServer, factors, refuse_servers
from parallel.settings import OF_PIPELINES, OF_SERVERS, Settings
from parallel.checkpoint.tensor_slices import Stretch


class Trains(Protocol):
    """What `parallel.trainer.trainer` asks of an engine; `parallel.engine.data_parallel_engine.Engine` says what each of it means.

    Where the way has the setting `pool`, `step` takes `drawn` as well.
    """

    ledger: Ledger
    steps: int
    remarks: Sequence[str]

    @property
    def updates(self) -> int: ...
    @property
    def flat(self) -> Flat: ...
    @property
    def events(self) -> list[Event]: ...
    def share(self, micro_batches: int) -> range: ...
    def step(self, batches: Sequence[Batch], *, stop: bool = False) -> Report: ...
    def evaluate(
        self, batches: Sequence[Batch], measure: Callable[[Array, Array], float] | None = None
    ) -> Evaluation: ...
    def stretches(self) -> Iterator[Stretch]: ...
    def refresh(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Job(NamedTuple):
    """What an engine is made of, besides the settings; `mortal` if this MPI goes on after the death of a rank."""

    model: Sequential
    loss: Any
    comm: Communicator
    optimizer: Optimizer
    device: str = "cpu"
    trace: bool = False
    mortal: bool = False


class Way(NamedTuple):
    """A line of the table.

    Attributes
    ----------
    engine : callable (job, settings) -> engine
        Collective.
    check : callable (settings, ranks)
        Raises ValueError, which names the setting, for what this way cannot do.
    workers : callable (settings, ranks) -> int
        How many of the ranks share the samples of a step.
    settle : callable (job, settings, take) -> settings
        What was left open is decided; ``take(n)`` gives n samples to try. Collective.
    settings : names
        Of settings that not every way has.
    forecast : callable (job, settings, x, y, micro-batches) -> bytes by kind
        What this rank will need for micro-batches like x and y (specs), so many in a step; nothing where that is not
        known.
    draws : bool
        Whether ranks draw a step's micro-batches while it goes on, so that each must be able to make any of them.
    kinds : bool
        Whether a name behind a colon says more.
    meet : callable (engine)
        Wait until all ranks have made as many steps. Collective; most make their steps together anyway.
    save : callable (engine, comm, write)
        Have a checkpoint written, by `write` (ranks that hold the state, what each holds of it). Collective.
    outlives : bool
        Whether a training goes on when ranks die, where the MPI does.
    speaks : callable (engine, comm)
        Whether this rank tells of the training.
    """

    engine: Callable[[Job, Settings], Trains]
    check: Callable[[Settings, int], None] = lambda said, ranks: None
    workers: Callable[[Settings, int], int] = lambda said, ranks: ranks
    settle: Callable[[Job, Settings, Take], Settings] = lambda job, said, take: said
    settings: tuple[str, ...] = ()
    forecast: Callable[[Job, Settings, Spec, Spec, int], Counter[str]] = lambda job, said, x, y, parts: Counter()
    draws: bool = False
    kinds: bool = False
    meet: Callable[[Any], None] = lambda engine: None
    save: Callable[[Any, MPI.Intracomm, Any], Any] = lambda engine, comm, write: write(comm, engine.stretches())
    outlives: bool = False
    speaks: Callable[[Any, MPI.Intracomm], bool] = lambda engine, comm: comm.Get_rank() == 0


def _replicas(job: Job, said: Settings) -> Engine:
    return Engine(
        job.model,
        job.loss,
        job.comm,
        job.optimizer,
        layout=said.layout,
        seed=said.seed,
        precision=said.precision,
        reproducible=said.reproducible,
        clip=said.clip or None,
        bucket_bytes=said.bucket_bytes,
        check_every=said.check_every,
        compress=said.compress,
        device=job.device,
        trace=job.trace,
    )


def _styled(job: Job, said: Settings) -> Replicas:
    return Replicas(
        job.model,
        job.loss,
        job.comm,
        job.optimizer,
        style=said.layout,
        options=Options(said.tau, said.group),
        seed=said.seed,
        precision=said.precision,
        reproducible=said.reproducible,
        clip=said.clip or None,
        check_every=said.check_every,
        device=job.device,
        trace=job.trace,
    )


def _style_refuses(said: Settings, ranks: int) -> None:
    options = Options(said.tau, said.group)
    refuse(said.layout, options, ranks, said.precision, said.reproducible, said.check_every)


def _forecast(job: Job, said: Settings, x: Spec, y: Spec, parts: int) -> Counter[str]:
    return _of_layout(said.layout, job.comm.Get_rank(), job.comm.Get_size(), job, said, x, y, parts)


def _style_forecast(job: Job, said: Settings, x: Spec, y: Spec, parts: int) -> Counter[str]:
    """That of an engine for one rank, and what the style keeps besides."""
    mine = len(LAYOUTS[OWN].share(parts, job.comm.Get_rank(), job.comm.Get_size()))
    forecast = _of_layout(OWN, 0, 1, job, said, x, y, mine)
    vector = Flat(job.model).length * PRECISIONS[said.precision].wide.itemsize
    forecast["buffers"] += STYLES[said.layout].buffers(vector, Options(said.tau, said.group))
    return forecast


def _of_layout(
    layout: str, rank: int, ranks: int, job: Job, said: Settings, x: Spec, y: Spec, parts: int
) -> Counter[str]:
    share, units, flat = LAYOUTS[layout].share, tuple(job.model.items), Flat(job.model)
    plan = Plan(
        units=units,
        flat=flat,
        ranks=ranks,
        rank=rank,
        precision=PRECISIONS[said.precision],
        reproducible=said.reproducible,
        bucket_bytes=said.bucket_bytes,
        first_bytes=said.bucket_bytes,
    )
    everyone = [tuple(share(parts, other, ranks)) for other in range(ranks)]
    forecast = predict(plan, layout, len(job.optimizer.states()), everyone)
    forecast["activations"], forecast["temporaries"] = predict_activations(plan, job.loss, x, y)
    return forecast


def _stages(job: Job, said: Settings) -> Pipeline:
    return pipelines.engine(said, job.comm, job.model, job.loss, job.optimizer, job.device, job.trace)


def _cut(job: Job, said: Settings, take: Take) -> Settings:
    return pipelines.settle(said, job.comm, job.model, job.loss, job.optimizer, take, job.device)


def _served(job: Job, said: Settings) -> ParameterServer:
    if job.device != "cpu":
        raise ValueError(f"device: servers and workers are on the host, found {job.device}")
    return ParameterServer(
        job.model,
        job.loss,
        job.comm,
        job.optimizer,
        servers=said.servers,
        consistency=said.consistency,
        replicas=said.replicas,
        mortal=job.mortal,
        seed=said.seed,
        precision=said.precision,
        reproducible=said.reproducible,
        clip=said.clip or None,
        bucket_bytes=said.bucket_bytes,
        slow=factors(said.slow),
        record=Path(said.record) if said.record else None,
        replay=Path(said.replay) if said.replay else None,
        trace=job.trace,
    )


def _servers_refuse(said: Settings, ranks: int) -> None:
    refuse_servers(ranks, said.servers, said.consistency, said.precision, said.optimizer == "lamb", factors(said.slow))
    if not 1 <= said.replicas <= said.servers:
        raise ValueError(f"replicas: expected 1 to {said.servers}, as many as servers, found {said.replicas}")
    if said.replicas > 1 and (said.record or said.replay):
        raise ValueError(f"replicas: expected 1 where the order of messages is kept or played, found {said.replicas}")
    if said.check_every:
        raise ValueError(f"check_every: expected 0, since ps has one copy of each parameter; found {said.check_every}")
    if said.record and said.record == said.replay:
        raise ValueError(f"record: {said.record} is what is to be replayed")


def _check(said: Settings, ranks: int) -> None:
    if problem := uncompressible(said.compress, said.layout, said.precision, said.reproducible):
        raise problem


WAYS = {
    name: Way(_replicas, _check, settings=("compress", *(("pool",) if layout.drawn else ())), forecast=_forecast)
    for name, layout in LAYOUTS.items()
}
WAYS["pp"] = Way(_stages, pipelines.check, pipelines.workers, _cut, OF_PIPELINES, kinds=True)
WAYS["ps"] = Way(
    _served,
    _servers_refuse,
    workers=lambda said, ranks: ranks - said.servers,
    settings=OF_SERVERS,
    draws=True,
    meet=lambda engine: engine.settle(),
    save=lambda engine, comm, write: engine.save(write),
    outlives=True,
    speaks=lambda engine, comm: engine.speaks,
)
WAYS |= {
    name: Way(_styled, _style_refuses, settings=line.options, forecast=_style_forecast) for name, line in STYLES.items()
}


def way_of(said: Settings) -> Way:
    """The line that the settings' layout belongs to, by what stands before a colon.

    Raises
    ------
    ValueError
        If there is none, or if a setting is said that another way has.

    Examples
    --------
    >>> way_of(Settings(layout="zero3")).workers(Settings(), 4)
    4
    """
    name = said.layout.partition(":")[0]
    if name not in WAYS or (":" in said.layout and not WAYS[name].kinds):
        raise ValueError(f"layout: expected one of {', '.join(WAYS)}, found {said.layout!r}")
    unsaid = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    for setting in {setting for way in WAYS.values() for setting in way.settings} - set(WAYS[name].settings):
        if getattr(said, setting) != unsaid[setting]:
            owners = ", ".join(other for other, way in WAYS.items() if setting in way.settings)
            raise ValueError(f"{setting}: it belongs to {owners}, and the layout is {said.layout}")
    return WAYS[name]
