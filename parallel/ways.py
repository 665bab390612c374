"""Ways to train: what a training needs of an engine, and which engine a layout's first word stands for; a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from collectives import Communicator
from parallel.data import Batch
from parallel.engine import Engine
from parallel.flat import Flat
from parallel.layouts import LAYOUTS
from parallel.ledger import Ledger
from parallel.nn.compose import Sequential
from parallel.nn.operator import Array
from parallel.optim import Optimizer
from parallel.record import Event
from parallel.report import Evaluation, Report
from parallel.server.engine import ParameterServer, factors, refuse_servers
from parallel.settings import OF_SERVERS, Settings
from parallel.stretches import Stretch


class Trains(Protocol):
    """What `parallel.training` asks of an engine; `parallel.engine.Engine` says what each of it means."""

    flat: Flat
    ledger: Ledger
    steps: int

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
    settings : names
        Of settings that no other way has.
    draws : bool
        Whether ranks draw a step's micro-batches while it goes on, so that each must be able to make any of them.
    settle : callable (engine)
        Wait until all ranks have made as many steps. Collective; most make their steps together anyway.
    save : callable (engine, comm, write)
        Have a checkpoint written, by `write` (ranks that hold the state, what each holds of it). Collective.
    """

    engine: Callable[[Job, Settings], Trains]
    check: Callable[[Settings, int], None] = lambda said, ranks: None
    workers: Callable[[Settings, int], int] = lambda said, ranks: ranks
    settings: tuple[str, ...] = ()
    draws: bool = False
    settle: Callable[[Any], None] = lambda engine: None
    save: Callable[[Any, MPI.Intracomm, Any], Any] = lambda engine, comm, write: write(comm, engine.stretches())


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
        device=job.device,
        trace=job.trace,
    )


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


WAYS: dict[str, Way] = dict.fromkeys(LAYOUTS, Way(_replicas))
WAYS["ps"] = Way(
    _served,
    _servers_refuse,
    workers=lambda said, ranks: ranks - said.servers,
    settings=OF_SERVERS,
    draws=True,
    settle=lambda engine: engine.settle(),
    save=lambda engine, comm, write: engine.save(write),
)


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
    if name not in WAYS or (":" in said.layout and name in LAYOUTS):
        raise ValueError(f"layout: expected one of {', '.join(WAYS)}, found {said.layout!r}")
    unsaid = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    for other, way in WAYS.items():
        for setting in set(way.settings) - set(WAYS[name].settings):
            if getattr(said, setting) != unsaid[setting]:
                raise ValueError(f"{setting}: it belongs to {other}, and the layout is {said.layout}")
    return WAYS[name]
