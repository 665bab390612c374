"""Draw the parts of a model's tensors that the ranks of a mesh have, as text or picture.

    chorus draw mesh --mesh dp=2,tp=2
    chorus draw mesh --mesh pp=2,cp=2,tp=2 --model gpt:small -o out/mesh.png
    chorus draw mesh --mesh dp=2,tp=2,ep=4 --model gpt-moe:tiny

Of layers with equal parts only the first is drawn. "-" marks a tensor that a rank lacks. Replicas (dp) and ranks that
share sequences (cp) have the same parts. ZeRO divides these further. Stages (pp) have nearly equally many units. Runs
in one process. Pictures need matplotlib (the extra "plot").
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.benchmark.reports import PICTURES, save_figure
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from parallel.cli.reports.attention_plots import COLOURS
from parallel.cli.reports.tensor_parts import Holding, holdings, unlike
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import build
from parallel.pipeline.config import schedule_of
from parallel.sharding.mesh import Mesh

GREY = "#c9c9c9"


def draw_holdings(path: Path, mesh: Mesh, held: Sequence[Holding]) -> None:
    """Plot a column for each rank and a row for each tensor: its outline, and the part that the rank has, filled.

    Ranks with the same parts have the same colour. Whole tensors are grey. Sides grow with the square root of
    their length.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    longest = max(math.sqrt(length) for one in held for length in one.shape)
    figure, axes = plt.subplots(figsize=(1.8 + 1.1 * mesh.size, 0.6 + 0.62 * len(held)), layout="constrained")
    for row, one in enumerate(held):
        height, width = (0.8 * math.sqrt(length) / longest for length in _sides(one.shape))
        for rank in range(mesh.size):
            corner = rank - width / 2, row - height / 2
            for x, y, w, h in _filled(one, rank):
                place = corner[0] + x * width, corner[1] + y * height
                axes.add_patch(Rectangle(place, w * width, h * height, color=_colour(one, rank)))
            axes.add_patch(Rectangle(corner, width, height, fill=False, linewidth=0.6))  # last, on top of the parts
    names = [f"{one.name}  {' x '.join(map(str, one.shape))}" for one in held]
    axes.set(xlim=(-0.6, mesh.size - 0.4), ylim=(len(held) - 0.4, -0.6), yticks=range(len(held)), yticklabels=names)
    axes.set_xticks(range(mesh.size), [_label(mesh, rank) for rank in range(mesh.size)])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    looks = {
        "whole on this rank": GREY,
        "part on this rank (a colour for each part)": COLOURS[0],
        "on other ranks": "white",
    }
    patches = [Rectangle((0, 0), 1, 1, fc=colour, ec="black", lw=0.6, label=label) for label, colour in looks.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=1, frameon=False, fontsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
    save_figure(path, figure, 90)


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor's outline. A vector is one row."""
    return (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))


def _filled(one: Holding, rank: int) -> list[tuple[float, float, float, float]]:
    """Parts of the outline (x, y, width, height, as shares) that a rank has."""
    part = one.parts[rank]
    if part is None:
        return [(0, 0, 1, 1)]
    dim, ranges = part
    shares = [(start / one.shape[dim], (stop - start) / one.shape[dim]) for start, stop in ranges]
    across = dim == len(one.shape) - 1
    return [(at, 0, size, 1) if across else (0, at, 1, size) for at, size in shares]


def _colour(one: Holding, rank: int) -> Any:
    cut = list(dict.fromkeys(part for part in one.parts if part is not None and part.ranges))
    part = one.parts[rank]
    return GREY if part is None else COLOURS[cut.index(part) % len(COLOURS)]


def _label(mesh: Mesh, rank: int) -> str:
    return f"rank {rank}\n" + " ".join(f"{name} {at}" for name, at in mesh.coordinates(rank).items())


SAMPLES = {"gpt": (32,), "gpt-moe": (32,), "mlp": (64,), "convnet": (1, 8, 8)}
"""Shapes of samples, by family."""


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add = result.add_argument
    add("--mesh", default="dp=2,tp=2", metavar="AXES", help="as of chorus train (default dp=2,tp=2)")
    add("--layout", "--parallel", default="pp", metavar="LAYOUT", help="of stages, as of chorus train, such as pp:zb-v")
    add("--model", default="gpt:tiny", metavar="NAME", help="as of chorus train (default gpt:tiny)")
    add("--classes", type=at_least(1, int), default=256, metavar="N", help="tokens or classes (default 256)")
    add("-o", "--output", type=picture_file, metavar="FILE", help=f"a file {', '.join(PICTURES)}")
    return result


def drawn(mesh: Mesh, model: str, classes: int, layout: str = "pp") -> list[Holding]:
    """Tensors to draw. ValueError if mesh, model or layout do not fit."""
    made = build(model, SAMPLES.get(model.partition(":")[0], ()), classes)
    return unlike(holdings(made, SoftmaxCrossEntropy(), mesh, schedule_of(Settings(layout=layout))))


def as_text(mesh: Mesh, held: Sequence[Holding]) -> str:
    """Table of tensors and ranks. A line above it has the ranks' coordinates."""
    rows = [["tensor", "shape", *(f"rank {rank}" for rank in range(mesh.size))]]
    places = [" ".join(f"{name} {at}" for name, at in mesh.coordinates(rank).items()) for rank in range(mesh.size)]
    rows.append(["", "", *places])
    for one in held:
        here = [one.text(rank) for rank in range(mesh.size)]
        rows.append([one.name, " x ".join(map(str, one.shape)), *here])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(f"{text:<{width}}" for text, width in zip(row, widths)).rstrip() for row in rows)


def main() -> int:
    command = parser()
    arguments = command.parse_args()
    try:
        mesh = Mesh.parse(arguments.mesh)
        held = drawn(mesh, arguments.model, arguments.classes, arguments.layout)
    except ValueError as error:
        command.error(str(error))
    if arguments.output is None:
        print(as_text(mesh, held))
        return 0
    draw_holdings(arguments.output, mesh, held)
    print(f"{arguments.output} written")
    return 0
