"""Price every algorithm of a collective at any number of ranks, on paper: no MPI job, no cluster.

    chorus simulate --collective allreduce --ranks 4096 --per-node 8 --bytes 1M
    chorus simulate --collective allreduce --ranks 4096 --per-node 8 --bytes 1M --plot out/scale.png

Times are those of the alpha-beta-gamma model: a message of n bytes takes alpha + n beta, to combine n bytes takes
n gamma; ranks of a node share its card. Rows marked "formula" have too many messages to simulate all ranks.
The root is rank 0. Pictures need matplotlib (the extra "plot").
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from tqdm import tqdm

from collectives.algorithms import catalog
from collectives.benchmark import predictions as paper
from collectives.benchmark.predictions import CostPrediction, PredictionRow
from collectives.benchmark.size_arguments import format_size, parse_size, parse_sizes
from collectives.cli import cost_arguments
from collectives.cli.arguments import picture_file
from collectives.cli.cost_arguments import time
from collectives.cli.launcher import ProgramParser, at_least


def table(rows: list[PredictionRow]) -> list[str]:
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


def sweep(
    collective: str, points: Iterable[tuple[int, int]], names: list[str], model: CostPrediction
) -> list[PredictionRow]:
    todo = tqdm([(name, *point) for point in points for name in names], desc="pricing", unit="price", disable=None)
    return [paper.row(collective, name, size, nbytes, model) for name, size, nbytes in todo]


def rank_counts(most: int) -> list[int]:
    """Powers of four up to so many ranks, and these.

    >>> rank_counts(1000)
    [4, 16, 64, 256, 1000]
    """
    return sorted({4**power for power in range(1, 16) if 4**power <= most} | {most})


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = ProgramParser(__doc__)
    add = parser.add_argument
    add("--collective", default="allreduce", choices=list(catalog.CATALOG), metavar="NAME", help="the catalogue's")
    add("--algorithm", metavar="NAME,...", help="only these")
    count = at_least(1, int)
    add("--ranks", type=count, default=4096, metavar="P", help="ranks (default 4096)")
    add("--bytes", type=parse_size, default="1M", metavar="SIZE", help="of the whole array (default 1M)")
    cost_arguments.add_options(parser)
    add("--plot", type=picture_file, metavar="FILE", help="draw time against ranks and against size (PNG, SVG, PDF)")
    add("--up-to", type=count, default=1 << 16, metavar="P", help="ranks in the picture (default 65536)")
    add("--sizes", type=parse_sizes, default="8:256M:8", metavar="SIZES", help="in the picture (8:256M:8)")
    arguments = parser.parse_args(argv)
    known = catalog.names(arguments.collective)
    wanted = arguments.algorithm.split(",") if arguments.algorithm else known
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"--algorithm: {arguments.collective} has no {', '.join(unknown)}; known: {', '.join(known)}")
    arguments.algorithm = wanted
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The table, and the picture."""
    arguments = parse(argv)
    collective, ranks, names = arguments.collective, arguments.ranks, arguments.algorithm
    model = cost_arguments.model(arguments)
    title = f"{collective}, {ranks} ranks on {-(-ranks // model.per_node)} nodes, {format_size(arguments.bytes)} bytes"
    costs = cost_arguments.describe(model)
    print(f"# {title}\n# {costs}")
    print("\n".join(table(sweep(collective, [(ranks, arguments.bytes)], names, model))))
    if arguments.plot:
        from collectives.benchmark.race_plots import plot_scale

        counts, sizes = rank_counts(arguments.up_to), arguments.sizes
        across = sweep(collective, [(count, arguments.bytes) for count in counts], names, model)
        along = sweep(collective, [(ranks, nbytes) for nbytes in sizes], names, model)
        plot_scale(arguments.plot, f"{collective}, {model.per_node} ranks on a node", costs, across, along)
        print(f"{arguments.plot} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
