"""The best choice there is: by looking at all of them, or by integer programming."""

from __future__ import annotations

from itertools import product

import numpy as np

from quant.search.table import Choice, Table


def brute(table: Table, budget: float) -> Choice:
    """All choices, one after another: the reference, for a few layers.

    Options to the power of layers.
    """
    best = table.cheapest(budget)
    for choice in product(*(np.flatnonzero(np.isfinite(row)).tolist() for row in table.costs)):
        if table.cost(choice) <= budget and table.loss(choice) < table.loss(best):
            best = choice
    return best


def milp(table: Table, budget: float) -> Choice:
    """Branch and bound by HiGHS, in scipy: x[l, o] is 0 or 1, one of each layer's is 1, and what they cost is bounded.

    Raises
    ------
    ValueError
        If nothing is within the budget.
    ImportError
        Without the package scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.optimize import milp as solve
    except ImportError as error:
        raise ImportError("integer programming is scipy's: pip install 'chorus-mpi[quant]'") from error
    best = table.cheapest(budget)
    there = np.isfinite(table.costs).reshape(-1)
    costs, losses = np.where(there, table.costs.reshape(-1), 0), table.losses.reshape(-1)
    layers, options = table.costs.shape
    one_each = np.kron(np.eye(layers), np.ones(options))
    # Tolerances are absolute: costs in units of the budget, losses in units of a small part of their range.
    scale = np.ptp(losses) / LOSSES or 1.0
    found = solve(
        losses / scale,
        integrality=np.ones(len(losses)),
        bounds=Bounds(0, there.astype(float)),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(costs[None] / (budget or 1.0), -np.inf, min(budget, 1.0)),
        ],
        options={"mip_rel_gap": 0},
    )
    if found.x is not None:
        choice = tuple(int(option) for option in found.x.reshape(layers, options).argmax(axis=1))
        if table.cost(choice) <= budget and table.loss(choice) < table.loss(best):
            best = choice
    return best


LOSSES = 1e3
"""The range of losses as the solver sees it, which stops within 1e-6 of the best."""
