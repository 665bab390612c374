"""Placements of a graph's operators as text and as a dict, and the table of resharding costs."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from collectives.benchmark.reports import save_figure
from collectives.units import format_bytes, format_time
from parallel.cli.reports.attention_plots import COLOURS
from parallel.nn.placement import Shard
from parallel.planning.analytic.graph_costs import HALF, GraphOption, GraphPlan
from parallel.planning.analytic.graph_stages import StagedPlan
from parallel.planning.analytic.operator_graph import OperatorGraph
from parallel.planning.analytic.operator_kinds import KINDS
from parallel.planning.analytic.resharding import PlacementMesh, Resharding, resharding, short_name, value_placements

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

    A weight's part has the colour of the first device that holds it. What all hold is grey. Above an operator are the
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
            if cell is None:  # no stage has the input and the output of the graph
                continue
            axes.text(column + 0.02, row, cell.text, fontsize=9, va="center")
            for position, text in enumerate(cell.exchanges):
                axes.text(column + 0.02, row - 0.5 + 0.17 * position, text, fontsize=7, va="center", color="tab:red")
            for (x, y, width, height), device in cell.weight.items():
                colour = COLOURS[device % len(COLOURS)] if device >= 0 else "lightgrey"
                place = column + 0.78 + 0.18 * x, row - 0.36 + 0.72 * y
                axes.add_patch(Rectangle(place, 0.18 * width, 0.72 * height, fc=colour, ec="black", linewidth=0.6))
    count = max(prod(sizes), len(staged.stages) if staged else 0)
    looks = {
        **{f"on device {device}": COLOURS[device % len(COLOURS)] for device in range(min(count, 8))},
        "on all": "lightgrey",
    }
    parts = [Rectangle((0, 0), 1, 1, fc=colour, ec="black", lw=0.6, label=label) for label, colour in looks.items()]
    note = "red: exchange before the operator, ↓ forward ↑ backward, of mesh axis (0), bytes each device sends"
    figure.legend(
        handles=parts,
        title=note,
        loc="outside lower center",
        ncols=len(parts),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
    )
    axes.set(xlim=(0, len(columns)), ylim=(len(graph.operators) - 0.4, -1.1))
    axes.axis("off")
    save_figure(path, figure, 100)


def _cell(plan: GraphPlan, name: str, graph: OperatorGraph, sizes: tuple[int, ...]) -> _Cell:
    option, kind = plan.options[name], graph.operators[name].kind
    weight = _weight_parts(kind, option, sizes) if kind == "linear" else {}
    return _Cell(f"{name}: {'/'.join(option.rules)}", _exchanges(plan, name), weight)


def _stage_cells(staged: StagedPlan, graph: OperatorGraph) -> dict[str, _Cell]:
    """Cells of operators by stage. Each stage has one colour."""
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
    """Parts of a weight, inputs downwards, by the first device that has them. -1: all have it."""
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
        owners.setdefault((x, y, width, height), device)  # replicas have the same part: the first stays
    return owners if len(owners) > 1 else dict.fromkeys(owners, -1)


DIMENSIONS = (0, 1, -1)
"""Dimensions of values that can be cut: samples, positions, features."""


def sent(plan: GraphPlan) -> tuple[float, float]:
    """Bytes that each device sends to change placements, in the forward and in the backward pass."""
    forward = sum(there.nbytes for there, _ in plan.edges.values())
    return forward, sum(back.nbytes for _, back in plan.edges.values())


def plan_lines(plans: Mapping[str, GraphPlan]) -> Iterator[str]:
    """Yield a table of operators by plan, their totals, and the exchanges of the first plan."""
    first = next(iter(plans.values()))
    width = max(14, *(len(name) + 2 for name in first.options))
    columns = {
        name: max(len(name), *(len("/".join(option.rules)) for option in plan.options.values())) + 2
        for name, plan in plans.items()
    }
    yield f"{'':{width}}" + "".join(f"{name:>{size}}" for name, size in columns.items())
    for operator in first.options:
        cells = ("/".join(plan.options[operator].rules) for plan in plans.values())
        yield f"{operator:{width}}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, columns.values()))
    for title, of in TOTALS.items():
        cells = (of(plan) for plan in plans.values())
        yield f"{title:{width}}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, columns.values()))
    for name, plan in plans.items():
        yield ""
        yield f"exchanges, {name}:"
        yield from exchange_lines(plan)


TOTALS: dict[str, Callable[[GraphPlan], str]] = {
    "time": lambda plan: format_time(plan.seconds),
    "sent forward": lambda plan: format_bytes(sent(plan)[0]),
    "sent backward": lambda plan: format_bytes(sent(plan)[1]),
    "gradient sums": lambda plan: format_time(sum(option.sums for option in plan.options.values())),
    "memory": lambda plan: format_bytes(plan.nbytes),
}
"""Rows of totals: of a micro-batch, on a device."""


def exchange_lines(plan: GraphPlan) -> Iterator[str]:
    """Yield the values whose placement changes: collectives with their axis, and bytes that each device sends."""
    found = False
    for (source, target), changes in plan.edges.items():
        texts = [
            f"{when} {change} {format_bytes(change.nbytes)}"
            for when, change in zip(("forward", "backward"), changes)
            if change.nbytes
        ]
        if texts:
            found = True
            yield f"  {source} -> {target}: {', '.join(texts)}"
    if not found:
        yield "  none"


def stage_lines(found: StagedPlan) -> Iterator[str]:
    """Yield the stages, with mesh, time and placements."""
    yield f"{len(found.stages)} stage{'s' * (len(found.stages) > 1)}, {format_time(found.seconds)} a step"
    for number, each in enumerate(found.stages):
        mesh = "x".join(map(str, each.mesh.sizes))
        sending = f", sending {format_time(each.sending)}" if each.sending else ""
        seconds, nbytes = format_time(each.plan.seconds), format_bytes(each.plan.nbytes)
        yield f"  stage {number}: mesh {mesh}, {seconds}{sending}, {nbytes}"
        several = each.mesh.devices > 1
        rules = {name: f" {'/'.join(each.plan.options[name].rules)}" * several for name in each.names}
        yield "    " + ", ".join(name + rule for name, rule in rules.items())


def resharding_lines(mesh: PlacementMesh, nbytes: float) -> Iterator[str]:
    """Yield a table of all changes of a value's placement that exchange data: collectives, bytes, seconds."""
    placements = value_placements(DIMENSIONS, len(mesh.sizes))
    yield f"{'from':<10}{'to':<10}{'sent':>10}{'time':>11}  collectives (axis)"
    for source in placements:
        for target in placements:
            change: Resharding = resharding(source, target, nbytes, mesh, DIMENSIONS)
            if change.nbytes:
                cells = f"{format_bytes(change.nbytes):>10}{format_time(change.seconds):>11}"
                yield f"{short_name(source):<10}{short_name(target):<10}{cells}  {change}"


def as_dict(plans: Mapping[str, GraphPlan], staged: StagedPlan | None) -> dict[str, Any]:
    """Plans and stages for programs."""
    found: dict[str, Any] = {"plans": {name: _plan_dict(plan) for name, plan in plans.items()}}
    if staged:
        stages = [{"mesh": each.mesh.sizes, "sending": each.sending, **_plan_dict(each.plan)} for each in staged.stages]
        found["stages"] = {"seconds": staged.seconds, "stages": stages}
    return found


def _plan_dict(plan: GraphPlan) -> dict[str, Any]:
    forward, backward = sent(plan)
    return {
        "seconds": plan.seconds,
        "memory": plan.nbytes,
        "sent_forward": forward,
        "sent_backward": backward,
        "rules": {name: list(option.rules) for name, option in plan.options.items()},
        "exchanges": [
            {"from": source, "to": target, "forward": str(there), "backward": str(back)}
            for (source, target), (there, back) in plan.edges.items()
            if there.nbytes or back.nbytes
        ],
    }
