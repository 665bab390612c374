"""Placements of a graph's operators as text and as a dict, and the table of resharding costs."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from collectives.benchmark.size_arguments import format_time
from parallel.planning.analytic.graph_costs import GraphPlan
from parallel.planning.analytic.graph_stages import StagedPlan
from parallel.planning.analytic.resharding import PlacementMesh, Resharding, resharding, short_name, value_placements

DIMENSIONS = (0, 1, -1)
"""Dimensions of values that can be cut: samples, positions, features."""


def format_bytes(nbytes: float) -> str:
    """Bytes in decimal units.

    >>> format_bytes(1.5e6), format_bytes(0), format_bytes(999)
    ('1.5 MB', '0', '999 B')
    """
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B" if nbytes else "0"


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
