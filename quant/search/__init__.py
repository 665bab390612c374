"""One option for every layer, so that the loss is least and the cost within a budget: pure functions of a table."""

from quant.search.dynamic import dynamic
from quant.search.evolutionary import evolutionary
from quant.search.exact import brute, milp
from quant.search.greedy import greedy
from quant.search.table import Choice, Table

SEARCHES = {"milp": milp, "greedy": greedy, "dp": dynamic, "evolutionary": evolutionary}
"""By name: functions (table, budget) -> choice."""

__all__ = ["SEARCHES", "Choice", "Table", "brute", "dynamic", "evolutionary", "greedy", "milp"]
