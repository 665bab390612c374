"""Greedy search: repeatedly the change with the greatest gain per cost."""

from __future__ import annotations

import numpy as np

from quant.search.table import Choice, SearchTable


def greedy(table: SearchTable, budget: float) -> Choice:
    """Start with the cheapest options; take the change with the greatest gain per cost until none fits the budget.

    Changes that cost nothing go first. No step is undone, so there are at most layers x options steps; the loss may be
    above the optimum. ValueError if nothing is within the budget.
    """
    choice = list(table.cheapest(budget))
    rows = np.arange(table.layers)
    over = np.zeros(table.costs.shape, bool)  # options that fit by their price, but not by the sum, rounded differently
    while True:
        now = rows, choice
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
