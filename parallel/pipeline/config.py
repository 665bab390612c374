"""Pipeline settings: schedule, mesh, micro-batches and cuts. Fills in open values, by timing of units."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.compressed.compression_model import fitted
from parallel.engine.base import type_of
from parallel.engine.data_parallel.partition_spec import units_of
from parallel.engine.model_on_mesh import check_on_mesh
from parallel.engine.settings import Settings
from parallel.nn.array_checks import is_float
from parallel.nn.flat_params import FlatParams
from parallel.nn.operator import Operator, Parameter, PassMode, nbytes_of, parts_of
from parallel.optim.optimizer import Optimizer
from parallel.optim.precision import PRECISIONS, Precision
from parallel.pipeline.schedule.actions import from_csv
from parallel.pipeline.schedule.pipeline_plan import build, check_ranks
from parallel.pipeline.schedule.schedule_search import search
from parallel.pipeline.schedule.schedules import SCHEDULES, ScheduleEntry, tabled
from parallel.pipeline.schedule.stage_partition import LayerCost, partition, replicate
from parallel.pipeline.stage_params import AXIS, replicas_of
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.vector_memory import namespace
from parallel.sharding.axis import REPLICAS
from parallel.sharding.mesh import Mesh
from quant.types import Array

TIMES = 3
"""Repetitions per measurement. The shortest time counts."""


def measure(
    units: Sequence[Operator], loss: Any, x: Array, y: Array, recipe: Precision, *, states: int, device: str = "cpu"
) -> list[LayerCost]:
    """Measure seconds and bytes of each unit for a micro-batch in training. Those of the last include the loss.

    `x` and `y` are in the model's dtypes, `states` is the number of the optimizer's state vectors. The parameters must
    be named, and keep the values that they have; weights of one unit at a time are allocated.
    """
    xp = namespace(device)
    x, y, layers = xp.asarray(x), xp.asarray(y), []
    for unit in units:
        before = {one: one.data if one.has_values else None for one in unit.parameters()}
        for parameter in before:
            parameter.bind(xp.asarray(parameter.first(0)).astype(recipe.storage))
        x, layer = _layer(unit, x, loss if unit is units[-1] else None, y, recipe, states, device)
        layers.append(layer)
        for parameter, values in before.items():
            parameter.release()
            parameter.data = values
    return layers


def _layer(
    unit: Operator, x: Array, loss: Any, y: Array, recipe: Precision, states: int, device: str
) -> tuple[Array, LayerCost]:
    later: list[tuple[Parameter, Callable[[Array], object]]] = []
    found: dict[str, Any] = {}
    xp = namespace(device)
    mode = PassMode(samples=np.arange(len(parts_of(x)[0])))

    def forward() -> None:
        found["y"], found["saved"] = unit.forward(x, mode)
        if loss is not None:
            found["loss"] = loss.forward(found["y"], y)[1]

    def backward() -> None:
        later.clear()  # _shortest calls it several times
        ones = tuple(xp.ones_like(one) if is_float(one) else None for one in parts_of(found["y"]))
        dy = loss.backward(1.0, found["loss"]) if loss else ones if type(found["y"]) is tuple else ones[0]
        unit.backward(dy, found["saved"], lambda parameter, compute: later.append((parameter, compute)))

    def weights() -> None:
        for parameter, compute in later:
            compute(xp.empty(parameter.shape, recipe.wide))

    F, B, W = (_shortest(run, device) for run in (forward, backward, weights))
    size = sum(parameter.size for parameter in unit.parameters())
    kept = sum(recipe.bytes_per_parameter(states).values()) * size
    saved = nbytes_of((found["saved"], found.get("loss")))
    return found["y"], LayerCost(F, B, W, saved, kept)


def _shortest(run: Callable[[], None], device: str) -> float:
    def timed() -> float:
        began = time.perf_counter()
        run()
        if device == "cuda":
            namespace(device).cuda.get_current_stream().synchronize()
        return time.perf_counter() - began

    return min(timed() for _ in range(TIMES))


AUTO = "auto"
Take = Callable[[int], tuple[Array, Array]]
"""Callable that returns inputs and targets of a number of samples."""


def schedule_of(settings: Settings) -> str:
    """Schedule name in ``settings.layout``, or ``auto``. Default ``1f1b``. Reads a CSV file into `SCHEDULES`, once.

    Raises ValueError if the schedule is unknown or the file is not a table of actions, OSError if it cannot be read.
    """
    name = settings.layout.partition(":")[2] or "1f1b"
    if name.lower().endswith(".csv") and name not in SCHEDULES:
        SCHEDULES[name] = ScheduleEntry(tabled(from_csv(Path(name).read_text())))
    if name not in (*SCHEDULES, AUTO):
        raise ValueError(
            f"layout: expected {AXIS}: and one of {', '.join(SCHEDULES)}, {AUTO}; found {settings.layout!r}"
        )
    return name


def mesh_of(settings: Settings, ranks: int) -> Mesh:
    """Mesh of the settings. ValueError if invalid for `ranks`.

    By default ``pp`` x ``dp``; along ``pp`` are `stages`, else the ranks in `stage_ranks`, else all.
    """
    if settings.mesh is None:
        turns = None if settings.stage_ranks == AUTO else ranks_of(settings.stage_ranks)
        stages = settings.stages or sum(turns or ()) or ranks
        if ranks % stages:
            raise ValueError(f"stages: {ranks} ranks do not divide into pipelines of {stages} stages")
        return Mesh({AXIS: stages, REPLICAS.name: ranks // stages})
    mesh = Mesh.parse(settings.mesh)
    replicas_of(mesh, ranks)
    if settings.stages not in (None, mesh.sizes[AXIS]):
        raise ValueError(f"stages: {settings.stages} are not those of the mesh {mesh}")
    return mesh


def workers(settings: Settings, ranks: int) -> int:
    """Number of replicas of the pipeline, which share the samples of a step. Some ranks may share these."""
    return mesh_of(settings, ranks).samples.size


def microbatches(settings: Settings, ranks: int) -> int:
    """Number of micro-batches of a step in a pipeline. The largest number if pipelines differ."""
    if settings.microbatches is not None and settings.micro_batch is None:
        return settings.microbatches
    pipelines = workers(settings, ranks)
    parts = -(-settings.batch // settings.micro(pipelines))
    return -(-parts // pipelines)


def check_batch(settings: Settings, ranks: int) -> None:
    """Raise ValueError unless the `batch` of the settings divides into equally many micro-batches for each pipeline."""
    pipelines, each, batch = workers(settings, ranks), settings.microbatches, settings.batch
    if each is not None and batch % (each * pipelines):
        wanted = f"{pipelines} x {each}" if pipelines > 1 else f"{each}"
        raise ValueError(f"microbatches: a batch of {batch} samples does not divide into {wanted} micro-batches")
    if (parts := -(-batch // settings.micro(pipelines))) % pipelines:
        raise ValueError(
            f"microbatches: {parts} of a step do not divide among {pipelines} pipelines; micro_batch sets their size"
        )


def check(settings: Settings, ranks: int) -> None:
    """Raise ValueError if the settings, but for `batch`, do not fit a pipeline on so many ranks."""
    name = schedule_of(settings)
    mesh = mesh_of(settings, ranks)
    stages = mesh.sizes[AXIS]
    if settings.stage_ranks is not None:
        turns = (1,) * stages if settings.stage_ranks == AUTO else ranks_of(settings.stage_ranks)
        check_ranks(name, stages, turns or ())
    check_on_mesh(settings, mesh, mesh.replicas)
    cuts_of(settings.cuts)
    if name == AUTO and (settings.virtual, settings.cuts) != (None, None):
        raise ValueError(f"virtual, cuts: {AUTO} finds them, found {settings.virtual}, {settings.cuts}")
    if settings.stage_ranks == AUTO and settings.cuts is not None:
        raise ValueError(f"cuts: stage_ranks {AUTO} finds them, found {settings.cuts}")
    if settings.memory is not None and name != AUTO:
        raise ValueError(f"memory: a limit is for {AXIS}:{AUTO}, the layout is {settings.layout}")


def cuts_of(text: str | None) -> tuple[int, ...] | None:
    """Parse cuts (first unit of each part, then the number of units) such as ``"0,2,5"``. None for None."""
    return None if text is None else _numbers("cuts", text, "0,2,5")


def ranks_of(text: str | None) -> tuple[int, ...] | None:
    """Parse the ranks of each part, such as ``"2,1,1"``. None for None."""
    return None if text is None else _numbers("stage_ranks", text, "2,1,1")


def _numbers(name: str, text: str, example: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"{name}: expected numbers as in {example}, found {text!r}")
    return tuple(int(word) for word in words)


def resolve(
    settings: Settings, comm: Communicator, model: Operator, loss: Any, optimizer: Optimizer, take: Take
) -> Settings:
    """Fill in cuts, if open, and with ``auto`` also schedule, micro-batches and chunks, by measurement. Collective.

    With ``stage_ranks="auto"`` the ranks of each part are found too, for which a sum over the ranks is measured.
    Settings that have cuts are returned unchanged. Times are measured on rank 0, so that all ranks cut alike; what is
    not filled in stays as on each rank. Raises ValueError on all ranks, if the model has too few units or the memory
    limit is too low.
    """
    ranks, recipe = comm.Get_size(), PRECISIONS[settings.precision]
    mesh, units = mesh_of(settings, ranks), units_of(model)
    stages, pipelines = mesh.sizes[AXIS], workers(settings, ranks)
    FlatParams(model)  # names the parameters

    def layers(samples: int) -> list[LayerCost]:
        x, y = take(samples)
        x, y = x.astype(type_of(x, recipe.storage)), y.astype(type_of(y, recipe.wide))
        copies, copy = deepcopy((units, loss))  # passes may change operators, which must be alike on all ranks
        return measure(copies, copy, x, y, recipe, states=len(optimizer.states()), device=settings.device)

    def chosen() -> dict[str, Any]:
        found: dict[str, Any] = {}
        if schedule_of(settings) != AUTO:
            costs = layers(settings.micro(pipelines))
            if settings.stage_ranks == AUTO:
                cuts, turns = replicate(costs, stages, exchange)
                found["stage_ranks"] = ",".join(map(str, turns))
            elif given := ranks_of(settings.stage_ranks):
                cuts = partition(costs, len(given), ranks=given)
            else:
                parts = build(schedule_of(settings), stages, 1, virtual=settings.virtual).placement.parts
                cuts = partition(costs, parts)
        else:
            numbers = None if settings.microbatches is None else [settings.microbatches]
            samples = settings.batch // pipelines
            if settings.microbatches is not None:
                samples = settings.microbatches * settings.micro(pipelines)
            best = search(layers, stages, samples, settings.memory, microbatches=numbers)[0]
            found = {"layout": f"{AXIS}:{best.schedule}", "microbatches": best.microbatches, "virtual": best.virtual}
            found, cuts = found | {"micro_batch": None, "accumulate": None}, best.cuts
        return found | {"cuts": ",".join(map(str, (0, *(cut.stop for cut in cuts))))}

    if settings.cuts is not None:
        return settings
    exchange = 0.0  # seconds of a gradient sum per byte of parameters and state, and micro-batch
    if settings.stage_ranks == AUTO:
        kinds = recipe.bytes_per_parameter(len(optimizer.states()))
        exchange = fitted(comm).beta * kinds["gradients"] / sum(kinds.values()) / microbatches(settings, ranks)
    return replace(settings, **collective_call(comm, chosen, "the pipeline cannot be cut", root=0))
