"""From the cheapest options upwards: always the change that gains most for what it costs."""

from __future__ import annotations

import numpy as np

from quant.search.table import Choice, Table


def greedy(table: Table, budget: float) -> Choice:
    """Take the change of one layer with the greatest gain for its price, until none that is left fits the budget.

    A gain that costs nothing, or less than nothing, goes first. Layers times options steps at most, as no step is taken
    back. The loss is never above that of the cheapest options; it may be above the best.

    Raises
    ------
    ValueError
        If nothing is within the budget.
    """
    choice = list(table.cheapest(budget))
    lines = np.arange(table.layers)
    over = np.zeros(table.costs.shape, bool)  # what fits by its price, and not by the sum, which is rounded otherwise
    while True:
        now = lines, choice
        gains = table.losses[now][:, None] - table.losses
        prices = table.costs - table.costs[now][:, None]
        usable = ~over & (gains > 0) & np.isfinite(prices) & (table.cost(tuple(choice)) + prices <= budget)
        if not usable.any():
            return tuple(choice)
        with np.errstate(divide="ignore", invalid="ignore"):
            worth = np.where(prices > 0, gains / prices, np.inf)
        worth = np.where(usable, worth, -np.inf)
        layer, option = np.unravel_index(int(worth.argmax()), worth.shape)
        changed = [*choice[:layer], int(option), *choice[layer + 1 :]]
        if table.cost(tuple(changed)) <= budget:
            choice = changed
        else:
            over[layer, option] = True
