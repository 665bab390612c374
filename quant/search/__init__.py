"""Choice of one option per layer with the least loss within a budget."""

from quant.search.dynamic import dynamic
from quant.search.evolutionary import evolutionary
from quant.search.exact import brute, milp
from quant.search.greedy import greedy
from quant.search.table import Choice, SearchTable

SEARCHES = {"milp": milp, "greedy": greedy, "dp": dynamic, "evolutionary": evolutionary}
"""Searches by name: functions (table, budget) -> choice."""

__all__ = ["SEARCHES", "Choice", "SearchTable", "brute", "dynamic", "evolutionary", "greedy", "milp"]
