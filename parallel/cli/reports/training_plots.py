"""Plots of training: learning curves, and quantised models."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from collectives.benchmark.race_plots import NATIVE, OURS, page

TESTED: dict[str, Any] = {"color": OURS[1], "marker": "o", "ms": 3.5, "lw": 1.4}
LABEL: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "color": OURS[1], "fontweight": "bold"}
LABEL["path_effects"] = [withStroke(linewidth=3, foreground="white")]  # legible on a line
PLAIN_NUMBERS = FuncFormatter(lambda value, _: f"{value:g}")


@contextmanager
def picture(
    path: str | Path, size: tuple[float, float], panels: int, title: str, note: str = "", **options: Any
) -> Iterator[Any]:
    """Context that yields the axes of a new figure with `panels` panels. On exit the figure is written to `path`."""
    with page(Path(path), *size, title, note) as figure:
        yield figure.subplots(1, panels, squeeze=False, **options)[0]


def plot_learning(path: str | Path, lines: list[dict[str, Any]], title: str, note: str) -> None:
    """Plot training loss against steps (bits per byte for text), with test loss and test accuracy where measured.

    `lines` come from a file of metrics. `note` is written below the axes.
    """
    steps = [line for line in lines if not line.get("final")]  # the summary repeats the last loss
    tested = [line for line in lines if line.get("test_loss") is not None]
    bits = any("bits_per_byte" in line for line in tested)
    panels = 1 if bits or not any("test_accuracy" in line for line in tested) else 2
    with picture(path, (5.2 * panels + 2.2 * (panels == 1), 4.4), panels, title, note, sharex=True) as axes:
        _loss(axes[0], steps, tested, bits)
        if panels == 2:
            _accuracy(axes[1], tested)
        for axis in axes:
            axis.set_xlabel("step")


def _loss(axis: Axes, steps: list[dict[str, Any]], tested: list[dict[str, Any]], bits: bool) -> None:
    unit = math.log(2) if bits else 1.0
    at = np.array([line["step"] for line in steps])
    losses = np.array([line["loss"] for line in steps], float) / unit
    # a line through one point is invisible
    look: dict[str, Any] = {"color": OURS[0], "marker": "o" if len(at) == 1 else None, "ms": 4}
    axis.plot(at, losses, lw=0.7, alpha=0.35, **look)
    width = max(1, len(losses) // 50)
    label = f"training (mean of {width} steps)" if width > 1 else "training"
    axis.plot(at[width - 1 :], smooth(losses, width), lw=1.8, label=label, **look)
    axis.plot([line["step"] for line in tested], [line["test_loss"] / unit for line in tested], label="test", **TESTED)
    axis.set_title("bits per byte" if bits else "loss", loc="left")
    if bits:
        axis.set_ylim(bottom=0, top=8.2)
        last = tested[-1]
        axis.annotate(f"{last['bits_per_byte']:.2f}", (last["step"], last["bits_per_byte"]), (0, 8), **LABEL)
    else:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(PLAIN_NUMBERS)
    axis.legend(loc="best")


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Running mean of `width` values."""
    return np.convolve(values, np.full(width, 1 / width), "valid") if len(values) else values


def _accuracy(axis: Axes, tested: list[dict[str, Any]]) -> None:
    axis.plot([line["step"] for line in tested], [line["test_accuracy"] for line in tested], **TESTED)
    last = tested[-1]
    axis.annotate(f"{last['test_accuracy']:.1%}", (last["step"], last["test_accuracy"]), (0, -14), **LABEL)
    axis.set_title("test accuracy", loc="left")
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    low, high = min(line["test_accuracy"] for line in tested), 1.0
    axis.set_ylim(low - 0.08 * (high - low) - 1e-3, high + 0.02 * (high - low) + 1e-3)


class ParetoPoint(NamedTuple):
    """Results of a quantised model: bits per weight with scales, test loss, accuracy (None for non-classifiers)."""

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
    """Plot loss, and accuracy if known, by bits per weight: `uniform` as points, `mixed` (found by search) as a curve.

    `whole` is the float32 model, a horizontal line.
    """
    kinds = ["loss"] + ["accuracy"] * (whole.accuracy is not None)
    with picture(path, (5 * len(kinds), 4.1), len(kinds), title, note) as axes:
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
