"""Plots of the studies: steps of parameter-server workers, regret, replicas, and pruned models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from collectives.benchmark.race_plots import NATIVE, OURS
from parallel.cli.reports.training_plots import PLAIN_NUMBERS, picture, smooth


def plot_clocks(path: str | Path, ticks: dict[str, list[tuple[float, int, int]]], slow: int, title: str) -> None:
    """Plot the number of steps of each worker over time, with one panel per consistency rule.

    `ticks` has (seconds, worker, steps made) by rule, of each worker in order; `slow` is the slow worker's number.
    """
    with picture(path, (3.6 * len(ticks), 3.8), len(ticks), title, sharex=True, sharey=True) as axes:
        for axis, (rule, events) in zip(axes, ticks.items()):
            for worker in sorted({worker for _, worker, _ in events}):
                points = [(0.0, 0), *((seconds, clock) for seconds, number, clock in events if number == worker)]
                look: dict[str, Any] = {"color": OURS[worker % len(OURS)], "label": f"worker {worker}", "lw": 1.4}
                if worker == slow:
                    look |= {"color": NATIVE, "label": f"worker {worker}, the slow one", "lw": 2.4, "ls": "--"}
                axis.step(*zip(*points, strict=True), where="post", **look)
            axis.set_title(rule, loc="left")
            axis.set_xlabel("seconds")
        axes[0].set_ylabel("clock (steps made)")
        axes[0].legend(loc="lower right")


def plot_regret(path: str | Path, curves: dict[int, tuple[np.ndarray, np.ndarray]], title: str) -> None:
    """Plot mean regret, and its ratio to the bound, by number of gradients; `curves`: (regret, bound) by staleness."""
    with picture(path, (10.4, 4.4), 2, title) as (left, right):
        for color, (staleness, (regret, bound)) in zip(OURS, curves.items()):
            at = np.arange(1, len(regret) + 1)
            left.plot(at, regret, lw=1.6, color=color, label=f"staleness {staleness}")
            right.plot(at, regret / bound, lw=1.6, color=color)
        left.set_title("mean regret", loc="left")
        right.set_title("share of the bound (100 % would reach it)", loc="left")
        right.yaxis.set_major_formatter(PercentFormatter(1))
        for axis in (left, right):
            axis.set(xscale="log", xlabel="gradients")
            axis.set_ylim(bottom=0)
        left.legend()


def plot_styles(path: str | Path, found: Mapping[str, Mapping[str, Any]], title: str, note: str) -> None:
    """Plot results of `compare_styles.history` by name: training losses, and distances of replicas to their mean."""
    with picture(path, (10.4, 4.4), 2, title, note) as (left, right):
        # Each line is thinner than those below it: one that coincides with others stays visible as a rim.
        widths = np.linspace(6, 1.2, max(2, len(found)))
        for color, line, (name, history) in zip([NATIVE, *OURS], widths, found.items()):
            losses = np.array(history["losses"])
            width = max(1, len(losses) // 25)
            look: dict[str, Any] = {"color": color, "lw": line, "label": name, "solid_capstyle": "butt"}
            left.plot(np.arange(width, len(losses) + 1), smooth(losses, width), **look)
            at = [(step, distance) for step, distance in history["distances"].items() if distance > 0]
            if at:
                right.plot(*zip(*at), **look)
        left.set_title("training loss of all ranks", loc="left")
        right.set_title("distance of replicas to their mean", loc="left")
        for axis in (left, right):
            axis.set(yscale="log", xlabel="step")
            axis.yaxis.set_major_formatter(PLAIN_NUMBERS)
        left.legend(loc="best")


def plot_pruning(
    path: str | Path, curves: Mapping[str, Sequence[tuple[float, float]]], whole: float, title: str, note: str
) -> None:
    """Plot accuracies by pruned fraction, as points (fraction, accuracy) by method; `whole` is that without pruning."""
    with picture(path, (6.4, 4.1), 1, title, note) as (axis,):
        axis.axhline(whole, color=NATIVE, lw=1, ls=":", label="not pruned")
        for color, (method, points) in zip(OURS, curves.items()):
            axis.plot(*zip(*points), color=color, marker="o", ms=4, lw=1.5, label=f"pruned {method}")
        for by in (axis.xaxis, axis.yaxis):
            by.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.set_xlabel("pruned weights")
        axis.set_ylabel("test accuracy")
        axis.legend(loc="lower left")
