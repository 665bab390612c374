"""Pictures of the race of algorithms against the MPI's own, and of the winners in a timing table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from collectives.benchmark.result_rows import Report, Row
from collectives.benchmark.size_arguments import format_size
from collectives.selection.timing_file import mpi_name
from collectives.selection.timing_table import BLOCKING, AlgorithmChoice, Rows, TimingKey, TimingTable
from collectives.selection.timing_table import NATIVE as MPI_S_OWN

STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "axes.titleweight": "bold",
    "legend.frameon": False,
}
NATIVE = "#333333"
OURS = ["#0b6fbf", "#e07b00", "#2a9d52", "#b5379b", "#8a6d00", "#d1333b", "#5b4fc4", "#159a9c"]
SEVERAL = [*OURS, "#7f7f7f", "#00477a", "#f2a65a", "#74c69d", "#e38fd0", "#c9b458", "#ff8a8a", "#a9a3ff"]
MARKERS = "osD^vPX*"
MOST_COLUMNS = 3


def _time(us: float, _: object = None) -> str:
    for limit, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= limit:
            return f"{us / limit:g} {unit}"
    return f"{us:g} us"


def _size_axis(axis: Axes, sizes: list[int]) -> None:
    axis.set_xscale("log", base=2)
    every = max(1, math.ceil(len(sizes) / 7))
    axis.xaxis.set_major_locator(FixedLocator(sizes[::every]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(round(x))))


def _series(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by line of the picture: the algorithm, and what else differs between rows."""
    varying = [name for name in ("dtype", "memory", "mode") if len({row.get(name) for row in rows}) > 1]
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["bytes"]):
        name = " ".join(["Chorus", str(row["algorithm"]), *(str(row.get(field)) for field in varying)])
        lines.setdefault(name, []).append(row)
    return lines


def _race(times: Axes, ratios: Axes, collective: str, rows: list[Row]) -> None:
    lines = _series(rows)
    sizes = sorted({max(1, row["bytes"]) for row in rows})
    modes = list(dict.fromkeys(row.get("mode", "blocking") for row in rows))
    for mode, dash in zip(modes, ("--", ":", "-."), strict=False):
        mine = [row for row in rows if row.get("mode", "blocking") == mode and row["native_us"] is not None]
        natives = sorted({max(1, row["bytes"]): row["native_us"] for row in mine}.items())
        if natives:
            label = f"the MPI's own{f' {mode}' if len(modes) > 1 else ''}"
            look: dict[str, Any] = {"color": NATIVE, "lw": 2, "marker": ".", "ms": 7, "label": label, "zorder": 3}
            times.plot(*zip(*natives, strict=True), dash, **look)
    for i, (name, line) in enumerate(lines.items()):
        width = 2.2 if " auto" in name else 1.4
        look = {"color": SEVERAL[i % len(SEVERAL)], "marker": MARKERS[i % len(MARKERS)], "ms": 4.5, "lw": width}
        at = [max(1, row["bytes"]) for row in line]
        times.plot(at, [row["ours_us"] for row in line], label=name, zorder=4 if " auto" in name else 2, **look)
        against = [(max(1, row["bytes"]), row["ratio"]) for row in line if row["ratio"] is not None]
        if against:
            ratios.plot(*zip(*against, strict=True), **look)
    times.set_yscale("log")
    low, high = times.get_ylim()
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    times.yaxis.set_major_formatter(FuncFormatter(_time))
    times.yaxis.set_minor_formatter(NullFormatter())
    times.set_title(collective.replace("_", "-"), loc="left")
    times.legend(loc="upper left", fontsize=9)
    _size_axis(times, sizes)
    times.tick_params(labelbottom=False)
    _size_axis(ratios, sizes)
    ratios.set_yscale("log", base=2)
    ratios.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    low, high = ratios.get_ylim()
    low, high = min(low, 0.45), max(1.15 * high, 2.2)
    ratios.set_ylim(low, high)
    ratios.axhspan(low, 1, color="#2a9d52", alpha=0.08, lw=0, zorder=0)
    ratios.axhline(1, color=NATIVE, lw=1.2, ls="--", zorder=1)
    ratios.text(0.99, 0.04, "ours is faster", transform=ratios.transAxes, ha="right", fontsize=8.5, color="#2a7d45")
    ratios.set_xlabel("message size (bytes)")


def plot_race(path: str | Path, report: Report) -> None:
    """Write the race as a picture: per collective, time against size, and below it the ratio to native."""
    collectives = list(dict.fromkeys(row["collective"] for row in report["rows"] if row["bytes"]))
    if not collectives:
        return
    across = min(len(collectives), MOST_COLUMNS if len(collectives) != 4 else 2)
    down = math.ceil(len(collectives) / across)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(max(7.0, 5.4 * across), 5.2 * down + 0.5), layout="constrained")
        grid = figure.add_gridspec(2 * down, across, height_ratios=[3, 1.25] * down)
        for i, collective in enumerate(collectives):
            down_to, column = divmod(i, across)
            times = figure.add_subplot(grid[2 * down_to, column])
            ratios = figure.add_subplot(grid[2 * down_to + 1, column], sharex=times)
            rows = [row for row in report["rows"] if row["collective"] == collective and row["bytes"]]
            _race(times, ratios, collective, rows)
            if column == 0:
                times.set_ylabel("median latency (slowest rank)")
                ratios.set_ylabel("ours / native")
        heading = f"Chorus against {report['mpi']}, {report['ranks']} ranks"
        figure.suptitle(heading, fontsize=13, fontweight="bold", x=0.02, ha="left")
        figure.supxlabel(report["machine"], fontsize=8.5, color="#666666", x=0.02, ha="left")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _scale(axis: Axes, rows: list[Any], along: str) -> None:
    """Time of each algorithm along `along`, "size" (ranks) or "nbytes"; hollow if calculated by formula."""
    for i, name in enumerate(dict.fromkeys(row.algorithm for row in rows)):
        line = [row for row in rows if row.algorithm == name]
        at, times = [getattr(row, along) for row in line], [row.seconds * 1e6 for row in line]
        color, marker = SEVERAL[i % len(SEVERAL)], MARKERS[i % len(MARKERS)]
        axis.plot(at, times, color=color, lw=1.5, label=name)
        for played, fill in ((True, color), (False, "white")):
            some = [(x, y) for x, y, row in zip(at, times, line, strict=True) if row.played is played]
            if some:
                axis.plot(*zip(*some, strict=True), marker, ls="", color=color, mfc=fill, ms=5)
    bounds = {getattr(row, along): row.bound * 1e6 for row in rows}
    axis.plot(list(bounds), list(bounds.values()), "--", color=NATIVE, lw=1.3, label="lower bound", zorder=1)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(_time))
    _size_axis(axis, sorted(bounds))


def plot_scale(path: str | Path, title: str, costs: str, across: list[Any], along: list[Any]) -> None:
    """Plot predictions: time against ranks (rows `across`, of one size), and time against size (rows `along`)."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(12.5, 5.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _scale(left, across, "size")
        _scale(right, along, "nbytes")
        left.set_title(f"{format_size(across[0].nbytes)} bytes", loc="left")
        right.set_title(f"{along[0].size} ranks", loc="left")
        left.set_xlabel("ranks")
        left.set_ylabel("time by the model")
        right.set_xlabel("bytes")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=9)
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.02, ha="left")
        note = f"{costs}; hollow: by formula, the others by playing all ranks"
        figure.supxlabel(note, fontsize=8.5, color="#666666", x=0.02, ha="left")
        figure.savefig(path, dpi=100)
        plt.close(figure)


def plot_winners(path: str | Path, table: TimingTable) -> None:
    """Write a tuned table as a picture: per collective, the winner by message size and rank count.

    Series of other forms than blocking, and of several placements, are rows of their own.
    """
    series: dict[str, dict[TimingKey, Rows]] = {}
    for key, rows in sorted(table.entries.items(), key=lambda item: item[0]):
        series.setdefault(key.collective, {})[key] = rows
    if not series:
        return
    names = sorted({_winner(row).algorithm for rows in table.entries.values() for row in rows.values()})
    ours = [name for name in names if name != MPI_S_OWN]
    palette = plt.get_cmap("tab20")
    colours = {name: palette(i % 20) for i, name in enumerate(ours)} | {MPI_S_OWN: NATIVE}
    across = min(len(series), MOST_COLUMNS)
    down = math.ceil(len(series) / across)
    tallest = max(map(len, series.values()))
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(
            down, across, squeeze=False, layout="constrained",
            figsize=(max(7.0, 5.6 * across), down * (1.5 + 0.5 * tallest) + 1.0),
        )  # fmt: skip
        for axis, (collective, entries) in zip(axes.flat, series.items(), strict=False):
            _winners(axis, collective, entries, colours)
        for axis in list(axes.flat)[len(series) :]:
            axis.axis("off")
        handles = [Patch(color=colours[name], label=name) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), fontsize=9)
        heading = f"The fastest algorithm, {mpi_name()}; in the cells: time / the MPI's own, and segments"
        figure.suptitle(heading, fontsize=12, x=0.02, ha="left")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _winner(row: Mapping[AlgorithmChoice, float]) -> AlgorithmChoice:
    return min(row, key=row.__getitem__)


def _winners(axis: Axes, collective: str, entries: dict[TimingKey, Rows], colours: dict[str, Any]) -> None:
    sizes = sorted({nbytes for rows in entries.values() for nbytes in rows})
    for y, rows in enumerate(entries.values()):
        for (nbytes, row), (left, right) in zip(rows.items(), _cells(list(rows)), strict=True):
            best = _winner(row)
            color = colours[best.algorithm]
            axis.add_patch(Rectangle((left, y - 0.5), right - left, 1, facecolor=color, edgecolor="white"))
            native = row.get(AlgorithmChoice(MPI_S_OWN))
            ratio = "" if native is None or best.algorithm == MPI_S_OWN else f"{row[best] / native:.2f}"
            cut = f"x{best.segments}" if best.segments > 1 else ""
            text = "\n".join(line for line in (ratio, cut) if line)
            ink = "black" if sum(to_rgb(color)) > 1.5 else "white"
            axis.text(_octave(nbytes), y, text, ha="center", va="center", fontsize=7.5, color=ink)
    low, high = _octave(sizes[0]) - 1.5, _octave(sizes[-1]) + 1.5
    axis.set_xlim(low, high)
    axis.set_ylim(-0.5, len(entries) - 0.5)
    ticks = [power for power in range(0, 40, 4 if high - low > 14 else 2) if low <= power <= high]
    axis.set_xticks(ticks or [0], [format_size(1 << power) for power in ticks] or ["0"])
    axis.set_yticks(range(len(entries)), [_series_name(key) for key in entries])
    axis.set_title(f"{collective.replace('_', '-')}, by bytes", loc="left")


def _octave(nbytes: int) -> float:
    return math.log2(max(1, nbytes))


def _cells(sizes: list[int]) -> list[tuple[float, float]]:
    """Ends of each size's cell on a logarithmic axis: half way to its neighbours."""
    at = [_octave(nbytes) for nbytes in sizes]
    middles = [(low + high) / 2 for low, high in pairwise(at)]
    return list(zip([at[0] - 1.5, *middles], [*middles, at[-1] + 1.5], strict=True))


def _series_name(key: TimingKey) -> str:
    nodes = "" if key.placement == str(key.ranks) else f" ({key.placement})"
    form = "" if key.form == BLOCKING else f" {key.form}"
    return f"{key.ranks} ranks{nodes}{form}"
