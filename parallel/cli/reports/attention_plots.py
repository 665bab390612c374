"""Plots of ring attention: rank and step of every score, and the work of each step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from collectives.benchmark.reports import save_figure
from parallel.nn.attention_mask import AttentionMask
from parallel.sharding.context.cost_formulas import ring_work, score_steps
from parallel.sharding.context.sequence_division import SequenceDivision

COLOURS = ("#0b6fbf", "#e07b00", "#2a9d52", "#c4453b", "#5b4fc4", "#8c6d31", "#17a2b8", "#b5489b")
"""Of ranks, repeated."""

PALEST = 0.7
"""Share of white in the colour of the last step."""


def draw_divisions(path: Path, divisions: Sequence[SequenceDivision], mask: AttentionMask) -> None:
    """Plot the score matrix of each division, and below it the pairs that each rank computes in each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    look: Any = {"squeeze": False, "layout": "constrained", "height_ratios": [3, 1]}
    figure, axes = plt.subplots(2, len(divisions), figsize=(3.6 * len(divisions), 5.6), **look)
    for (above, below), division in zip(axes.T, divisions):
        work = ring_work(division, mask)
        above.imshow(_colours(*score_steps(division, mask), division.ranks))
        above.set(title=f"{division.name}: {work.efficiency:.0%} computing", xlabel="key", xticks=[], yticks=[])
        _steps(above, division, mask)
        for rank in range(division.ranks):
            places = np.arange(division.ranks) + (rank - (division.ranks - 1) / 2) * 0.8 / division.ranks
            below.bar(places, work.pairs[:, rank], 0.8 / division.ranks, color=COLOURS[rank % len(COLOURS)])
        below.set(xlabel="step", xticks=range(division.ranks), yticks=[])
    axes[0, 0].set_ylabel("query")
    axes[1, 0].set_ylabel("pairs by rank")
    ranks = range(divisions[0].ranks)
    handles = [Patch(color=COLOURS[rank % len(COLOURS)], label=f"rank {rank}") for rank in ranks]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, frameon=False)
    save_figure(path, figure, 90)


def _colours(rank: np.ndarray, step: np.ndarray, ranks: int) -> np.ndarray:
    """RGB image: the colour of the rank, paler with the step. White where nothing is computed."""
    from matplotlib.colors import to_rgb

    table = np.array([to_rgb(COLOURS[number % len(COLOURS)]) for number in range(ranks)])
    white = PALEST * step[..., None] / max(ranks - 1, 1)
    image: np.ndarray = np.where(rank[..., None] < 0, 1.0, table[rank] * (1 - white) + white)
    return image


def _steps(axes: Any, division: SequenceDivision, mask: AttentionMask) -> None:
    """Write the step into the middle of each block of scores that is computed together, if it is large enough."""
    for rank in range(division.ranks):
        for other in range(division.ranks):
            for queries in division.blocks(rank):
                for keys in division.blocks(other):
                    if queries.step == 1 and mask.key_ranges(queries, keys).pairs:
                        middle = keys.start + len(keys) / 2 - 0.5, queries.start + len(queries) / 2 - 0.5
                        axes.text(*middle, str((rank - other) % division.ranks), ha="center", va="center", fontsize=8)
