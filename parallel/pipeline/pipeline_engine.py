"""Training engine with pipeline parallelism, optionally with replicas of the stages."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from parallel.data.sampler import Batch, contiguous
from parallel.engine.base import PassResult, TrainEngine, check, frees_on_error, type_of
from parallel.engine.compression import compressor_of, resolve_compression
from parallel.engine.data_parallel.expert_shards import HeldGroup
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.partition_spec import PartitionSpec as Division
from parallel.engine.data_parallel.partition_spec import units_of
from parallel.engine.data_parallel.reducers import Assignment, StepScale
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.data_parallel.sharded_optimizer import ParamShard
from parallel.engine.fingerprint import agreed
from parallel.engine.memory_ledger import MemoryLedger, Workload
from parallel.engine.microbatch_pass import Measure, batch_without_samples
from parallel.engine.model_on_mesh import check_on_mesh, divide_model, place_model, plan_of, sequence_models
from parallel.engine.settings import Settings
from parallel.nn.flat_params import FlatParams
from parallel.nn.operator import ArraySpec, Operator
from parallel.optim.optimizer import Optimizer
from parallel.pipeline import config
from parallel.pipeline.param_division import SharedParamGroup, cuts_for
from parallel.pipeline.runner import BoundAction, ScheduleRunner, actions_of, bind_actions
from parallel.pipeline.schedule.actions import to_csv
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pass_pairs import paired
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build, forward_only, truncate
from parallel.pipeline.schedule.simulator import simulate
from parallel.pipeline.stage import Microbatch, StageChunk, StageEvaluator, StageTrainer, empty_microbatch
from parallel.pipeline.stage_params import AXIS, Portion
from parallel.runtime.profiler import Profiler
from parallel.runtime.vector_memory import VectorAllocator
from parallel.sharding.axes import AXES
from parallel.sharding.context.models_by_length import LengthModel
from parallel.sharding.device_mesh import DeviceMesh, MeshPlace
from parallel.sharding.mesh import Mesh


class Pipeline(TrainEngine):
    """Training engine with the model's parts on pipeline stages, which may have replicas. Construction is collective.

    Parameters
    ----------
    model : a `Sequential` with at least one item per part; its operators have outlines, which give message sizes
    loss, comm, optimizer : as of `parallel.engine.data_parallel_engine.DataParallelEngine`
    settings : `layout` is ``pp:SCHEDULE``; `mesh` has an axis ``pp``, perhaps one named after the layout of the stages'
        replicas (`REPLICAS`), and perhaps ``cp`` and ``tp``, along which sequences are divided and operators cut; by
        default it is one pipeline of `stages`. `microbatches` is the number per step in each replica; a step may have
        fewer.
    schedule : plan without messages, in place of the layout's schedule

    Attributes
    ----------
    mesh, cuts, ledger
    plan : with messages
    sent : number of messages of this rank in the last step or evaluation, by receiving stage

    Raises
    ------
    ValueError, RankMismatch
        On all ranks and before any message, if a setting is invalid, the mesh does not fit, or the plan fails the
        simulation; if models or settings differ between ranks.
    """

    @frees_on_error
    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Optimizer,
        settings: Settings,
        schedule: PipelinePlan | None = None,
    ) -> None:
        check(comm, settings)
        self.mesh = config.mesh_of(settings, comm.Get_size())
        check_on_mesh(settings, self.mesh, self.mesh.replicas, type(optimizer))
        plan = self._scheduled(self.mesh, settings) if schedule is None else schedule
        units = units_of(model)
        facts = [("schedule", plan.name), ("placement", plan.placement.routes), ("number of units", len(units))]
        actions = [(f"the line of stage {at}", line) for at, line in enumerate(to_csv(plan.actions).splitlines())]
        self._own(comm, model, settings)
        self._fingerprint = agreed(comm, model, loss, optimizer, settings.seed, [*facts, *actions])
        if plan.stages != self.mesh.sizes[AXIS]:
            raise ValueError(f"schedule: {plan.name} is for {plan.stages} stages, the mesh is {self.mesh}")
        self._ownership.start()
        settings, remarks = resolve_compression(settings, comm, self.mesh, FlatParams(model).length)
        plan = paired(plan) if settings.overlap_expert_comm else plan
        self.cuts = cuts_for(config.cuts_of(settings.cuts), len(units), plan.placement.parts)
        self._mesh = DeviceMesh(comm, self.mesh, (*self.mesh.sizes, *AXES))
        self.resources.callback(self._mesh.close)
        self.remarks = (*remarks, *self._mesh.remarks, *unpaired(plan, settings), *self._ownership.remarks)
        here, everyone = place_model(model, loss, self._mesh, settings), comm
        comm = here.replicas
        whole = plan_of(here.whole, comm.Get_size(), comm.Get_rank(), settings, compressor_of(settings.compress))
        self._sequences, self._model = here.sequences, LengthModel(here.model, here.loss)
        stages, each = self.mesh.alike, here.sequences.parts_per_rank
        self._portion = portion = Portion.make(whole, stages, plan, self.cuts, each, here.experts, settings.device)
        self.plan = portion.plan
        simulate(self.plan)
        if refusal := self._refusal(plan, portion.groups, self.mesh, settings):
            raise ValueError(refusal)
        context = RunContext(whole, comm, VectorAllocator(comm, settings.device), Profiler(settings.trace))
        self._shares = [(group, self._share(context, group, division)) for group, division in portion.held]
        self._chunks = {}
        for chunk, part in portion.parts.items():
            shares = [(group, share) for group, share in self._shares if part in group.parts]
            self._chunks[chunk] = StageChunk(part, plan.placement.parts, range(*self.cuts[part : part + 2]), shares)
        plain: Any = MPI.Intracomm(comm) or comm  # threads as ranks have no MPI communicator
        self._line = plain.Split(portion.replica(), portion.stage())
        self.resources.callback(self._line.Free)
        self._runner = ScheduleRunner(self._line, context.recorder, context.memory.xp)
        self.sent = self._runner.sent
        self._bound = cache(self._actions)
        parts = [part for _, part in self._shares]
        spans = comm.allgather([span for part in parts for span in part.mine])
        teams = self.mesh.teams
        super().__init__(context, parts, spans, here.loss, optimizer, settings, teams, here)
        self.ledger = MemoryLedger(context.memory.allocated)
        portion.expect(self.ledger, len(optimizer.states()), [()] * portion.replicas)
        self.refresh()
        self._begin_ownership(everyone)

    @classmethod
    def forecast(
        cls, model: Operator, loss: Any, optimizer: Optimizer, workload: Workload, settings: Settings
    ) -> MemoryLedger:
        """Forecast of a rank's memory in a workload, as `DataParallelEngine.forecast`."""
        mesh, states, ledger = config.mesh_of(settings, workload.ranks), len(optimizer.states()), MemoryLedger()
        plan = cls._scheduled(mesh, settings)
        plan = paired(plan) if settings.overlap_expert_comm else plan
        place = MeshPlace(mesh, workload.rank)
        own, stages = divide_model(model, loss, place, settings), mesh.alike
        sequences = sequence_models(own.model, own.loss, place, settings)
        _, rank, ranks, _ = place.axis(*stages.sizes)
        whole = plan_of(own.whole, ranks, rank, settings, compressor_of(settings.compress))
        cuts = cuts_for(config.cuts_of(settings.cuts), len(whole.units), plan.placement.parts)
        each = sequences.parts_per_rank
        portion = Portion.make(whole, stages, plan, cuts, each, own.experts, settings.device)
        portion.expect(ledger, states, [()] * portion.replicas)
        teams, (team, _) = portion.teams, portion.teams.places[portion.replica()]
        for step in workload.steps:
            shares = [tuple(contiguous(len(step), at, teams.number)) for at in range(teams.number)]
            portion.expect(ledger, states, teams.leaves(shares))
            specs = [workload.shapes(step[number]) for number in shares[team]]
            models = [sequences.of_shape(x.shape) for x, _ in specs]
            forms = [(model, model.part_spec(x), model.part_spec(y)) for model, (x, y) in zip(models, specs)]
            ledger.expect(*portion.activations(forms))
        return ledger

    @classmethod
    def _scheduled(cls, mesh: Mesh, settings: Settings) -> PipelinePlan:
        microbatches = config.microbatches(settings, mesh.size)
        options = {"virtual": settings.virtual, "ranks": config.ranks_of(settings.stage_ranks)}
        return cls._build(config.schedule_of(settings), mesh.sizes[AXIS], microbatches, options)

    @staticmethod
    def _build(schedule: str, stages: int, microbatches: int, options: dict[str, Any]) -> PipelinePlan:
        return build(schedule, stages, microbatches, **options)

    @staticmethod
    def _refusal(plan: PipelinePlan, groups: Sequence[SharedParamGroup], mesh: Mesh, settings: Settings) -> str | None:
        return None if plan.versions is None else f"schedule: {plan.name} updates on the way; it is for Asynchronous"

    def share(self, micro_batches: int) -> range:
        teams = self._portion.teams
        return contiguous(micro_batches, teams.places[self._portion.replica()][0], teams.number)

    def _share(self, context: RunContext, group: SharedParamGroup, division: Division) -> ParamShard:
        """Create this rank's shard of a parameter group. Collective over the ranks that hold the group.

        Every group has its own communicator, as the plan completes groups in different orders on different ranks.
        """
        holders = context.comm.Get_group().Incl(self._portion.holders[group.number])
        comm = context.comm.Create_group(holders, tag=group.number)
        self.resources.callback(comm.Free)
        own = RunContext(division, comm, context.memory.with_comm(comm), context.recorder)
        held = HeldGroup(division, group.unit)
        share = held.shard(own, LAYOUTS[self._portion.layout_of(group)], self._portion.sharing)
        self.resources.callback(share.close)
        share.gradients.bind()
        return share

    def _foresee(self, mine: list[Batch]) -> None:
        """Compute message sizes of the micro-batches before the step. Raises an error if one does not fit the model."""
        for batch in mine:
            self._sequences.expect(batch)
            self._outputs(self._sequences.of_shape(batch.x.shape), batch)

    def _outputs(self, model: LengthModel, batch: Batch) -> list[ArraySpec]:
        """Specs of the outputs of the model's parts."""
        x = model.part_spec(ArraySpec(batch.x.shape, type_of(batch.x, self.context.storage)))
        return [outline.y for outline in self._portion.outlines(model, x)]

    def _passes(self, mine: list[Batch], assignment: Assignment, step_scale: StepScale) -> PassResult:
        self._expect_at_most(assignment)
        assignment = self._portion.teams.leaves(assignment)
        here = [self._microbatch(batch, training=True) for batch in mine]
        note = None
        with self._errors.noted():
            note = self._noting(here, assignment)
        here, line = self._begin(mine, here, assignment, training=True)
        work = StageTrainer(self._chunks, here, self._runner.progress, scale=step_scale.scale, note=note)
        for group, part in self._shares:
            part.gradients.begin(self._portion.leaves(group, assignment), step_scale)
        self._runner.run(line, work)
        for _, part in self._shares:
            part.gradients.finish()
        return PassResult(work.losses, work.problem)

    def _begin(
        self, mine: list[Batch], here: list[Microbatch], assignment: Assignment, training: bool
    ) -> tuple[list[Microbatch], list[BoundAction]]:
        """Micro-batches, with empty ones for those that only other replicas have, and actions of this rank's line."""
        rounds = self._portion.rounds(assignment)
        line = self._bound(rounds, training)
        for at, chunk in self._chunks.items():
            chunk.begin(action.kind for action in actions_of(line) if action.chunk == at)
        empty = empty_microbatch(self._model, self.plan.placement.parts)
        if self._portion.sharing is not None and rounds:
            lengths = [len(assignment[self._portion.replica(rank)]) for rank in range(self.context.plan.ranks)]
            batch = batch_without_samples(mine, lengths, self.context.comm, self.context.memory.xp)
            run = self._mode(batch, training)
            model = self._sequences.of_shape(batch.x.shape)
            empty = Microbatch(None, None, model, *self._typed(model.part(batch)), run, self._outputs(model, batch))
        return here + [empty] * (rounds - len(here)), line

    def _expect_at_most(self, assignment: Assignment) -> None:
        most, found = self.plan.microbatches, max(map(len, assignment))
        if found > most:
            planned = f"planned for the option batch={self.settings.batch}"
            raise ValueError(f"micro-batches: expected at most {most} for each pipeline, found {found}; {planned}")

    def _scores(self, mine: list[Batch], assignment: Assignment, measure: Measure | None) -> PassResult:
        here = [self._microbatch(batch, training=False) for batch in mine]
        here, line = self._begin(mine, here, self._portion.teams.leaves(assignment), training=False)
        work = StageEvaluator(self._chunks, here, self._runner.progress, measure)
        self._runner.run(line, work)
        return PassResult(work.losses, work.problem, work.measured)

    def _actions(self, microbatches: int, training: bool) -> list[BoundAction]:
        if training:
            return bind_actions(truncate(self.plan, microbatches), self._portion.stage())
        return bind_actions(lower(forward_only(self.plan, microbatches)), self._portion.stage(), "evaluate ")

    def _microbatch(self, batch: Batch, training: bool) -> Microbatch:
        model = self._sequences.of_shape(batch.x.shape)
        x, y = self._typed(model.part(batch))
        leaf = self._portion.teams.leaf(batch.number, self._portion.replica())
        run = self._run(batch, training)
        return Microbatch(batch.number, leaf, model, x, y, run, self._outputs(model, batch))

    def _noting(self, here: list[Microbatch], assignment: Assignment) -> Callable[[int], None] | None:
        """Add a forecast to the ledger if micro-batch shapes or counts are new. Returns a callback then, else None.

        The callback records the bytes of activations.
        """
        divisions = (one.model.division for one in here)
        kind = (*(one.x.shape for one in here), *(one.y.shape for one in here), *divisions, *map(len, assignment))
        if not self._is_new(kind):
            return None
        self._portion.expect(self.ledger, len(self._optimizer.states()), assignment)
        specs = [(ArraySpec(one.x.shape, one.x.dtype), ArraySpec(one.y.shape, one.y.dtype)) for one in here]
        self.ledger.expect(*self._portion.activations([(one.model, *both) for one, both in zip(here, specs)]))
        return lambda alive: self.context.memory.record_peak("activations", alive)


def unpaired(plan: PipelinePlan, settings: Settings) -> list[str]:
    """Remark that `Settings.overlap_expert_comm` changes nothing: a list of one, or empty if the plan has pairs."""
    if plan.pairs or not settings.overlap_expert_comm:
        return []
    return [f"overlap_expert_comm: pairs of passes would not shorten the steps of {plan.name}; there are none"]
