"""Plot of the parts of a model's tensors that every rank of a mesh has."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.benchmark.reports import save_figure
from parallel.cli.reports.attention_plots import COLOURS
from parallel.cli.reports.tensor_parts import Holding
from parallel.sharding.mesh import Mesh


def draw_holdings(path: Path, mesh: Mesh, held: Sequence[Holding]) -> None:
    """Plot a column for each rank and a row for each tensor: its outline, and the part that the rank has, filled.

    Ranks with the same parts have the same colour; whole tensors are grey. Sides grow with the square root of
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
            axes.add_patch(Rectangle(corner, width, height, fill=False, linewidth=0.6))
    names = [f"{one.name}  {' x '.join(map(str, one.shape))}" for one in held]
    axes.set(xlim=(-0.6, mesh.size - 0.4), ylim=(len(held) - 0.4, -0.6), yticks=range(len(held)), yticklabels=names)
    axes.set_xticks(range(mesh.size), [_label(mesh, rank) for rank in range(mesh.size)])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    save_figure(path, figure, 90)


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor's outline; a vector is one row."""
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
    return "#c9c9c9" if part is None else COLOURS[cut.index(part) % len(COLOURS)]


def _label(mesh: Mesh, rank: int) -> str:
    return f"rank {rank}\n" + " ".join(f"{name} {at}" for name, at in mesh.coordinates(rank).items())
