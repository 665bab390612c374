"""Plot of tables of predicted scaling."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from collectives.benchmark.reports import save_figure
from parallel.cli.reports.attention_plots import COLOURS
from parallel.planning.analytic.scaling import MEASURED

DASHES = ("-", (0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))
"""Styles of lines in their order, thinner ones later, so that lines that lie on others are seen."""


def draw_scaling(path: Path, tables: Mapping[str, Mapping[str, Mapping[int, float]]]) -> None:
    """Plot a panel for each table and a line for each of its rows, over logarithmic numbers of ranks or batches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, -(-len(tables) // 2), figsize=(10, 6.4), layout="constrained", squeeze=False)
    for axes, (title, lines) in zip(panels.flat, tables.items()):
        colours = dict(zip((name for name in lines if not name.endswith(MEASURED)), cycle(COLOURS)))
        for number, (name, line) in enumerate(lines.items()):
            if name.endswith(MEASURED):
                colour = colours.get(name.removesuffix(MEASURED), "black")
                axes.plot(list(line), list(line.values()), "o", mfc="white", color=colour, label=name)
                continue
            style = {"color": colours[name], "ls": DASHES[number % len(DASHES)]}
            axes.plot(list(line), list(line.values()), marker=".", lw=2.8 - 0.4 * number, label=name, **style)
        what, _, by = title.partition(", by ")
        axes.set(xlabel=by, title=what, xscale="log", yscale="log" if what.startswith("seconds") else "linear")
        if not what.startswith("seconds"):
            axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_figure(path, figure, 90)
