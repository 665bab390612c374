"""Asynchronous pipelines: stages update while micro-batches are in flight and keep older weight versions.

The backward of a micro-batch uses the weights of its forward (Narayanan et al., "PipeDream", SOSP 2019, section 3.3);
the plan determines the version. No micro-batch is in flight at the end of a step, so only the newest version remains.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from parallel.data.sampler import Batch
from parallel.data_parallel.reducers import Assignment, StepScale
from parallel.data_parallel.sharded_optimizer import ParamShard, numbers_of
from parallel.engine.base import PassResult
from parallel.engine.settings import Settings
from parallel.mesh.mesh import Mesh
from parallel.nn.flat_params import BLOCK
from parallel.optim.optimizers import block_squares
from parallel.optim.param_groups import RateClock
from parallel.optim.precision import PRECISIONS
from parallel.pipeline.param_division import SharedParamGroup
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.stage import StageTrainer
from parallel.pipeline.stage_params import intervals_of
from parallel.runtime.tree_sum import VectorPool
from quant.types import Array


class WeightVersions:
    """Versions of a stage's weights: the newest in place, and copies of older ones while micro-batches need them.

    `wanted` is the version that each micro-batch uses, in the order of backwards; `pools` have vectors of each part.
    """

    def __init__(self, parts: Sequence[ParamShard], pools: Sequence[VectorPool], wanted: Sequence[int]):
        self._parts, self._pools, self._wanted = parts, pools, wanted
        self._over = self.newest = 0
        self._older: dict[int, list[Array]] = {}

    def use(self, microbatch: int) -> None:
        older = self._older.get(self._wanted[microbatch])
        for at, part in enumerate(self._parts):
            part.context.flat.bind(older[at] if older else part.weights.vector)

    def end_backward(self) -> None:
        """Count one more micro-batch whose backward is done; frees versions that no later one needs."""
        self._over += 1
        for version in set(self._older) - set(self._wanted[self._over :]):
            for pool, vector in zip(self._pools, self._older.pop(version)):
                pool.give(vector)

    def begin_version(self) -> None:
        """Begin a new version, to be updated in place; first copies the newest if a later backward needs it."""
        if self.newest in self._wanted[self._over :]:
            older = self._older[self.newest] = [pool.take() for pool in self._pools]
            for vector, part in zip(older, self._parts):
                vector[...] = part.weights.vector
        self.newest += 1


class WeightStashing(StageTrainer):
    """Computations of a stage that updates its weights between backwards and stashes older versions (PipeDream).

    `intervals` are the micro-batches of each update. `begin` and `apply` are called with these before the first and
    after the last gradient of an update.
    """

    def __init__(
        self,
        *args: Any,
        intervals: Sequence[Sequence[int]],
        begin: Callable[[Sequence[int]], None],
        apply: Callable[[Sequence[int]], None],
        versions: WeightVersions,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self._intervals, self._begin, self._apply, self._versions = intervals, begin, apply, versions
        self._is_incomplete = False  # an array of another stage is missing: it has failed
        self._begin_next(0)

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
        """Begin the next weight version; apply update `number` to it unless this stage or a neighbour has failed."""
        for _, part in self._chunks[chunk].shares:
            part.gradients.finish()
        self._versions.begin_version()
        try:
            if self.problem is None and not self._is_incomplete:
                self._apply(self._intervals[number])
        except FloatingPointError as error:
            self.problem = error
        self._begin_next(number + 1)

    def _begin_next(self, number: int) -> None:
        if number < len(self._intervals):
            self._begin(self._intervals[number])


class AsynchronousPipeline(Pipeline):
    """PipeDream engine: stages update several times per step and stash older weights.

    No replicas, tied weights, clipping or fp16. Reports have no gradient norm. Updates before a failure in a step are
    kept.
    """

    _unchanged = "updates that the step had made before stay"

    @cached_property
    def _pools(self) -> list[VectorPool]:
        allocate = partial(self.context.memory.private, "parameters", dtype=self.context.storage)
        return [VectorPool(partial(allocate, part.context.flat.length)) for part in self._parts]

    @staticmethod
    def _build(schedule: str, stages: int, microbatches: int, virtual: int | None) -> PipelinePlan:
        """Plan of a training step: schedule steps of `stages` micro-batches each, or one of all if not divisible."""
        each = microbatches if microbatches % stages else stages
        return build(schedule, stages, each, virtual=virtual, steps=microbatches // each)

    @staticmethod
    def _refusal(plan: PipelinePlan, groups: Sequence[SharedParamGroup], mesh: Mesh, settings: Settings) -> str | None:
        if plan.versions is None:
            return f"schedule: {plan.name} does not update on the way; it is for Pipeline"
        if mesh.size > plan.stages or plan.placement.chunks > 1:
            return f"mesh: {plan.name} is for stages without replicas that have one part each, found {mesh}"
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
        counts = [int(self._loss.count(one.y)) for one in here]
        line = self._bound(len(here), True)
        intervals = intervals_of([bound.action for bound in line])
        wanted = self.plan.versions[self._portion.stage()][: len(here)]
        clock = RateClock(self._clock)  # all updates of a step have its learning rate

        def begin(interval: Sequence[int]) -> None:
            for group, part in self._shares:
                part.gradients.begin([tuple(group.leaf(here[at].number, group.parts[0]) for at in interval)])

        def apply(interval: Sequence[int]) -> None:
            held = [gradient for part in self._parts for _, gradient in part.gradients.own]
            if not all(np.isfinite(block_squares(gradient)).all() for gradient in held):
                raise FloatingPointError(f"the gradient of micro-batches {list(interval)} is not finite")
            if count := sum(counts[at] for at in interval):
                self._optimizer.update(self._sharded.pieces, self.updates, 1 / count, self._gather, clock)
            self.updates += 1

        work = WeightStashing(
            self._chunks,
            here,
            self._loss,
            self._runner.progress,
            scale=step_scale.scale,
            note=self._noting(here, assignment),
            intervals=intervals,
            begin=begin,
            apply=apply,
            versions=WeightVersions(self._parts, self._pools, wanted),
        )
        before = self.updates
        self._runner.run(line, work)
        for part in self._parts:
            part.context.flat.bind(part.weights.vector)
        self.updates = before + len(intervals)  # on all ranks, also where something has failed
        return PassResult(work.losses, work.problem)

    def _gather(self, of_pieces: np.ndarray) -> np.ndarray:
        """Vector over the blocks of all parameters: this rank's values `of_pieces` in their places, zeros elsewhere."""
        whole = np.zeros(self.flat.length // BLOCK)
        whole[numbers_of(piece.span for piece in self._sharded.pieces)] = of_pieces
        return whole

    @property
    def _clock(self) -> int:
        return self.steps

    def _update(self, count: int) -> tuple[float | None, bool]:
        return None, True
