"""Speed and memory of a training whose operators are cut over 1, 2, 4 ... of the ranks, and a plot of both.

chorus bench meshes -n 4 --output out/node.json
scripts/cluster --hosts 4 -- chorus bench meshes --output out/cluster.json
chorus bench meshes --plot out/tensor.png out/node.json out/cluster.json

All meshes train the same batches in turns, while the other ranks sleep. A row of the file has the seconds of every
step after the first ones of each turn, and the bytes of a rank by kind. A plot has their quartiles.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.benchmark.reports import check_writable, quartiles, read_report, save_figure, write
from collectives.cli import launcher
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import at_least, say
from collectives.selection.timing_file import machine, mpi_name
from parallel.cli.measure_scaling import RankPrefixes
from parallel.cli.reports.attention_plots import COLOURS
from parallel.engine.memory_ledger import KINDS
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.resources import limit_threads
from parallel.runtime.vector_memory import keep_freed_memory
from parallel.trainer.recipes import complete
from parallel.trainer.trainer import Training

Report = Mapping[str, Any]
"""Rows of a machine, with its number of ranks, and the model and the tokens of a step."""


def checked(report: Report) -> Report:
    """The report itself. Errors of any kind unless it has what is plotted."""
    if not rates(report) or not isinstance(report["model"], str):
        raise ValueError("no rows")
    for row in report["rows"]:
        row["nodes"] + sum(row["bytes"][kind] for kind in KINDS)
    return report


def rates(report: Report) -> dict[tuple[int, bool], Mapping[str, float]]:
    """Quartiles of tokens per second, by ranks along tp and sequence parallelism."""
    return {
        (row["tp"], row["sequence_parallel"]): quartiles(report["tokens"] / np.array(row["seconds"]))
        for row in report["rows"]
    }


def draw_mesh_scaling(path: Path, reports: Sequence[Report]) -> None:
    """Plot tokens per second, a line by report with and without sequence parallelism, and bytes of a rank by kind.

    Lines are medians, vertical ones quartiles.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, memory) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for report, colour in zip(reports, COLOURS):
        nodes, found = max(row["nodes"] for row in report["rows"]), rates(report)
        where = "one node" if nodes == 1 else f"{nodes} nodes"
        for sequence, style in ((False, "-"), (True, "--")):
            # one rank has no sequence parallelism: both lines begin at its point
            counts = [count for count, of in found if of == sequence or count == 1]
            points = [found[count, sequence and count > 1] for count in counts]
            middle = [point["median"] for point in points]
            ends = [[abs(point[end] - point["median"]) for point in points] for end in ("q1", "q3")]
            name = where + ", sequence parallel" * sequence
            speed.errorbar(counts, middle, ends, fmt=style, marker="o", capsize=3, color=colour, label=name)
    speed.set(xlabel="ranks along tp", ylabel="tokens per second", title=f"speed, {reports[0]['model']}")
    speed.set_ylim(bottom=0)
    _draw_memory(memory, reports[0]["rows"])
    counts = sorted({row["tp"] for report in reports for row in report["rows"]})
    speed.set_xticks(counts)
    speed.grid(alpha=0.3)
    speed.legend(fontsize=8)
    save_figure(path, figure, 90)


def _draw_memory(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bars of megabytes by kind, for each row."""
    names = [f"tp={row['tp']}" + "\nsequence" * row["sequence_parallel"] for row in rows]
    below = [0.0] * len(rows)
    for kind, colour in zip(KINDS, COLOURS):
        heights = [row["bytes"][kind] / 1e6 for row in rows]
        axes.bar(names, heights, 0.7, below, color=colour, label=kind)
        below = [start + height for start, height in zip(below, heights)]
    axes.set(ylabel="MB on a rank", title="memory")
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8)


WARM_UP = 2
"""Steps of a turn that do not count."""


class MeshTurn(NamedTuple):
    """Seconds of the steps of a turn, and bytes by kind, on one rank."""

    seconds: list[float]
    nbytes: dict[str, int]


def variants(counts: list[int]) -> Iterator[tuple[int, bool]]:
    """Ranks along tp, and True with sequence parallelism."""
    yield from ((count, sequence) for count in counts for sequence in (False, True)[: min(count, 2)])


def turn(options: dict[str, Any], comm: Communicator) -> MeshTurn:
    """Train some steps on all ranks of a communicator. Collective."""
    with Training(complete(options), comm) as training:
        seconds = [record.seconds for record in training.run()][WARM_UP:]
        ledger = training.engine.ledger.allocated
        return MeshTurn(seconds, {kind: ledger[kind] for kind in KINDS})


def measure(comm: Communicator, options: dict[str, Any], turns: int) -> list[dict[str, Any]]:
    """Rows of all variants: numbers of ranks, with and without sequence parallelism. Collective."""
    prefixes, nodes = RankPrefixes(comm), comm.nodes or (0,) * comm.Get_size()  # None on one node
    rows: dict[tuple[int, bool], dict[str, Any]] = {}
    for _ in range(turns):
        for count, sequence in variants(prefixes.counts):
            mesh: dict[str, Any] = {"mesh": f"tp={count}"} | ({"sequence_parallel": True} if sequence else {})
            found = prefixes.results(count, partial(turn, options | mesh))
            fixed = {"tp": count, "sequence_parallel": sequence, "nodes": len(set(nodes[:count]))}
            row = rows.setdefault((count, sequence), {**fixed, "seconds": []})
            row["seconds"] += [max(step) for step in zip(*(one.seconds for one in found))]
            row["bytes"] = max((one.nbytes for one in found), key=lambda one: sum(one.values()))
    return list(rows.values())


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = launcher.LauncherParser(__doc__)
    add = parser.add_argument
    add("files", type=Path, nargs="*", metavar="FILE", help="rows to plot, JSON")
    add("--plot", type=picture_file, metavar="FILE", help="plot the rows of files, and measure nothing")
    add("--output", type=Path, metavar="FILE", help="rows, JSON")
    add("--model", default="gpt:small", metavar="NAME", help="a gpt (default gpt:small)")
    add("--length", type=at_least(1, int), default=64, metavar="N", help="tokens of a sample (default 64)")
    add("--batch", type=at_least(1, int), default=8, metavar="N", help="samples of a step (default 8)")
    add("--steps", type=at_least(1, int), default=6, metavar="N", help=f"of a turn, after {WARM_UP} (default 6)")
    add("--turns", type=at_least(1, int), default=3, metavar="N", help="default 3")
    options = parser.parse_args(argv)
    if (options.plot is None) != (not options.files) or (options.plot is None) == (options.output is None):
        parser.error("expected --output FILE, or --plot FILE and files of rows")
    return options


def plot(path: Path, files: Sequence[Path]) -> None:
    """Plot the rows of files. ValueError if one has others."""
    rows = "rows of chorus bench meshes --output"
    draw_mesh_scaling(path, [read_report(one, rows, lambda data: checked(json.loads(data))) for one in files])


def main(argv: list[str] | None = None) -> int:
    """Measure, and write rows. Or plot the rows of files."""
    options = parse(argv)
    comm = Communicator(MPI.COMM_WORLD)
    if options.plot is not None:
        collective_call(comm, partial(plot, options.plot, options.files), "no plot", root=0)
        return 0
    collective_call(comm, partial(check_writable, options.output), "--output", root=0)
    keep_freed_memory()
    limit_threads(1)
    job = {"data": "pydoc", "model": options.model, "length": options.length, "batch": options.batch}
    rows = measure(comm, job | {"steps": options.steps + WARM_UP}, options.turns)
    tokens = options.length * options.batch
    found = {"mpi": mpi_name(), "machine": machine(), "model": options.model, "tokens": tokens, "rows": rows}
    collective_call(comm, partial(write, options.output, found), "--output", root=0)
    for (count, sequence), rate in rates(found).items():
        what = f"tp={count}" + ", sequence" * sequence
        say(f"{what:15} {rate['median']:8.0f} tokens/s  (quartiles {rate['q1']:.0f} to {rate['q3']:.0f})")
    say(f"{options.output} written")
    return 0
