"""Searches among options find the best there is, or one that is no worse than promised, within the budget."""

from itertools import product

import numpy as np
import pytest

from quant import search as module
from quant.search import SEARCHES, SearchTable, dynamic, milp

pytest.importorskip("scipy")


@pytest.mark.parametrize("costs, losses", [([[1j]], [[1.0]]), ([[1]], [[2j]]), ([["1"]], [[1.0]])])
def test_tables_of_other_than_real_numbers(costs, losses):
    with pytest.raises(TypeError, match="expected real numbers"):
        SearchTable(costs, losses)


def brute(table, budget):
    """Enumerate all choices: the reference, for a few layers."""
    best = table.cheapest(budget)
    for choice in product(*(np.flatnonzero(np.isfinite(row)).tolist() for row in table.costs)):
        if table.cost(choice) <= budget and table.loss(choice) < table.loss(best):
            best = choice
    return best


def problem(seed, whole=True):
    """A table, and a budget that leaves something to choose."""
    random = np.random.default_rng(seed)
    layers, options = random.integers(1, 6, 2)
    costs = random.integers(0, 50, (layers, options)) + (0 if whole else random.random((layers, options)))
    losses = random.normal(size=(layers, options)) * 10.0 ** random.integers(-6, 3)
    missing = random.random((layers, options)) < 0.15
    missing[:, 0] = False
    table = SearchTable(np.where(missing, np.inf, costs), losses)
    least = table.cost(table.cheapest(np.inf))
    return table, least + float(random.integers(0, 60))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("whole", [True, False], ids=["whole numbers", "fractions"])
def test_against_all_choices(seed, whole):
    table, budget = problem(seed, whole)
    best = table.loss(brute(table, budget))
    found = {name: search(table, budget) for name, search in SEARCHES.items()}
    assert all(table.cost(choice) <= budget for choice in found.values())
    loss = {name: table.loss(choice) for name, choice in found.items()}
    assert loss["milp"] == pytest.approx(best, rel=1e-9)
    if whole:
        assert loss["dp"] == pytest.approx(best, rel=1e-12)
    else:  # rounded up to units
        assert loss["dp"] >= best - 1e-9 * abs(best)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("cells", [16, 100, 1000])
def test_few_cells_cost_no_more_than_a_unit_for_each_layer(seed, cells):
    """Costs that are rounded up: no worse than the best within a budget that is smaller by that much."""
    table, budget = problem(seed, whole=False)
    found = dynamic(table, budget, cells)
    assert table.cost(found) <= budget
    smaller = budget * (1 - len(table.costs) / cells)
    if table.cost(table.cheapest(np.inf)) <= smaller:
        assert table.loss(found) <= table.loss(brute(table, smaller)) + 1e-12


def test_the_greatest_gain_is_not_the_best():
    """One step gains most for its price and leaves no room for two others that are better together."""
    table = SearchTable([[0, 6], [0, 5], [0, 5]], [[7.0, 0.0], [5.0, 0.0], [5.0, 0.0]])
    assert milp(table, 10) == dynamic(table, 10) == brute(table, 10) == (0, 1, 1)


@pytest.mark.parametrize(
    "table, budget",
    [
        (SearchTable([[500000, 1000000, 1000001], [1000000, 2000000, 2000001]], [[9, 3, 2.0], [9, 3, 2.9]]), 3_000_000),
        (SearchTable([[0, 0.1], [0, 0.2]], [[1, 0], [1, 0]]), 0.3),
        (SearchTable([[0, 1e-7], [0, 0]], [[2, 0], [1, 0]]), 0),
    ],
    ids=["a byte", "rounding", "nothing"],
)
def test_what_a_solver_takes_for_the_budget(table, budget):
    """Choices that are over the budget by less than its tolerance are none, and hide none."""
    assert table.cost(milp(table, budget)) <= budget
    assert table.loss(milp(table, budget)) == table.loss(brute(table, budget))


@pytest.mark.parametrize("seed", range(30))
def test_a_few_bytes_of_millions(seed):
    """Many choices cost the budget but for a few bytes, some of them more."""
    random = np.random.default_rng(seed)
    widths = random.integers(1, 6, (4, 4)).cumsum(axis=1)
    table = SearchTable(1_000_000 * widths + random.integers(-2, 3, (4, 4)), -widths + random.random((4, 4)))
    budget = 1_000_000.0 * random.integers(widths[:, 0].sum() + 1, widths[:, -1].sum())
    assert table.cost(milp(table, budget)) <= budget
    assert table.loss(milp(table, budget)) == pytest.approx(table.loss(brute(table, budget)), rel=1e-9)


@pytest.mark.parametrize("cuts", [0, 1])
def test_more_choices_over_the_budget_than_are_cut_off(monkeypatch, cuts):
    """What is left is found within a smaller budget, and is no worse than what dynamic programming finds."""
    monkeypatch.setattr(module, "CUTS", cuts)
    tables = [SearchTable([[0, 0.1 * i], [0, 0.2 * i], [0.01, 0.02]], [[1, 0], [1, 0], [0.1, 0]]) for i in (1, 2, 3)]
    for i, table in enumerate(tables, 1):
        budget = np.nextafter(0.1 * i + 0.2 * i + 0.02, 0)
        found = milp(table, budget)
        assert table.cost(found) <= budget
        assert table.loss(found) <= min(
            table.loss(dynamic(table, budget)), table.loss(brute(table, budget * (1 - 2e-6)))
        )


@pytest.mark.parametrize("search", [*SEARCHES.values(), brute])
def test_budgets(search):
    table = SearchTable([[1, 5], [2, np.inf]], [[3.0, 1.0], [2.0, 0.0]])
    assert search(table, 3) == (0, 0)
    assert search(table, np.inf) == search(table, 1e300) == (1, 0)
    with pytest.raises(ValueError, match=r"budget: the cheapest options cost 3 together, found 2\.5"):
        search(table, 2.5)
    with pytest.raises(ValueError, match="found nan"):
        search(table, np.nan)
    assert search(SearchTable([[0, 0.5]], [[1.0, 0.0]]), 0) == (0,)
    assert search(SearchTable([[0, 0]], [[1.0, 0.5]]), 0) == (1,)
    assert search(SearchTable([[7, 7, 7]], [[1.0, 1.0, 1.0]]), 7) == (0,)


@pytest.mark.parametrize(
    "costs, losses, told",
    [
        ([[1]], [[1, 2]], "shape"),
        ([], [], "shape"),
        ([[-1]], [[0]], "no negative"),
        ([[np.nan]], [[0]], "or NaN"),
        ([[1], [np.inf]], [[0], [0]], "layer 1 has no option of finite cost"),
        ([[1]], [[np.nan]], "losses: expected finite"),
    ],
)
def test_no_table(costs, losses, told):
    with pytest.raises(ValueError, match=told):
        SearchTable(costs, losses)
