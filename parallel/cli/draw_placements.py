"""Draw three placements of a mixture's experts on ranks, with the bytes that each rank sends for a layer and step.

    chorus draw placements --ranks 8 --tp 2
    chorus draw placements --ranks 8 --tp 2 -o out/placements.png

Experts replicated with the data, divided over all ranks, or over data and model axes (GShard, Switch Transformers).
Sizes assume float32 and equal loads. Runs in one process; pictures need matplotlib (the extra "plot").
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from collectives.benchmark.reports import save_figure
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from collectives.units import format_bytes
from parallel.sharding.expert.placements import ExpertPlacement, MixtureSize, placements


def parser() -> argparse.ArgumentParser:
    result = ProgramParser(__doc__)
    add, count, size = result.add_argument, at_least(1, int, 1 << 12), at_least(1, int)
    add("--ranks", type=count, default=8, metavar="P", help="default 8")
    add("--tp", type=count, default=2, metavar="T", help="ranks of the model axis, in the third placement (default 2)")
    add("--experts", type=count, default=8, metavar="E", help="default 8")
    add("--choices", type=count, default=2, metavar="K", help="experts of a token (default 2)")
    add("--tokens", type=size, default=2048, metavar="N", help="of a replica and step (default 2048)")
    add("--width", type=size, default=256, metavar="H", help="of a token; experts have 4 H / K hidden (default 256)")
    add("-o", "--output", type=picture_file, metavar="FILE", help="a picture")
    return result


def as_text(every: Sequence[ExpertPlacement], ranks: int, size: MixtureSize) -> str:
    """Experts of every rank, and bytes that a rank sends, by placement."""
    blocks = []
    for placement in every:
        cut = f" (1/{placement.tp} of each)" if placement.tp > 1 else ""
        lines = [f"{placement}", *(f"  rank {rank}: {_experts(placement, rank, size)}{cut}" for rank in range(ranks))]
        sent = (f"{name} {format_bytes(nbytes)}" for name, nbytes in placement.sent(size).items())
        blocks.append("\n".join([*lines, "  " + ", ".join(sent)]))
    return "\n\n".join(blocks)


def _experts(placement: ExpertPlacement, rank: int, size: MixtureSize) -> str:
    return " ".join(map(str, placement.experts_of(rank, size.experts))) or "none"


def picture(path: Path, every: Sequence[ExpertPlacement], ranks: int, size: MixtureSize) -> None:
    """Grid of ranks and experts for each placement, filled where a rank has an expert. Below, bytes sent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(every), figsize=(3.6 * len(every), 0.9 + 0.3 * ranks), layout="constrained")
    for axis, placement in zip(axes, every):
        for rank in range(ranks):
            for expert in placement.experts_of(rank, size.experts):
                left = expert - 0.45 + 0.9 * (rank % placement.tp) / placement.tp
                color = f"C{rank // placement.tp % placement.ep % 10}"
                axis.barh(rank, 0.9 / placement.tp, left=left, color=color)
        sent = placement.sent(size)
        label = "\n".join(f"{name}: {format_bytes(nbytes)}" for name, nbytes in sent.items())
        axis.set(xlim=(-0.6, size.experts - 0.4), ylim=(ranks - 0.4, -0.6), yticks=range(ranks), ylabel="rank")
        axis.set_title(str(placement), fontsize=9)
        axis.set_xlabel(f"expert\n\n{label}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    save_figure(path, figure, 110)


def main(argv: list[str] | None = None) -> int:
    command = parser()
    options = command.parse_args(argv)
    hidden = max(4 * options.width // options.choices, 1)
    size = MixtureSize(options.experts, options.choices, options.tokens, options.width, hidden)
    try:
        every = placements(options.ranks, options.tp)
    except ValueError as error:
        command.error(str(error))
    if options.output is None:
        print(as_text(every, options.ranks, size))
        return 0
    picture(options.output, every, options.ranks, size)
    print(f"{options.output} written")
    return 0
