"""Data-parallel engine (DDP, ZeRO): forward and backward unit by unit, gradient sum over the ranks, update."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import chain, islice
from typing import Any

from collectives import Communicator
from parallel.data.sampler import Batch
from parallel.engine.base import PassResult, TrainEngine, check, frees_on_error, type_of
from parallel.engine.compression import compressor_of, resolve_compression
from parallel.engine.data_parallel.expert_shards import JoinedGradients, JoinedWeights, RankGroups
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.partition_spec import units_of
from parallel.engine.data_parallel.reducers import Assignment, StepScale
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.data_parallel.sharded_optimizer import ParamShard
from parallel.engine.fingerprint import agreed
from parallel.engine.memory_ledger import MemoryLedger, Workload, predict_activations
from parallel.engine.microbatch_pass import Measure, MicrobatchPass, MicrobatchTurn, batch_without_samples, empty_pass
from parallel.engine.model_on_mesh import check_on_mesh, divide_model, mesh_of, place_model, plan_of, sequence_models
from parallel.engine.replica_teams import Teams
from parallel.engine.settings import DEFAULTS, Settings
from parallel.engine.step_sync import CheckedBatches, Losses
from parallel.engine.synchronised_norm import is_synchronised
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import FlatParams
from parallel.nn.operator import ArraySpec, Operator
from parallel.optim.optimizer import Optimizer
from parallel.runtime.collective_errors import raise_shared
from parallel.runtime.interleaving import interleave
from parallel.runtime.profiler import Profiler
from parallel.runtime.step_report import StepReport
from parallel.runtime.vector_memory import VectorAllocator
from parallel.sharding.context.models_by_length import LengthModel
from parallel.sharding.device_mesh import DeviceMesh, MeshPlace
from parallel.sharding.mesh import EXPERT_REPLICAS


class DataParallelEngine(TrainEngine):
    """Data-parallel training engine (DDP or ZeRO, by `settings.layout`) on a communicator. Construction is collective.

    Parameters
    ----------
    model : a `Sequential`'s items are the units in which weights are gathered; any other operator is one unit
    loss, optimizer
    comm : not closed by the engine
    settings : `layout` is a key of `LAYOUTS`
    memory : by default that of the communicator and `settings.device`

    Attributes
    ----------
    steps, updates : steps, skipped ones included; those that changed the weights
    ledger : bytes by kind

    Raises
    ------
    TypeError, ValueError, RankMismatch
        If an argument is invalid; on all ranks, if models or settings differ (it names the first difference).

    All methods are collective, except `forecast`, `share`, `state`, `load` and `tensor_slices`.
    """

    @frees_on_error
    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Optimizer,
        settings: Settings = DEFAULTS,
        *,
        memory: VectorAllocator | None = None,
    ) -> None:
        check(comm, settings)
        if settings.layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}; found {settings.layout!r}")
        check_settings(settings, comm.Get_size(), type(optimizer))
        self._own(comm, model, settings)
        self._fingerprint = agreed(comm, model, loss, optimizer, settings.seed)
        self._ownership.start()
        self._mesh = DeviceMesh(comm, mesh_of(settings, comm.Get_size()))
        self.resources.callback(self._mesh.close)
        here = place_model(model, loss, self._mesh, settings)
        self._layout, replicas = LAYOUTS[settings.layout], here.replicas
        settings, remarks = resolve_compression(settings, comm, self._mesh.mesh, FlatParams(model).length)
        self.remarks = (*remarks, *self._mesh.remarks, *self._ownership.remarks)
        compress = compressor_of(settings.compress)
        self._plan = plan_of(here.whole, replicas.Get_size(), replicas.Get_rank(), settings, compress)
        self._units = self._plan.units
        self._memory = memory or VectorAllocator(replicas, settings.device)
        context = RunContext(self._plan, replicas, self._memory, Profiler(settings.trace))
        self._groups = RankGroups.of(self._plan, here.experts)
        parts = self._shards(context)
        self._teams = Teams.of(self._mesh.mesh.alike)
        self._sequences = here.sequences
        self._model = LengthModel(here.model, here.loss)
        self._is_guarded, self._passes_together = here.is_guarded, is_synchronised(here.model)
        self._in_flight = 1  # micro-batches of this rank at a time
        teams = self._mesh.mesh.teams
        spans = parts[0].spans
        if self._groups.teams is not None:
            spans = replicas.allgather([span for one in parts for span in one.mine])
        super().__init__(context, parts, spans, here.loss, optimizer, settings, teams, here)
        self._workers = self._plan.ranks
        self.ledger = MemoryLedger(self._memory.allocated)
        self._guard_results = lru_cache(64)(lambda model, x: model.outline(x))  # which guarded operators keep
        self._outlined = cache(lambda shape, dtype: Sequential(self._units).outline(ArraySpec(shape, dtype)))
        self._expect([()] * self._plan.ranks)
        self.refresh()
        self._begin_ownership(comm)

    def _shards(self, context: RunContext) -> list[ParamShard]:
        """Shards of this rank's parameter groups; sets the gradient sink and the parameter store of all."""
        groups = self._groups
        self._weights: Any
        if groups.teams is None:
            part = ParamShard.make(context, self._layout)
            self.resources.callback(part.close)
            self._gradients, self._weights = part.gradients, part.weights
            return [part]
        comm = self._mesh.axis(EXPERT_REPLICAS).comm
        of_experts = replace(context, comm=comm, memory=context.memory.with_comm(comm))
        parts = [
            group.shard(context if group.unit is None else of_experts, self._layout, groups.teams)
            for group in groups.held
        ]
        for part in parts:
            self.resources.callback(part.close)
        self._gradients, self._weights = JoinedGradients(groups, parts), JoinedWeights(parts)
        return parts

    @classmethod
    def forecast(
        cls, model: Operator, loss: Any, optimizer: Optimizer, workload: Workload, settings: Settings = DEFAULTS
    ) -> MemoryLedger:
        """Predict peak memory of one rank for the steps of `workload`, without building an engine.

        In `settings`, ``compress="auto"`` must have been replaced by the choice of the ranks.
        """
        layout, states, ledger = settings.layout, len(optimizer.states()), MemoryLedger()
        place = MeshPlace(mesh_of(settings, workload.ranks), workload.rank)
        alike = place.mesh.alike
        _, rank, ranks, _ = place.axis(*alike.sizes)
        teams, own = Teams.of(alike), divide_model(model, loss, place, settings)
        sequences = sequence_models(own.model, own.loss, place, settings)
        plan = plan_of(own.whole, ranks, rank, settings, compressor_of(settings.compress))
        groups = RankGroups.of(plan, own.experts)
        ledger.expect_step(groups, layout, states, [()] * ranks)
        for step in workload.steps:
            shares = [tuple(LAYOUTS[layout].share(len(step), team, teams.number)) for team in range(teams.number)]
            ledger.expect_step(groups, layout, states, teams.leaves(shares))
            mine = step if workload.drawn else [step[number] for number in shares[teams.places[rank][0]]]
            for samples in dict.fromkeys(mine):
                x, y = workload.shapes(samples)
                here = sequences.of_shape(x.shape)
                specs = here.part_spec(x), here.part_spec(y)
                in_flight = min(len(mine), 1 + settings.overlap_expert_comm)
                predicted = predict_activations(
                    units_of(here.model), here.loss, *specs, in_flight=in_flight, device=settings.device
                )
                ledger.expect(*predicted)
        return ledger

    def share(self, micro_batches: int) -> range:
        """Numbers of the micro-batches that this rank must process, of `micro_batches` in the step over all ranks."""
        return self._layout.share(micro_batches, self._teams.places[self._plan.rank][0], self._teams.number)

    def step(self, batches: Iterable[Batch], *, stop: bool = False, drawn: bool = False) -> StepReport:
        """Run one step as `TrainEngine.step`; if `drawn`, `batches` is an iterator over a queue shared by all ranks.

        With `drawn`, equal on all ranks, each takes the next micro-batch when the previous one is done, so that they
        share them dynamically (`WorkQueue`), and the assignment is exchanged afterwards. ValueError for layouts that
        communicate before the step's end.
        """
        if not drawn:
            return super().step(batches, stop=stop)
        if self._groups.teams is not None:
            raise ValueError("drawn: ranks that share experts need their micro-batches before the step; found drawn")
        if not self._layout.drawn:
            can, found = ", ".join(name for name, layout in LAYOUTS.items() if layout.drawn), self.settings.layout
            raise ValueError(f"drawn: ranks can draw their micro-batches in {can}, and the layout is {found}")
        return self._step(lambda scale: self._drawn(batches, stop, scale))

    def _foresee(self, mine: list[Batch]) -> None:
        for batch in mine:
            self._sequences.expect(batch)
            if self._groups.teams is not None:
                self._outlined(batch.x.shape, type_of(batch.x, self._plan.precision.storage))
            if self._is_guarded:
                here = self._sequences.of_shape(batch.x.shape)
                x = ArraySpec(batch.x.shape, type_of(batch.x, self._plan.precision.storage))
                self._guard_results(here.model, here.part_spec(x))

    def _passes(self, mine: list[Batch], assignment: Assignment, step_scale: StepScale) -> PassResult:
        assignment = self._teams.leaves(assignment)
        self._expect(assignment)
        gradients = self._gradients
        if self._passes_together and len({*map(len, assignment)}) > 1:  # else ranks would wait for ever
            found = ", ".join(str(len(one)) for one in assignment)
            raise_shared(ValueError(f"BatchNorm: sync needs as many micro-batches on all ranks; found {found}"), None)
        turns = self._begin_turns(mine, assignment)
        units = range(len(self._units))
        self._weights.begin([*units, *reversed(units)] * turns)
        gradients.begin(assignment, step_scale)
        losses: Losses = []
        problem, following, scale = None, None, step_scale.scale
        for turn in range(turns):
            current = following or self._forward(self._turn(mine, turn, problem), scale)
            problem, following = problem or current.passes.problem, None
            backward = partial(self._backward, current)
            if self._in_flight == 1 or turn + 1 == turns:  # no forward to fill its waits
                backward()
            else:
                ahead = self._turn(mine, turn + 1, problem)
                _, following = interleave(backward, partial(self._forward, ahead, scale, current))
            problem = problem or current.passes.problem
            losses += current.losses
            gradients.end_backward()
        gradients.finish()
        return PassResult(losses, problem)

    def _begin_turns(self, mine: list[Batch], assignment: Assignment) -> int:
        """Number of this rank's turns; if experts exchange tokens in them, sets the batch of turns without samples."""
        turns: int = self._gradients.rounds(assignment, self._plan.rank)
        if self._groups.teams is not None and turns:
            self._in_flight = min(turns, 1 + self.settings.overlap_expert_comm)
            lengths = [len(numbers) for numbers in assignment]
            self._no_samples = batch_without_samples(mine, lengths, self.context.comm, self._memory.xp)
        return turns

    def _drawn(self, batches: Iterable[Batch], stop: bool, scale: float) -> tuple[float, bool, PassResult]:
        """Run passes of micro-batches drawn one by one from a shared queue, then synchronise; results as `_assigned`.

        A rank that has failed draws no more, and the others get the rest; its error is exchanged at the end.
        """
        gradients, problem = self._gradients, self._clock_problem
        gradients.begin(None)
        mine: list[Batch] = []
        losses: Losses = []
        counts: list[float] = []
        source = chain.from_iterable([batches])  # its errors come in `_checked`
        while problem is None:
            drawn = self._checked(islice(source, 1))
            problem = drawn.problem
            if not drawn.mine:
                break
            counts += drawn.counts
            (batch,) = drawn.mine
            here = self._sequences.of_shape(batch.x.shape)
            turn = MicrobatchTurn(len(mine), here, batch, self._microbatch_pass(here, batch, training=True))
            self._backward(self._forward(turn, scale))
            gradients.end_backward()
            mine.append(batch)
            losses += turn.losses
            problem = turn.passes.problem
        given = CheckedBatches(mine, counts, problem)
        assignment, count, stop = self._sync.begin(*self._timed(given), stop)
        self._expect(assignment)
        gradients.assign(assignment, StepScale(self.steps, count, scale))
        gradients.finish()
        return count, stop, PassResult(losses, None)

    def _part(self, mine: list[Batch], turn: int) -> tuple[LengthModel, Batch | None]:
        """Model for the micro-batch of a turn, and this rank's part of it (None if it has none in this turn)."""
        if turn >= len(mine):
            shares = self._groups.teams is not None
            return self._sequences.of_shape(self._no_samples.x.shape) if shares else self._model, None
        here = self._sequences.of_shape(mine[turn].x.shape)
        return here, here.part(mine[turn])

    def _turn(self, mine: list[Batch], number: int, problem: BaseException | None) -> MicrobatchTurn:
        """MicrobatchTurn of this rank, in which it computes nothing after a problem."""
        here, batch = self._part(mine, number)
        passes = self._microbatch_pass(here, batch if problem is None else None, training=True)
        return MicrobatchTurn(number, here, batch, passes)

    def _forward(self, turn: MicrobatchTurn, scale: float, before: MicrobatchTurn | None = None) -> MicrobatchTurn:
        """Forward pass of a turn, and its loss; the backward pass of the turn `before` may be under way."""
        weights, passes = self._weights, turn.passes
        together = before is not None and self._is_new((turn.batch and turn.batch.x.shape, self._in_flight))
        with self._recorder("compute", "forward", turn=turn.number):
            units = units_of(turn.here.model)
            for number in range(len(units)):
                weights.unshard()
                passes.forward(units, number)
                weights.reshard()
                if before is not None and together:
                    self._memory.record_peak("activations", turn.nbytes + before.nbytes)
            passes.score()
            with self._errors.noted():
                self._note(turn)
            passes.loss_backward(scale)
        return turn

    def _backward(self, turn: MicrobatchTurn) -> None:
        gradients, weights, units = self._gradients, self._weights, units_of(turn.here.model)
        leaf = None if turn.batch is None else self._teams.leaf(turn.batch.number, self._plan.rank)
        gradients.begin_backward(turn.number, leaf)
        with self._recorder("compute", "backward", turn=turn.number):
            for number in reversed(range(len(units))):
                weights.unshard()
                turn.passes.backward(units[number], gradients)
                weights.reshard()
                gradients.left(number)

    def _microbatch_pass(self, here: LengthModel, batch: Batch | None, training: bool) -> MicrobatchPass:
        if batch is not None:
            return MicrobatchPass(*self._typed(batch), self._run(batch, training), here.loss)
        if self._groups.teams is None:
            return empty_pass()
        run = self._mode(self._no_samples, training)
        return MicrobatchPass(*self._typed(here.part(self._no_samples)), run, here.loss)

    def _scores(self, mine: list[Batch], assignment: Assignment, measure: Measure | None) -> PassResult:
        turns = self._begin_turns(mine, self._teams.leaves(assignment))
        self._weights.begin([*range(len(self._units))] * turns)
        losses: Losses = []
        measured, problem = 0.0, None
        for turn in range(turns):
            here, batch = self._part(mine, turn)
            pass_ = self._microbatch_pass(here, batch, training=False)
            units = units_of(here.model)
            for number in range(len(units)):
                self._weights.unshard()
                pass_.forward(units, number)
                pass_.saved.clear()
                self._weights.reshard()
            pass_.score(measure if batch is not None else None)
            measured += pass_.measured
            problem = problem or pass_.problem
            losses += MicrobatchTurn(turn, here, batch, pass_).losses
        return PassResult(losses, problem, measured)

    def _note(self, turn: MicrobatchTurn) -> None:
        """Enter the activations of a micro-batch's forward pass in the ledger, if its shapes are new."""
        batch, here = turn.batch, turn.here
        if batch is None or turn.passes.problem or self._errors.first:
            return
        if not self._is_new((batch.x.shape, batch.y.shape, here.division, self._in_flight)):
            return
        self._memory.record_peak("activations", turn.nbytes)
        precision = self._plan.precision
        x = ArraySpec(batch.x.shape, type_of(batch.x, precision.storage))
        y = ArraySpec(batch.y.shape, type_of(batch.y, precision.wide))
        predicted = predict_activations(
            units_of(here.model), here.loss, x, y, in_flight=self._in_flight, device=self.settings.device
        )
        self.ledger.expect(*predicted)

    def _expect(self, assignment: Assignment) -> None:
        if self._is_new(tuple(assignment)):
            self.ledger.expect_step(self._groups, self.settings.layout, len(self._optimizer.states()), assignment)


def check_settings(settings: Settings, ranks: int, optimizer: type[Optimizer] | None = None) -> None:
    """Raise ValueError if the mesh does not fit so many ranks, or settings do not go with it or with each other."""
    check_on_mesh(settings, mesh_of(settings, ranks), settings.layout, optimizer)


def workers(settings: Settings, ranks: int) -> int:
    """Number of teams of ranks, each with a copy of the model, that share the samples of a step."""
    return mesh_of(settings, ranks).samples.size
