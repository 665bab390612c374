"""Share of a rank in a pipelined model and its memory, from settings and shapes; used by engine and forecast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

from parallel.data_parallel.partition_spec import PartitionSpec as Division
from parallel.data_parallel.reducers import Assignment
from parallel.engine.memory_ledger import MemoryLedger, predict_part
from parallel.mesh.mesh import Mesh
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import BLOCK
from parallel.nn.operator import ArraySpec, OperatorOutline, nbytes_of
from parallel.nn.trial_outline import loss_outline
from parallel.pipeline.param_division import SharedParamGroup, divide
from parallel.pipeline.schedule.actions import Action
from parallel.pipeline.schedule.activation_memory import versions
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, truncate

AXIS = "pp"
REPLICAS = ("dp", "zero1")
"""Axes along which stages have replicas, named after the layout that sums gradients."""


@dataclass(frozen=True)
class Portion:
    """Share of a rank in a pipelined model: its stage and replica, parameter groups, and bytes in a step."""

    division: Division  # of the whole vector, among all ranks
    mesh: Mesh
    plan: PipelinePlan  # with messages
    cuts: tuple[int, ...]  # first unit of every part, and the number of units
    groups: tuple[SharedParamGroup, ...]  # of the whole vector
    layout: str  # of the gradient sums over replicas

    @classmethod
    def make(cls, division: Division, mesh: Mesh, plan: PipelinePlan, cuts: tuple[int, ...]) -> Portion:
        """Share of rank ``division.rank``, from a plan without messages; sets `uses` of all parameters (`divide`)."""
        groups = divide(division.flat, division.units, cuts, reproducible=division.reproducible)
        return cls(division, mesh, lower(plan), cuts, tuple(groups), replicas_of(mesh, division.ranks))

    @property
    def replicas(self) -> int:
        return len(self.mesh.lines(AXIS))

    def stage(self, rank: int | None = None) -> int:
        return self.mesh.coordinates(self.division.rank if rank is None else rank)[AXIS]

    def replica(self, rank: int | None = None) -> int:
        return self.mesh.coordinates(self.division.rank if rank is None else rank).get(self.layout, 0)

    @cached_property
    def holders(self) -> list[tuple[int, ...]]:
        """Ranks that hold each parameter group, by number of the group."""
        stages = [self.stage(rank) for rank in range(self.mesh.size)]
        owners = self.plan.placement.owners
        held = ({place.stage for part in group.parts for place in owners(part)} for group in self.groups)
        return [tuple(rank for rank, stage in enumerate(stages) if stage in some) for some in held]

    @cached_property
    def held(self) -> list[tuple[SharedParamGroup, Division]]:
        """Parameter groups of this rank, and the partition of each among the ranks that hold it."""
        found = []
        for group, ranks in zip(self.groups, self.holders):
            if self.division.rank in ranks:
                flat, rank = self.division.flat.part(group.tensors), ranks.index(self.division.rank)
                found.append((group, replace(self.division, flat=flat, ranks=len(ranks), rank=rank)))
        return found

    @cached_property
    def parts(self) -> dict[int, int]:
        here = self.stage()
        return {chunk: part for (stage, chunk), part in self.plan.placement.part.items() if stage == here}

    def leaves(self, group: SharedParamGroup, assignment: Assignment) -> list[tuple[int, ...]]:
        """Leaf numbers (`SharedParamGroup.leaf`) of the gradients that each rank holding a group contributes."""
        return [
            group.leaves(self.plan.placement, self.stage(rank), assignment[self.replica(rank)])
            for rank in self.holders[group.number]
        ]

    def expect(self, ledger: MemoryLedger, states: int, assignment: Assignment) -> None:
        """Enter predicted bytes of a step, except activations, in the ledger; each group's maximum over steps counts.

        `states` is the number of the optimizer's state vectors, `assignment` the micro-batches of every pipeline.
        """
        ledger.expect(Counter(buffers=self.division.flat.length // BLOCK * 8))
        older = versions(truncate(self.plan, len(assignment[self.replica()])))[self.stage()] - 1
        for group, division in self.held:
            for leaves in self._sums(group, division, assignment):
                kept = predict_part(division, self.layout, states, leaves)
                kept["parameters"] += older * division.flat.length * division.precision.storage.itemsize
                ledger.expect(kept, part=group.number)

    def activations(self, forms: Sequence[tuple[ArraySpec, ArraySpec]], loss: Any) -> tuple[Counter[str], int]:
        """Predicted peak bytes of activations, and of temporaries; `forms` are specs of (x, y) by micro-batch."""
        most = work = 0
        held: dict[tuple[int, int], int] = {}
        for action in self._line(len(forms)):
            key = action.chunk, action.microbatch
            if action.kind == "F":
                (x, y), part = forms[action.microbatch], self.parts[action.chunk]
                outline = self.outlines(x)[part]
                kept, work = [outline.y, outline.saved], max(work, outline.work)
                if part == self.plan.placement.parts - 1:
                    y = ArraySpec(*y)
                    end = loss_outline(loss, outline.y, y)
                    kept, work = [*kept, y, end.saved], max(work, end.work)
                held[key] = nbytes_of(kept)
                most = max(most, sum(held.values()))
            elif action.kind in ("W", "BW"):
                del held[key]
        return Counter(activations=most), work

    @cached_property
    def outlines(self) -> Callable[[ArraySpec], list[OperatorOutline]]:
        """Cached function from the model's input spec to outlines of its parts: output, saved arrays, temporaries."""
        return cache(self._outlines)

    def _outlines(self, x: ArraySpec) -> list[OperatorOutline]:
        outlines: list[OperatorOutline] = []
        for start, stop in pairwise(self.cuts):
            part = Sequential(self.division.units[start:stop])
            outlines.append(part.outline(outlines[-1].y if outlines else x))
        return outlines

    def _line(self, microbatches: int) -> tuple[Action, ...]:
        return truncate(self.plan, microbatches).actions[self.stage()]

    def _sums(self, group: SharedParamGroup, division: Division, assignment: Assignment) -> list[list[tuple[int, ...]]]:
        """Leaf numbers by holder, for each gradient sum of a group in a step; this rank's are in order of arrival."""
        numbers = assignment[self.replica()]
        line = self._line(len(numbers))
        if self.plan.versions is not None:  # a sum for every update; no replicas
            return [[tuple(interval)] for interval in intervals_of(line) or [[]]]
        leaves = self.leaves(group, assignment)
        done = [(action.microbatch, self.parts[action.chunk]) for action in line if action.kind in ("W", "BW")]
        leaves[division.rank] = tuple(group.leaf(numbers[turn], part) for turn, part in done if part in group.parts)
        return [leaves]


def intervals_of(line: Sequence[Action]) -> list[list[int]]:
    intervals: list[list[int]] = [[]]
    for action in line:
        if action.kind in ("W", "BW"):
            intervals[-1].append(action.microbatch)
        elif action.kind == "U":
            intervals.append([])
    return intervals[:-1]


def replicas_of(mesh: Mesh, ranks: int) -> str:
    """Mesh axis along which stages have replicas; ``"dp"`` if there is none.

    Raises ValueError if the mesh lacks stages, has an unknown axis, or another number of ranks.
    """
    others = [name for name in mesh.sizes if name != AXIS]
    if AXIS not in mesh.sizes or len(others) > 1 or not set(others) <= set(REPLICAS):
        raise ValueError(f"mesh: expected {AXIS}, and {' or '.join(REPLICAS)} if stages have replicas; found {mesh}")
    if mesh.size != ranks:
        raise ValueError(f"mesh: {mesh} is for {mesh.size} ranks, found {ranks}")
    return others[0] if others else "dp"
