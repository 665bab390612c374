"""Draw the messages of a schedule by round and rank: as text, or as a picture with -o.

    chorus draw collective --collective allreduce --algorithm ring --ranks 5
    chorus draw collective --collective broadcast --algorithm mst --ranks 16 --root 3 -o mst.png
    chorus draw collective --collective allreduce --algorithm ring --ranks 8 --per-node 4 -o nodes.png

Runs in one process. Pictures need matplotlib (the extra "plot").
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from collectives.algorithms.catalog import CATALOG, blocks, build_all, find
from collectives.analysis import draw
from collectives.analysis.matching import match
from collectives.benchmark.reports import save_figure
from collectives.cli.algorithm_file import entry_name
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from collectives.schedule.semantics import MEANINGS
from collectives.schedule.steps import Copy, Recv, Reduce, Schedule, Send
from collectives.schedule.topology import Nodes, numbered, regular

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOVES, ADDS, INK = "#0b6fbf", "#e07b00", "#333333"
GROUNDS = ("#e3eefb", "#fdebd3", "#e1f3e6", "#f6e3f2", "#f3efd6", "#fbe0e0", "#e6e4fa", "#dff2f2")
"""Background colours of nodes, behind the lines of their ranks."""

TAIL, HEAD = 0.1, 0.62
"""Where arrows start and end within their round. The rest has room for the label."""


class Arrow(NamedTuple):
    """Arrow of a drawing, for messages from one rank to another: round and rank at both ends."""

    leaves: int
    source: int
    arrives: int
    target: int
    adds: bool


def arrows(schedules: Sequence[Schedule], count: int) -> dict[Arrow, str]:
    """Arrows for all messages of the schedules, each with its label: the numbers of the chunks that it carries."""
    carried: dict[Arrow, list[str]] = defaultdict(list)
    for receive, send in sorted(match(schedules, count).items(), key=lambda pair: pair[0]):
        step = schedules[receive.rank][receive.round][receive.step]
        assert not isinstance(step, (Send, Reduce, Copy))
        arrow = Arrow(send.round, send.rank, receive.round, receive.rank, not isinstance(step, Recv))
        carried[arrow].append(draw.chunks(step.chunks, count).strip("[]"))
    return {arrow: ", ".join(filter(None, labels)) for arrow, labels in carried.items()}


def picture(path: Path, title: str, schedules: Sequence[Schedule], count: int, nodes: Nodes | None) -> None:
    """Draw schedules into a file: ranks as lines, rounds as columns, an arrow per message, a background per node."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    import matplotlib.pyplot as plt

    size, rounds = len(schedules), max(1, *map(len, schedules))
    messages = arrows(schedules, count)
    crowd = max(Counter((arrow.target, arrow.arrives) for arrow in messages).values(), default=1)
    longest = max(map(len, messages.values()), default=0)
    width = max(5.0, 1.0 + rounds * max(0.95, 0.5 + 0.085 * (longest + 4 * (crowd > 1))))
    figure, axis = plt.subplots(figsize=(width, max(0.36, 0.15 * crowd) * size + 1.55), layout="constrained")
    _ground(axis, size, rounds, nodes)
    _messages(axis, messages, crowd)
    for rank, schedule in enumerate(schedules):
        for column, steps in enumerate(schedule):
            work = "\n".join(draw.step(step, count) for step in steps if isinstance(step, (Reduce, Copy)))
            axis.text(column + HEAD, rank + 0.3, work, ha="center", va="center", fontsize=6, color=INK)
    for adds, label in (False, "a message"), (True, "a message to combine"):
        if any(arrow.adds == adds for arrow in messages):
            axis.plot([], [], color=ADDS if adds else MOVES, lw=1.6, label=label)
    if longest:
        meaning = "numbers are chunks" if crowd == 1 else "2: 0-6 are chunks 0 to 6 from rank 2"
        axis.plot([], [], lw=0, label=meaning)
    figure.suptitle(title, fontweight="bold", fontsize=11)
    if messages:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    save_figure(path, figure, 130)


def _ground(axis: Axes, size: int, rounds: int, nodes: Nodes | None) -> None:
    for rank, node in enumerate(nodes or (0,) * size):
        axis.axhspan(rank - 0.5, rank + 0.5, color=GROUNDS[node % len(GROUNDS)], lw=0, zorder=0)
    for column in range(rounds):
        axis.axvline(column, color="white", lw=3, zorder=0.5)
        axis.text(column + 0.5, -0.75, f"round {column}", ha="center", va="bottom", fontsize=8, color=INK)
    axis.hlines(range(size), 0, rounds, color="#b8bec6", lw=1, zorder=1)
    names = [f"rank {rank}" if nodes is None else f"node {nodes[rank]}  rank {rank}" for rank in range(size)]
    axis.set_yticks(range(size), names, fontsize=9)
    axis.set(xlim=(0, rounds), ylim=(size - 0.4, -0.7), xticks=[], frame_on=False)
    axis.tick_params(length=0)


def _messages(axis: Axes, messages: dict[Arrow, str], crowd: int) -> None:
    """Draw arrows with their labels, and the sender's rank where several arrive at once (`crowd` at most)."""
    arriving: dict[tuple[int, int], list[Arrow]] = defaultdict(list)
    for arrow in sorted(messages, key=attrgetter("source")):
        arriving[arrow.target, arrow.arrives].append(arrow)
    box: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85}
    for several in arriving.values():
        for index, arrow in enumerate(several):
            color, text = ADDS if arrow.adds else MOVES, messages[arrow]
            start, end = (arrow.leaves + TAIL, arrow.source), (arrow.arrives + HEAD, arrow.target)
            look = {"arrowstyle": "-|>", "color": color, "lw": 1.1, "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", end, start, arrowprops=look, zorder=2)
            if text and len(several) > 1:
                text = f"{arrow.source}: {text}"
            y = arrow.target + (index - (len(several) - 1) / 2) * 0.85 / max(2, crowd)
            axis.text(end[0] + 0.03, y, text, va="center", fontsize=8 if crowd < 3 else 7, color=color, bbox=box)


def parse() -> argparse.Namespace:
    """Parse the command line. `nodes` of the result has the node of every rank, or is None."""
    parser = ProgramParser(__doc__)
    add, count = parser.add_argument, at_least(1, int, 1 << 12)
    add("--collective", required=True, choices=list(CATALOG), metavar="NAME", help=", ".join(CATALOG))
    add(
        "--algorithm",
        required=True,
        metavar="NAME",
        help="one of the catalogue's for the collective, or file.py:function",
    )
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
        arguments.algorithm = entry_name(collective, arguments.algorithm, size)
    except ValueError as error:
        parser.error(str(error))
    if arguments.segments > 1 and collective == "barrier":
        parser.error("--segments must be 1 for a barrier")
    if root and not MEANINGS[collective].rooted:
        parser.error(f"--root: {collective} has no root")
    if root >= size:
        parser.error(f"--root must be a rank from 0 to {size - 1}, found {root}")
    names = regular(size, arguments.per_node or size)
    if arguments.nodes is not None and len(names := arguments.nodes.split(",")) != size:
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
