"""Pictures of quantised models: errors layer by layer, and loss against bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from collectives.benchmark.race_plots import NATIVE, OURS
from collectives.benchmark.size_arguments import format_size
from parallel.benchmark.training_plots import PLAIN_NUMBERS, caption, picture
from parallel.ptq.evaluation import LayerErrorRow


class ParetoPoint(NamedTuple):
    """Score of a quantised model: bits per weight with scales, loss, and accuracy of a classifier."""

    bits: float
    loss: float
    accuracy: float | None
    name: str


ERRORS = (("weights", "of weights"), ("outputs", "of outputs, the layer alone"), ("arriving", "of outputs, all layers"))
"""Attributes of `LayerErrorRow` and their labels."""


def plot_layers(path: str | Path, rows: Sequence[LayerErrorRow], title: str, note: str) -> None:
    """Draw the relative errors of every layer, and its bytes before and after."""
    size = (9.5, 1.9 + 0.42 * len(rows))
    with picture(path, size, 2, sharey=True, width_ratios=[3, 2]) as (figure, (errors, sizes)):
        places = np.arange(len(rows))
        for number, (name, label) in enumerate(ERRORS):
            values = [getattr(row, name) for row in rows]
            errors.barh(places + 0.26 * (number - 1), values, 0.24, color=OURS[number], label=label)
        errors.set_xlabel("relative error (norm of the difference over norm)")
        errors.set_yticks(places, [f"{row.name}\n{row.shape[0]} x {row.shape[1]}" for row in rows], fontsize=8)
        errors.invert_yaxis()
        sizes.barh(places - 0.19, [row.before for row in rows], 0.34, color=NATIVE, label="float32")
        sizes.barh(places + 0.19, [row.nbytes for row in rows], 0.34, color=OURS[0], label="in few bits")
        for place, row in zip(places, rows):
            sizes.annotate(f" {row.bits:.3g} bits", (row.nbytes, place + 0.19), va="center", fontsize=8, color=OURS[0])
        sizes.set_xlabel("bytes of weights, scales counted")
        sizes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(round(x))))
        sizes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 8]))
        for axis in (errors, sizes):
            axis.grid(axis="y", visible=False)
            axis.set_axisbelow(True)
        errors.legend(fontsize=8)
        sizes.legend(fontsize=8)
        caption(figure, title, note)


def plot_pareto(
    path: str | Path,
    uniform: Sequence[ParetoPoint],
    mixed: Sequence[ParetoPoint],
    whole: ParetoPoint,
    title: str,
    note: str,
) -> None:
    """Draw loss and accuracy against bits: uniform widths as points, results of a search as a curve."""
    kinds = ["loss"] + ["accuracy"] * (whole.accuracy is not None)
    with picture(path, (5 * len(kinds), 4.1), len(kinds)) as (figure, axes):
        for axis, kind in zip(axes, kinds):
            _pareto(axis, kind, uniform, mixed, whole)
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter(PLAIN_NUMBERS)
        axes[0].yaxis.set_minor_formatter(FuncFormatter(lambda y, _: ""))
        axes[0].legend(loc="upper right")
        caption(figure, title, note)


def _pareto(
    axis: Axes, kind: str, uniform: Sequence[ParetoPoint], mixed: Sequence[ParetoPoint], whole: ParetoPoint
) -> None:
    scale = 100 if kind == "accuracy" else 1

    def xy(points: Sequence[ParetoPoint]) -> tuple[list[float], list[float]]:
        return [point.bits for point in points], [scale * getattr(point, kind) for point in points]

    axis.axhline(scale * getattr(whole, kind), color=NATIVE, lw=1, ls=":", label="float32")
    axis.plot(*xy(sorted(mixed)), color=OURS[0], marker="o", ms=3.5, lw=1.5, label="a width for each layer, by search")
    axis.plot(*xy(uniform), color=OURS[1], marker="s", ms=6, lw=0, label="the same width for all")
    for point, x, y in zip(uniform, *xy(uniform)):
        axis.annotate(point.name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8, color=OURS[1])
    axis.set_xlabel("bits of a weight, scales counted")
    axis.set_ylabel("test loss" if kind == "loss" else "accuracy, per cent")
