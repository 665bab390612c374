"""Predicted seconds of a training step on the ranks that there are, from settings alone.

The units of the model, the update and messages are measured once each (`MeasurementRecord`), and put together by the
layout's own order: of its buckets, or of its pipeline schedule.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.selection.cost_model import BUILT_IN
from parallel.data_parallel.layouts import LAYOUTS
from parallel.data_parallel.partition_spec import plan_of, units_of
from parallel.engine.divided_sequences import TENSOR
from parallel.engine.model_on_mesh import cut_for, forecast_axis, mesh_of
from parallel.engine.settings import Settings
from parallel.forecast.data_parallel_step import RankGroup, UnitWork, data_parallel_step
from parallel.forecast.measured_costs import MeasuredCosts, UnitCost, Workpiece
from parallel.forecast.measured_messages import MeasuredMessages
from parallel.forecast.measurement_record import MeasurementRecord
from parallel.forecast.pipeline_step import PipelineWork, pipeline_step
from parallel.forecast.server_step import server_step
from parallel.forecast.step_timeline import NETWORK, SHARED, STEP, StepTimeline
from parallel.mesh.mesh import Mesh
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import BLOCK
from parallel.nn.operator import Operator
from parallel.optim.optimizer import Optimizer
from parallel.pipeline import config
from parallel.pipeline.param_division import cuts_for
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.stage_partition import LayerCost, partition
from parallel.pipeline.stage_params import AXIS, Portion
from parallel.runtime.collective_errors import collective_call
from parallel.trainer.strategies import strategy_of
from parallel.trainer.task_setup import loss_of, prepare, specs


class Job(NamedTuple):
    """Data, model, loss and optimizer of a training."""

    task: Any
    model: Sequential
    loss: Any
    optimizer: Optimizer

    def take(self, count: int) -> Any:
        data = self.task.train
        return data.take(np.arange(count) % len(data))


class StepForecaster:
    """Forecaster of the steps of trainings on some ranks, from a record that grows by what it does not have yet.

    All methods are collective.
    """

    def __init__(self, record: MeasurementRecord):
        self.record, self.measured = record, MeasuredCosts(record)
        self.ranks = len(record.nodes)
        self.messages = MeasuredMessages(BUILT_IN, record.nodes, record.sharing.cores, record=record)

    def prepare(self, settings: Settings) -> tuple[Settings, Job]:
        """Data and model of a training, and its settings with the cuts of a pipeline; ValueError if they do not fit."""
        task, model, optimizer = collective_call(
            self.record.comm or MPI.COMM_SELF, lambda: prepare(settings, self.ranks), "this cannot be trained"
        )
        job = Job(task, model, loss_of(task), optimizer)
        if strategy_of(settings).measures and settings.cuts is None:
            settings = replace(settings, cuts=self._cuts(settings, job))
        return settings, job

    def step(self, settings: Settings, job: Job) -> StepTimeline:
        """Predicted step of a training, of settings and job as from `prepare`."""
        kind = settings.layout.partition(":")[0]
        if kind in LAYOUTS or kind == "pp":
            found = self._data_parallel(settings, job) if kind in LAYOUTS else self._pipeline(settings, job)
            found.spend("synchronise", STEP, self._synchronisation(job))
            return found
        if kind == "ps":
            return self._servers(settings, job)
        known = ", ".join([*LAYOUTS, "pp", "ps"])
        raise ValueError(f"layout: expected one whose time can be forecast, of {known}; found {settings.layout}")

    def _synchronisation(self, job: Job) -> float:
        """Seconds of a step's small collectives: numbers of micro-batches, sums of the losses, squares of gradients."""
        blocks = sum(-(-parameter.size // BLOCK) for parameter in job.model.parameters())
        calls = (("allgatherv", 40 * self.ranks), ("allreduce", 16), ("allgatherv", 8 * blocks))
        return sum(self.messages.collective(name, range(self.ranks), nbytes) for name, nbytes in calls)

    def _units(self, settings: Settings, job: Job, samples: int, tp: int) -> list[UnitCost]:
        work = Workpiece(job.model, job.loss, job.take)
        return self.measured.units(work, settings, samples, tp)

    def _work(
        self, settings: Settings, job: Job, samples: int, mesh: Mesh, rounds: int, crowd: float = 1.0
    ) -> tuple[list[UnitWork], str]:
        """Work of the units for one of `rounds` micro-batches, and the cause of exchanges along tp.

        Passes take `crowd` times as long as measured. Gradients of all micro-batches but the first one are added.
        """
        tp = mesh.sizes.get(TENSOR, 1)
        ranks = next(group for group in mesh.groups([TENSOR]) if 0 in group)
        found = []
        for unit in self._units(settings, job, samples, tp):
            added = self.measured.sum_of_gradients(unit.parameters) * (rounds - 1) / rounds
            along = sum(self.messages.among(name, ranks, nbytes) for name, nbytes in unit.exchanges)
            forward, backward, weights = unit.forward * crowd, unit.backward * crowd, (unit.weights + added) * crowd
            found.append(UnitWork(forward, backward, weights, along))
        return found, NETWORK if self.messages.over_network(ranks) else SHARED

    def _data_parallel(self, settings: Settings, job: Job) -> StepTimeline:
        ranks = self.ranks
        mesh, crowd = mesh_of(settings, ranks), self.measured.sharing.crowd
        workers = strategy_of(settings).workers(settings, ranks)
        samples, microbatches = _micro_batches(settings, workers)
        rounds = -(-microbatches // workers)
        replicas = next(group for group in mesh.groups(mesh.without(TENSOR).sizes) if 0 in group)
        units, tensor = self._work(settings, job, samples, mesh, rounds, crowd)
        model, _ = cut_for(job.model, job.loss, forecast_axis(mesh, 0), mesh, settings)
        plan = plan_of(model, len(replicas), 0, settings)
        own = -(-plan.flat.length // len(replicas)) if LAYOUTS[settings.layout].divided else plan.flat.length
        update = self.measured.update(job.optimizer, settings, own) * crowd
        group = RankGroup(plan, replicas, self.messages)
        return data_parallel_step(settings.layout, units, rounds, group, update, tensor)

    def _cuts(self, settings: Settings, job: Job) -> str:
        mesh = config.mesh_of(settings, self.ranks)
        parts = build(config.schedule_of(settings), mesh.sizes[AXIS], 1, virtual=settings.virtual).placement.parts
        samples, _ = _micro_batches(settings, config.workers(settings, mesh.size))
        costs = [LayerCost(*unit[:3]) for unit in self._units(settings, job, samples, mesh.sizes.get(TENSOR, 1))]
        return ",".join(map(str, (0, *(cut.stop for cut in partition(costs, parts)))))

    def _pipeline(self, settings: Settings, job: Job) -> StepTimeline:
        mesh = config.mesh_of(settings, self.ranks)
        replicas, whole = config.workers(settings, mesh.size), mesh.without(TENSOR)
        samples, microbatches = _micro_batches(settings, replicas)
        units, _ = self._work(settings, job, samples, mesh, -(-microbatches // replicas))
        model, _ = cut_for(job.model, job.loss, forecast_axis(mesh, 0), mesh, settings)
        plan = build(
            config.schedule_of(settings),
            mesh.sizes[AXIS],
            config.microbatches(settings, mesh.size),
            virtual=settings.virtual,
        )
        ranks = next(group for group in mesh.groups(whole.sizes) if 0 in group)
        cuts = cuts_for(config.cuts_of(settings.cuts), len(units), plan.placement.parts)
        line = next(group for group in whole.groups([AXIS]) if 0 in group)
        portions = [Portion.make(plan_of(model, whole.size, at, settings), whole, plan, cuts) for at in line]
        outputs = _outputs(units_of(model), job, settings, samples)
        update = partial(self.measured.update, job.optimizer, settings)
        return pipeline_step(
            PipelineWork(units, outputs, portions, ranks), self.messages, self.measured.sharing, update
        )

    def _servers(self, settings: Settings, job: Job) -> StepTimeline:
        ranks, sharing = self.ranks, self.measured.sharing
        workers = ranks - settings.servers
        samples, microbatches = _micro_batches(settings, workers)
        crowd = max(1.0, sharing.crowd * workers / ranks)
        units, _ = self._work(settings, job, samples, Mesh({"dp": ranks}), 1, crowd)
        plan = plan_of(job.model, ranks, 0, settings)
        length, precision = plan.flat.length, plan.precision
        own = -(-length // settings.servers)
        seconds = self.measured.sum_of_gradients(own), self.measured.update(job.optimizer, settings, own)
        nbytes = length * precision.storage.itemsize, length * precision.wide.itemsize
        return server_step(units, microbatches, nbytes, settings.servers, self.messages, seconds)


def _micro_batches(settings: Settings, workers: int) -> tuple[int, int]:
    """Samples of a micro-batch, and number of micro-batches of a step over all workers."""
    samples = min(settings.batch, settings.micro(workers))
    return samples, -(-settings.batch // samples)


def _outputs(units: Sequence[Operator], job: Job, settings: Settings, samples: int) -> list[int]:
    """Bytes of each unit's output for a micro-batch of `samples`."""
    x, found = specs(job.task, settings.precision, samples)[0], []
    for unit in units:
        x = unit.outline(x).y
        found.append(x.nbytes)
    return found
