"""Evolutionary search with crossover and mutation; can minimise a measured loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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

    A child has every layer's option from one of its parents, some mutated; while it exceeds the budget, a random layer
    takes its next cheaper option. The best stays, so the result is no worse than the greedy choice. `measure` maps a
    choice to its loss, by default the table's sum, which ignores interactions of layers; it is called once per choice.
    ValueError if nothing is within the budget.
    """
    random = np.random.default_rng(seed)
    loss = cache(measure or table.loss)
    layers = table.layers
    usable = [np.flatnonzero(np.isfinite(row)) for row in table.costs]
    living = {greedy(table, budget), table.cheapest(budget)}
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
