"""Plot of the placements of a graph's operators on the devices of a mesh."""

from collections.abc import Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeAlias

from collectives.benchmark.reports import save_figure
from parallel.cli.reports.attention_plots import COLOURS
from parallel.cli.reports.graph_report import format_bytes
from parallel.nn.placement import Shard
from parallel.planning.analytic.graph_costs import HALF, GraphOption, GraphPlan
from parallel.planning.analytic.graph_stages import StagedPlan
from parallel.planning.analytic.operator_graph import OperatorGraph
from parallel.planning.analytic.operator_kinds import KINDS

Part: TypeAlias = tuple[float, float, float, float]
"""Left, top, width and height of a part of a weight, as shares."""


class _Cell(NamedTuple):
    """One operator of a plan: its text, exchanges before it, and parts of its weight by device that has them."""

    text: str
    exchanges: list[str]
    weight: dict[Part, int]


def draw_plans(
    path: Path,
    graph: OperatorGraph,
    sizes: tuple[int, ...],
    plans: Mapping[str, GraphPlan],
    staged: StagedPlan | None = None,
) -> None:
    """Plot a column for each plan and a row for each operator: its rules, the parts of its weight by device, exchanges.

    A weight's part has the colour of the first device that holds it; what all hold is grey. Above an operator are the
    collectives before it, with the bytes that each device sends forward and backward. `staged` is a further column.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    columns = {
        title: {name: _cell(plan, name, graph, sizes) for name in graph.operators} for title, plan in plans.items()
    }
    if staged:
        columns["pipeline"] = _stage_cells(staged, graph)
    figure, axes = plt.subplots(
        figsize=(0.5 + 3.6 * len(columns), 0.6 + 0.6 * len(graph.operators)), layout="constrained"
    )
    for column, (title, cells) in enumerate(columns.items()):
        axes.text(column + 0.02, -0.75, title.replace(",", ", "), fontsize=9, fontweight="bold", va="center")
        for row, cell in enumerate(map(cells.get, graph.operators)):
            if cell is None:
                continue
            axes.text(column + 0.02, row, cell.text, fontsize=9, va="center")
            for position, text in enumerate(cell.exchanges):
                axes.text(column + 0.02, row - 0.5 + 0.17 * position, text, fontsize=7, va="center", color="tab:red")
            for (x, y, width, height), device in cell.weight.items():
                colour = COLOURS[device % len(COLOURS)] if device >= 0 else "lightgrey"
                place = column + 0.78 + 0.18 * x, row - 0.36 + 0.72 * y
                axes.add_patch(Rectangle(place, 0.18 * width, 0.72 * height, fc=colour, ec="black", linewidth=0.6))
    axes.set(xlim=(0, len(columns)), ylim=(len(graph.operators) - 0.4, -1.1))
    axes.axis("off")
    save_figure(path, figure, 100)


def _cell(plan: GraphPlan, name: str, graph: OperatorGraph, sizes: tuple[int, ...]) -> _Cell:
    option, kind = plan.options[name], graph.operators[name].kind
    weight = _weight_parts(kind, option, sizes) if kind == "linear" else {}
    return _Cell(f"{name}: {'/'.join(option.rules)}", _exchanges(plan, name), weight)


def _stage_cells(staged: StagedPlan, graph: OperatorGraph) -> dict[str, _Cell]:
    """Cells of operators by stage; each stage has one colour."""
    stage_of = {name: number for number, stage in enumerate(staged.stages) for name in stage.names}
    cells = {}
    for name, number in stage_of.items():
        operator = graph.operators[name]
        sent = [source for source in operator.inputs if stage_of.get(source, number) != number]
        texts = [f"{source}: ↓↑ send {format_bytes(HALF * prod(graph.shapes[source]))}" for source in sent]
        weight: dict[Part, int] = {(0.0, 0.0, 1.0, 1.0): number} if operator.kind == "linear" else {}
        cells[name] = _Cell(f"{name}: stage {number}", texts, weight)
    return cells


def _exchanges(plan: GraphPlan, name: str) -> list[str]:
    """Text of each change of an operator's input."""
    found = []
    for (source, target), changes in plan.edges.items():
        texts = [
            f"{arrow} {change} {format_bytes(change.nbytes)}" for arrow, change in zip("↓↑", changes) if change.nbytes
        ]
        if target == name and texts:
            found.append(f"{source}: {'  '.join(texts)}")
    return found


def _weight_parts(kind: str, option: GraphOption, sizes: tuple[int, ...]) -> dict[Part, int]:
    """Parts of a weight, inputs downwards, by the first device that has them; -1: all have it."""
    rules = [KINDS[kind].rules[name] for name in option.rules]
    owners: dict[Part, int] = {}
    for device, place in enumerate(product(*map(range, sizes))):
        x, y, width, height = 0.0, 0.0, 1.0, 1.0
        for at, size, rule in zip(place, sizes, rules):
            if rule.cut_weight and isinstance(rule.gives, Shard):
                width /= size
                x += at * width
            elif rule.cut_weight:
                height /= size
                y += at * height
        owners.setdefault((x, y, width, height), device)
    return owners if len(owners) > 1 else dict.fromkeys(owners, -1)
