"""Plot of the load of experts over a training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.benchmark.reports import save_figure
from parallel.cli.reports.expert_load import ExpertLoad, ExpertTraffic

CELLS = 200
"""Most columns of a plot."""


def plot_expert_loads(path: Path, loads: Sequence[ExpertLoad], traffic: Sequence[ExpertTraffic], title: str) -> None:
    """Plot the load of each expert relative to the mean by step, a row per router; beside it entropy and drop rate.

    Where experts are on different ranks, also the copies between nodes relative to all choices, and the part of the
    step's time in the exchange.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    options: Any = {"squeeze": False, "layout": "constrained", "width_ratios": [3, 1]}
    figure, axes = plt.subplots(len(loads), 2, figsize=(10, 0.8 + 2.1 * len(loads)), **options)
    for (left, right), whole in zip(axes, loads):
        load = whole.mean_of(CELLS)
        experts = load.chosen.shape[1]
        extent = (0, float(load.steps[-1]), experts - 0.5, -0.5)
        image = left.imshow(
            load.share.T, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, extent=extent, interpolation="nearest"
        )
        ticks = range(0, experts, max(experts // 8, 1))
        left.set(title=f"{load.router}: choices relative to the mean", ylabel="expert", yticks=ticks)
        right.plot(load.steps, load.entropy, color="#0b6fbf", label="entropy (1: equal loads)")
        right.plot(load.steps, load.drop_rate, color="#c4453b", label="dropped")
        right.plot(load.steps, load.share.max(axis=1) / experts, color="#888888", lw=0.8, label="largest share")
        for one in (one for one in traffic if one.experts == whole.router.replace("router", "experts")):
            mean, between = one.mean_of(CELLS), one.between_nodes_per_choice(whole, CELLS)
            right.plot(mean.steps, between, color="#3a8f4d", label="copies between nodes")
            right.plot(mean.steps, mean.share, color="#e07b00", label="time in the exchange")
        right.set(ylim=(-0.03, 1.03))
        right.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, ax=axes[:, 0], location="left", fraction=0.03, label="load / mean", ticks=[0, 1, 2])
    axes[-1, 0].set_xlabel("step")
    axes[-1, 1].set_xlabel("step")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11, x=0.02, ha="left")
    save_figure(path, figure, 90)
