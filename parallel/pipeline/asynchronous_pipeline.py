"""Pipelines that do not wait: stages update by themselves while micro-batches are under way, and keep older weights.

A micro-batch's backward uses the weights that its forward has used (Narayanan et al., "PipeDream", SOSP 2019, section
3.3), however often these have been updated meanwhile; which version that is, is the plan's matter. At the end of a step
all micro-batches are through, so that between two steps there is one version, the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.data_parallel.grad_norm import numbers_of
from parallel.runtime.tree_sum import Pool
from parallel.data.sampler import Batch
from parallel.nn.flat_params import BLOCK
from parallel.data_parallel.sharded_optimizer import Part
from parallel.engine.memory_ledger import predict_part
from parallel.mesh import Mesh
from parallel.nn.operator import Array, Operator
from parallel.optim.optimizers import Optimizer, block_squares
from parallel.pipeline.schedule.actions import Action
from parallel.pipeline.param_division import Group
from parallel.pipeline.engine import Pipeline
from parallel.pipeline.schedule.truncate import fewer
from parallel.pipeline.schedule.activation_memory import versions
from parallel.pipeline.schedule.pipeline_plan import Plan, build
from parallel.pipeline.stage import Training
from parallel.optim.precision import Precision
from parallel.optim.lr_schedules import rate_at
from parallel.engine.base import Passed
from parallel.data_parallel.reducers import Moment, Numbers


class Stash:
    """Versions of a part's weights: the newest where it lies, older ones as long as they are wanted.

    Parameters
    ----------
    part : Part
    wanted : sequence of int
        By micro-batch, in the order in which they come to their end: the version that it uses.
    """

    def __init__(self, part: Part, pool: Pool, wanted: Sequence[int]):
        self._flat, self._live, self._pool = part.context.flat, part.weights.vector, pool
        self._wanted, self._over, self.newest = list(wanted), 0, 0
        self._older: dict[int, Array] = {}

    def use(self, version: int) -> None:
        """Let parameters' values be those of a version."""
        self._flat.bind(self._live if version == self.newest else self._older[version])

    def over(self) -> None:
        """The next micro-batch has come to its end."""
        self._over += 1
        for version in set(self._older) - set(self._wanted[self._over :]):
            self._pool.give(self._older.pop(version))

    def next(self) -> None:
        """The newest version is about to be overwritten by the one after it."""
        if self.newest in self._wanted[self._over :]:
            kept = self._older[self.newest] = self._pool.take()
            kept[...] = self._live
        self.newest += 1


class Stashing(Training):
    """Forwards, backwards and updates in between.

    Parameters
    ----------
    wanted : sequence of int
        By micro-batch: the version of the weights that it uses here.
    intervals : sequence of sequence of int
        By update: the micro-batches whose gradients it is made of.
    begin, apply : callable (numbers of an interval's micro-batches)
        Gradients are about to come; they have come.
    stashes : sequence of Stash

    Attributes
    ----------
    used : dict
        By kind of action and micro-batch: the version that it has used.
    """

    def __init__(
        self,
        *args: Any,
        wanted: Sequence[int],
        intervals: Sequence[Sequence[int]],
        begin: Callable[[Sequence[int]], None],
        apply: Callable[[Sequence[int]], None],
        stashes: Sequence[Stash],
        **options: Any,
    ):
        super().__init__(*args, **options)
        self._wanted, self._intervals, self._begin, self._apply = wanted, intervals, begin, apply
        self._stashes = stashes
        self._void: set[int] = set()
        self.used: dict[tuple[str, int], int] = {}
        self._begin_next(0)

    def forward(self, chunk: int, microbatch: int, x: Array) -> Array:
        """F, with the version that the plan says."""
        self._use("F", microbatch)
        return super().forward(chunk, microbatch, x)

    def backward(self, chunk: int, microbatch: int, dy: Array, whole: bool) -> Array:
        """The same version again."""
        self._use("B", microbatch)
        if dy is None and not self._chunks[chunk].last:
            self._void.add(microbatch)
        dx = super().backward(chunk, microbatch, dy, whole)
        for stash in self._stashes:
            stash.over()
        return dx

    def update(self, chunk: int, number: int) -> None:
        """U: the next version. Where a micro-batch has failed nothing is changed any more."""
        for _, part in self._chunks[chunk].shares:
            part.gradients.finish()
        for stash in self._stashes:
            stash.next()
        try:
            if self.problem is None and not self._void:
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


class Asynchronous(Pipeline):
    """A pipeline whose plan updates on the way. As `Pipeline`, without replicas, tied weights, clipping and fp16.

    The gradient's norm is not known to anybody, and reports have none. What a step that fails has updated stays so.

    Attributes
    ----------
    used : dict
        Of the last step: the version of the weights, counted from its beginning, that every F and B has used here.
    """

    _left = "updates that the step had made before stay"

    def __init__(self, model: Operator, loss: Any, comm: Communicator, optimizer: Optimizer, **options: Any):
        super().__init__(model, loss, comm, optimizer, **options)
        self.used: dict[tuple[str, int], int] = {}
        self._rate = 0.0
        self._own = replace(optimizer, rate=lambda update: self._rate)  # it goes by steps, and a step has many updates
        memory, storage = self._context.memory, self._context.storage
        self._pools = [
            Pool(lambda length=part.context.flat.length: memory.own("parameters", length, storage))  # type: ignore[misc]
            for part in self._parts
        ]

    @staticmethod
    def _build(schedule: str, stages: int, microbatches: int, virtual: int | None) -> Plan:
        """Where updates wait for several micro-batches, for as many as there are stages if these divide the step."""
        each = microbatches if microbatches % stages else stages
        return build(schedule, stages, each, virtual=virtual, steps=microbatches // each)

    @staticmethod
    def _refusal(plan: Plan, groups: Sequence[Group], mesh: Mesh, clip: float | None, recipe: Precision) -> str | None:
        if plan.versions is None:
            return f"schedule: {plan.name} does not update on the way; it is for Pipeline"
        if mesh.size > plan.stages or plan.placement.chunks > 1:
            return f"mesh: {plan.name} is for stages without replicas that have one part each, found {mesh}"
        if tied := [group for group in groups if len(group.parts) > 1]:
            name = tied[0].tensors[0].parameter.name
            return f"model: {plan.name} updates stage by stage, and {name} belongs to several"
        if clip is not None:
            return f"clip: {plan.name} updates stage by stage, and nobody knows the norm over all; found {clip}"
        return f"precision: {plan.name} has no loss scale for all" if recipe.scaled else None

    def _passes(self, mine: list[Batch], everyone: Numbers, moment: Moment) -> Passed:
        """All forwards and backwards, and the updates between them."""
        self._expect_at_most(everyone)
        here = [self._microbatch(batch, training=True) for batch in mine]
        counts = [int(self._loss.count(one.y)) for one in here]
        line = [deed.action for deed in self._bind("train", len(here))]
        intervals = intervals_of(line)
        wanted = self._wanted(len(here))
        stashes = [Stash(part, pool, wanted) for part, pool in zip(self._parts, self._pools)]
        self._rate = rate_at(self._optimizer.rate, self._clock)

        def begin(interval: Sequence[int]) -> None:
            for group, part in self._shares:
                part.gradients.begin([tuple(group.leaf(here[at].number, group.parts[0]) for at in interval)])

        def apply(interval: Sequence[int]) -> None:
            held = [gradient for part in self._parts for _, gradient in part.gradients.own]
            if not all(np.isfinite(block_squares(gradient)).all() for gradient in held):
                raise FloatingPointError(f"the gradient of micro-batches {list(interval)} is not finite")
            if count := sum(counts[at] for at in interval):
                self._own.update(self._holdings.pieces, self.updates, 1 / count, self._gather)
            self.updates += 1

        options: dict[str, Any] = {"scale": moment.scale, "note": self._noting(here, everyone)}
        options |= {"wanted": wanted, "intervals": intervals, "begin": begin, "apply": apply, "stashes": stashes}
        work = Stashing(self._chunks, here, self._loss, self._runner.progress, **options)
        before = self.updates
        self._runner.run(self._bind("train", len(here)), work)
        self.used = work.used
        for stash in stashes:
            stash.use(stash.newest)
        self.updates = before + len(intervals)  # on all ranks, also where something has failed
        return Passed(work.early, work.losses, work.problem)

    def _wanted(self, microbatches: int) -> tuple[int, ...]:
        """By micro-batch: the version of the weights that it uses here, counted from the step's beginning."""
        assert self.plan.versions is not None
        return self.plan.versions[self._stage(self._context.plan.rank)][:microbatches]

    def _gather(self, of_pieces: np.ndarray) -> np.ndarray:
        """Every block's number, as far as this rank has it: all blocks of its tensors."""
        whole = np.zeros(self.flat.length // BLOCK)
        whole[numbers_of(piece.span for piece in self._holdings.pieces)] = of_pieces
        return whole

    @property
    def _clock(self) -> int:
        return self.steps

    def _update(self, count: int) -> tuple[float | None, bool]:
        """It was done on the way."""
        return None, True

    def _predict(self, everyone: Numbers) -> Counter[str]:
        """Older versions are parameters, too; gradients are those of one update's micro-batches."""
        plan = fewer(self.plan, len(everyone[0]))
        stage = self._stage(self._context.plan.rank)
        older, intervals = versions(plan)[stage] - 1, intervals_of(plan.actions[stage])
        states, total = len(self._optimizer.states()), Counter(buffers=self.flat.length // BLOCK * 8)
        for _, part in self._shares:
            division = part.context.plan
            total += predict_part(division, self._layout, states, [tuple(intervals[0]) if intervals else ()])
            total["parameters"] += older * division.flat.length * division.precision.storage.itemsize
        return total


def intervals_of(line: Sequence[Action]) -> list[list[int]]:
    """By update: the micro-batches whose gradients it is made of, from a stage's line."""
    intervals: list[list[int]] = [[]]
    for action in line:
        if action.kind in ("W", "BW"):
            intervals[-1].append(action.microbatch)
        elif action.kind == "U":
            intervals.append([])
    return intervals[:-1]
