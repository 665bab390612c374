"""Predict the time of every algorithm of a collective at any number of ranks, without MPI or a cluster.

    chorus simulate --collective allreduce --ranks 4096 --per-node 8 --bytes 1M
    chorus simulate --collective allreduce --ranks 4096 --per-node 8 --bytes 1M --plot out/scale.png

Times follow the alpha-beta-gamma model: a message of n bytes takes alpha + n beta, to combine n bytes takes n gamma.
Ranks of a node share its card. Rows marked "formula" have too many messages to simulate all ranks. The root is rank 0.
Pictures need matplotlib (the extra "plot").
"""

import argparse
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from collectives.algorithms import catalog
from collectives.analysis.cost_functions import ClusteredNetwork, LinearCost
from collectives.analysis.simulate_large import VectorSimulator
from collectives.benchmark.size_arguments import parse_size, parse_sizes
from collectives.cli.algorithm_file import entry_name
from collectives.cli.arguments import picture_file, words
from collectives.cli.launcher import ProgramParser, at_least, followed
from collectives.schedule.chunks import ChunkLayout
from collectives.schedule.topology import regular
from collectives.selection.expected_time import TimedCall
from collectives.selection.timing_file import TableError, default_path, read
from collectives.selection.timing_table import TimingTable
from collectives.units import format_bytes, format_time

FEW_ROUNDS, LARGEST = 6, 1 << 17
"""A schedule of up to `LARGEST` ranks is simulated if it has at most `FEW_ROUNDS` times log2 p rounds."""

MESSAGES = 1 << 17
"""Ranks times rounds up to which any schedule is simulated."""

CHUNKS = 1 << 18
"""Chunks of all ranks together up to which a schedule is simulated: an alltoall has p^2."""

RANGES = 1 << 22
"""Ranges of blocks of all messages up to which a strided schedule is simulated: there are ranks times nodes."""

SAMPLE = 64
"""Least number of ranks in the simulation that calibrates a formula for nodes."""


class CostPrediction(NamedTuple):
    """Cost parameters of a cluster of equal nodes: messages within and between nodes, and reduction per byte."""

    per_node: int  # ranks on a node, the last node may have fewer
    node: LinearCost  # a message within a node
    network: LinearCost  # a message between nodes, whose card all ranks of a node share
    gamma: float  # seconds to combine a byte

    def of(self, size: int) -> ClusteredNetwork:
        return ClusteredNetwork(regular(size, self.per_node), self.node, self.network, LinearCost(0, self.gamma))


class PredictionRow(NamedTuple):
    """Predicted cost of one algorithm for one number of ranks and one array size."""

    algorithm: str
    size: int
    nbytes: int
    rounds: int  # messages that wait for one another
    volume: int  # bytes that the busiest rank sends or receives, whichever is more
    traffic: int | None  # bytes that all ranks send together, None where unknown
    seconds: float
    bound: float  # seconds that no algorithm can beat
    simulated: bool  # rather than calculated by formula


def layout_of(collective: str, name: str, size: int, nbytes: int) -> ChunkLayout:
    """Byte ranges of the chunks. `nbytes` is the whole vector, or all blocks, or (alltoall) the blocks of one rank."""
    return TimedCall(collective, name, 1, size, nbytes).layout


def is_quick_to_simulate(collective: str, name: str, size: int, nodes: int = 1) -> bool:
    """True if an algorithm on `size` ranks of `nodes` nodes can be simulated in a few seconds, by estimate."""
    entry = catalog.find(collective, name)
    rounds = catalog.evaluate(entry.rounds, size, 1, nodes)
    if catalog.blocks(collective, name, size) > max(size, CHUNKS):
        return False
    if entry.strided and 1 < nodes < size and nodes * size > RANGES:
        return False
    return rounds * size <= MESSAGES or (size <= LARGEST and rounds <= FEW_ROUNDS * size.bit_length())


@lru_cache(maxsize=32)
def _simulator(collective: str, name: str, size: int, per_node: int) -> VectorSimulator:
    """Simulator of all ranks of an algorithm, with root 0."""
    nodes = regular(size, per_node) if size > per_node else None
    symmetry = catalog.symmetry_of(collective, name, size, nodes)
    ranks = range(size) if symmetry is None else symmetry.ranks
    return VectorSimulator(catalog.rounds_of(ranks, collective, name, size, nodes=nodes), symmetry)


def simulated_seconds(collective: str, name: str, size: int, nbytes: int, model: CostPrediction) -> float:
    simulator = _simulator(collective, name, size, model.per_node)
    return float(simulator.price(layout_of(collective, name, size, nbytes), 1, model.of(size)).max())


def traffic(collective: str, name: str, size: int, nbytes: int, model: CostPrediction) -> int | None:
    """Bytes that all ranks send together: counted, or by formula where the schedule is too large and has one."""
    if is_quick_to_simulate(collective, name, size, -(-size // model.per_node)):
        layout = layout_of(collective, name, size, nbytes)
        return _simulator(collective, name, size, model.per_node).traffic(layout, 1)
    total = catalog.find(collective, name).total
    return round(catalog.evaluate(total, size) * nbytes) if total else None


def by_formula(collective: str, name: str, size: int, nbytes: int, model: CostPrediction) -> float:
    """Predicted seconds of an algorithm by its cost formula. Across nodes scaled to a simulation of a few nodes.

    The simulation accounts for cheaper messages within nodes, and for the cost of a shared card. alpha and beta are
    scaled separately, each by the ratio of simulation to formula.
    """
    entry = catalog.find(collective, name)
    if size <= model.per_node:
        return float(entry.seconds(size, nbytes, *model.node, model.gamma))
    scaled = {}
    for cost, other in (("alpha", "beta"), ("beta", "alpha")):
        node, network = (wire._replace(**{other: 0.0}) for wire in (model.node, model.network))
        alone = CostPrediction(model.per_node, node, network, 0.0)
        scaled[cost] = getattr(network, cost) * _weight(collective, name, alone)
    return float(entry.seconds(size, nbytes, **scaled, gamma=model.gamma))


@lru_cache(maxsize=256)
def _weight(collective: str, name: str, model: CostPrediction) -> float:
    """Ratio of an algorithm's simulated time on a few nodes to the time by its cost formula. 1.0 if that is zero."""
    size, nbytes = max(SAMPLE, 4 * model.per_node), 1 << 20
    expected = catalog.find(collective, name).seconds(size, nbytes, *model.network, 0.0)
    return simulated_seconds(collective, name, size, nbytes, model) / float(expected) if expected else 1.0


def bound(collective: str, size: int, nbytes: int, model: CostPrediction) -> float:
    """Lower bound in seconds for any algorithm of a collective: the largest by latency, bandwidth or reduction."""
    if size == 1:
        return 0.0
    least, nodes = catalog.BOUNDS[collective], size // model.per_node
    cheapest = LinearCost(*map(min, model.node, model.network)) if nodes else model.node
    per_node = nbytes * (model.per_node if collective == "alltoall" else 1)  # what the ranks of a node hold together
    seconds = [nbytes * float(catalog.evaluate(least.combined, size)) * model.gamma]
    for ends, held, wire in ((size, nbytes, cheapest), (nodes, per_node, model.network)):
        if ends > 1:
            seconds.append(float(catalog.evaluate(least.rounds, ends)) * wire.alpha)
            seconds.append(float(catalog.evaluate(least.volume, ends)) * held * wire.beta)
    return max(seconds)


def row(collective: str, name: str, size: int, nbytes: int, model: CostPrediction) -> PredictionRow:
    entry, nodes = catalog.find(collective, name), -(-size // model.per_node)
    simulated = is_quick_to_simulate(collective, name, size, nodes)
    seconds = (simulated_seconds if simulated else by_formula)(collective, name, size, nbytes, model)
    rounds, volume = (catalog.evaluate(formula, size, 1, nodes) for formula in (entry.rounds, entry.volume))
    least = bound(collective, size, nbytes, model)
    together = traffic(collective, name, size, nbytes, model)
    return PredictionRow(name, size, nbytes, int(rounds), round(volume * nbytes), together, seconds, least, simulated)


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
    """The user's tuned table, or an empty one. A file that cannot be used is reported."""
    try:
        return read(default_path())
    except FileNotFoundError:
        return TimingTable()
    except (OSError, TableError) as error:
        print(f"chorus simulate: continuing without a tuned table: {error}", file=sys.stderr)
        return TimingTable()


def cost_model(arguments: argparse.Namespace) -> CostPrediction:
    """Cost parameters from the options. Missing ones come from the tuned table, else from the defaults."""
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
    heading = f"{'algorithm':<22}{'rounds':>10}{'busiest':>12}{'all ranks':>12}{'time':>12}{'/ best':>9}{'bound':>12}"
    lines = [f"{heading}{'/ bound':>9}  priced by"]
    for row in rows:
        to_best = f"{row.seconds / best.seconds:.2f}" if best.seconds else "-"
        to_bound = f"{row.seconds / row.bound:.2f}" if row.bound else "-"
        together = "-" if row.traffic is None else format_bytes(row.traffic)
        lines.append(
            f"{row.algorithm + (' *' if row is best else ''):<22}{row.rounds:>10}"
            f"{format_bytes(row.volume):>12}{together:>12}"
            f"{format_time(row.seconds):>12}{to_best:>9}{format_time(row.bound):>12}{to_bound:>9}  "
            f"{'clock' if row.simulated else 'formula'}"
        )
    return [*lines, "* the best"]


def sweep(
    collective: str, points: Iterable[tuple[int, int]], names: list[str], model: CostPrediction
) -> list[PredictionRow]:
    todo = [(name, *point) for point in points for name in names]
    priced = followed(todo, "pricing", "price")
    return [row(collective, name, size, nbytes, model) for name, size, nbytes in priced]


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
    add("--algorithm", type=words, metavar="NAME,...", help="only these, or file.py:function")
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
    wanted = arguments.algorithm or catalog.names(arguments.collective)
    try:
        arguments.algorithm = [entry_name(arguments.collective, name, arguments.ranks) for name in wanted]
    except ValueError as error:
        parser.error(f"--algorithm: {error}")
    for name in arguments.algorithm:
        if arguments.plot and catalog.find(arguments.collective, name).rounds.isdecimal():
            parser.error(f"--plot: expected algorithms with cost formulas for other numbers of ranks, found {name!r}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    collective, ranks, names = arguments.collective, arguments.ranks, arguments.algorithm
    model = cost_model(arguments)
    title = f"{collective}, {ranks} ranks on {-(-ranks // model.per_node)} nodes, {format_bytes(arguments.bytes)}"
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
