"""A pipeline by its settings: ``pp:<schedule>``, so many stages, micro-batches and replicas, cut by measured times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from collectives import Communicator
from parallel.nn.flat_params import Flat
from parallel.mesh import Axis, Mesh
from parallel.nn.operator import Array, Operator
from parallel.optim.optimizers import Optimizer
from parallel.pipeline.schedule.actions import from_csv
from parallel.pipeline.asynchronous_pipeline import Asynchronous
from parallel.pipeline.engine import AXIS, Pipeline, replicas_of
from parallel.pipeline.unit_timing import measure
from parallel.pipeline.schedule.stage_partition import partition
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.schedules import SCHEDULES, Entry, tabled
from parallel.pipeline.schedule.schedule_search import search
from parallel.optim.precision import PRECISIONS
from parallel.settings import Settings
from parallel.engine.base import type_of, units_of
from parallel.runtime.collective_errors import together

AUTO = "auto"
Take = Callable[[int], tuple[Array, Array]]
"""So many samples: inputs and targets."""


def schedule_of(said: Settings) -> str:
    """The schedule's name: what stands behind the colon, or 1f1b; a file of one's own joins the table by its name.

    Raises
    ------
    ValueError
        If there is none of that name, or the file is no table of actions.
    OSError
        If the file cannot be read.
    """
    name = said.layout.partition(":")[2] or "1f1b"
    if name.endswith(".csv") and name not in SCHEDULES:
        SCHEDULES[name] = Entry(tabled(from_csv(Path(name).read_text())))
    if name not in (*SCHEDULES, AUTO):
        raise ValueError(f"layout: expected {AXIS}: and one of {', '.join(SCHEDULES)}, {AUTO}; found {said.layout!r}")
    return name


def mesh_of(said: Settings, ranks: int) -> Mesh:
    """The mesh that is said, or one of so many stages, by default all ranks, whose replicas are neighbours.

    Raises
    ------
    ValueError
        If it does not fit the ranks.
    """
    if said.mesh is None:
        stages = said.stages or ranks
        if ranks % stages:
            raise ValueError(f"stages: {ranks} ranks do not divide into pipelines of {stages} stages")
        return Mesh((Axis(AXIS, stages), Axis("dp", ranks // stages)))
    mesh = Mesh.parse(said.mesh)
    replicas_of(mesh, ranks)
    if said.stages not in (None, mesh.sizes[AXIS]):
        raise ValueError(f"stages: {said.stages} are not those of the mesh {mesh}")
    return mesh


def workers(said: Settings, ranks: int) -> int:
    """Pipelines: how many of the ranks share the samples of a step."""
    mesh = mesh_of(said, ranks)
    return mesh.size // mesh.sizes[AXIS]


def microbatches(said: Settings, ranks: int) -> int:
    """Micro-batches of a step in each pipeline.

    Raises
    ------
    ValueError
        If the step's samples or micro-batches do not divide.
    """
    pipelines = workers(said, ranks)
    if said.microbatches is not None and said.batch % (said.microbatches * pipelines):
        wanted = f"{pipelines} x {said.microbatches}" if pipelines > 1 else f"{said.microbatches}"
        raise ValueError(f"microbatches: a batch of {said.batch} samples does not divide into {wanted} micro-batches")
    parts = -(-said.batch // said.micro(pipelines))
    if parts % pipelines:
        raise ValueError(f"microbatches: {parts} of a step do not divide among {pipelines} pipelines")
    return parts // pipelines


def check(said: Settings, ranks: int) -> None:
    """Raise ValueError for what cannot be."""
    name = schedule_of(said)
    microbatches(said, ranks)
    if said.cuts is not None:
        cuts_of(said.cuts)
    if name == AUTO and (said.virtual, said.cuts) != (None, None):
        raise ValueError(f"virtual, cuts: {AUTO} finds them, found {said.virtual}, {said.cuts}")
    if said.memory is not None and name != AUTO:
        raise ValueError(f"memory: a limit is for {AXIS}:{AUTO}, the layout is {said.layout}")


def cuts_of(text: str) -> tuple[int, ...]:
    """``"0,2,5"`` as numbers."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"cuts: expected numbers as in 0,2,5, found {text!r}")
    return tuple(int(word) for word in words)


def settle(
    said: Settings, comm: Communicator, model: Operator, loss: Any, optimizer: Optimizer, take: Take, device: str
) -> Settings:
    """The settings with all that was left open: cuts, and with ``auto`` schedule, micro-batches and chunks. Collective.

    Times are rank 0's, so that all ranks cut alike.

    Raises
    ------
    ValueError
        On all ranks, if the model has too few units, or too little memory is allowed.
    """
    ranks, recipe = comm.Get_size(), PRECISIONS[said.precision]
    mesh, units = mesh_of(said, ranks), units_of(model)
    stages, pipelines = mesh.sizes[AXIS], workers(said, ranks)
    Flat(model)  # names the parameters

    def layers(samples: int) -> Any:
        x, y = take(samples)
        x, y = x.astype(type_of(x, recipe.storage)), y.astype(type_of(y, recipe.wide))
        return measure(units, loss, x, y, recipe, states=len(optimizer.states()), device=device)

    def chosen() -> Settings:
        if schedule_of(said) != AUTO:
            parts = build(schedule_of(said), stages, 1, virtual=said.virtual).placement.parts
            return replace(said, cuts=_told(partition(layers(said.micro(pipelines)), parts)))
        numbers = None if said.microbatches is None else [said.microbatches]
        best = search(layers, stages, said.batch // pipelines, said.memory, microbatches=numbers)[0]
        found = {"layout": f"{AXIS}:{best.schedule}", "microbatches": best.microbatches, "virtual": best.virtual}
        return replace(said, cuts=_told(best.cuts), micro_batch=None, accumulate=None, **found)  # type: ignore[arg-type]

    return said if said.cuts is not None else together(comm, chosen, "the pipeline cannot be cut", root=0)


def _told(cuts: Any) -> str:
    return ",".join(str(cut.start) for cut in cuts) + f",{cuts[-1].stop}"


def engine(
    said: Settings, comm: Communicator, model: Operator, loss: Any, optimizer: Optimizer, device: str, trace: bool
) -> Pipeline:
    """The engine of settled settings. Collective."""
    kind = Pipeline if SCHEDULES[schedule_of(said)].version is None else Asynchronous
    return kind(
        model,
        loss,
        comm,
        optimizer,
        schedule=schedule_of(said),
        mesh=mesh_of(said, comm.Get_size()),
        microbatches=microbatches(said, comm.Get_size()),
        virtual=said.virtual,
        cuts=None if said.cuts is None else cuts_of(said.cuts),
        seed=said.seed,
        precision=said.precision,
        reproducible=said.reproducible,
        clip=said.clip or None,
        bucket_bytes=said.bucket_bytes,
        check_every=said.check_every,
        device=device,
        trace=trace,
    )
