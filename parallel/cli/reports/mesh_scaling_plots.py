"""Plot of speed and memory against the ranks that operators are cut over, from the rows of `chorus bench meshes`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from collectives.benchmark.reports import quartiles, save_figure
from parallel.cli.reports.attention_plots import COLOURS
from parallel.engine.memory_ledger import KINDS

Report = Mapping[str, Any]
"""Rows of a machine, with its number of ranks, and the model and the tokens of a step."""


def checked(report: Report) -> Report:
    """The report itself; errors of any kind unless it has what is plotted."""
    if not rates(report) or not isinstance(report["model"], str):
        raise ValueError("no rows")
    for row in report["rows"]:
        row["nodes"] + sum(row["bytes"][kind] for kind in KINDS)
    return report


def rates(report: Report) -> dict[tuple[int, bool], Mapping[str, float]]:
    """Quartiles of tokens per second, by ranks along tp and sequence parallelism."""
    return {
        (row["tp"], row["sequence_parallel"]): quartiles(report["tokens"] / np.array(row["seconds"]))
        for row in report["rows"]
    }


def draw_mesh_scaling(path: Path, reports: Sequence[Report]) -> None:
    """Plot tokens per second, a line by report with and without sequence parallelism; and bytes of a rank by kind.

    Lines are medians, vertical ones quartiles.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, memory) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for report, colour in zip(reports, COLOURS):
        nodes, found = max(row["nodes"] for row in report["rows"]), rates(report)
        where = "one node" if nodes == 1 else f"{nodes} nodes"
        for sequence, style in ((False, "-"), (True, "--")):
            counts = [count for count, of in found if of == sequence or count == 1]
            points = [found[count, sequence and count > 1] for count in counts]
            middle = [point["median"] for point in points]
            ends = [[abs(point[end] - point["median"]) for point in points] for end in ("q1", "q3")]
            name = where + ", sequence parallel" * sequence
            speed.errorbar(counts, middle, ends, fmt=style, marker="o", capsize=3, color=colour, label=name)
    speed.set(xlabel="ranks along tp", ylabel="tokens per second", title=f"speed, {reports[0]['model']}")
    speed.set_ylim(bottom=0)
    _draw_memory(memory, reports[0]["rows"])
    counts = sorted({row["tp"] for report in reports for row in report["rows"]})
    speed.set_xticks(counts)
    speed.grid(alpha=0.3)
    speed.legend(fontsize=8)
    save_figure(path, figure, 90)


def _draw_memory(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars of megabytes by kind, for each row."""
    names = [f"tp={row['tp']}" + "\nsequence" * row["sequence_parallel"] for row in rows]
    below = [0.0] * len(rows)
    for kind, colour in zip(KINDS, COLOURS):
        heights = [row["bytes"][kind] / 1e6 for row in rows]
        axes.bar(names, heights, 0.7, below, color=colour, label=kind)
        below = [start + height for start, height in zip(below, heights)]
    axes.set(ylabel="MB on a rank", title="memory")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8)
