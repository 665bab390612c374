"""Choice of one option per node of a graph, with costs on nodes and edges and a bound on memory.

Integer programming like Alpa's intra-operator pass (Zheng et al., OSDI 2022, section 4.2). `exhaustive` is the
reference.
"""

from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]


class ChoiceProblem(NamedTuple):
    """Costs and memory of each node's options, and of pairs of options on edges. Infinite where impossible.

    `edges` are (node, node, array of shape (options, options)). One pair of nodes may have several, and a node one
    with itself.
    """

    costs: list[Costs]
    edges: list[tuple[int, int, Costs]]
    memory: list[Costs]
    limit: float = np.inf

    def cost(self, choice: tuple[int, ...]) -> float:
        """Cost of an option per node. Infinite above the limit."""
        if sum(float(memory[at]) for memory, at in zip(self.memory, choice)) > self.limit:
            return np.inf
        nodes = sum(float(costs[at]) for costs, at in zip(self.costs, choice))
        return nodes + sum(float(pair[choice[one], choice[other]]) for one, other, pair in self.edges)


def exhaustive(problem: ChoiceProblem) -> tuple[int, ...] | None:
    """Cheapest choice, by trying all. None if all are impossible. For small graphs."""
    best = min(product(*(range(len(costs)) for costs in problem.costs)), key=problem.cost, default=None)
    return best if best is not None and np.isfinite(problem.cost(best)) else None


def by_milp(problem: ChoiceProblem) -> tuple[int, ...] | None:
    """Cheapest choice, by integer programming with HiGHS (scipy). None if all are impossible.

    Binary x[node, option] have sum 1 for each node. Each edge has y[option, option] >= 0, whose row and column sums
    are the x of its ends, so that it is the product of both. ImportError without scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise ImportError("integer programming is scipy's: pip install 'chorus-mpi[plan]'") from error
    starts = np.cumsum([0, *(len(costs) for costs in problem.costs), *(pair.size for *_, pair in problem.edges)])
    nodes = len(problem.costs)
    costs = np.concatenate([*problem.costs, *(pair.reshape(-1) for *_, pair in problem.edges)])
    possible = np.isfinite(costs)
    scale = float(np.abs(costs[possible]).max(initial=0.0)) or 1.0
    rows: list[Costs] = []
    columns: list[Costs] = []
    values: list[Costs] = []
    totals: list[float] = []

    def constrain(variables: Costs, factors: Costs, total: float) -> None:
        rows.append(np.full(len(variables), len(totals)))
        columns.append(variables)
        values.append(factors)
        totals.append(total)

    for node in range(nodes):
        variables = np.arange(starts[node], starts[node + 1])
        constrain(variables, np.ones(len(variables)), 1.0)
    for number, (one, other, pair) in enumerate(problem.edges, nodes):
        grid = starts[number] + np.arange(pair.size).reshape(pair.shape)
        for end, lines in ((one, grid), (other, grid.T)):
            for option, line in enumerate(lines):
                constrain(np.append(line, starts[end] + option), np.append(np.ones(len(line)), -1.0), 0.0)
    if one_node := [number for number, (one, other, _) in enumerate(problem.edges, nodes) if one == other]:
        for number in one_node:  # of an edge from a node to itself, the diagonal only
            pair = problem.edges[number - nodes][2]
            possible[starts[number] : starts[number + 1]] &= np.eye(len(pair), dtype=bool).reshape(-1)
    matrix = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), (len(totals), len(costs))
    )
    constraints = [LinearConstraint(matrix.tocsr(), totals, totals)]
    if np.isfinite(problem.limit):
        memory = np.concatenate(problem.memory) / (problem.limit or 1.0)
        padded = np.append(memory, np.zeros(len(costs) - len(memory)))
        constraints.append(LinearConstraint(padded[None], -np.inf, 1.0 if problem.limit else 0.0))
    found = milp(
        np.where(possible, costs, 0.0) / scale,
        integrality=np.arange(len(costs)) < starts[nodes],
        bounds=Bounds(0, possible.astype(float)),
        constraints=constraints,
        options={"mip_rel_gap": 0},
    )
    if found.x is None:
        return None
    return tuple(int(found.x[starts[node] : starts[node + 1]].argmax()) for node in range(nodes))
