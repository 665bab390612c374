"""Plots of benchmark results against the MPI library, and of predicted times."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from collectives.benchmark.reports import save_figure
from collectives.benchmark.result_rows import Report, Row
from collectives.units import format_bytes, format_time

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
WORDS = {"plain": "NumPy arrays", "symmetric": "comm.empty arrays"}  # of values in rows
LABELS = 24  # names above each other beside a plot


@contextmanager
def page(path: Path, width: float, height: float, title: str, note: str = "") -> Iterator[Figure]:
    """Context manager that yields an empty figure. Saves it to `path` on exit without exception."""
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.02, ha="left")
        figure.supxlabel(note, fontsize=8.5, color="#666666", x=0.02, ha="left")
        save_figure(path, figure, 110)


def _size_axis(axis: Axes, sizes: list[int]) -> None:
    axis.set_xscale("log", base=2)
    every = max(1, math.ceil(len(sizes) / 7))
    axis.xaxis.set_major_locator(FixedLocator(sizes[::every]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: re.sub("[ iB]", "", format_bytes(round(x)))))


def _series(rows: list[Row]) -> dict[str, list[Row]]:
    """Group rows into lines of the plot, by label: algorithm unless ``auto``.

    Adds dtype, memory, mode where rows differ.
    """
    varying = [name for name in ("dtype", "memory", "mode") if len({row.get(name) for row in rows}) > 1]
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["bytes"]):
        words = [str(row.get(name)) for name in ("algorithm", *varying)]
        name = ", ".join(["Chorus", *(WORDS.get(word, word) for word in words if word != "auto")])
        lines.setdefault(name, []).append(row)
    return lines


def _race(times: Axes, ratios: Axes, collective: str, rows: list[Row]) -> None:
    modes = list(dict.fromkeys(row.get("mode", "blocking") for row in rows))
    for mode, dash in zip(modes, ("--", ":", "-."), strict=False):
        mine = [row for row in rows if row.get("mode", "blocking") == mode and row["native_us"] is not None]
        if natives := sorted({row["bytes"]: row["native_us"] for row in mine}.items()):
            label = f"the MPI's own{f' {mode}' if len(modes) > 1 else ''}"
            look: dict[str, Any] = {"color": NATIVE, "lw": 2, "marker": ".", "ms": 7, "label": label, "zorder": 3}
            times.plot(*zip(*natives, strict=True), dash, **look)
    for i, (name, line) in enumerate(_series(rows).items()):
        width, order = (2.2, 4) if line[0]["algorithm"] == "auto" else (1.4, 2)
        look = {"color": SEVERAL[i % len(SEVERAL)], "marker": MARKERS[i % len(MARKERS)], "ms": 4.5, "lw": width}
        times.plot([row["bytes"] for row in line], [row["ours_us"] for row in line], label=name, zorder=order, **look)
        if against := [(row["bytes"], row["ratio"]) for row in line if row["ratio"] is not None]:
            ratios.plot(*zip(*against, strict=True), **look)
    for axis in (times, ratios):
        _size_axis(axis, sorted({row["bytes"] for row in rows}))
    times.set_yscale("log")
    # few decades need more ticks than powers of ten
    low, high = times.get_ylim()
    times.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    times.yaxis.set_major_formatter(FuncFormatter(lambda us, _: format_time(us / 1e6)))
    times.yaxis.set_minor_formatter(NullFormatter())
    times.set_title(collective.replace("_", "-"), loc="left")
    times.legend(loc="upper left", fontsize=9)
    times.tick_params(labelbottom=False)
    ratios.set_yscale("log", base=2)
    ratios.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    low, high = ratios.get_ylim()
    ratios.set_ylim(low := min(low, 0.45), max(1.15 * high, 2.2))
    ratios.axhspan(low, 1, color="#2a9d52", alpha=0.08, lw=0, zorder=0)
    ratios.axhline(1, color=NATIVE, lw=1.2, ls="--", zorder=1)
    ratios.set_title("below 1 Chorus is faster", loc="right", fontsize=8.5, fontweight="normal", color="#2a7d45")
    ratios.set_xlabel("message size (bytes)")


def plot_race(path: Path, report: Report) -> None:
    """Plot a benchmark report to a file: per collective, time against size, and below it the ratio to native.

    No-op without rows of one byte or more.
    """
    collectives = list(dict.fromkeys(row["collective"] for row in report["rows"] if row["bytes"]))
    if not collectives:
        return
    # four fit a square
    across = min(len(collectives), MOST_COLUMNS if len(collectives) != 4 else 2)
    down = math.ceil(len(collectives) / across)
    title = f"Chorus against {report['mpi']}, {report['ranks']} ranks"
    with page(path, max(7.0, 5.4 * across), 5.2 * down + 0.5, title, report["machine"]) as figure:
        grid = figure.add_gridspec(2 * down, across, height_ratios=[3, 1.25] * down)
        for i, collective in enumerate(collectives):
            place, column = divmod(i, across)
            times = figure.add_subplot(grid[2 * place, column])
            ratios = figure.add_subplot(grid[2 * place + 1, column], sharex=times)
            rows = [row for row in report["rows"] if row["collective"] == collective and row["bytes"]]
            _race(times, ratios, collective, rows)
            if column == 0:
                times.set_ylabel("median latency (slowest rank)")
                ratios.set_ylabel("Chorus / MPI")


def _scale(axis: Axes, rows: list[Any], along: str) -> None:
    """Plot predicted times of each algorithm against `along`, "size" (ranks) or "nbytes". Hollow: by formula."""
    ends: list[tuple[float, str, str]] = []  # last time, label and color of each line
    for i, name in enumerate(dict.fromkeys(row.algorithm for row in rows)):
        line = [row for row in rows if row.algorithm == name]
        at, times = [getattr(row, along) for row in line], [row.seconds * 1e6 for row in line]
        color, marker = SEVERAL[i % len(SEVERAL)], MARKERS[i % len(MARKERS)]
        axis.plot(at, times, color=color, lw=1.5)
        for x, y, row in zip(at, times, line, strict=True):
            axis.plot(x, y, marker, color=color, mfc=color if row.simulated else "white", ms=4)
        ends.append((times[-1], name, color))
    bounds = {getattr(row, along): row.bound * 1e6 for row in rows}
    axis.plot(list(bounds), list(bounds.values()), "--", color=NATIVE, lw=1.3, zorder=1)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda us, _: format_time(us / 1e6)))
    _size_axis(axis, sorted(bounds))
    _label_ends(axis, max(bounds), [*ends, (bounds[max(bounds)], "lower bound", NATIVE)])


def _label_ends(axis: Axes, last: float, ends: list[tuple[float, str, str]]) -> None:
    """Write labels beside the lines that end at (`last`, y), moved up or down where they would overlap.

    `ends` has (y, label, color) of each line. The y-axis is logarithmic.
    """
    low, high = map(math.log10, axis.get_ylim())
    ends = sorted(ends)
    heights = [(math.log10(y) - low) / (high - low) for y, *_ in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + 1 / LABELS)
    top = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], top)
        top = heights[i] - 1 / LABELS
    for (y, label, color), height in zip(ends, heights, strict=True):
        look: dict[str, Any] = {"color": color, "fontsize": 8.5, "va": "center", "annotation_clip": False}
        leader = {"arrowstyle": "-", "color": color, "lw": 0.6, "shrinkA": 0, "shrinkB": 3, "relpos": (0, 0.5)}
        axis.annotate(label, (last, y), (1.05, height), textcoords="axes fraction", arrowprops=leader, **look)


def plot_scale(path: Path, title: str, costs: str, across: list[Any], along: list[Any]) -> None:
    """Plot predictions: time against ranks (rows `across`, of one size), and time against size (rows `along`)."""
    with page(path, 12.5, 5.6, title, f"{costs}; hollow: by formula, the others by simulating all ranks") as figure:
        left, right = figure.subplots(1, 2)
        _scale(left, across, "size")
        _scale(right, along, "nbytes")
        left.set(xlabel="ranks", ylabel="time by the model")
        left.set_title(f"{format_bytes(across[0].nbytes)}", loc="left")
        right.set(xlabel="bytes")
        right.set_title(f"{along[0].size} ranks", loc="left")
