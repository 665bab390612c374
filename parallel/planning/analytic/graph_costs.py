"""Placement of a graph's operators on a mesh of devices: options of every operator, their costs, the cheapest choice.

An option is a placement rule per axis. Its cost is the time of a micro-batch: products, memory traffic, and a share in
the sum of the weight's gradient. Edges cost the collectives that change the placement of a value and of its gradient.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from parallel.nn.placement import Shard
from parallel.planning.analytic.checked import lookup
from parallel.planning.analytic.choice_search import ChoiceProblem, Costs, by_milp
from parallel.planning.analytic.operator_graph import OperatorGraph
from parallel.planning.analytic.operator_kinds import KINDS, PlacementRule
from parallel.planning.analytic.resharding import MeshPlacement, PlacementMesh, Resharding, edge_reshardings
from parallel.planning.analytic.step_time import (
    BACKWARD_TRAFFIC,
    FORWARD_TRAFFIC,
    Setup,
    message_seconds,
    product_seconds,
)

HALF = 2
"""Bytes of an element of values and of gradients that are summed."""


class GraphOption(NamedTuple):
    """Option of an operator: names of the rules and placements along every axis, and its costs."""

    rules: tuple[str, ...]
    takes: MeshPlacement
    gives: MeshPlacement
    compute: float  # seconds of a micro-batch, forward and backward
    sums: float  # seconds of a micro-batch's share in the sum of the weight's gradient
    nbytes: float  # states of weights, and saved activations


class GraphPlan(NamedTuple):
    """Chosen option of every operator, changes of placement on edges (forward, backward), and their seconds."""

    options: dict[str, GraphOption]
    edges: dict[tuple[str, str], tuple[Resharding, Resharding]]

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch."""
        computed = sum(option.compute + option.sums for option in self.options.values())
        return computed + sum(change.seconds for pair in self.edges.values() for change in pair)

    @property
    def nbytes(self) -> float:
        """Bytes on a device."""
        return sum(option.nbytes for option in self.options.values())


class GraphCosts:
    """Options of a graph's operators on a mesh, for steps of a number of micro-batches.

    Parameters
    ----------
    graph : OperatorGraph
    mesh : PlacementMesh
    setup : Setup
    microbatches, alive : int
        Micro-batches of a step, and micro-batches whose activations are kept at the same time.
    fixed : mapping of str to tuple of str, optional
        Rules along every axis of operators that have no choice. ValueError if an operator lacks them.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        mesh: PlacementMesh,
        setup: Setup,
        microbatches: int = 1,
        alive: int = 1,
        fixed: Mapping[str, tuple[str, ...]] | None = None,
    ):
        self.graph, self.mesh, self.setup, self.microbatches, self.alive = graph, mesh, setup, microbatches, alive
        self.options = {name: list(self._options(name)) for name in graph.operators}
        for name, rules in (fixed or {}).items():
            known = {option.rules: option for option in lookup("operator", name, self.options)}
            if rules not in known:
                names = ", ".join("/".join(each) for each in known)
                raise ValueError(f"{name}: expected one of {names}; found {'/'.join(rules)}")
            self.options[name] = [known[rules]]

    def _options(self, name: str) -> Iterator[GraphOption]:
        rules = KINDS[self.graph.operators[name].kind].rules
        for names in product(rules, repeat=len(self.mesh.sizes)):
            option = self._option(name, names, [rules[each] for each in names])
            if option is not None:
                yield option

    def _option(self, name: str, names: tuple[str, ...], rules: list[PlacementRule]) -> GraphOption | None:
        """Option with these rules. None if a dimension is not divisible."""
        operator = self.graph.operators[name]
        takes, gives = tuple(rule.takes for rule in rules), tuple(rule.gives for rule in rules)
        taken = self.graph.shapes[operator.inputs[0]] if operator.inputs else self.graph.shapes[name]
        units = operator.heads if operator.kind == "attention" else 0
        if not self._divisible(takes, taken, units) or not self._divisible(gives, self.graph.shapes[name], units):
            return None
        samples = self._ways(takes, (0, 1))
        inputs = self._ways(takes, (-1,))
        outputs = self._ways(gives, (-1,))
        seconds = sum(
            product_seconds(cost, self.setup) for cost in self.graph.products(name, (samples, inputs, outputs))
        )
        held = self.graph.weights(name) / prod(size for size, rule in zip(self.mesh.sizes, rules) if rule.cut_weight)
        # the backward pass of a sum needs no inputs
        saved = HALF * prod(taken) / self.mesh.parts(takes) if operator.kind not in ("input", "output", "add") else 0.0
        # the backward pass has two products for each one of the forward pass
        compute = 3 * seconds + (FORWARD_TRAFFIC + BACKWARD_TRAFFIC) * saved / self.setup.device.bandwidth
        return GraphOption(
            names,
            takes,
            gives,
            compute,
            self._gradient_sum(rules, held),
            held * sum(self.setup.recipe) + self.alive * saved,
        )

    def _ways(self, placement: MeshPlacement, dims: tuple[int, ...]) -> int:
        """Number of parts along some dimensions."""
        return prod(
            size for size, each in zip(self.mesh.sizes, placement) if isinstance(each, Shard) and each.dim in dims
        )

    def _divisible(self, placement: MeshPlacement, shape: tuple[int, ...], units: int) -> bool:
        return all(
            (units if units and dim == -1 else shape[dim]) % self._ways(placement, (dim,)) == 0 for dim in (0, 1, -1)
        )

    def _gradient_sum(self, rules: list[PlacementRule], held: float) -> float:
        """Seconds to sum the weight's gradient, once a step, divided by the micro-batches."""
        seconds = 0.0
        for size, link, rule in zip(self.mesh.sizes, self.mesh.links, rules):
            if rule.some_samples and held:
                seconds += message_seconds("allreduce", "ring", size, HALF * held, link)
        return seconds / self.microbatches

    def changes(self, edge: tuple[str, str], one: GraphOption, other: GraphOption) -> tuple[Resharding, Resharding]:
        """Placement changes of the value on an edge, and of its gradient, if its ends take these options."""
        shape = self.graph.shapes[edge[0]]
        dims = tuple(dim for dim in (0, 1, -1) if shape[dim] % self.mesh.devices == 0)
        return edge_reshardings(one.gives, other.takes, float(HALF * prod(shape)), self.mesh, dims)

    def problem(self, limit: float = inf) -> ChoiceProblem:
        """Choice of one option per operator, within `limit` bytes of a device."""
        names = list(self.options)
        edges: list[tuple[int, int, Costs]] = []
        for edge in self.graph.edges:
            ends = [self.options[name] for name in edge]
            # product() varies its last one fastest, as reshape expects
            pairs = [sum(each.seconds for each in self.changes(edge, *pair)) for pair in product(*ends)]
            edges.append((names.index(edge[0]), names.index(edge[1]), np.array(pairs).reshape(*map(len, ends))))
        seconds = [np.array([each.compute + each.sums for each in options]) for options in self.options.values()]
        memory = [np.array([each.nbytes for each in options]) for options in self.options.values()]
        return ChoiceProblem(seconds, edges, memory, limit)

    def plan(self, choice: tuple[int, ...]) -> GraphPlan:
        """Plan of the options with these numbers."""
        chosen = {name: options[number] for (name, options), number in zip(self.options.items(), choice)}
        return GraphPlan(
            chosen, {edge: self.changes(edge, *(chosen[name] for name in edge)) for edge in self.graph.edges}
        )

    def best(self, limit: float = inf) -> GraphPlan | None:
        """Fastest plan within `limit` bytes of a device. None if there is none."""
        choice = by_milp(self.problem(limit))
        return None if choice is None else self.plan(choice)
