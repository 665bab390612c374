"""Choice of a training's layout on the available ranks: fitting layouts by predicted time, and reasons against others.

Memory is the engines' own forecast, exact to the byte. `StepForecaster` predicts the times.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import NamedTuple

from collectives import Communicator
from collectives.units import format_bytes
from parallel.engine.compression import WIDTHS
from parallel.engine.grad_compression import AUTO, NONE
from parallel.engine.memory_ledger import MemoryLedger, Workload
from parallel.engine.settings import Settings
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.rewrite import operators_in
from parallel.planning.analytic.search import divisors
from parallel.planning.measured.measurement_record import MeasurementRecord
from parallel.planning.measured.step_forecast import Job, StepForecaster
from parallel.planning.measured.step_timeline import StepTimeline
from parallel.runtime.collective_errors import collective_call
from parallel.sharding.axes import AXES
from parallel.sharding.axis import REPLICAS
from parallel.sharding.mesh import Mesh
from parallel.trainer.strategies import strategy_of
from parallel.trainer.task_setup import sampler_of, specs

DATA_PARALLEL = ("dp", "zero1", "zero2", "zero3")
PIPELINES = ("gpipe", "1f1b", "zb-h1", "interleaved")
ACCUMULATE = (1, 2, 4)
MICROBATCHES = (2, 4, 8)
RECOMPUTE = ("none", "full")


class LayoutForecast(NamedTuple):
    """Settings of a layout that fits, with bytes by kind of each rank, and the predicted step."""

    settings: Settings
    memory: list[dict[str, int]]
    step: StepTimeline

    @property
    def nbytes(self) -> int:
        """Bytes of the rank that needs most."""
        return max(sum(kinds.values()) for kinds in self.memory)


class Refusal(NamedTuple):
    """Settings of a layout that was rejected, and why."""

    settings: Settings
    reason: str


def candidates(given: Settings, ranks: int, experts: bool = False) -> Iterator[Settings]:
    """Settings of all layouts on `ranks` ranks: DDP and ZeRO on `meshes`, pipelines, a parameter server.

    Each also appears with the given compression of gradients, if any. "auto": all methods that it chooses from.
    """
    fresh = replace(given, micro_batch=None, accumulate=None, microbatches=None, stages=None, mesh=None, cuts=None)
    fresh = replace(fresh, compress=NONE)
    ways = {NONE: (NONE,), AUTO: (NONE, *WIDTHS)}.get(given.compress, (NONE, given.compress))
    for compress, mesh, layout in product(ways, meshes(ranks, experts), DATA_PARALLEL):
        # on one replica without compression all layouts of data parallelism are the same step
        if mesh.alike.size > 1 or (layout == "dp" and compress == NONE):
            text = None if [*mesh.sizes] == [REPLICAS.name] and mesh.ep == 1 else str(mesh)
            for accumulate, recompute in product(ACCUMULATE, RECOMPUTE):
                form = replace(fresh, layout=layout, mesh=text, compress=compress)
                yield replace(form, accumulate=accumulate, recompute=recompute)
    for compress, schedule, stages in product(ways, PIPELINES, divisors(ranks)[1:]):
        text, virtual = f"pp={stages},dp={ranks // stages}", 2 if schedule == "interleaved" else None
        for count, recompute in product(MICROBATCHES if stages < ranks or compress == NONE else (), RECOMPUTE):
            form = replace(fresh, layout=f"pp:{schedule}", virtual=virtual, mesh=text, compress=compress)
            yield replace(form, microbatches=count, recompute=recompute)
    for recompute in RECOMPUTE if ranks > 1 else ():
        yield replace(fresh, layout="ps", servers=1, recompute=recompute)


def meshes(ranks: int, experts: bool) -> Iterator[Mesh]:
    """Meshes of all axes but stages, with `experts` also of those over which experts are divided.

    >>> [str(mesh) for mesh in meshes(2, experts=True)]
    ['dp=2', 'dp=2,ep=2', 'cp=2', 'cp=2,ep=2', 'tp=2', 'tp=2,ep=2']
    """
    names = [name for name, axis in AXES.items() if axis.input is not None]
    for counts in product(divisors(ranks), repeat=len(names)):
        # other counts would leave ranks idle, or need more of them
        if prod(counts) == ranks:
            sizes = {name: size for name, size in zip(names, reversed(counts)) if size > 1} or {REPLICAS.name: 1}
            for ep in divisors(ranks) if experts else (1,):
                yield Mesh(sizes, ep)


class LayoutChoice:
    """Judgement of layouts on the ranks of a communicator. `limit` is the memory of a rank in bytes.

    All methods are collective.
    """

    def __init__(self, comm: Communicator, limit: float):
        self._comm, self._limit, self._forecaster = comm, limit, StepForecaster(MeasurementRecord.on(comm))

    def judge(self, settings: Settings) -> LayoutForecast | Refusal:
        """Memory and step of a layout, or why it is rejected."""
        try:
            settings, job = self._forecaster.prepare(settings)
            memory = self._comm.allgather(collective_call(self._comm, partial(self._memory, settings, job), "memory"))
        except ValueError as error:  # on all ranks
            return Refusal(settings, str(error))
        most = max(memory, key=lambda kinds: sum(kinds.values()))
        if (needed := sum(most.values())) > self._limit:
            kind = max(most, key=lambda name: most[name])
            over = f"{format_bytes(needed - self._limit)} over {format_bytes(self._limit)}"
            return Refusal(settings, f"{over}; {kind} {format_bytes(most[kind])}")
        return LayoutForecast(settings, memory, self._forecaster.step(settings, job))

    def _memory(self, settings: Settings, job: Job) -> dict[str, int]:
        """Forecast bytes of this rank by kind."""
        ranks, strategy = self._comm.Get_size(), strategy_of(settings)
        steps = sampler_of(settings, job.task, ranks).sizes(1)
        workload = Workload(self._comm.Get_rank(), ranks, partial(specs, job.task, settings.precision), steps)
        engine = strategy.engine_class(settings)
        forecast: MemoryLedger = engine.forecast(job.model, job.loss, job.optimizer, workload, settings)
        return dict(forecast.needed)

    def search(self, given: Settings) -> tuple[list[LayoutForecast], list[Refusal]]:
        """All layouts that fit, fastest first, and all others. ValueError if the simplest one cannot be trained."""
        simplest = next(candidates(given, self._comm.Get_size()))
        _, job = self._forecaster.prepare(simplest)
        experts = any(isinstance(one, MixtureOfExperts) for one in operators_in(job.model))
        layouts = candidates(given, self._comm.Get_size(), experts)
        found = [self.judge(settings) for settings in layouts]
        fitting = [each for each in found if isinstance(each, LayoutForecast)]
        fitting.sort(key=lambda each: each.step.seconds)
        return fitting, [each for each in found if isinstance(each, Refusal)]
