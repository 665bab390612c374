"""Multiple-choice knapsack by dynamic programming over layers and sums of costs."""

from __future__ import annotations

import math

import numpy as np

from quant.search.table import Choice, SearchTable

CELLS = 1 << 16
"""Number of distinct cost sums."""


def dynamic(table: SearchTable, budget: float, cells: int = CELLS) -> Choice:
    """Multiple-choice knapsack by its recurrence: best(l, c) = min over options of best(l - 1, c - cost) + loss.

    Whole costs are counted exactly, in units of their greatest common divisor, if the budget has at most `cells` units:
    then the result is optimal. Otherwise a unit is budget / `cells` and costs are rounded up: the result is within the
    budget, and no worse than the optimum within a budget that is smaller by one unit for each layer. ValueError if
    nothing is within the budget. Cost: layers times options times cells.
    """
    cheapest, available = table.cheapest(budget), np.isfinite(table.costs)
    if np.where(available, table.costs, 0).max(axis=1).sum() <= budget:  # every choice fits
        return tuple(int(option) for option in np.where(available, table.losses, np.inf).argmin(axis=1))
    units, cells = _in_units(table.costs, budget, cells)
    best = np.zeros(cells + 1)
    taken: list[np.ndarray] = []
    for costs, losses in zip(units, table.losses):
        totals = np.full((len(costs), cells + 1), np.inf)
        for option in np.flatnonzero(costs <= cells):
            cost = int(costs[option])
            totals[option, cost:] = best[: cells + 1 - cost] + losses[option]
        best = totals.min(axis=0)
        taken.append(totals.argmin(axis=0))
    if not np.isfinite(best[cells]):
        return cheapest  # it fits, though not when rounded up
    choice, left = [], cells
    for costs, options in zip(units[::-1], reversed(taken)):
        choice.append(int(options[left]))
        left -= int(costs[choice[-1]])
    found = tuple(reversed(choice))
    return found if table.loss(found) < table.loss(cheapest) else cheapest


def _in_units(costs: np.ndarray, budget: float, cells: int) -> tuple[np.ndarray, int]:
    """Costs and budget in integer units."""
    finite = costs[np.isfinite(costs)]
    if (finite == np.rint(finite)).all() and finite.max() < 2**53:
        unit = float(math.gcd(*(int(cost) for cost in finite))) or 1.0
        if budget // unit <= cells:
            return costs / unit, int(budget // unit)
    if not budget:
        return np.ceil(costs), 0
    unit = budget / cells
    return np.ceil(costs / unit), cells
