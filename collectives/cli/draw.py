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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from collectives.algorithms.catalog import CATALOG, Algorithm, blocks, build_all, find
from collectives.analysis import draw
from collectives.analysis.matching import match
from collectives.cli.arguments import missing_matplotlib
from collectives.cli.launcher import ProgramParser
from collectives.schedule.semantics import MEANINGS
from collectives.schedule.steps import Copy, Recv, Reduce, Schedule, Send
from collectives.schedule.topology import Nodes, numbered, regular

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOVES, ADDS, INK, PALE = "#0b6fbf", "#e07b00", "#333333", "#f4f6f8"
GROUNDS = ("#e3eefb", "#fdebd3", "#e1f3e6", "#f6e3f2", "#f3efd6", "#fbe0e0", "#e6e4fa", "#dff2f2")
"""Behind the ranks of a node."""

FORMATS = (".png", ".svg", ".pdf")
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
    across = min(rounds, ROUNDS_PER_ROW)
    rows = -(-rounds // across)
    labels = _labels(messages)
    longest = max((len(text) for texts in labels.values() for text, _ in texts), default=0)
    crowd = max(map(len, labels.values()), default=1)
    width = max(5.0, 1.0 + across * max(0.95, 0.5 + 0.085 * longest))
    height = max(0.36, 0.15 * crowd) * size + 0.75
    figure, axes = plt.subplots(rows, 1, figsize=(width, rows * height + 0.8), squeeze=False, layout="constrained")
    for row, axis in enumerate(axes[:, 0]):
        columns = range(row * across, min(rounds, (row + 1) * across))
        _lines(axis, size, columns, across, nodes)
        _messages(axis, messages, columns)
        _write(axis, labels, columns, crowd)
        _local(axis, schedules, count, columns)
    figure.suptitle(title, fontweight="bold", fontsize=11)
    kinds = {False: (MOVES, "a message"), True: (ADDS, "a message that is combined with the data of its receiver")}
    used = [kinds[adds] for adds in sorted({arrow.adds for arrow in messages})]
    handles = [Line2D([], [], color=color, lw=1.6, label=label) for color, label in used]
    if longest:
        meaning = "numbers are chunks" if crowd == 1 else "2: 0-6 are chunks 0 to 6 from rank 2"
        handles.append(Line2D([], [], lw=0, label=meaning))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _labels(messages: dict[Arrow, str]) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """(text, colour) of the arriving chunks, by (rank, round); the sender is named where several arrive at once."""
    arriving: dict[tuple[int, int], list[tuple[Arrow, str]]] = defaultdict(list)
    for arrow, chunks in messages.items():
        arriving[arrow.target, arrow.arrives].append((arrow, chunks))
    labels = {}
    for place, several in arriving.items():
        several.sort(key=lambda pair: pair[0].source)
        named = [f"{arrow.source}: {chunks}" if chunks and len(several) > 1 else chunks for arrow, chunks in several]
        labels[place] = list(zip(named, [ADDS if arrow.adds else MOVES for arrow, _ in several]))
    return labels


def _lines(axis: Axes, size: int, columns: range, across: int, nodes: Nodes | None) -> None:
    """The ranks, and the rounds or the nodes behind them."""
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
    axis.set_xlim(columns.start, columns.start + across)
    axis.set_ylim(size - 0.4, -0.7)
    axis.set_xticks([])
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _messages(axis: Axes, messages: dict[Arrow, str], columns: range) -> None:
    """The arrows; one that crosses from one row of rounds to the next is in both, cut at the edge."""
    from matplotlib.patches import FancyArrowPatch

    for arrow in messages:
        if arrow.leaves in columns or arrow.arrives in columns:
            tail, head = (arrow.leaves + TAIL, arrow.source), (arrow.arrives + HEAD, arrow.target)
            look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0, "zorder": 2}
            axis.add_patch(FancyArrowPatch(tail, head, color=ADDS if arrow.adds else MOVES, lw=1.1, **look))


def _write(axis: Axes, labels: dict[tuple[int, int], list[tuple[str, str]]], columns: range, crowd: int) -> None:
    """Write the received chunks beside the arrow heads."""
    for (target, column), texts in labels.items():
        if column not in columns:
            continue
        for index, (text, color) in enumerate(texts):
            y = target + (index - (len(texts) - 1) / 2) * 0.85 / max(2, crowd)
            box: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.85}
            size = 8 if crowd < 3 else 7
            axis.text(column + HEAD + 0.03, y, text, va="center", fontsize=size, color=color, bbox=box, zorder=3)


def _local(axis: Axes, schedules: Sequence[Schedule], count: int, columns: range) -> None:
    """Local work, below the rank's line."""
    for rank, schedule in enumerate(schedules):
        for column in columns:
            steps = schedule[column] if column < len(schedule) else ()
            work = [draw.step(step, count) for step in steps if isinstance(step, (Reduce, Copy))]
            if work:
                axis.text(column + HEAD, rank + 0.3, "\n".join(work), ha="center", va="center", fontsize=6, color=INK)


def output(text: str) -> Path:
    """File name with the suffix of a picture format."""
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text}: expected a name that ends in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no directory {path.parent}")
    return path


def placement(arguments: argparse.Namespace) -> Nodes | None:
    """The node of every rank, if the options name nodes; ValueError if they are wrong."""
    size, per_node = arguments.ranks, arguments.per_node
    if per_node is not None and arguments.nodes is not None:
        raise ValueError("--nodes and --per-node exclude each other: give one of them")
    if per_node is not None:
        if per_node < 1:
            raise ValueError(f"--per-node must be at least 1, found {per_node}")
        return numbered(regular(size, per_node))
    if arguments.nodes is None:
        return None
    names = arguments.nodes.split(",")
    if len(names) != size:
        raise ValueError(f"--nodes must name the node of each of {size} ranks, found {len(names)} names")
    return numbered(names)


def parse() -> tuple[argparse.Namespace, Algorithm, Nodes | None]:
    """The command line, its algorithm, and the placement."""
    parser = ProgramParser(__doc__)
    add = parser.add_argument
    add("--collective", required=True, choices=list(CATALOG), metavar="NAME", help=", ".join(CATALOG))
    add("--algorithm", required=True, metavar="NAME", help="one of the catalogue's for the collective")
    add("--ranks", type=int, default=5, metavar="P", help="number of ranks (default 5)")
    add("--root", type=int, metavar="R", help="the root, where there is one (default 0)")
    add("--segments", type=int, default=1, metavar="K", help="pipeline K segments of the data (default 1)")
    add("--per-node", type=int, metavar="K", help="nodes of K neighbouring ranks")
    add("--nodes", metavar="A,A,B,...", help="the node of every rank, by any names")
    add("-o", "--output", type=output, metavar="FILE", help="draw a picture, .png, .svg or .pdf")
    arguments = parser.parse_args()
    collective, size, root, segments = (getattr(arguments, n) for n in ("collective", "ranks", "root", "segments"))
    try:
        entry = find(collective, arguments.algorithm)
    except ValueError as error:
        parser.error(str(error))
    if size < 1:
        parser.error(f"--ranks must be at least 1, found {size}")
    if segments < 1 or (segments > 1 and collective == "barrier"):
        parser.error(f"--segments must be {'1 for a barrier' if segments > 1 else f'at least 1, found {segments}'}")
    if root is not None and not MEANINGS[collective].rooted:
        parser.error(f"--root: {collective} has no root")
    if not 0 <= (root or 0) < size:
        parser.error(f"--root must be a rank from 0 to {size - 1}, found {root}")
    if arguments.output and (fault := missing_matplotlib()):
        parser.error(fault)
    try:
        return arguments, entry, placement(arguments)
    except ValueError as error:
        parser.error(str(error))


def main() -> int:
    arguments, entry, nodes = parse()
    collective, name, size = arguments.collective, arguments.algorithm, arguments.ranks
    root, segments = arguments.root or 0, arguments.segments
    schedules = build_all(collective, name, size, root, segments, nodes)
    count = blocks(collective, name, size) * segments
    title = f"{collective}, {name}, {size} ranks"
    title += f", root {root}" if MEANINGS[collective].rooted else ""
    title += f", {segments} segments" if segments > 1 else ""
    title += f", {1 + max(nodes)} nodes" if nodes else ""
    if arguments.output is None:
        print(f"{title}\n{entry.idea}\n")
        print(draw.table(schedules, count, shutil.get_terminal_size((0, 0)).columns))
        return 0
    picture(arguments.output, title, schedules, count, nodes)
    print(f"{arguments.output} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
