"""Pipeline stages of a graph on a cluster: dynamic programming around the placement of each stage's operators.

Every stage of a range of operators on a number of devices is placed on all meshes of these devices, by integer
programming, and the fastest counts (Zheng et al., "Alpa", OSDI 2022, section 5).
"""

from dataclasses import replace
from functools import cache
from math import inf, prod
from typing import NamedTuple

from parallel.planning.analytic.graph_costs import HALF, GraphCosts, GraphPlan
from parallel.planning.analytic.machines import Cluster
from parallel.planning.analytic.operator_graph import GraphOperator, OperatorGraph
from parallel.planning.analytic.resharding import PlacementMesh
from parallel.planning.analytic.stage_search import Stage, best_stages
from parallel.planning.analytic.step_time import Setup

ENDS = ("input", "output")
"""Kinds of operators that compute nothing and belong to no stage."""


class PlacedStage(NamedTuple):
    """Stage, its operators' names, the mesh of its devices, the plan, and seconds to send its values and gradients."""

    stage: Stage
    names: tuple[str, ...]
    mesh: PlacementMesh
    plan: GraphPlan
    sending: float


class StagedPlan(NamedTuple):
    """Stages in order, and seconds of a step."""

    stages: tuple[PlacedStage, ...]
    seconds: float


def mesh_of(sizes: tuple[int, ...], cluster: Cluster) -> PlacementMesh:
    """Mesh with axes of these sizes. Consecutive devices are along the last one."""
    return PlacementMesh(sizes, tuple(cluster.link(size, prod(sizes[at + 1 :])) for at, size in enumerate(sizes)))


def meshes(devices: int, cluster: Cluster) -> list[PlacementMesh]:
    """Meshes of one or two axes with this number of devices."""
    shapes = [(devices,), *((devices // inner, inner) for inner in range(2, devices) if devices % inner == 0)]
    return [mesh_of(sizes, cluster) for sizes in shapes]


def subgraph(graph: OperatorGraph, names: tuple[str, ...]) -> OperatorGraph:
    """Graph of some consecutive operators: values from others are inputs, values that others take are outputs."""
    found: dict[str, GraphOperator] = {}
    for name in names:
        for source in graph.operators[name].inputs:
            if source not in names:
                found[source] = GraphOperator("input", features=graph.shapes[source][-1])
    batch, length, width = graph.shapes[names[0]]
    found |= {name: replace(graph.operators[name], features=graph.shapes[name][-1]) for name in names}
    for source in values_out(graph, names):
        found[f"{source}, sent"] = GraphOperator("output", (source,))
    return OperatorGraph(found, (batch, length, width))


def values_out(graph: OperatorGraph, names: tuple[str, ...]) -> list[str]:
    """Values of a stage that other operators take, or that no operator takes."""
    takers = {name: {other for other, each in graph.operators.items() if name in each.inputs} for name in names}
    return [
        name
        for name in names
        if graph.operators[name].kind != "output" and (not takers[name] or not takers[name] <= set(names))
    ]


class StagePlanner:
    """Division of a graph's operators into stages on devices of a cluster.

    Parameters
    ----------
    graph : OperatorGraph
    setup : Setup
    microbatches : int
        Of a step. The graph's batch is one micro-batch.
    limit : float
        Bytes of a device. A stage keeps the activations of one micro-batch for each stage from it on.
    """

    def __init__(self, graph: OperatorGraph, setup: Setup, microbatches: int, limit: float = inf):
        self.graph, self.setup, self.microbatches, self.limit = graph, setup, microbatches, limit
        self.names = tuple(name for name, operator in graph.operators.items() if operator.kind not in ENDS)
        self._placed = cache(self._place)

    def placed(self, stage: Stage, left: int) -> PlacedStage | None:
        """Fastest placement of a stage that is number `left` from the end. None if none is within the memory."""
        return self._placed(stage, min(left, self.microbatches) if self.limit < inf else 1)

    def _place(self, stage: Stage, alive: int) -> PlacedStage | None:
        names = self.names[stage.start : stage.stop]
        part = subgraph(self.graph, names)
        found = []
        for mesh in meshes(stage.devices, self.setup.cluster):
            plan = GraphCosts(part, mesh, self.setup, self.microbatches, alive).best(self.limit)
            if plan is not None:
                found.append(PlacedStage(stage, names, mesh, plan, self._sending(stage)))
        return min(found, key=lambda each: each.plan.seconds, default=None)

    def _sending(self, stage: Stage) -> float:
        """Seconds to send values that later stages take, and to receive their gradients: each device a part."""
        sent = [
            name
            for name in values_out(self.graph, self.names[stage.start : stage.stop])
            if any(name in self.graph.operators[other].inputs for other in self.names[stage.stop :])
        ]
        link = self.setup.cluster.link(2, stage.devices)
        return sum(2 * float(link.cost(HALF * prod(self.graph.shapes[name]) / stage.devices)) for name in sent)

    def seconds(self, stage: Stage, left: int) -> float:
        """Seconds of a micro-batch on a stage."""
        found = self.placed(stage, left)
        return inf if found is None else found.plan.seconds + found.sending

    def best(self, devices: int, count: int = 0) -> StagedPlan | None:
        """Fastest division on exactly `devices` devices, a power of two of them for every stage. None if none fits.

        `count`: number of stages, 0 for any.
        """
        sizes = [1 << power for power in range(devices.bit_length())]
        found = best_stages(len(self.names), devices, sizes, self.seconds, self.microbatches, count)
        if found is None:
            return None
        placed = [self.placed(stage, len(found.stages) - at) for at, stage in enumerate(found.stages)]
        return StagedPlan(tuple(each for each in placed if each is not None), found.seconds)
