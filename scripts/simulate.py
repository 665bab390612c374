"""Price every algorithm of a collective at any number of ranks, on paper: no MPI job, no cluster.

    python scripts/simulate.py --collective allreduce --ranks 4096 --per-node 8 --bytes 1M
    python scripts/simulate.py --collective allreduce --ranks 4096 --per-node 8 --bytes 1M --plot out/scale.png

Times are those of the alpha-beta-gamma model: a message of n bytes takes alpha + n beta, to combine n bytes takes
n gamma; ranks of a node share its card. Rows marked "formula" have too many messages to play all ranks.
The root is rank 0. Pictures need matplotlib (the extra "plot").
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from benchlib import model as paper
from benchlib.model import Model, Row
from benchlib.sizes import format_size, parse_size, parse_sizes
from collectives import catalog
from collectives.networks import Line
from collectives.select import BUILT_IN

NETWORK = Line(20e-6, 1 / 1.25e9)
"""Between nodes, where nothing is said: Ethernet of 10 Gbit/s."""

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
RATES = {"GB/s": 1e9, "MB/s": 1e6, "Gbit/s": 1e9 / 8, "Mbit/s": 1e6 / 8}


def seconds(text: str) -> float:
    """A time such as 5us, 0.2ms or 2e-6 (seconds)."""
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*(s|ms|us|ns|)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as 5us, 0.2ms or 2e-6 (seconds)")
    return float(match[1]) * TIMES[match[2] or "s"]


def per_byte(text: str) -> float:
    """Seconds a byte, from a rate such as 12.5GB/s or 10Gbit/s, or as a number of seconds."""
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*(GB/s|MB/s|Gbit/s|Mbit/s|)", text.strip())
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no rate; write it as 12.5GB/s, 10Gbit/s or 8e-11 (seconds a byte)"
        )
    return float(match[1]) if not match[2] else 1 / (float(match[1]) * RATES[match[2]])


def time(value: float) -> str:
    """Seconds for people."""
    unit = next((unit for unit in ("s", "ms") if value >= TIMES[unit]), "us")
    return f"{value / TIMES[unit]:.4g} {unit}"


def table(rows: list[Row]) -> list[str]:
    """The rows as text, the best one marked."""
    best = min(rows, key=lambda row: row.seconds)
    heading = f"{'algorithm':<22}{'rounds':>10}{'bytes':>16}{'time':>12}{'/ best':>9}{'bound':>12}{'/ bound':>9}"
    lines = [f"{heading}  priced by"]
    for row in rows:
        to_best = f"{row.seconds / best.seconds:.2f}" if best.seconds else "-"
        to_bound = f"{row.seconds / row.bound:.2f}" if row.bound else "-"
        lines.append(
            f"{row.algorithm + (' *' if row is best else ''):<22}{row.rounds:>10}{row.volume:>16}"
            f"{time(row.seconds):>12}{to_best:>9}{time(row.bound):>12}{to_bound:>9}  "
            f"{'clock' if row.played else 'formula'}"
        )
    return [*lines, "* the best"]


def sweep(collective: str, points: Iterable[tuple[int, int]], names: list[str], model: Model) -> list[Row]:
    """All algorithms at all (ranks, bytes)."""
    todo = [(name, *point) for point in points for name in names]
    return [paper.row(collective, *each, model) for each in tqdm(todo, desc="pricing", unit="price", disable=None)]


def rank_counts(most: int) -> list[int]:
    """Powers of four up to so many ranks, and these.

    >>> rank_counts(1000)
    [4, 16, 64, 256, 1000]
    """
    return sorted({4**power for power in range(1, 16) if 4**power <= most} | {most})


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--collective", default="allreduce", choices=list(catalog.CATALOG), metavar="NAME", help="the catalogue's")
    add("--algorithm", metavar="NAME,...", help="only these")
    add("--ranks", type=int, default=4096, metavar="P", help="ranks (default 4096)")
    add("--per-node", type=int, default=1, metavar="K", help="ranks on each node (default 1)")
    add("--bytes", type=parse_size, default="1M", metavar="SIZE", help="of the whole array (default 1M)")
    add("--alpha", type=seconds, default=NETWORK.alpha, metavar="TIME", help="a message between nodes (20us)")
    add("--beta", type=per_byte, default=NETWORK.beta, metavar="RATE", help="of a node's card (10Gbit/s)")
    add("--node-alpha", type=seconds, default=BUILT_IN.alpha, metavar="TIME", help="a message within a node")
    add("--node-beta", type=per_byte, default=BUILT_IN.beta, metavar="RATE", help="of messages within a node")
    add("--gamma", type=per_byte, default=BUILT_IN.gamma, metavar="RATE", help="of combining two vectors")
    add("--plot", type=Path, metavar="FILE", help="draw time against ranks and against size (PNG, SVG, PDF)")
    add("--up-to", type=int, default=1 << 16, metavar="P", help="ranks in the picture (default 65536)")
    add("--sizes", type=parse_sizes, default="8:256M:8", metavar="SIZES", help="in the picture (8:256M:8)")
    arguments = parser.parse_args(argv)
    for name in ("ranks", "per_node", "up_to"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, found {getattr(arguments, name)}")
    known = catalog.names(arguments.collective)
    wanted = arguments.algorithm.split(",") if arguments.algorithm else known
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"--algorithm: {arguments.collective} has no {', '.join(unknown)}; known: {', '.join(known)}")
    arguments.algorithm = wanted
    if arguments.plot:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            parser.error(f"pictures need matplotlib ({error}): pip install 'chorus-mpi[plot]'")
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The table, and the picture."""
    arguments = parse(argv)
    collective, ranks, names = arguments.collective, arguments.ranks, arguments.algorithm
    node, network = Line(arguments.node_alpha, arguments.node_beta), Line(arguments.alpha, arguments.beta)
    model = Model(arguments.per_node, node, network, arguments.gamma)
    title = f"{collective}, {ranks} ranks on {-(-ranks // model.per_node)} nodes, {format_size(arguments.bytes)} bytes"
    costs = "; ".join(
        f"{where}: {time(wire.alpha)} a message, {1e-9 / wire.beta if wire.beta else 0:.3g} GB/s"
        for where, wire in (("within nodes", node), ("a node's card", network))
    )
    print(f"# {title}\n# {costs}; combining: {1e-9 / model.gamma if model.gamma else 0:.3g} GB/s")
    print("\n".join(table(sweep(collective, [(ranks, arguments.bytes)], names, model))))
    if arguments.plot:
        from benchlib.plots import plot_scale

        counts, sizes = rank_counts(arguments.up_to), arguments.sizes
        across = sweep(collective, [(count, arguments.bytes) for count in counts], names, model)
        along = sweep(collective, [(ranks, nbytes) for nbytes in sizes], names, model)
        plot_scale(arguments.plot, f"{collective}, {model.per_node} ranks on a node", costs, across, along)
        print(f"{arguments.plot} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
