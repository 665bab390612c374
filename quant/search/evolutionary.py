"""Evolutionary search with crossover and mutation; can minimise a measured loss."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quant.search.greedy import greedy
from quant.search.table import Choice, SearchTable


def evolutionary(
    table: SearchTable,
    budget: float,
    measure: Callable[[Choice], float] | None = None,
    *,
    population: int = 32,
    generations: int = 40,
    seed: int = 0,
) -> Choice:
    """Evolve a population that starts with the greedy choice; children of two of the best replace the worst.

    A child has every layer's option from one of its parents, some changed at random; as long as it is beyond the
    budget, a layer drawn at random takes its next cheaper option. The best is never lost, so the result is no worse
    than the greedy choice.

    Parameters
    ----------
    table : Table
    budget : float
    measure : callable choice -> loss, optional
        What is to be small; by default the table's sum, which knows nothing of how layers work on each other. Asked
        once for every choice.
    population, generations, seed : int

    Raises
    ------
    ValueError
        If nothing is within the budget.
    """
    random = np.random.default_rng(seed)
    known: dict[Choice, float] = {}

    def loss(choice: Choice) -> float:
        if choice not in known:
            known[choice] = float((measure or table.loss)(choice))
        return known[choice]

    layers = table.layers
    usable = [np.flatnonzero(np.isfinite(row)) for row in table.costs]
    first, cheapest = greedy(table, budget), table.cheapest(budget)
    living = {first, cheapest}
    for _ in range(generations):
        parents = sorted(living, key=lambda choice: (loss(choice), choice))[: max(population // 2, 2)]
        living = set(parents)
        for _ in range(population - len(parents)):
            pair = [parents[int(random.integers(len(parents)))] for _ in range(2)]
            child = np.where(random.random(layers) < 0.5, *pair)
            changed = random.random(layers) < max(1 / layers, 0.1)
            for layer in np.flatnonzero(changed):
                child[layer] = random.choice(usable[layer])
            living.add(_within(table, budget, child, random))
    return min(living, key=lambda choice: (loss(choice), choice))


def _within(table: SearchTable, budget: float, child: np.ndarray, random: np.random.Generator) -> Choice:
    """Cheaper options for random layers until the choice fits the budget."""
    while table.cost(tuple(child)) > budget:
        layer = int(random.integers(table.layers))
        costs = table.costs[layer]
        cheaper = np.flatnonzero(costs < costs[child[layer]])
        if len(cheaper):
            child[layer] = cheaper[costs[cheaper].argmax()]
    return tuple(int(option) for option in child)
