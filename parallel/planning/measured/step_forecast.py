"""Predicted seconds of a training step on the ranks that there are, from settings alone.

The units of the model, the update and messages are measured once each (`MeasurementRecord`), and put together by the
layout's own order: of its buckets, or of its pipeline schedule.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.selection.cost_model import BUILT_IN
from parallel.engine.compression import compressor_of
from parallel.engine.data_parallel.expert_shards import RankGroups
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.partition_spec import units_of
from parallel.engine.model_on_mesh import divide_model, mesh_of, plan_of
from parallel.engine.settings import Settings
from parallel.nn.array_checks import elements
from parallel.nn.compose import Sequential
from parallel.nn.expert_group import ExpertGroup
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.operator import ArraySpec, Operator
from parallel.nn.rewrite import operators_in
from parallel.optim.optimizer import Optimizer
from parallel.optim.precision import PRECISIONS
from parallel.pipeline import config
from parallel.pipeline.param_division import cuts_for
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.pipeline.schedule.stage_partition import LayerCost, partition
from parallel.pipeline.stage_params import AXIS, Portion
from parallel.planning.measured.data_parallel_step import EXCHANGES, RankGroup, UnitWork, data_parallel_step
from parallel.planning.measured.measured_costs import MeasuredCosts, Workpiece
from parallel.planning.measured.measured_messages import MeasuredMessages
from parallel.planning.measured.measurement_record import MeasurementRecord
from parallel.planning.measured.message_costs import MessageCosts
from parallel.planning.measured.pipeline_step import PipelineWork, pipeline_step
from parallel.planning.measured.recording_comm import AxisExchange
from parallel.planning.measured.step_timeline import COMPUTE, IDLE, NETWORK, SHARED, STEP, StepTimeline
from parallel.runtime.collective_errors import collective_call
from parallel.sharding.context.context_axis import CONTEXT
from parallel.sharding.device_mesh import MeshPlace
from parallel.sharding.expert.dispatch import Dispatch
from parallel.sharding.expert.expert_axis import EXPERTS
from parallel.sharding.expert.row_codec import RowCodec
from parallel.sharding.mesh import EXPERT_REPLICAS, Mesh
from parallel.trainer.recipes import complete
from parallel.trainer.strategies import strategy_of
from parallel.trainer.task_setup import loss_of, prepare, specs
from parallel.trainer.trainer import Training


def server_step(
    units: Sequence[UnitWork],
    microbatches: int,
    nbytes: tuple[int, int],
    servers: int,
    messages: MessageCosts,
    server_seconds: tuple[float, float],
) -> StepTimeline:
    """Step of `microbatches` micro-batches in total, each with one push of gradients, by bulk-synchronous workers.

    `nbytes`: of all weights, and of all gradients. A server has its share of both, and sends and receives one
    message after another. `server_seconds`: to add a gradient, and to update, all of the parameters of one server.
    """
    ranks = len(messages.nodes)
    workers = ranks - servers
    cause = NETWORK if messages.over_network(range(ranks)) else SHARED
    rounds, step = -(-microbatches // workers), StepTimeline()
    pull, push = (
        sum(messages.message(0, worker, each / servers) for worker in range(servers, ranks)) for each in nbytes
    )
    add, update = server_seconds
    step.spend("pull", cause, pull)
    for turn in range(rounds):
        step.spend("draw", cause, 2 * messages.message(0, ranks - 1, 0))
        for number, unit in enumerate(units):
            step.spend(f"F{number}", COMPUTE, unit.forward)
        for number, unit in reversed([*enumerate(units)]):
            step.spend(f"B{number}", COMPUTE, unit.backward + unit.weights)
        step.spend("push", cause, push)
        step.spend("server adds", IDLE, add * min(workers, microbatches - turn * workers))
    step.spend("server updates", IDLE, update)
    return step


WARM_UP, STEPS = 5, 41
"""Steps before the measured ones, and measured steps. The median counts."""


def tiny_settings(layout: str, ranks: int, servers: int) -> Settings:
    """Settings of a training of the smallest model, with one sample for each rank."""
    options = {"data": "digits", "model": "mlp:tiny", "dropout": 0.0, "steps": WARM_UP + STEPS}
    return complete({**options, "layout": layout, "batch": ranks, "servers": servers})


def tiny_step_seconds(settings: Settings, comm: Communicator | None) -> float:
    """Median seconds of a step on the slowest rank. Collective."""
    assert comm is not None  # a record without ranks measures nothing
    with Training(settings, comm) as training:
        seconds = np.array([record.seconds for record in training.run()][WARM_UP:])
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return float(median(seconds.tolist()))


class Job(NamedTuple):
    """Data, model, loss and optimizer of a training."""

    task: Any
    model: Sequential
    loss: Any
    optimizer: Optimizer

    def take(self, count: int) -> Any:
        data = self.task.train
        return data.take(np.arange(count) % len(data))

    @property
    def work(self) -> Workpiece:
        return Workpiece(self.model, self.loss, self.take)


class StepForecaster:
    """Forecaster of the steps of trainings on some ranks. It adds missing measurements to its record.

    All methods are collective.
    """

    def __init__(self, record: MeasurementRecord):
        self.record, self.measured = record, MeasuredCosts(record)
        self.ranks = len(record.nodes)
        self._overheads: dict[Settings, float] = {}
        self.messages = MeasuredMessages(BUILT_IN, record.nodes, record.sharing.cores, record=record)

    def prepare(self, settings: Settings) -> tuple[Settings, Job]:
        """Data and model of a training, and its settings with the cuts of a pipeline. ValueError if they do not fit."""
        task, model, optimizer = collective_call(
            self.record.comm or MPI.COMM_SELF, lambda: prepare(settings, self.ranks), "this cannot be trained"
        )
        job = Job(task, model, loss_of(task, settings), optimizer)
        if strategy_of(settings).measures and settings.cuts is None:
            settings = replace(settings, cuts=self._cuts(settings, job))
        return settings, job

    def step(self, settings: Settings, job: Job) -> StepTimeline:
        """Predicted step of a training, from settings and job of `prepare`."""
        found = self._parts(settings, job)
        found.spend("engine", STEP, self._overhead(settings))
        return found

    def _parts(self, settings: Settings, job: Job) -> StepTimeline:
        """Predicted step without what every step costs."""
        kind = settings.layout.partition(":")[0]
        if kind in LAYOUTS:
            return self._data_parallel(settings, job)
        if kind == "pp":
            return self._pipeline(settings, job)
        if kind == "ps":
            return self._servers(settings, job)
        known = ", ".join([*LAYOUTS, "pp", "ps"])
        raise ValueError(f"layout: expected one whose time can be forecast, of {known}; found {settings.layout}")

    def _overhead(self, settings: Settings) -> float:
        """Seconds of a tiny training's step beyond its predicted parts, with servers or without."""
        tiny = tiny_settings("ps" if settings.layout == "ps" else "dp", self.ranks, settings.servers)
        if tiny not in self._overheads:
            trial = partial(tiny_step_seconds, tiny, self.record.comm)
            measured = max(self.record.results(("tiny", tiny.layout, tiny.servers), trial, True))
            self._overheads[tiny] = max(0.0, measured - self._parts(*self.prepare(tiny)).seconds)
        return self._overheads[tiny]

    def _work(
        self, settings: Settings, job: Job, samples: int, mesh: Mesh, rounds: int, crowd: float = 1.0
    ) -> tuple[list[UnitWork], str]:
        """Work of the units for one of `rounds` micro-batches, and the cause of the exchanges in them.

        Passes take `crowd` times as long as measured. Gradients of all micro-batches but the first one are added.
        """
        found, over = [], False
        units = self.measured.units(job.work, settings, samples, mesh, _exchanges_in_units(settings.layout))
        experts = _first_group(mesh.lines(EXPERTS.name))
        exchanges = _expert_exchanges(settings, job, samples, mesh, self.messages.over_network(experts))
        for unit, routed in zip(units, exchanges):
            added = self.measured.sum_of_gradients(unit.parameters) * (rounds - 1) / rounds
            along = 0.0
            for name, nbytes, axis in (*unit.exchanges, *routed):
                ranks = _first_group(mesh.lines(axis))
                along += self.messages.among(name, ranks, nbytes)
                over |= self.messages.over_network(ranks)
            forward, backward, weights = unit.forward * crowd, unit.backward * crowd, (unit.weights + added) * crowd
            found.append(UnitWork(forward, backward, weights, along))
        return found, NETWORK if over else SHARED

    def _data_parallel(self, settings: Settings, job: Job) -> StepTimeline:
        ranks = self.ranks
        mesh, crowd = mesh_of(settings, ranks), self.measured.sharing.crowd
        workers = strategy_of(settings).workers(settings, ranks)
        samples, microbatches = _micro_batches(settings, workers, job)
        rounds = -(-microbatches // workers)
        replicas = _first_group(mesh.groups(mesh.alike.sizes))
        units, tensor = self._work(settings, job, samples, mesh, rounds, crowd)
        own = divide_model(job.model, job.loss, MeshPlace(mesh, 0), settings)
        plan = plan_of(own.whole, len(replicas), 0, settings, compressor_of(settings.compress))
        groups = []
        for held in RankGroups.of(plan, own.experts).held:
            holders = replicas if held.unit is None else _first_group(mesh.lines(EXPERT_REPLICAS))
            groups.append(RankGroup(held.division, holders, self.messages, settings.compress))
        divided = LAYOUTS[settings.layout].divided
        length = sum(-(-each.plan.flat.length // (each.plan.ranks if divided else 1)) for each in groups)
        update = self.measured.update(job.optimizer, settings, length, job.work, samples) * crowd
        return data_parallel_step(settings.layout, units, rounds, groups, update, tensor)

    def _cuts(self, settings: Settings, job: Job) -> str:
        mesh = config.mesh_of(settings, self.ranks)
        parts = build(config.schedule_of(settings), mesh.sizes[AXIS], 1, virtual=settings.virtual).placement.parts
        samples, _ = _micro_batches(settings, config.workers(settings, mesh.size), job)
        costs = [LayerCost(*unit[:3]) for unit in self.measured.units(job.work, settings, samples, mesh)]
        return ",".join(map(str, (0, *(cut.stop for cut in partition(costs, parts)))))

    def _pipeline(self, settings: Settings, job: Job) -> StepTimeline:
        mesh = config.mesh_of(settings, self.ranks)
        replicas, whole = config.workers(settings, mesh.size), mesh.alike
        samples, microbatches = _micro_batches(settings, replicas, job)
        units, _ = self._work(settings, job, samples, mesh, -(-microbatches // replicas))
        own = divide_model(job.model, job.loss, MeshPlace(mesh, 0), settings)
        plan = build(
            config.schedule_of(settings),
            mesh.sizes[AXIS],
            config.microbatches(settings, mesh.size),
            virtual=settings.virtual,
        )
        ranks = _first_group(mesh.groups(whole.sizes))
        cuts = cuts_for(config.cuts_of(settings.cuts), len(units), plan.placement.parts)
        line, compressor = _first_group(whole.groups([AXIS])), compressor_of(settings.compress)
        plans = [plan_of(own.whole, whole.size, at, settings, compressor) for at in line]
        portions = [Portion.make(each, whole, plan, cuts, experts=own.experts) for each in plans]
        outputs = [y.nbytes for y in _outputs(units_of(own.whole), job, settings, samples)]
        update = partial(self.measured.update, job.optimizer, settings, work=job.work, samples=samples)
        work = PipelineWork(units, outputs, portions, ranks, settings.compress)
        return pipeline_step(work, self.messages, self.measured.sharing, update)

    def _servers(self, settings: Settings, job: Job) -> StepTimeline:
        ranks, sharing = self.ranks, self.measured.sharing
        workers = ranks - settings.servers
        samples, microbatches = _micro_batches(settings, workers, job)
        crowd = max(1.0, sharing.crowd * workers / ranks)
        units, _ = self._work(settings, job, samples, Mesh({"dp": ranks}), 1, crowd)
        plan = plan_of(job.model, ranks, 0, settings)
        length, precision = plan.flat.length, plan.precision
        own = -(-length // settings.servers)
        seconds = self.measured.sum_of_gradients(own), self.measured.update(job.optimizer, settings, own)
        nbytes = length * precision.storage.itemsize, length * precision.wide.itemsize
        return server_step(units, microbatches, nbytes, settings.servers, self.messages, seconds)


def _micro_batches(settings: Settings, workers: int, job: Job) -> tuple[int, int]:
    """Samples of a micro-batch, and number of micro-batches of a step over all workers."""
    batch = min(settings.batch, len(job.task.train))
    samples = min(batch, settings.micro(workers))
    return samples, -(-batch // samples)


def _exchanges_in_units(layout: str) -> bool:
    """True for layouts whose ranks exchange something in every unit: pipelines, and ZeRO from stage 2 on."""
    return layout.startswith("pp") or (layout in EXCHANGES and EXCHANGES[layout].when == "each")


def _first_group(groups: Sequence[Sequence[int]]) -> Sequence[int]:
    """Group of rank 0."""
    return next(group for group in groups if 0 in group)


def _outputs(units: Sequence[Operator], job: Job, settings: Settings, samples: int) -> list[ArraySpec]:
    """Each unit's output for a micro-batch of `samples`."""
    x, found = specs(job.task, settings.precision, samples)[0], []
    for unit in units:
        x = unit.outline(x).y
        found.append(x)
    return found


def _expert_exchanges(
    settings: Settings, job: Job, samples: int, mesh: Mesh, network: bool = False
) -> list[tuple[AxisExchange, ...]]:
    """Exchanges of tokens in each unit, if replicas share experts: to the experts and back, in both passes.

    Tokens are spread evenly, so that a rank computes as much as with all experts. A rank sends the tokens of its part
    of the sequences (along ``cp``) that choose its shards of the experts (along ``tp``). The hierarchical route counts
    like the direct one, in its format if experts are on several nodes (`network`).
    """
    units, found = units_of(job.model), list[tuple[AxisExchange, ...]]()
    if mesh.expert_replicas == 1:
        return [()] * len(units)
    model = divide_model(job.model, job.loss, MeshPlace(mesh, 0), settings).whole
    dispatch, parts = Dispatch.parse(settings.dispatch), mesh.sizes.get(CONTEXT.name, 1)
    code = dispatch.code if network or dispatch.route == "direct" else ""
    for unit, y in zip(units_of(model), _outputs(units, job, settings, samples)):
        tokens, moved = elements(y) // y.shape[-1] // parts, list[int]()
        for one in operators_in(unit):
            if isinstance(one, MixtureOfExperts):
                row = RowCodec(code, one.router.width, PRECISIONS[settings.precision].storage).nbytes
                chosen = Fraction(tokens * one.router.settings.choices, one.router.experts)
                groups = [group for group in operators_in(one.experts) if isinstance(group, ExpertGroup)]
                moved += [row * int(chosen * len(group)) for group in groups]
        # four times: tokens and results, and the gradients of both
        found.append(tuple(AxisExchange("alltoallv", nbytes, EXPERTS.name) for nbytes in moved for _ in range(4)))
    return found
