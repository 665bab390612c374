"""Share of a rank in a pipelined model and its memory, from settings and shapes. Used by engine and forecast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

from parallel.engine.data_parallel.expert_shards import ExpertDivision, ExpertTeams
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel.partition_spec import PartitionSpec as Division
from parallel.engine.data_parallel.partition_spec import units_of
from parallel.engine.data_parallel.reducers import Assignment, Turns
from parallel.engine.memory_ledger import MemoryLedger, predict_part
from parallel.engine.replica_teams import Teams
from parallel.nn.compose import Sequential
from parallel.nn.flat_params import BLOCK
from parallel.nn.kernels.causal_attention import outlines_on
from parallel.nn.operator import ArraySpec, OperatorOutline, nbytes_of
from parallel.nn.trial_outline import loss_outline
from parallel.pipeline.param_division import SharedParamGroup, divide
from parallel.pipeline.schedule.actions import Action, gradients_by_update
from parallel.pipeline.schedule.activation_memory import versions
from parallel.pipeline.schedule.lowering import lower
from parallel.pipeline.schedule.pipeline_plan import PipelinePlan, truncate
from parallel.pipeline.schedule.stage_placement import StagePlace
from parallel.sharding.axes import AXES
from parallel.sharding.axis import STAGES
from parallel.sharding.context.models_by_length import LengthModel
from parallel.sharding.mesh import Mesh

AXIS = STAGES.name
REPLICAS = tuple(name for name, layout in LAYOUTS.items() if layout.across_stages)
"""Axes along which stages have replicas, named after the layout of their gradients, weights and optimizer state."""


@dataclass(frozen=True)
class Portion:
    """Share of a rank in a pipelined model: its stage and replica, parameter groups, and bytes in a step."""

    division: Division  # of the whole vector, among all ranks
    mesh: Mesh  # of stages and their replicas, which may share sequences
    plan: PipelinePlan  # with messages
    cuts: tuple[int, ...]  # first unit of every part, and the number of units
    groups: tuple[SharedParamGroup, ...]  # of the whole vector
    layout: str  # of the replicas of a stage, one of `REPLICAS`
    sharing: ExpertTeams | None = None  # of replicas that share experts
    device: str = "cpu"  # as in `Settings`

    @classmethod
    def make(
        cls,
        division: Division,
        mesh: Mesh,
        plan: PipelinePlan,
        cuts: tuple[int, ...],
        parts_per_rank: int = 1,
        experts: ExpertDivision | None = None,
        device: str = "cpu",
    ) -> Portion:
        """Share of rank ``division.rank``, from a plan without messages. Sets `uses` of all parameters (`divide`).

        `parts_per_rank` are the parts of a sequence that a rank computes one by one.
        """
        options: dict[str, Any] = {"reproducible": division.reproducible, "terms": parts_per_rank}
        holders, sharing = (experts.holders, experts.teams) if experts else (None, None)
        groups = divide(division.flat, division.units, cuts, holders=holders, **options)
        layout = replicas_of(mesh, division.ranks)
        return cls(division, mesh, lower(plan), cuts, tuple(groups), layout, sharing, device)

    @property
    def replicas(self) -> int:
        return len(self.mesh.lines(AXIS))

    @cached_property
    def teams(self) -> Teams:
        """Pipelines by replica: those of a team share the sequences of the same micro-batches."""
        return Teams.of(self.mesh.summed)

    @cached_property
    def _replica_of(self) -> dict[int, int]:
        return {rank: number for number, line in enumerate(self.mesh.lines(AXIS)) for rank in line}

    def stage(self, rank: int | None = None) -> int:
        return self.mesh.coordinates(self.division.rank if rank is None else rank)[AXIS]

    def layout_of(self, group: SharedParamGroup) -> str:
        """Layout of a parameter group: that of the replicas if a single place has the group, else `across_stages`.

        Replicas of a place make the same actions and may wait for each other in any of them.
        """
        places = [place for part in group.parts for place in self.plan.placement.owners(part)]
        return self.layout if len(places) == 1 else LAYOUTS[self.layout].across_stages or self.layout

    def rounds(self, assignment: Assignment) -> int:
        """Number of micro-batches in this rank's actions of a step. Those beyond its assignment are empty."""
        if self.sharing is not None:
            return max(map(len, assignment))
        return int(LAYOUTS[self.layout].gradients.rounds(assignment, self.replica()))

    def replica(self, rank: int | None = None) -> int:
        return self._replica_of[self.division.rank if rank is None else rank]

    @cached_property
    def holders(self) -> list[tuple[int, ...]]:
        """Ranks that hold each parameter group, by number of the group."""
        return [tuple(rank for rank in range(self.mesh.size) if self._holds(rank, group)) for group in self.groups]

    def _holds(self, rank: int, group: SharedParamGroup) -> bool:
        """True if a rank's stage has a part with the group, and its replica those experts."""
        owners = [place.stage for part in group.parts for place in self.plan.placement.owners(part)]
        has = self.sharing is None or group.holder in (None, self.replica(rank) % self.sharing.size)
        return has and self.stage(rank) in owners

    @cached_property
    def held(self) -> list[tuple[SharedParamGroup, Division]]:
        """Parameter groups of this rank, and the partition of each among the ranks that hold it."""
        found = []
        for group, ranks in zip(self.groups, self.holders):
            if self.division.rank in ranks:
                flat, rank = self.division.flat.part(group.tensors), ranks.index(self.division.rank)
                compress = self.division.compress if len(ranks) > 1 else None
                own = replace(self.division, flat=flat, ranks=len(ranks), rank=rank, compress=compress)
                found.append((group, own))
        return found

    @cached_property
    def parts(self) -> dict[int, int]:
        here = self.stage()
        return {chunk: part for (stage, chunk), part in self.plan.placement.part.items() if stage == here}

    def leaves(self, group: SharedParamGroup, assignment: Assignment) -> list[tuple[int | None, ...]]:
        """Leaf numbers (`SharedParamGroup.leaf`) of the gradients that each rank holding a group contributes."""
        if group.holder is not None:
            return [self._expert_leaves(rank, group.parts[0], assignment) for rank in self.holders[group.number]]
        return [
            group.leaves(self.plan.placement, self.stage(rank), assignment[self.replica(rank)])
            for rank in self.holders[group.number]
        ]

    def _expert_leaves(self, rank: int, part: int, assignment: Assignment) -> tuple[int | None, ...]:
        """Numbers of the gradients of a rank's experts in a part of the model, in the order that its stage has them."""
        assert self.sharing is not None
        stage, parts = self.stage(rank), self.plan.placement.part
        line = truncate(self.plan, self.rounds(assignment)).actions[stage]
        ended = [action for action in line if action.kind in ("W", "BW")]
        turns = [action.microbatch for action in ended if parts[StagePlace(stage, action.chunk)] == part]
        mine = [tuple(numbers[turn] for turn in turns) for numbers in self.sharing.padded(assignment)]
        return self.sharing.leaves(mine)[self.replica(rank) // self.sharing.size]

    def expect(self, ledger: MemoryLedger, states: int, assignment: Assignment) -> None:
        """Enter predicted bytes of a step, except activations, in the ledger. Each group's maximum over steps counts.

        `states` is the number of the optimizer's state vectors, `assignment` the micro-batches of every pipeline.
        """
        ledger.expect(Counter(buffers=self.division.flat.length // BLOCK * 8))
        older = versions(truncate(self.plan, len(assignment[self.replica()])))[self.stage()] - 1
        for group, division in self.held:
            for leaves in self._sums(group, division, assignment):
                kept = predict_part(division, self.layout_of(group), states, leaves)
                kept["parameters"] += older * division.flat.length * division.precision.storage.itemsize
                ledger.expect(kept, part=group.number)

    def activations(self, forms: Sequence[tuple[LengthModel, ArraySpec, ArraySpec]]) -> tuple[Counter[str], int]:
        """Predicted peak bytes of activations, and of temporaries. `forms`: model and specs of x, y by micro-batch."""
        most = work = 0
        held: dict[tuple[int, int], int] = {}
        plan = truncate(self.plan, len(forms))
        for action in plan.actions[self.stage()]:
            key = action.chunk, action.microbatch
            if action.kind == "F":
                held[key], here = self._held_by(action, forms)
                most = max(most, sum(held.values()))
                both = action in plan.partners
                work = max(work, here + (self._held_by(plan.partners[action], forms)[1] if both else 0))
            elif action.kind in ("W", "BW"):
                del held[key]
        return Counter(activations=most), work

    def _held_by(self, action: Action, forms: Sequence[tuple[LengthModel, ArraySpec, ArraySpec]]) -> tuple[int, int]:
        """Bytes that a part holds of a micro-batch from its forward to its backward pass, and bytes of temporaries."""
        (model, x, y), part = forms[action.microbatch], self.parts[action.chunk]
        outline = self.outlines(model, x)[part]
        kept, work = [outline.y, outline.saved], outline.work
        if part == self.plan.placement.parts - 1:
            y = ArraySpec(*y)
            end = loss_outline(model.loss, outline.y, y)
            kept, work = [*kept, y, end.saved], max(work, end.work)
        return nbytes_of(kept), work

    @cached_property
    def outlines(self) -> Callable[[LengthModel, ArraySpec], list[OperatorOutline]]:
        """Cached function from model and input spec to outlines of the parts: output, saved arrays, temporaries."""
        return cache(self._outlines)

    def _outlines(self, model: LengthModel, x: ArraySpec) -> list[OperatorOutline]:
        units, outlines = units_of(model.model), list[OperatorOutline]()
        with outlines_on(self.device):
            for start, stop in pairwise(self.cuts):
                part = Sequential(units[start:stop])
                outlines.append(part.outline(outlines[-1].y if outlines else x))
        return outlines

    def updates(self, group: SharedParamGroup, microbatches: int) -> list[Assignment]:
        """Micro-batches of each update of an asynchronous plan, by rank that holds the group."""
        lines = truncate(self.plan, microbatches).actions
        return [list(update) for update in zip(*(updates_of(lines[rank]) for rank in self.holders[group.number]))]

    def _line(self, microbatches: int) -> tuple[Action, ...]:
        return truncate(self.plan, microbatches).actions[self.stage()]

    def _sums(self, group: SharedParamGroup, division: Division, assignment: Assignment) -> list[Turns]:
        """Leaf numbers by holder, for each gradient sum of a group in a step. This rank's are in order of arrival.

        Where ranks sum after every micro-batch, there is one list of all leaves in order of arrival.
        """
        if self.plan.versions is not None:  # a sum for every update
            return [*self.updates(group, len(assignment[0]))] or [[()] * division.ranks]
        line = self._line(self.rounds(assignment))
        leaves = self.leaves(group, assignment)
        if group.holder is not None:
            return [leaves]
        done = [(action.microbatch, self.parts[action.chunk]) for action in line if action.kind in ("W", "BW")]
        if not LAYOUTS[self.layout_of(group)].drawn:
            turns = [turn for turn, part in done if part in group.parts]
            return [[tuple(here[turn] for turn in turns for here in leaves if turn < len(here))]]
        numbers = assignment[self.replica()]
        leaves[division.rank] = tuple(
            group.leaf(numbers[turn], part, term)
            for turn, part in done
            if part in group.parts and turn < len(numbers)
            for term in range(group.terms)
        )
        return [leaves]


def updates_of(line: Sequence[Action]) -> list[tuple[int, ...]]:
    """Micro-batches of each update of a stage. None where only other replicas have some."""
    return [tuple(action.microbatch for action in some) for some in gradients_by_update(line).values()]


def replicas_of(mesh: Mesh, ranks: int) -> str:
    """Mesh axis along which stages have replicas, named after their layout. ``"dp"`` if there is none.

    Raises ValueError if the mesh lacks stages, has an unknown axis, or another number of ranks.
    """
    mesh.expect(ranks, tuple(dict.fromkeys((AXIS, *REPLICAS, *AXES))))
    others = [name for name in mesh.sizes if name in REPLICAS]
    if AXIS not in mesh.sizes or len(others) > 1:
        raise ValueError(
            f"mesh: expected {AXIS}, and one of {', '.join(REPLICAS)} if stages have replicas; found {mesh}"
        )
    return mesh.replicas
