"""Asynchronous pipelines: stages update while micro-batches are in flight and keep older weight versions.

The backward of a micro-batch uses the weights of its forward (Narayanan et al., "PipeDream", SOSP 2019, section 3.3);
the plan determines the version. No micro-batch is in flight at the end of a step, so only the newest version remains.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from parallel.data.sampler import Batch
from parallel.engine.base import PassResult
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.reducers import Assignment, StepScale
from parallel.engine.data_parallel.sharded_optimizer import ParamShard, numbers_of
from parallel.engine.settings import Settings
from parallel.nn.flat_params import BLOCK
from parallel.optim.grad_norm import block_squares
from parallel.optim.precision import PRECISIONS
from parallel.pipeline.param_division import SharedParamGroup
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.stage import StageTrainer
from parallel.pipeline.stage_params import replicas_of
from parallel.runtime.tree_sum import VectorPool
from parallel.sharding.mesh import Mesh
from quant.types import Array


class WeightVersions:
    """Versions of a stage's weights: the newest in place, and copies of older ones while micro-batches need them.

    `wanted` is the version of each micro-batch of the stage, in the order of backwards; `pools` have vectors of each
    part.
    """

    def __init__(self, parts: Sequence[ParamShard], pools: Sequence[VectorPool], wanted: Mapping[int, int]):
        self._parts, self._pools, self._wanted = parts, pools, wanted
        self._later = deque(wanted.values())
        self.newest = 0
        self._older: dict[int, list[Array]] = {}

    def use(self, microbatch: int) -> None:
        older = self._older.get(self._wanted[microbatch])
        for at, part in enumerate(self._parts):
            part.context.flat.bind(older[at] if older else part.weights.vector)

    def end_backward(self) -> None:
        """Count one more micro-batch whose backward is done. Frees versions that no later one needs."""
        self._later.popleft()
        for version in set(self._older) - set(self._later):
            for pool, vector in zip(self._pools, self._older.pop(version)):
                pool.give(vector)

    def begin_version(self) -> None:
        """Begin a new version, to be updated in place. First copies the newest if a later backward needs it."""
        if self.newest in self._later:
            older = self._older[self.newest] = [pool.take() for pool in self._pools]
            for vector, part in zip(older, self._parts):
                vector[...] = part.weights.vector
        self.newest += 1


class WeightStashing(StageTrainer):
    """Computations of a stage that updates its weights between backwards and stashes older versions (PipeDream).

    ``begin(number)`` is called before the first gradient of an update, ``apply(number, intact)`` after the last one:
    not `intact` if this stage or a neighbour has failed.
    """

    def __init__(
        self,
        *args: Any,
        begin: Callable[[int], None],
        apply: Callable[[int, bool], None],
        versions: WeightVersions,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self._begin, self._apply, self._versions = begin, apply, versions
        self._is_incomplete = False  # an array of another stage is missing: it has failed
        self._begin(0)

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        self._versions.use(microbatch)
        self._is_incomplete |= x is None and not self._chunks[chunk].first
        return super().forward(chunk, microbatch, x)

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        self._versions.use(microbatch)
        self._is_incomplete |= dy is None and not self._chunks[chunk].last
        dx = super().backward(chunk, microbatch, dy, whole)
        self._versions.end_backward()
        return dx

    def update(self, chunk: int, number: int) -> None:
        """Begin the next weight version and apply update `number` to it."""
        for _, part in self._chunks[chunk].shares:
            part.gradients.finish()
        self._versions.begin_version()
        try:
            self._apply(number, self.problem is None and not self._is_incomplete)
        except FloatingPointError as error:
            self.problem = error
        self._begin(number + 1)


class AsynchronousPipeline(Pipeline):
    """PipeDream engine: stages update several times per step and stash older weights.

    Replicas of a stage are `Settings.stage_ranks`. No tied weights, clipping or fp16. Reports have no gradient norm.
    Updates before a failure in a step are kept.
    """

    _unchanged = "updates that the step had made before stay"

    @cached_property
    def _pools(self) -> list[VectorPool]:
        allocate = partial(self.context.memory.private, "parameters", dtype=self.context.storage)
        return [VectorPool(partial(allocate, part.context.flat.length)) for part in self._parts]

    @staticmethod
    def _build(schedule: str, stages: int, microbatches: int, options: dict[str, Any]) -> PipelinePlan:
        """Plan of a training step: schedule steps of `stages` micro-batches each, or one of all if not divisible."""
        each = microbatches if microbatches % stages else stages
        return build(schedule, stages, each, steps=microbatches // each, **options)

    @staticmethod
    def _refusal(plan: PipelinePlan, groups: Sequence[SharedParamGroup], mesh: Mesh, settings: Settings) -> str | None:
        if plan.versions is None:
            return f"schedule: {plan.name} does not update on the way; it is for Pipeline"
        if mesh.size > plan.stages or plan.placement.chunks > 1:
            return f"mesh: {plan.name} is for one pipeline, with replicas by stage_ranks; found {mesh}"
        if not LAYOUTS[replicas_of(mesh, mesh.size)].drawn:
            return f"mesh: {plan.name} keeps versions of whole weights; found {mesh}"
        if tied := [group for group in groups if len(group.parts) > 1]:
            name = tied[0].tensors[0].parameter.name
            return f"model: {plan.name} updates stage by stage, and {name} belongs to several"
        if settings.clip:
            return f"clip: {plan.name} updates stage by stage, without the norm over all; found {settings.clip}"
        return f"precision: {plan.name} has no loss scale for all" if PRECISIONS[settings.precision].scaled else None

    def _passes(self, mine: list[Batch], assignment: Assignment, step_scale: StepScale) -> PassResult:
        self._expect_at_most(assignment)
        assert self.plan.versions is not None
        here = [self._microbatch(batch, training=True) for batch in mine]
        counts = self._own_counts
        line = self._bound(len(here), True)
        stage, before = self._portion.stage(), self.updates
        own = [bound.action.microbatch for bound in line if bound.action.kind in ("W", "BW")]
        updates = {group.number: self._portion.updates(group, len(here)) for group, _ in self._shares}
        clock = self._rates  # all updates of a step have its learning rate

        def targets(update: Assignment) -> float:
            return math.fsum(counts[at] for some in update for at in some)

        def begin(number: int) -> None:
            for group, part in self._shares:
                for update in updates[group.number][number : number + 1]:  # none after the last
                    part.gradients.begin(update, StepScale(before + number, targets(update), 1.0))

        def apply(number: int, intact: bool) -> None:
            intact = intact and self._errors.first is None
            held = [gradient for part in self._parts for _, gradient in part.gradients.own]
            finite = all(np.isfinite(block_squares(gradient)).all() for gradient in held)
            if not self._agreed(intact and finite):
                for reducer in self._compressed():
                    reducer.undo()
            elif count := max((targets(some[number]) for some in updates.values()), default=0):
                self._optimizer.update(self._sharded.pieces, before + number, 1 / count, self._gather, clock)
                self._sharded.publish()
            if intact and not finite:  # only now: the replicas wait for this rank in _agreed
                raise FloatingPointError(f"the gradient of update {number} is not finite")

        work = WeightStashing(
            self._chunks,
            here,
            self._runner.progress,
            scale=step_scale.scale,
            note=self._noting(here, assignment),
            begin=begin,
            apply=apply,
            versions=WeightVersions(self._parts, self._pools, {at: self.plan.versions[stage][at] for at in own}),
        )
        self._runner.run(line, work)
        for part in self._parts:
            part.context.flat.bind(part.weights.vector)
        # On all ranks, also where something has failed.
        self._count_updates(sum(bound.action.kind == "U" for bound in line))
        return PassResult(work.losses, work.problem)

    def _gather(self, of_pieces: np.ndarray) -> np.ndarray:
        """Vector over the blocks of all parameters: values of this stage's replicas, zeros elsewhere. Collective."""
        whole = np.zeros(self.flat.length // BLOCK)
        whole[numbers_of(piece.span for piece in self._sharded.pieces)] = of_pieces
        if LAYOUTS[self._portion.layout].divided and self._parts:
            self._parts[0].context.comm.Allreduce(MPI.IN_PLACE, whole)
        return whole

    def _agreed(self, ready: bool) -> bool:
        """True if all replicas of this stage are ready to update. Collective over them."""
        if not self._parts or self._parts[0].context.plan.ranks == 1:
            return ready
        return bool(self._parts[0].context.comm.allreduce(ready, MPI.LAND))

    @property
    def _clock(self) -> int:
        return self.steps

    def _update(self, count: float) -> tuple[float | None, bool]:
        return None, True
