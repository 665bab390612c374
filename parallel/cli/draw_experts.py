"""Draw the load of the experts of a training, from its metrics file, as text or picture.

    chorus train --data pydoc --model gpt-moe:tiny --json out/moe.jsonl
    chorus draw experts out/moe.jsonl
    chorus draw experts out/moe.jsonl -o out/moe.png

For each router: the largest load relative to the mean, the entropy of the choices relative to equal loads, and
the fraction of the choices that were dropped. If experts are on different ranks, also the copies of tokens to other
ranks in a step, the copies between nodes, and the part of the step's time in the exchange. Runs in one process.
Pictures need matplotlib (the extra "plot").
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.benchmark.reports import read_report, save_figure
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.reports import metrics
from parallel.cli.reports.expert_load import ExpertLoad, ExpertTraffic, expert_loads, expert_traffic

CELLS = 200
"""Most columns of a plot."""


def plot_expert_loads(path: Path, loads: Sequence[ExpertLoad], traffic: Sequence[ExpertTraffic], title: str) -> None:
    """Plot the load of each expert relative to the mean by step, a row per router. Beside it entropy and drop rate.

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


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add = result.add_argument
    add("metrics", type=Path, help="file that chorus train --json has written")
    add("--rows", type=at_least(1, int), default=8, metavar="N", help="lines for each router (default 8)")
    add("-o", "--output", type=picture_file, metavar="FILE", help="a picture")
    return result


def as_text(loads: Sequence[ExpertLoad], traffic: Sequence[ExpertTraffic], rows: int) -> str:
    """Tables of loads and exchanges, in `rows` parts of the training."""
    blocks = []
    for load in loads:
        short = load.mean_of(rows)
        lines = [load.router, f"{'step':>8}{'largest load':>14}{'entropy':>10}{'dropped':>10}"]
        for step, share, entropy, dropped in zip(short.steps, short.share, short.entropy, short.drop_rate):
            lines.append(f"{step:>8}{share.max():>14.2f}{entropy:>10.3f}{dropped:>10.1%}")
        blocks.append("\n".join(lines))
    for whole in traffic:
        mean = whole.mean_of(rows)
        lines = [whole.experts, f"{'step':>8}{'copies':>14}{'between nodes':>15}{'exchange':>10}"]
        for step, copies, between, share in zip(mean.steps, mean.copies, mean.between_nodes, mean.share):
            lines.append(f"{step:>8}{copies:>14.0f}{between:>15.0f}{share:>10.1%}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


METRICS = "the metrics of a model with mixtures of experts, as gpt-moe"


def read(data: bytes) -> tuple[list[ExpertLoad], list[ExpertTraffic]]:
    """Loads and traffic in a metrics file. ValueError if there are none."""
    lines = metrics.parse(data)
    loads = expert_loads(lines)
    if not loads:
        raise ValueError("no choices of experts")
    return loads, expert_traffic(lines)


def main() -> int:
    command = parser()
    arguments = command.parse_args()
    try:
        loads, traffic = read_report(arguments.metrics, METRICS, read)
    except ValueError as error:
        command.error(str(error))
    if arguments.output is None:
        print(as_text(loads, traffic, arguments.rows))
        return 0
    plot_expert_loads(arguments.output, loads, traffic, f"load of experts: {arguments.metrics.name}")
    print(f"{arguments.output} written")
    return 0
