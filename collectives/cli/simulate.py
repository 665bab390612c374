"""Predict the time of every algorithm of a collective at any number of ranks, without MPI or a cluster.

    chorus simulate --collective allreduce --ranks 4096 --per-node 8 --bytes 1M
    chorus simulate --collective allreduce --ranks 4096 --per-node 8 --bytes 1M --plot out/scale.png

Times are those of the alpha-beta-gamma model: a message of n bytes takes alpha + n beta, to combine n bytes takes
n gamma; ranks of a node share its card. Rows marked "formula" have too many messages to simulate all ranks.
The root is rank 0. Pictures need matplotlib (the extra "plot").
"""

import argparse
import re
import sys
from collections.abc import Iterable

from tqdm import tqdm

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import LinearCost
from collectives.benchmark import predictions as paper
from collectives.benchmark.predictions import CostPrediction, PredictionRow
from collectives.benchmark.size_arguments import format_size, format_time, parse_size, parse_sizes
from collectives.cli.arguments import picture_file
from collectives.cli.launcher import ProgramParser, at_least
from collectives.selection.timing_file import TableError, default_path, read
from collectives.selection.timing_table import TimingTable

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
RATES = {"GB/s": 1e9, "MB/s": 1e6, "Gbit/s": 1e9 / 8, "Mbit/s": 1e6 / 8}


def _quantity(text: str, units: dict[str, float], expected: str) -> tuple[float, float | None]:
    match = re.fullmatch(rf"([\d.]+(?:e[+-]?\d+)?)\s*({'|'.join(units)}|)", text.strip())
    if not match or not (float(match[1]) or units is TIMES):
        raise argparse.ArgumentTypeError(f"{text!r} is no {expected}")
    return float(match[1]), units.get(match[2])


def seconds(text: str) -> float:
    """Argument type: seconds, from a time such as 5us, 0.2ms or 2e-6 (seconds)."""
    number, unit = _quantity(text, TIMES, "time; write it as 5us, 0.2ms or 2e-6 (seconds)")
    return number * (unit or 1.0)


def per_byte(text: str) -> float:
    """Argument type: seconds per byte, from a rate such as 12.5GB/s or 10Gbit/s, or a number of seconds."""
    number, unit = _quantity(text, RATES, "rate; write it as 12.5GB/s, 10Gbit/s or 8e-11 (seconds a byte)")
    return 1 / (number * unit) if unit else number


def timing_table(path: str) -> TimingTable:
    try:
        return read(path)
    except (OSError, TableError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def own_table() -> TimingTable:
    """The user's tuned table, or an empty one; a file that cannot be used is reported."""
    try:
        return read(default_path())
    except FileNotFoundError:
        return TimingTable()
    except (OSError, TableError) as error:
        print(f"chorus simulate: continuing without a tuned table: {error}", file=sys.stderr)
        return TimingTable()


def cost_model(arguments: argparse.Namespace) -> CostPrediction:
    """Cost parameters from the options; missing ones come from the tuned table, else from the defaults."""
    known = (arguments.table or own_table()).costs
    given = arguments.node_alpha, arguments.node_beta, arguments.alpha, arguments.beta, arguments.gamma
    default = *known.shared[:2], *known.network[:2], known.shared.gamma
    node_alpha, node_beta, alpha, beta, gamma = (d if g is None else g for g, d in zip(given, default, strict=True))
    return CostPrediction(arguments.per_node, LinearCost(node_alpha, node_beta), LinearCost(alpha, beta), gamma)


def describe(model: CostPrediction) -> str:
    def rate(per_byte: float) -> str:
        return f"{1e-9 / per_byte:.3g} GB/s" if per_byte else "any rate"

    wires = (("within nodes", model.node), ("a node's card", model.network))
    parts = [f"{where}: {format_time(wire.alpha)} a message, {rate(wire.beta)}" for where, wire in wires]
    return "; ".join([*parts, f"combining: {rate(model.gamma)}"])


def table(rows: list[PredictionRow]) -> list[str]:
    best = min(rows, key=lambda row: row.seconds)
    heading = f"{'algorithm':<22}{'rounds':>10}{'bytes':>16}{'all ranks':>16}{'time':>12}{'/ best':>9}{'bound':>12}"
    lines = [f"{heading}{'/ bound':>9}  priced by"]
    for row in rows:
        to_best = f"{row.seconds / best.seconds:.2f}" if best.seconds else "-"
        to_bound = f"{row.seconds / row.bound:.2f}" if row.bound else "-"
        together = "-" if row.traffic is None else row.traffic
        lines.append(
            f"{row.algorithm + (' *' if row is best else ''):<22}{row.rounds:>10}{row.volume:>16}{together:>16}"
            f"{format_time(row.seconds):>12}{to_best:>9}{format_time(row.bound):>12}{to_bound:>9}  "
            f"{'clock' if row.simulated else 'formula'}"
        )
    return [*lines, "* the best"]


def sweep(
    collective: str, points: Iterable[tuple[int, int]], names: list[str], model: CostPrediction
) -> list[PredictionRow]:
    todo = tqdm([(name, *point) for point in points for name in names], desc="pricing", unit="price", disable=None)
    rows = []
    for name, size, nbytes in todo:
        todo.set_postfix_str(name)
        rows.append(paper.row(collective, name, size, nbytes, model))
    return rows


def rank_counts(most: int) -> list[int]:
    """Powers of four from 4 up to `most`, and `most` itself.

    >>> rank_counts(1000)
    [4, 16, 64, 256, 1000]
    """
    return sorted({4**power for power in range(1, 16) if 4**power <= most} | {most})


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ProgramParser(__doc__)
    add = parser.add_argument
    add("--collective", default="allreduce", choices=list(catalog.CATALOG), metavar="NAME", help="the catalogue's")
    add("--algorithm", metavar="NAME,...", help="only these")
    count = at_least(1, int)
    add("--ranks", type=count, default=4096, metavar="P", help="ranks (default 4096)")
    add("--bytes", type=parse_size, default="1M", metavar="SIZE", help="of the whole array (default 1M)")
    add("--per-node", type=count, default=1, metavar="K", help="ranks on each node (default 1)")
    add("--table", type=timing_table, metavar="FILE", help="costs from chorus tune (default: your own, if any)")
    add("--alpha", type=seconds, metavar="TIME", help="a message between nodes")
    add("--beta", type=per_byte, metavar="RATE", help="of a node's card")
    add("--node-alpha", type=seconds, metavar="TIME", help="a message within a node")
    add("--node-beta", type=per_byte, metavar="RATE", help="of messages within a node")
    add("--gamma", type=per_byte, metavar="RATE", help="of combining two vectors")
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
    arguments = parse(argv)
    collective, ranks, names = arguments.collective, arguments.ranks, arguments.algorithm
    model = cost_model(arguments)
    title = f"{collective}, {ranks} ranks on {-(-ranks // model.per_node)} nodes, {format_size(arguments.bytes)} bytes"
    costs = describe(model)
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
