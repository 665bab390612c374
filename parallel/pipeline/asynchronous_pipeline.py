"""Asynchronous pipelines: stages update while microbatches are in flight and keep older weight versions.

The backward of a microbatch uses the weights of its forward (Narayanan et al., "PipeDream", SOSP 2019, section 3.3);
the plan determines the version. No microbatch is in flight at the end of a step, so only the newest version remains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.data.sampler import Batch
from parallel.data_parallel.grad_norm import numbers_of
from parallel.data_parallel.reducers import Assignment, StepScale
from parallel.data_parallel.sharded_optimizer import ParamShard
from parallel.engine.base import ForwardBackward
from parallel.engine.settings import Settings
from parallel.mesh import Mesh
from parallel.nn.flat_params import BLOCK
from parallel.nn.operator import Operator
from parallel.optim.lr_schedules import rate_at
from parallel.optim.optimizers import Optimizer, block_squares
from parallel.optim.precision import PRECISIONS
from parallel.pipeline.param_division import SharedParamGroup
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, build
from parallel.pipeline.stage import StageTrainer
from parallel.pipeline.stage_params import intervals_of
from parallel.runtime.tree_sum import VectorPool
from quant.types import Array


class WeightVersions:
    """Versions of a part's weights: the newest in place, older ones while they are needed.

    `wanted` is the version used by each microbatch, in the order of their backwards.
    """

    def __init__(self, part: ParamShard, pool: VectorPool, wanted: Sequence[int]):
        self._flat, self._live, self._pool = part.context.flat, part.weights.vector, pool
        self._wanted, self._over, self.newest = list(wanted), 0, 0
        self._older: dict[int, Array] = {}

    def use(self, version: int) -> None:
        """Bind the parameters to a version."""
        self._flat.bind(self._live if version == self.newest else self._older[version])

    def over(self) -> None:
        """Finish a microbatch; frees versions that are no longer needed."""
        self._over += 1
        for version in set(self._older) - set(self._wanted[self._over :]):
            self._pool.give(self._older.pop(version))

    def next(self) -> None:
        """Begin a new version; copies the newest if it is still needed."""
        if self.newest in self._wanted[self._over :]:
            kept = self._older[self.newest] = self._pool.take()
            kept[...] = self._live
        self.newest += 1


class WeightStashing(StageTrainer):
    """Stage work with updates between forwards and backwards.

    `wanted` is the weight version of each microbatch; `intervals` are the microbatches of each update. `begin` and
    `apply` are called with these before the first and after the last gradient of an update. `used` is the version by
    kind of action and microbatch.
    """

    def __init__(
        self,
        *args: Any,
        wanted: Sequence[int],
        intervals: Sequence[Sequence[int]],
        begin: Callable[[Sequence[int]], None],
        apply: Callable[[Sequence[int]], None],
        stashes: Sequence[WeightVersions],
        **options: Any,
    ):
        super().__init__(*args, **options)
        self._wanted, self._intervals, self._begin, self._apply = wanted, intervals, begin, apply
        self._stashes = stashes
        self._missing: set[int] = set()
        self.used: dict[tuple[str, int], int] = {}
        self._begin_next(0)

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        self._use("F", microbatch)
        return super().forward(chunk, microbatch, x)

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        self._use("B", microbatch)
        if dy is None and not self._chunks[chunk].last:
            self._missing.add(microbatch)
        dx = super().backward(chunk, microbatch, dy, whole)
        for stash in self._stashes:
            stash.over()
        return dx

    def update(self, chunk: int, number: int) -> None:
        """Begin the next version; updates it unless something has failed."""
        for _, part in self._chunks[chunk].shares:
            part.gradients.finish()
        for stash in self._stashes:
            stash.next()
        try:
            if self.problem is None and not self._missing:
                self._apply(self._intervals[number])
        except FloatingPointError as error:
            self.problem = error
        self._begin_next(number + 1)

    def _begin_next(self, number: int) -> None:
        if number < len(self._intervals):
            self._begin(self._intervals[number])

    def _use(self, kind: str, microbatch: int) -> None:
        version = self.used[kind, microbatch] = self._wanted[microbatch]
        for stash in self._stashes:
            stash.use(version)


class AsynchronousPipeline(Pipeline):
    """Pipeline with updates within a step; without replicas, tied weights, clipping and fp16.

    Reports have no gradient norm. Updates before a failure in a step are kept. `used` is the weight version of every F
    and B of the last step on this stage, counted from the step's beginning.
    """

    _unchanged = "updates that the step had made before stay"

    def __init__(
        self,
        model: Operator,
        loss: Any,
        comm: Communicator,
        optimizer: Optimizer,
        settings: Settings,
        schedule: PipelinePlan | None = None,
    ):
        super().__init__(model, loss, comm, optimizer, settings, schedule)
        self.used: dict[tuple[str, int], int] = {}
        self._rate = 0.0
        self._own = replace(optimizer, rate=lambda update: self._rate)  # it goes by steps, and a step has many updates
        memory, storage = self.context.memory, self.context.storage
        self._pools = [
            VectorPool(lambda length=part.context.flat.length: memory.private("parameters", length, storage))  # type: ignore[misc]
            for part in self._parts
        ]

    @staticmethod
    def _build(schedule: str, stages: int, microbatches: int, virtual: int | None) -> PipelinePlan:
        """Plan with updates every `stages` microbatches if these divide the step, else one update per step."""
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

    def _passes(self, mine: list[Batch], assignment: Assignment, step_scale: StepScale) -> ForwardBackward:
        self._expect_at_most(assignment)
        here = [self._microbatch(batch, training=True) for batch in mine]
        counts = [int(self._loss.count(one.y)) for one in here]
        line = [bound.action for bound in self._bind("train", len(here))]
        intervals = intervals_of(line)
        wanted = self._wanted(len(here))
        stashes = [WeightVersions(part, pool, wanted) for part, pool in zip(self._parts, self._pools)]
        self._rate = rate_at(self._optimizer.rate, self._clock)

        def begin(interval: Sequence[int]) -> None:
            for group, part in self._shares:
                part.gradients.begin([tuple(group.leaf(here[at].number, group.parts[0]) for at in interval)])

        def apply(interval: Sequence[int]) -> None:
            held = [gradient for part in self._parts for _, gradient in part.gradients.own]
            if not all(np.isfinite(block_squares(gradient)).all() for gradient in held):
                raise FloatingPointError(f"the gradient of micro-batches {list(interval)} is not finite")
            if count := sum(counts[at] for at in interval):
                self._own.update(self._sharded.pieces, self.updates, 1 / count, self._gather)
            self.updates += 1

        stage, note = (self._chunks, here, self._loss, self._runner.progress), self._noting(here, assignment)
        work = WeightStashing(
            *stage,
            scale=step_scale.scale,
            note=note,
            wanted=wanted,
            intervals=intervals,
            begin=begin,
            apply=apply,
            stashes=stashes,
        )
        before = self.updates
        self._runner.run(self._bind("train", len(here)), work)
        self.used = work.used
        for stash in stashes:
            stash.use(stash.newest)
        self.updates = before + len(intervals)  # on all ranks, also where something has failed
        return ForwardBackward(work.early, work.losses, work.problem)

    def _wanted(self, microbatches: int) -> tuple[int, ...]:
        assert self.plan.versions is not None
        return self.plan.versions[self._portion.stage()][:microbatches]

    def _gather(self, of_pieces: np.ndarray) -> np.ndarray:
        """Values of all blocks, of which this rank has its own."""
        whole = np.zeros(self.flat.length // BLOCK)
        whole[numbers_of(piece.span for piece in self._sharded.pieces)] = of_pieces
        return whole

    @property
    def _clock(self) -> int:
        return self.steps

    def _update(self, count: int) -> tuple[float | None, bool]:
        return None, True
