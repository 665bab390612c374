"""Optimal choice by enumeration or by integer programming."""

from __future__ import annotations

from itertools import product

import numpy as np

from quant.search.greedy import greedy
from quant.search.table import Choice, SearchTable


def brute(table: SearchTable, budget: float) -> Choice:
    """Enumerate all choices: the reference, for a few layers. ValueError if nothing is within the budget."""
    best = table.cheapest(budget)
    for choice in product(*(np.flatnonzero(np.isfinite(row)).tolist() for row in table.costs)):
        if table.cost(choice) <= budget and table.loss(choice) < table.loss(best):
            best = choice
    return best


def milp(table: SearchTable, budget: float) -> Choice:
    """Branch and bound by HiGHS (scipy): x[l, o] in {0, 1}, one option per layer, costs bounded.

    HiGHS has tolerances, by which a cost may exceed the budget. Such a choice is cut off, with all that cost no less in
    any layer, and the search continues, up to `CUTS` times, and once more within a budget smaller by `MARGIN`. The
    result is within the budget and no worse than `greedy`: the optimum, to HiGHS's accuracy, or after more than `CUTS`
    cuts no worse than the optimum within the smaller budget. ValueError if nothing is within the budget.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.optimize import milp as solve
    except ImportError as error:
        raise ImportError("integer programming is scipy's: pip install 'chorus-mpi[quant]'") from error
    best = greedy(table, budget)
    usable = (np.isfinite(table.costs) & (table.costs <= budget)).reshape(-1)
    costs, losses = np.where(usable, table.costs.reshape(-1), 0), table.losses.reshape(-1)
    layers, options = table.costs.shape
    one_each = np.kron(np.eye(layers), np.ones(options))
    # Tolerances are absolute: costs and losses in units of a small part of the budget, and of the losses' range.
    unit, scale = budget / BUDGET or 1.0, np.ptp(losses) / LOSSES or 1.0
    constraints = [LinearConstraint(one_each, 1, 1)]
    for limit in (*[BUDGET] * (CUTS + 1), BUDGET * (1 - MARGIN)):
        within = LinearConstraint(costs[None] / unit, -np.inf, limit)
        found = solve(
            losses / scale,
            integrality=np.ones(len(losses)),
            bounds=Bounds(0, usable.astype(float)),
            constraints=[*constraints, within],
            options={"mip_rel_gap": 0, "presolve": False},  # presolving was seen to lose the best
        )
        if found.x is None:
            break
        chosen = found.x.reshape(layers, options).argmax(axis=1)
        choice = tuple(int(option) for option in chosen)
        if table.cost(choice) <= budget:
            return min(best, choice, key=table.loss)
        no_less = table.costs >= table.costs[np.arange(layers), chosen][:, None]
        constraints.append(LinearConstraint(no_less.reshape(1, -1).astype(float), -np.inf, layers - 1))
    return best


LOSSES = 1e3
"""Scaled range of losses: the solver stops within 1e-6 of the optimum."""

BUDGET = 1e6
"""Scaled budget: the solver accepts violations up to 1e-6, also of x being 0 or 1."""

CUTS = 16
"""Number of over-budget choices that are cut off one by one."""

MARGIN = 2e-6
"""Share of the budget left free in the last attempt: twice the effect of an x that is off by 1e-6."""
