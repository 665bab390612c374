"""Multiple-choice knapsack by dynamic programming over layers and sums of costs."""

from __future__ import annotations

import math

import numpy as np

from quant.search.table import Choice, SearchTable

CELLS = 1 << 16
"""Number of distinct cost sums."""


def dynamic(table: SearchTable, budget: float, cells: int = CELLS) -> Choice:
    """Multiple-choice knapsack by its recurrence: best(l, c) = min over options of best(l - 1, c - cost) + loss.

    Costs are counted in units. Whole numbers are counted exactly, in units of their greatest common divisor, if the
    budget has no more than `cells` of them: then the result is the best there is. Otherwise a unit is budget / `cells`
    and costs are rounded up: what is found is within the budget, and no worse than the best within a budget that is
    smaller by one unit for each layer.

    Layers times options times cells.

    Parameters
    ----------
    table : Table
    budget : float
    cells : int

    Raises
    ------
    ValueError
        If nothing is within the budget.
    """
    cheapest, there = table.cheapest(budget), np.isfinite(table.costs)
    if np.where(there, table.costs, 0).max(axis=1).sum() <= budget:  # anything goes
        return tuple(int(option) for option in np.where(there, table.losses, np.inf).argmin(axis=1))
    units, cells = _in_units(table.costs, budget, cells)
    best = np.zeros(cells + 1)
    taken: list[np.ndarray] = []
    for costs, losses in zip(units, table.losses):
        so_far, best = best, np.full(cells + 1, np.inf)
        which = np.zeros(cells + 1, np.int32)
        for option, (cost, loss) in enumerate(zip(costs, losses)):
            if cost <= cells:
                with_it = np.full(cells + 1, np.inf)
                with_it[int(cost) :] = so_far[: cells + 1 - int(cost)] + loss
                better = with_it < best
                best, which = np.where(better, with_it, best), np.where(better, option, which)
        taken.append(which)
    if not np.isfinite(best[cells]):
        return cheapest  # it fits, though not when rounded up
    choice, left = [], cells
    for costs, which in zip(units[::-1], reversed(taken)):
        choice.append(int(which[left]))
        left -= int(costs[which[left]])
    found = tuple(reversed(choice))
    return found if table.loss(found) < table.loss(cheapest) else cheapest


def _in_units(costs: np.ndarray, budget: float, cells: int) -> tuple[np.ndarray, int]:
    """Costs and budget in integer units."""
    there = costs[np.isfinite(costs)]
    if (there == np.rint(there)).all() and there.max() < 2**53:
        unit = float(math.gcd(*(int(cost) for cost in there))) or 1.0
        if budget // unit <= cells:
            return costs / unit, int(budget // unit)
    if not budget:
        return np.ceil(costs), 0
    unit = budget / cells
    return np.ceil(costs / unit), cells
