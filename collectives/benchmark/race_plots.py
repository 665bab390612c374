"""Pictures: the race of our algorithms against the MPI's own, and training curves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from benchlib.rows import Report, Row
from benchlib.sizes import format_size
from collectives.selection.timing_table import BLOCKING, Choice, Key, Rows, Table
from collectives.selection.timing_table import NATIVE as MPI_S_OWN
from collectives.selection.timing_file import mpi_name

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
        look = {"color": SEVERAL[i % len(SEVERAL)], "marker": MARKERS[i % len(MARKERS)], "ms": 4.5}
        look["lw"] = 2.2 if " auto" in name else 1.4
        at = [max(1, row["bytes"]) for row in line]
        times.plot(
            at, [row["ours_us"] for row in line], label=name, zorder=4 if " auto" in name else 2, **look
        )
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
    ratios.text(
        0.99, 0.04, "ours is faster", transform=ratios.transAxes, ha="right", fontsize=8.5, color="#2a7d45"
    )
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
            row, column = divmod(i, across)
            times = figure.add_subplot(grid[2 * row, column])
            ratios = figure.add_subplot(grid[2 * row + 1, column], sharex=times)
            _race(
                times,
                ratios,
                collective,
                [r for r in report["rows"] if r["collective"] == collective and r["bytes"]],
            )
            if column == 0:
                times.set_ylabel("median latency (slowest rank)")
                ratios.set_ylabel("ours / native")
        heading = f"Chorus against {report['mpi']}, {report['ranks']} ranks"
        figure.suptitle(heading, fontsize=13, fontweight="bold", x=0.02, ha="left")
        figure.supxlabel(report["machine"], fontsize=8.5, color="#666666", x=0.02, ha="left")
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _scale(axis: Axes, rows: list[Any], along: str) -> None:
    """Time of each algorithm along `along`, "size" (ranks) or "nbytes"; hollow where it is by formula."""
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
    """Write what the model says as a picture: time against ranks, and time against size.

    Parameters
    ----------
    path
        Of the picture.
    title, costs
        What is priced, and with which costs.
    across, along
        Rows of `model`, at several rank counts of one size, and at several sizes of one rank count.
    """
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


def plot_learning(path: str | Path, lines: list[dict[str, Any]], title: str, note: str) -> None:
    """Write the course of a training as a picture: the loss, and the accuracy where there is one.

    Parameters
    ----------
    path
        Of the picture.
    lines
        Of a file of metrics: steps, and at the end what sums up. Bytes are drawn in bits.
    title, note
        What was trained, and on what.
    """
    steps = [line for line in lines if not line.get("final")]
    tested = [line for line in lines if line.get("test_loss") is not None]
    bits = any("bits_per_byte" in line for line in tested)
    panels = 1 if bits or not any("test_accuracy" in line for line in tested) else 2
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(5.2 * panels + 2.2 * (panels == 1), 4.4), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        _loss(axes[0], steps, tested, bits)
        if panels == 2:
            _accuracy(axes[1], tested)
        for axis in axes:
            axis.set_xlabel("step")
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.02, ha="left")
        figure.supxlabel(note, fontsize=8.5, color="#666666", x=0.02, ha="left")
        figure.savefig(path, dpi=110)
        plt.close(figure)


def plot_clocks(path: str | Path, ticks: dict[str, list[tuple[float, int, int]]], title: str) -> None:
    """Draw the steps that each worker has made over time, a panel for each rule of consistency.

    Parameters
    ----------
    ticks
        By rule: (seconds, worker, steps made), in order of time.
    """
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(3.6 * len(ticks), 3.8), layout="constrained")
        axes = figure.subplots(1, len(ticks), squeeze=False, sharex=True, sharey=True)[0]
        for axis, (rule, seen) in zip(axes, ticks.items()):
            for worker in sorted({worker for _, worker, _ in seen}):
                course = [(0.0, 0), *((when, clock) for when, who, clock in seen if who == worker)]
                look: dict[str, Any] = {"color": OURS[worker % len(OURS)], "label": f"worker {worker}"}
                axis.step(*zip(*course, strict=True), where="post", lw=1.4, **look)
            axis.set_title(rule, loc="left")
            axis.set_xlabel("seconds")
        axes[0].set_ylabel("clock: steps made")
        axes[0].legend(loc="lower right")
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.02, ha="left")
        figure.savefig(path, dpi=100)
        plt.close(figure)


def plot_regret(path: str | Path, courses: dict[int, tuple[np.ndarray, np.ndarray]], title: str) -> None:
    """Draw mean regret and its bound over the number of gradients.

    Parameters
    ----------
    courses
        By staleness: after 1, 2, ... gradients the mean regret, and the bound.
    """
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
        for color, (staleness, (regret, bound)) in zip(OURS, courses.items()):
            at = np.arange(1, len(regret) + 1)
            axis.plot(at, bound, "--", lw=1.2, color=color)
            axis.plot(at, regret, lw=1.6, color=color, label=f"s = {staleness}")
        axis.plot([], [], "--", color=NATIVE, lw=1.2, label="bound of each")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("gradients T")
        axis.set_ylabel("regret over T")
        axis.set_title(title, loc="left", fontsize=10)
        axis.legend()
        figure.savefig(path, dpi=100)
        plt.close(figure)


def _loss(axis: Axes, steps: list[dict[str, Any]], tested: list[dict[str, Any]], bits: bool) -> None:
    unit = math.log(2) if bits else 1.0
    at = np.array([line["step"] for line in steps])
    losses = np.array([line["loss"] for line in steps], float) / unit
    look: dict[str, Any] = {"color": OURS[0], "marker": "o" if len(at) == 1 else None, "ms": 4}
    axis.plot(at, losses, lw=0.7, alpha=0.35, **look)
    width = max(1, len(losses) // 50)
    if width > 1:
        mean = np.convolve(losses, np.full(width, 1 / width), "valid")
        axis.plot(at[width - 1 :], mean, lw=1.8, color=OURS[0], label=f"training (mean of {width} steps)")
    else:
        axis.lines[-1].set(alpha=1.0, lw=1.8, label="training")
    axis.plot([line["step"] for line in tested], [line["test_loss"] / unit for line in tested], label="test", **TESTED)
    axis.set_title("bits per byte" if bits else "loss", loc="left")
    if bits:
        axis.set_ylim(bottom=0, top=8.2)
        last = tested[-1]
        axis.annotate(f"{last['bits_per_byte']:.2f}", (last["step"], last["bits_per_byte"]), (0, 8), **LABEL)
    else:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axis.legend(loc="best")


def _accuracy(axis: Axes, tested: list[dict[str, Any]]) -> None:
    axis.plot([line["step"] for line in tested], [line["test_accuracy"] for line in tested], **TESTED)
    last = tested[-1]
    axis.annotate(f"{last['test_accuracy']:.1%}", (last["step"], last["test_accuracy"]), (0, -14), **LABEL)
    axis.set_title("test accuracy", loc="left")
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    low, high = min(line["test_accuracy"] for line in tested), 1.0
    axis.set_ylim(low - 0.08 * (high - low) - 1e-3, high + 0.02 * (high - low) + 1e-3)


TESTED: dict[str, Any] = {"color": OURS[1], "marker": "o", "ms": 3.5, "lw": 1.4}
LABEL: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "color": OURS[1], "fontweight": "bold"}


def plot_styles(path: str | Path, found: Mapping[str, Mapping[str, Any]], title: str, note: str) -> None:
    """Write the courses of several trainings as a picture: their losses, and how far replicas were from each other.

    Parameters
    ----------
    path
        Of the picture.
    found
        By name, as `compare_styles.course` makes them.
    title, note
        What was trained, and on what.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 4.4), layout="constrained")
        for color, (name, course) in zip([NATIVE, *OURS], found.items()):
            losses = np.array(course["losses"])
            width = max(1, len(losses) // 25)
            mean = np.convolve(losses, np.full(width, 1 / width), "valid")
            dash = "-" if course["distances"] else "--"
            look: dict[str, Any] = {"color": color, "lw": 1.6, "label": name, "ls": dash}
            left.plot(np.arange(width, len(losses) + 1), mean, **look)
            at = [(step, distance) for step, distance in course["distances"].items() if distance > 0]
            if at:
                right.plot(*zip(*at), **look)
        left.set_title("training loss of all ranks", loc="left")
        right.set_title("distance of replicas to their mean", loc="left")
        for axis in (left, right):
            axis.set(yscale="log", xlabel="step")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        left.legend(loc="best")
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.02, ha="left")
        figure.supxlabel(note, fontsize=8.5, color="#666666", x=0.02, ha="left")
        figure.savefig(path, dpi=100)
        plt.close(figure)


def plot_peers(path: str | Path, report: Mapping[str, Any]) -> None:
    """Write the race against PyTorch as a picture: both loss curves, and the rate of every turn.

    Parameters
    ----------
    path
        Of the picture.
    report
        As `compare_torch.race` makes it.
    """
    looks: dict[str, dict[str, Any]] = {
        "ours": {"label": "Chorus", "lw": 4, "alpha": 0.45, "color": OURS[0]},
        "torch": {"label": "PyTorch DDP, gloo", "lw": 1.6, "ls": "--", "color": NATIVE},
    }
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for name, look in looks.items():
            marker = "o" if len(report["losses"][name]) == 1 else None  # a line of one point would not be seen
            left.plot(range(1, len(report["losses"][name]) + 1), report["losses"][name], marker=marker, **look)
            right.plot(range(1, len(report["rates"][name]) + 1), report["rates"][name], marker="o", ms=3, **look)
        left.set(xlabel="step")
        left.set_title("loss", loc="left")
        right.set(xlabel="turn", ylim=(0, None))
        right.set_title(report["unit"], loc="left")
        left.legend(loc="best")
        ratio = report["summary"]["ratio"]["median"]
        title = f"{report['model']}, {report['ranks']} ranks: {ratio:.2f} times the speed of PyTorch (median)"
        figure.suptitle(title, x=0.02, ha="left", fontsize=11)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def plot_winners(path: str | Path, table: Table) -> None:
    """Write a tuned table as a picture: per collective, the winner by message size and rank count.

    Series of other forms than blocking, and of several placements, are rows of their own.
    """
    series: dict[str, dict[Key, Rows]] = {}
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


def _winner(row: Mapping[Choice, float]) -> Choice:
    return min(row, key=row.__getitem__)


def _winners(axis: Axes, collective: str, entries: dict[Key, Rows], colours: dict[str, Any]) -> None:
    sizes = sorted({nbytes for rows in entries.values() for nbytes in rows})
    for y, rows in enumerate(entries.values()):
        for (nbytes, row), (left, right) in zip(rows.items(), _cells(list(rows)), strict=True):
            best = _winner(row)
            axis.add_patch(
                Rectangle((left, y - 0.5), right - left, 1, facecolor=colours[best.algorithm], edgecolor="white")
            )
            native = row.get(Choice(MPI_S_OWN))
            ratio = "" if native is None or best.algorithm == MPI_S_OWN else f"{row[best] / native:.2f}"
            cut = f"x{best.segments}" if best.segments > 1 else ""
            text = "\n".join(line for line in (ratio, cut) if line)
            light = sum(to_rgb(colours[best.algorithm])) > 1.5
            axis.text(
                _octave(nbytes), y, text, ha="center", va="center", fontsize=7.5, color="black" if light else "white"
            )
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
    """From where to where each size's cell reaches on a logarithmic axis: half way to its neighbours."""
    at = [_octave(nbytes) for nbytes in sizes]
    middles = [(low + high) / 2 for low, high in pairwise(at)]
    return list(zip([at[0] - 1.5, *middles], [*middles, at[-1] + 1.5], strict=True))


def _series_name(key: Key) -> str:
    nodes = "" if key.placement == str(key.ranks) else f" ({key.placement})"
    form = "" if key.form == BLOCKING else f" {key.form}"
    return f"{key.ranks} ranks{nodes}{form}"
