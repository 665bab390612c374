"""Draw the messages of a schedule by round and rank: as text, or as a picture with -o.

    chorus draw collective --collective allreduce --algorithm ring --ranks 5
    chorus draw collective --collective broadcast --algorithm mst --ranks 16 --root 3 -o mst.png
    chorus draw collective --collective allreduce --algorithm ring --ranks 8 --per-node 4 -o nodes.png

Runs in one process; pictures need matplotlib (the extra "plot").
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from collectives.algorithms.catalog import CATALOG, blocks, build_all, find
from collectives.analysis import draw
from collectives.analysis.matching import match
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from collectives.schedule.semantics import MEANINGS
from collectives.schedule.steps import Copy, Recv, Reduce, Schedule, Send
from collectives.schedule.topology import Nodes, numbered, regular

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOVES, ADDS, INK, PALE = "#0b6fbf", "#e07b00", "#333333", "#f4f6f8"
GROUNDS = ("#e3eefb", "#fdebd3", "#e1f3e6", "#f6e3f2", "#f3efd6", "#fbe0e0", "#e6e4fa", "#dff2f2")
"""Behind the ranks of a node."""

ROUNDS_PER_ROW = 12
TAIL, HEAD = 0.1, 0.62
"""Where arrows start and end within their round; the rest has room for the label."""


class Arrow(NamedTuple):
    """All that one rank sends to another between two rounds: a round and a rank at each end."""

    leaves: int
    source: int
    arrives: int
    target: int
    adds: bool


def arrows(schedules: Sequence[Schedule], count: int) -> dict[Arrow, str]:
    """Every arrow of the picture, with the chunks that it carries."""
    carried: dict[Arrow, list[str]] = defaultdict(list)
    for receive, send in sorted(match(schedules, count).items(), key=lambda pair: pair[0]):
        step = schedules[receive.rank][receive.round][receive.step]
        assert not isinstance(step, (Send, Reduce, Copy))
        arrow = Arrow(send.round, send.rank, receive.round, receive.rank, not isinstance(step, Recv))
        carried[arrow].append(draw.chunks(step.chunks, count).strip("[]"))
    return {arrow: ", ".join(filter(None, labels)) for arrow, labels in carried.items()}


def picture(path: Path, title: str, schedules: Sequence[Schedule], count: int, nodes: Nodes | None) -> None:
    """Ranks as lines from left to right, rounds as columns, an arrow per message; many rounds go on below.

    With `nodes` the ranks of a node are on ground of one colour.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    size, rounds = len(schedules), max(1, *map(len, schedules))
    messages = arrows(schedules, count)
    arriving: dict[tuple[int, int], list[Arrow]] = defaultdict(list)
    for arrow in sorted(messages, key=attrgetter("source")):
        arriving[arrow.target, arrow.arrives].append(arrow)
    crowd = max(map(len, arriving.values()), default=1)
    longest = max(map(len, messages.values()), default=0)
    across = min(rounds, ROUNDS_PER_ROW)
    rows = -(-rounds // across)
    width = max(5.0, 1.0 + across * max(0.95, 0.5 + 0.085 * (longest + 4 * (crowd > 1))))
    height = max(0.36, 0.15 * crowd) * size + 0.75
    figure, axes = plt.subplots(rows, 1, figsize=(width, rows * height + 0.8), squeeze=False, layout="constrained")
    for row, axis in enumerate(axes[:, 0]):
        columns = range(row * across, min(rounds, (row + 1) * across))
        _ground(axis, size, columns, across, nodes)
        _messages(axis, messages, arriving, columns, crowd)
        _local(axis, schedules, count, columns)
    figure.suptitle(title, fontweight="bold", fontsize=11)
    kinds = {False: (MOVES, "a message"), True: (ADDS, "a message that is combined with the data of its receiver")}
    used = [kinds[adds] for adds in sorted({arrow.adds for arrow in messages})]
    handles = [Line2D([], [], color=color, lw=1.6, label=label) for color, label in used]
    if longest:
        meaning = "numbers are chunks" if crowd == 1 else "2: 0-6 are chunks 0 to 6 from rank 2"
        handles.append(Line2D([], [], lw=0, label=meaning))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _ground(axis: Axes, size: int, columns: range, across: int, nodes: Nodes | None) -> None:
    for rank, node in enumerate(nodes or ()):
        ground = GROUNDS[node % len(GROUNDS)]
        axis.fill_between([columns.start, columns.stop], rank - 0.5, rank + 0.5, color=ground, lw=0, zorder=0)
    for column in columns:
        if nodes:
            axis.axvline(column, color="white", lw=3, zorder=0.5)
        else:
            axis.axvspan(column, column + 1, color=PALE if column % 2 == 0 else "white", lw=0, zorder=0)
        axis.text(column + 0.5, -0.75, f"round {column}", ha="center", va="bottom", fontsize=8, color=INK)
    axis.hlines(range(size), columns.start, columns.stop, color="#b8bec6", lw=1, zorder=1)
    names = [f"rank {rank}" if nodes is None else f"node {nodes[rank]}  rank {rank}" for rank in range(size)]
    axis.set_yticks(range(size), names, fontsize=9)
    axis.set(xlim=(columns.start, columns.start + across), ylim=(size - 0.4, -0.7), xticks=[], frame_on=False)
    axis.tick_params(length=0)


def _messages(
    axis: Axes, messages: dict[Arrow, str], arriving: dict[tuple[int, int], list[Arrow]], columns: range, crowd: int
) -> None:
    """The arrows, and beside their heads the chunks: with the sender, where several arrive at once.

    An arrow that crosses from one row of rounds to the next is in both, cut at the edge.
    """
    from matplotlib.patches import FancyArrowPatch

    box: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85}
    for several in arriving.values():
        for index, arrow in enumerate(several):
            color, chunks = ADDS if arrow.adds else MOVES, messages[arrow]
            if arrow.leaves in columns or arrow.arrives in columns:
                ends = (arrow.leaves + TAIL, arrow.source), (arrow.arrives + HEAD, arrow.target)
                look: dict[str, Any] = {
                    "arrowstyle": "-|>",
                    "mutation_scale": 9,
                    "shrinkA": 0,
                    "shrinkB": 0,
                    "zorder": 2,
                }
                axis.add_patch(FancyArrowPatch(*ends, color=color, lw=1.1, **look))
            if arrow.arrives in columns:
                text = f"{arrow.source}: {chunks}" if chunks and len(several) > 1 else chunks
                x, y = (
                    arrow.arrives + HEAD + 0.03,
                    arrow.target + (index - (len(several) - 1) / 2) * 0.85 / max(2, crowd),
                )
                axis.text(x, y, text, va="center", fontsize=8 if crowd < 3 else 7, color=color, bbox=box, zorder=3)


def _local(axis: Axes, schedules: Sequence[Schedule], count: int, columns: range) -> None:
    for rank, schedule in enumerate(schedules):
        for column, steps in enumerate(schedule):
            work = [draw.step(step, count) for step in steps if isinstance(step, (Reduce, Copy))]
            if column in columns and work:
                axis.text(column + HEAD, rank + 0.3, "\n".join(work), ha="center", va="center", fontsize=6, color=INK)


def parse() -> argparse.Namespace:
    """The command line, with the node of every rank or None in `nodes`."""
    parser = ProgramParser(__doc__)
    add, count = parser.add_argument, at_least(1, int)
    add("--collective", required=True, choices=list(CATALOG), metavar="NAME", help=", ".join(CATALOG))
    add("--algorithm", required=True, metavar="NAME", help="one of the catalogue's for the collective")
    add("--ranks", type=count, default=5, metavar="P", help="number of ranks (default 5)")
    add("--root", type=at_least(0, int), default=0, metavar="R", help="the root, where there is one (default 0)")
    add("--segments", type=count, default=1, metavar="K", help="pipeline K segments of the data (default 1)")
    placement = parser.add_mutually_exclusive_group()
    placement.add_argument("--per-node", type=count, metavar="K", help="nodes of K neighbouring ranks")
    placement.add_argument("--nodes", metavar="A,A,B,...", help="the node of every rank, by any names")
    add("-o", "--output", type=picture_file, metavar="FILE", help="draw a picture, .png, .svg or .pdf")
    arguments = parser.parse_args()
    collective, size, root = arguments.collective, arguments.ranks, arguments.root
    try:
        find(collective, arguments.algorithm)
    except ValueError as error:
        parser.error(str(error))
    if arguments.segments > 1 and collective == "barrier":
        parser.error("--segments must be 1 for a barrier")
    if root and not MEANINGS[collective].rooted:
        parser.error(f"--root: {collective} has no root")
    if root >= size:
        parser.error(f"--root must be a rank from 0 to {size - 1}, found {root}")
    names = regular(size, arguments.per_node or size)
    if arguments.nodes and len(names := arguments.nodes.split(",")) != size:
        parser.error(f"--nodes must name the node of each of {size} ranks, found {len(names)} names")
    arguments.nodes = numbered(names)
    return arguments


def main() -> int:
    arguments = parse()
    collective, name, size, nodes = arguments.collective, arguments.algorithm, arguments.ranks, arguments.nodes
    schedules = build_all(collective, name, size, arguments.root, arguments.segments, nodes)
    count = blocks(collective, name, size) * arguments.segments
    title = f"{collective}, {name}, {size} ranks"
    title += f", root {arguments.root}" if MEANINGS[collective].rooted else ""
    title += f", {arguments.segments} segments" if arguments.segments > 1 else ""
    title += f", {1 + max(nodes)} nodes" if nodes else ""
    if arguments.output is None:
        print(f"{title}\n{find(collective, name).idea}\n")
        print(draw.table(schedules, count, shutil.get_terminal_size((0, 0)).columns))
        return 0
    picture(arguments.output, title, schedules, count, nodes)
    print(f"{arguments.output} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
