"""Parameters and gradients of replicas that share the experts of a model.

Neighbouring replicas form a *team*. Each has other experts and all other parameters, and the ranks of a team exchange
tokens. So gradients of experts are sums over the teams, all others over the replicas; a rank has its parameters in
groups of neighbours in the parameter vector, each a shard of its own::

    replica    0        1        2        3        sum over
    experts    0, 1     2, 3     0, 1     2, 3     replicas 0, 2 and 1, 3
    others     all      all      all      all      replicas 0, 1, 2, 3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from parallel.engine.data_parallel.grad_bucket import of
from parallel.engine.data_parallel.layouts import DataParallelLayout
from parallel.engine.data_parallel.partition_spec import PartitionSpec
from parallel.engine.data_parallel.reducers import START, Assignment, StepScale, Turns
from parallel.engine.data_parallel.run_context import RunContext
from parallel.engine.data_parallel.sharded_optimizer import ParamShard
from parallel.nn.flat_params import ParamSpan
from parallel.nn.operator import Parameter
from quant.types import Array

Compute = Callable[[Array], object]


class ExpertTeams(NamedTuple):
    """Teams of replicas that share experts.

    Attributes
    ----------
    size : int
        Replicas of a team.
    by_source : bool
        Experts compute on the rows of every rank apart, and have a gradient for each of its micro-batches; else one for
        each turn of the team.
    """

    size: int
    by_source: bool

    @property
    def sources(self) -> int:
        """Gradients that an expert's parameter has in a turn."""
        return self.size if self.by_source else 1

    def padded(self, assignment: Turns) -> Turns:
        """Assignment with equally many turns for all replicas. None: without a micro-batch."""
        turns = range(max(map(len, assignment)))
        return [tuple(_at(numbers, turn) for turn in turns) for numbers in assignment]

    def leaves(self, assignment: Turns) -> Turns:
        """Numbers of the gradients of experts, by team, from the micro-batches of each replica.

        >>> ExpertTeams(2, by_source=True).leaves([(0, 1), (2, 3), (4, 5), (6,)])
        [(0, 2, 1, 3), (4, 6, 5, None)]
        >>> ExpertTeams(2, by_source=False).leaves([(0, 1), (2, 3), (4, 5), (6,)])
        [(0, 1), (0, 1)]
        """
        padded = self.padded(assignment)
        teams = [padded[start : start + self.size] for start in range(0, len(padded), self.size)]
        if self.by_source:
            return [tuple(number for turn in zip(*team) for number in turn) for team in teams]
        return [tuple(range(len(team[0]))) for team in teams]


def _at(numbers: Sequence[int | None], turn: int) -> int | None:
    return numbers[turn] if turn < len(numbers) else None


class HeldGroup(NamedTuple):
    """Neighbouring parameters that a rank has, and their partition among the ranks that have them.

    `unit` is that of experts; None: parameters of all replicas.
    """

    division: PartitionSpec
    unit: int | None = None

    def numbers(self, teams: ExpertTeams | None, assignment: Assignment) -> Turns:
        """Numbers of the gradients of each rank that has the group."""
        if teams is None:
            return assignment
        return teams.padded(assignment) if self.unit is None else teams.leaves(assignment)

    def shard(self, context: RunContext, layout: DataParallelLayout, teams: ExpertTeams | None) -> ParamShard:
        """Shard of the group in the memory of this rank. `context` is of the ranks that have it. Collective."""
        shard = ParamShard.make(replace(context, plan=self.division), layout)
        if self.unit is None or teams is None:
            return shard
        sink = ExpertGradients(shard.gradients, self.division.rank, self.unit, teams.sources)
        return shard._replace(gradients=sink)


class ExpertDivision(NamedTuple):
    """Division of experts: teams of replicas that share them, and the holder in a team of every expert's parameter."""

    teams: ExpertTeams
    holders: Mapping[int, int]


class RankGroups(NamedTuple):
    """Parameters of a rank, in groups by the ranks that have them, in the order of the vector.

    Attributes
    ----------
    plan : PartitionSpec
        Of the whole vector, among all replicas.
    held : list of HeldGroup
    teams : ExpertTeams or None
        None if every rank has all parameters, in one group.
    """

    plan: PartitionSpec
    held: list[HeldGroup]
    teams: ExpertTeams | None = None

    @classmethod
    def of(cls, plan: PartitionSpec, experts: ExpertDivision | None) -> RankGroups:
        if experts is None:
            return cls(plan, [HeldGroup(plan)])
        size = experts.teams.size

        def key(place: ParamSpan) -> tuple[int, int] | None:
            holder = experts.holders.get(id(place.parameter))
            return None if holder is None else (holder, plan.users[id(place.parameter)][0])

        held = []
        for about, places in groupby(plan.flat.places, key):
            part = replace(plan, flat=plan.flat.part(places))
            if about is None:
                held.append(HeldGroup(part))
            elif about[0] == plan.rank % size:
                held.append(HeldGroup(replace(part, ranks=plan.ranks // size, rank=plan.rank // size), about[1]))
        return cls(plan, held, experts.teams)

    def numbers(self, assignment: Assignment) -> list[Turns]:
        """Numbers of the gradients of each group, by rank that has it, from the micro-batches of every replica."""
        return [group.numbers(self.teams, assignment) for group in self.held]


class ExpertGradients:
    """Gradient sink of the experts of one unit, which hands the gradients of a turn to the sink of a layout.

    `rank` is this rank's among those with the same experts. With several `sources` every parameter has as many
    gradients in a turn, in the order of the ranks of the team. The layout's sink gets them as if they came from as many
    backward passes.
    """

    def __init__(self, inner: Any, rank: int, unit: int, sources: int):
        self.inner, self.own, self.reducers = inner, inner.own, inner.reducers
        self._rank, self._unit, self._sources = rank, unit, sources
        self._numbers: Sequence[int | None] = ()
        self._next = 0
        self._terms: dict[int, list[tuple[Parameter, Compute]]] = {}

    def begin(self, assignment: Turns, step_scale: StepScale = START) -> None:
        """Begin a step. `assignment` are the numbers of `ExpertTeams.leaves`."""
        self.inner.begin(assignment, step_scale)
        self._numbers, self._next = assignment[self._rank], 0

    def begin_backward(self, turn: int, number: int | None) -> None:
        """Begin a turn, in which all ranks take part: `number`, of this rank's micro-batch, does not matter."""
        self._terms = {}

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        self._terms.setdefault(id(parameter), []).append((parameter, compute))

    def left(self, unit: int) -> None:
        """Hand the gradients of the turn on when the backward pass has left the unit of the experts."""
        if unit != self._unit:
            return
        for source in range(self._sources):
            number = self._numbers[self._next]
            self.inner.begin_backward(self._next, number)
            for terms in self._terms.values() if number is not None else ():
                self.inner(*terms[source])
            self.inner.left(unit)
            self.inner.end_backward()
            self._next += 1

    def end_backward(self) -> None:
        """No-op: all was handed on when backward left the unit."""

    def bind(self) -> None:
        self.inner.bind()

    def finish(self) -> None:
        self.inner.finish()

    def close(self) -> None:
        self.inner.close()


class JoinedGradients:
    """Gradient sink of all shards of a rank whose team shares experts.

    All ranks make as many turns, since experts exchange tokens in each. In one without a micro-batch a rank makes a
    pass without samples, of which only the gradients of experts count: they are of the other ranks' tokens.
    """

    def __init__(self, groups: RankGroups, shards: Sequence[ParamShard]):
        self._groups, self._shards = groups, shards
        self._sinks = [shard.gradients for shard in shards][::-1]  # from the last unit to the first, as backward passes
        self._of = {
            id(place.parameter): (group, shard.gradients)
            for group, shard in zip(groups.held, shards)
            for place in group.division.flat.places
        }
        self._is_empty = True

    @staticmethod
    def rounds(assignment: Assignment, rank: int) -> int:
        return max(map(len, assignment))

    def begin(self, assignment: Assignment, step_scale: StepScale = START) -> None:
        for shard, numbers in zip(self._shards, self._groups.numbers(assignment)):
            shard.gradients.begin(numbers, step_scale)

    def begin_backward(self, turn: int, number: int | None) -> None:
        self._is_empty = number is None
        for sink in self._sinks:
            sink.begin_backward(turn, number)

    def __call__(self, parameter: Parameter, compute: Compute) -> None:
        group, sink = of(self._of, parameter)
        if group.unit is not None or not self._is_empty:
            sink(parameter, compute)

    def left(self, unit: int) -> None:
        for sink in self._sinks:
            sink.left(unit)

    def end_backward(self) -> None:
        for sink in self._sinks:
            sink.end_backward()

    def finish(self) -> None:
        for sink in self._sinks:
            sink.finish()


class JoinedWeights:
    """Parameter store of several shards (`ShardedParams`)."""

    def __init__(self, shards: Sequence[ParamShard]):
        self._stores = [shard.weights for shard in shards]

    def begin(self, path: Sequence[int]) -> None:
        for store in self._stores:
            store.begin(path)

    def unshard(self) -> None:
        for store in self._stores:
            store.unshard()

    def reshard(self) -> None:
        for store in self._stores:
            store.reshard()
