"""Choice of the layout of a training on the ranks that there are: what fits, by predicted time; a reason for the rest.

Memory is the forecast of the engines themselves, to the byte; times are those of `StepForecaster`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from collectives import Communicator
from parallel.engine.memory_ledger import MemoryLedger, Workload
from parallel.engine.settings import Settings
from parallel.forecast.measurement_record import MeasurementRecord
from parallel.forecast.step_forecast import Job, StepForecaster
from parallel.forecast.step_timeline import StepTimeline
from parallel.runtime.collective_errors import collective_call
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


def candidates(given: Settings, ranks: int) -> Iterator[Settings]:
    """Settings of all layouts on so many ranks: DDP and ZeRO with tp, pipelines, a parameter server."""
    fresh = replace(given, micro_batch=None, accumulate=None, microbatches=None, stages=None, mesh=None, cuts=None)
    divisors = [each for each in range(1, ranks + 1) if ranks % each == 0]
    for layout, tp, accumulate, recompute in product(DATA_PARALLEL, divisors, ACCUMULATE, RECOMPUTE):
        if ranks // tp > 1 or layout == "dp":
            mesh = f"dp={ranks // tp},tp={tp}" if tp > 1 else None
            yield replace(fresh, layout=layout, mesh=mesh, accumulate=accumulate, recompute=recompute)
    for schedule, stages, count, recompute in product(PIPELINES, divisors[1:], MICROBATCHES, RECOMPUTE):
        mesh = f"pp={stages},dp={ranks // stages}"
        options: dict[str, Any] = {"mesh": mesh, "microbatches": count, "recompute": recompute}
        yield replace(fresh, layout=f"pp:{schedule}", virtual=2 if schedule == "interleaved" else None, **options)
    if ranks > 1:
        yield replace(fresh, layout="ps", servers=1)


class LayoutChoice:
    """Judgement of layouts on the ranks of a communicator; `limit` is the memory of a rank in bytes.

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
            over = f"{(needed - self._limit) / 1e6:.1f} MB over {self._limit / 1e6:.1f} MB"
            return Refusal(settings, f"{over}; {kind} {most[kind] / 1e6:.1f} MB")
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
        """All layouts that fit, fastest first, and all others; ValueError if the simplest one cannot be trained."""
        layouts = list(candidates(given, self._comm.Get_size()))
        self._forecaster.prepare(layouts[0])
        found = [self.judge(settings) for settings in layouts]
        fitting = [each for each in found if isinstance(each, LayoutForecast)]
        fitting.sort(key=lambda each: each.step.seconds)
        return fitting, [each for each in found if isinstance(each, Refusal)]
