"""Picture of quantised models: loss and accuracy against bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.ticker import NullFormatter

from collectives.benchmark.race_plots import NATIVE, OURS
from parallel.benchmark.training_plots import PLAIN_NUMBERS, caption, picture


class ParetoPoint(NamedTuple):
    """Score of a quantised model: bits per weight with scales, loss, and accuracy of a classifier."""

    bits: float
    loss: float
    accuracy: float | None
    name: str


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
            scale = 100 if kind == "accuracy" else 1
            searched, same = (
                [(point.bits, scale * getattr(point, kind)) for point in points] for points in (sorted(mixed), uniform)
            )
            axis.axhline(scale * getattr(whole, kind), color=NATIVE, lw=1, ls=":", label="float32")
            look = {"color": OURS[0], "marker": "o", "ms": 3.5, "lw": 1.5}
            axis.plot(*zip(*searched), **look, label="a width for each layer, by search")
            axis.plot(*zip(*same), color=OURS[1], marker="s", ms=6, lw=0, label="the same width for all")
            for point, at in zip(uniform, same):
                axis.annotate(point.name, at, (5, 4), textcoords="offset points", fontsize=8, color=OURS[1])
            axis.set_xlabel("bits of a weight, scales counted")
            axis.set_ylabel("test loss" if kind == "loss" else "accuracy, per cent")
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_formatter(PLAIN_NUMBERS)
        axes[0].yaxis.set_minor_formatter(NullFormatter())
        axes[0].legend(loc="upper right")
        caption(figure, title, note)
