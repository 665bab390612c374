"""Choice of one option per layer with the least loss within a budget: a multiple-choice knapsack."""

import math
from dataclasses import dataclass

import numpy as np

from quant.formats import expect_real

Choice = tuple[int, ...]
"""Option index of every layer."""

CELLS = 1 << 16
"""Number of distinct cost sums of `dynamic`."""

LOSSES = 1e3
"""Scaled range of losses: the solver stops within 1e-6 of the optimum."""

BUDGET = 1e6
"""Scaled budget: the solver accepts violations up to 1e-6, also of x being 0 or 1."""

CUTS = 16
"""Number of over-budget choices that are cut off one by one."""

MARGIN = 2e-6
"""Share of the budget left free in the last attempt: twice the effect of an x that is off by 1e-6."""


@dataclass(frozen=True)
class SearchTable:
    """Costs and losses by layer and option. Both add up over layers. ValueError for an invalid table.

    Parameters
    ----------
    costs : array of numbers, shape (layers, options)
        Bytes or seconds, for example: not negative. Infinite where a layer does not have an option.
    losses : array of finite numbers, shape (layers, options)
        Expected increase of the loss. May be negative.

    >>> table = SearchTable([[1, 2], [10, 20]], [[5.0, 1.0], [4.0, 0.0]])
    >>> table.cost((1, 0)), table.loss((1, 0))
    (12.0, 5.0)
    """

    costs: np.ndarray
    losses: np.ndarray

    def __post_init__(self) -> None:
        for name in ("costs", "losses"):
            given = expect_real(name, np.asarray(getattr(self, name)))
            object.__setattr__(self, name, given.astype(np.float64))
        if self.costs.ndim != 2 or self.costs.shape != self.losses.shape or not self.costs.size:
            shapes = f"{self.costs.shape} and {self.losses.shape}"
            raise ValueError(f"costs and losses: expected shape (layers, options), found {shapes}")
        if not (self.costs >= 0).all():
            raise ValueError("costs: expected no negative numbers or NaN")
        # a layer without a finite option makes every choice infinite, and HiGHS would not name it
        if not (finite := np.isfinite(self.costs).any(axis=1)).all():
            raise ValueError(f"costs: layer {finite.argmin()} has no option of finite cost")
        if not np.isfinite(self.losses).all():
            raise ValueError("losses: expected finite numbers")

    def cost(self, choice: Choice) -> float:
        """Total cost of a choice, the option index of every layer."""
        return float(self.costs[np.arange(len(self.costs)), choice].sum())

    def loss(self, choice: Choice) -> float:
        """Total loss of a choice, the option index of every layer."""
        return float(self.losses[np.arange(len(self.costs)), choice].sum())

    def cheapest(self, budget: float) -> Choice:
        """Cheapest choice, ties by loss. ValueError if it exceeds the budget."""
        choice: Choice = tuple(np.lexsort((self.losses, self.costs), axis=1)[:, 0].tolist())
        if not self.cost(choice) <= budget:
            raise ValueError(f"budget: the cheapest options cost {self.cost(choice):g} together, found {budget:g}")
        return choice


def dynamic(table: SearchTable, budget: float, cells: int = CELLS) -> Choice:
    """Choice of least loss within the budget (nearly least for costs that are rounded), by dynamic programming.

    best(l, c) = min over options of best(l - 1, c - cost) + loss. Whole costs are counted exactly, in units of their
    greatest common divisor, if the budget has at most `cells` units: then the result is optimal. Otherwise a unit is
    budget / `cells` and costs are rounded up: the result is within the budget, and no worse than the optimum within a
    budget that is smaller by one unit for each layer. ValueError if nothing is within the budget. Cost: layers times
    options times cells.
    """
    cheapest, available = table.cheapest(budget), np.isfinite(table.costs)
    if np.where(available, table.costs, 0).max(axis=1).sum() <= budget:  # every choice fits
        return tuple(np.where(available, table.losses, np.inf).argmin(axis=1).tolist())
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
    return min(cheapest, tuple(reversed(choice)), key=table.loss)


def _in_units(costs: np.ndarray, budget: float, cells: int) -> tuple[np.ndarray, int]:
    """(costs, budget) in whole units: exact for integer costs and at most `cells` units, else costs are rounded up."""
    finite = costs[np.isfinite(costs)]
    if (finite == np.rint(finite)).all() and finite.max() < 2**53:
        unit = float(math.gcd(*(int(cost) for cost in finite))) or 1.0
        if budget // unit <= cells:
            return costs / unit, int(budget // unit)
    if not budget:
        return np.ceil(costs), 0
    return np.ceil(costs / (budget / cells) * (1 + 1e-12)), cells  # a sum must not exceed the budget by rounding


def milp(table: SearchTable, budget: float) -> Choice:
    """Choice of least loss within the budget, by integer programming with HiGHS (scipy).

    Variables x[l, o] in {0, 1}, one option per layer. Within its tolerances, HiGHS may exceed the budget. Such
    a choice is cut off, with all that cost no less in any layer, and the search continues, up to `CUTS` times, and
    once more within a budget smaller by `MARGIN`. The result is within the budget and no worse than `dynamic`. It is
    the optimum to HiGHS's accuracy, or, after more than `CUTS` cuts, no worse than the optimum within the smaller
    budget. ValueError if nothing is within the budget, ImportError without scipy.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.optimize import milp as solve
    except ImportError as error:
        raise ImportError("integer programming is scipy's: pip install 'chorus-mpi[quant]'") from error
    best = dynamic(table, budget)
    usable = (np.isfinite(table.costs) & (table.costs <= budget)).reshape(-1)
    costs, losses = np.where(usable, table.costs.reshape(-1), 0), table.losses.reshape(-1)
    layers, options = table.costs.shape
    # Tolerances are absolute: costs and losses in units of a small part of the budget, and of the losses' range.
    unit, scale = budget / BUDGET or 1.0, np.ptp(losses) / LOSSES or 1.0
    constraints = [LinearConstraint(np.kron(np.eye(layers), np.ones(options)), 1, 1)]  # one option per layer
    for limit in (*[BUDGET] * (CUTS + 1), BUDGET * (1 - MARGIN)):
        found = solve(
            losses / scale,
            integrality=np.ones(len(losses)),
            bounds=Bounds(0, usable.astype(float)),
            constraints=[*constraints, LinearConstraint(costs[None] / unit, -np.inf, limit)],
            options={"mip_rel_gap": 0, "presolve": False},  # presolving was seen to lose the best
        )
        if found.x is None:
            break
        choice: Choice = tuple(found.x.reshape(layers, options).argmax(axis=1).tolist())
        if table.cost(choice) <= budget:
            return min(best, choice, key=table.loss)
        no_less = table.costs >= table.costs[np.arange(layers), choice][:, None]
        constraints.append(LinearConstraint(no_less.reshape(1, -1).astype(float), -np.inf, layers - 1))
    return best


SEARCHES = {"milp": milp, "dp": dynamic}
"""Searches by name: functions (table, budget) -> choice."""
