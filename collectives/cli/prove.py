"""Prove every algorithm in the catalogue correct for all numbers of ranks up to a limit, and show its costs.

    chorus prove collectives --max-size 64

Runs in one process. Up to 16 ranks all roots are tried, and above a sample. Up to 16 ranks every schedule is also
proved when it is pipelined over 2 and 3 segments, and those that depend on the placement on many of them, with equal
and unequal nodes, in order and interleaved. Ends with a status other than 0 at the first fault.
"""

import random
import sys
import time
from collections import Counter
from fractions import Fraction
from itertools import product
from typing import NamedTuple, TypeAlias

from collectives.algorithms import catalog
from collectives.analysis.matching import ScheduleError
from collectives.analysis.prove import Proof, prove
from collectives.cli.algorithm_file import entry_name
from collectives.cli.arguments import words
from collectives.cli.launcher import ProgramParser, at_least, followed
from collectives.schedule import semantics
from collectives.schedule.topology import Nodes, numbered
from collectives.units import format_time

SEGMENTS = (1, 2, 3)
"""Numbers of segments in the proofs of few ranks."""


def roots(collective: str, size: int, nodes: Nodes | None = None) -> list[int]:
    """Roots to prove: 0 if the collective has none. All up to 16 ranks, else up to six. Three if `nodes` are given."""
    if not semantics.MEANINGS[collective].rooted:
        return [0]
    if nodes is not None:
        return sorted({0, size // 2, size - 1})
    if size <= 16:
        return list(range(size))
    drawn = random.Random(size).sample(range(size), 2)
    return sorted({0, 1, size // 2, size - 1, *drawn})


def placements(size: int) -> list[Nodes | None]:
    """Rank-to-node maps to prove: one node, blocks of k ranks, ranks dealt round-robin over k nodes, random maps."""
    drawn = random.Random(size)
    # few maps of many ranks: their proofs take long
    widths = [width for width in (1, 2, 3, 4, 5, 8) if width < size]
    found = [numbered(rank // width for rank in range(size)) for width in widths if size <= 16 or width in (3, 8)]
    found += [numbered(rank % width for rank in range(size)) for width in widths if size <= 16 or width == 5]
    if size <= 16:
        found += [numbered(drawn.randrange(most) for _ in range(size)) for most in (2, 3, size)]
    return [None, *dict.fromkeys(nodes for nodes in found if nodes)]


def nodes_alike(nodes: Nodes | None) -> int:
    """Number of nodes if all have equally many ranks (1 for None), else 0."""
    if nodes is None:
        return 1
    ranks = Counter(nodes).values()
    return len(ranks) if len(set(ranks)) == 1 else 0


Costs: TypeAlias = tuple[Fraction, ...]
"""Rounds, volume, combined."""


def costs(vector: int, proof: Proof) -> Costs:
    """Costs of a proved schedule: rounds. Data moved and combined by the busiest rank, in units of `vector` chunks."""
    volume = max(*proof.sent, *proof.received)
    return Fraction(proof.rounds), Fraction(volume, vector), Fraction(max(proof.combined), vector)


def check_costs(collective: str, name: str, size: int, done: Costs, segments: int = 1, nodes: int = 1) -> None:
    entry, bound = catalog.find(collective, name), catalog.BOUNDS[collective]
    formulas, names = (entry.rounds, entry.volume, entry.combined), ("rounds", "volume", "combined")
    for what, value, formula, least in zip(names, done, formulas, bound, strict=True):
        expected, lowest = catalog.evaluate(formula, size, segments, nodes), catalog.evaluate(least, size)
        if value > expected or (entry.exact and value < expected):
            raise ScheduleError(f"{what}: the catalogue expects {formula} = {expected}, found {value}")
        if size > 1 and value < lowest:
            raise ScheduleError(f"{what}: expected at least {least} = {lowest}, the lower bound, found {value}")


class ProvedAlgorithm(NamedTuple):
    """Result of proving one algorithm: number of proved schedules, and costs at the largest number of ranks."""

    collective: str
    name: str
    schedules: int
    costs: Costs

    def line(self, size: int) -> str:
        bounds = [catalog.evaluate(formula, size) for formula in catalog.BOUNDS[self.collective]]
        pairs = zip(self.costs, bounds, strict=True)
        rounds, volume, combined = (f"{float(value):.4g} ({float(bound):.4g})" for value, bound in pairs)
        ordered = catalog.find(self.collective, self.name).ordered and semantics.MEANINGS[self.collective].reduces
        order = "kept" if ordered else ""
        return f"{self.collective:<16}{self.name:<20}{rounds:>14}{volume:>18}{combined:>18}  {order}".rstrip()


def prove_algorithm(collective: str, name: str, max_size: int) -> ProvedAlgorithm:
    """Prove an algorithm for 1 to `max_size` ranks and check its costs. ScheduleError at the first fault."""
    entry = catalog.find(collective, name)
    ordered = alike = True  # so far, where it must be
    proved, where = 0, ""
    try:
        for size in range(1, max_size + 1):
            blocks = catalog.blocks(collective, name, size)
            vector = semantics.vector(collective, size, blocks)
            for nodes, segments in product(placements(size) if entry.placed else [None], SEGMENTS):
                if segments > 1 and (size > 16 or nodes is not None or collective == "barrier"):
                    continue
                most: Costs = (Fraction(0),) * 3
                for root in roots(collective, size, nodes):
                    where = f"{collective} {name}, {size} ranks, root {root}, {segments} segments"
                    where += f", nodes {nodes}" if nodes else ""
                    schedules = catalog.build_all(collective, name, size, root, segments, nodes)
                    proof = prove(collective, schedules, root, segments, blocks)
                    ordered &= proof.ordered or not entry.keeps_order(nodes)
                    alike &= proof.alike
                    proved += 1
                    most = tuple(map(max, most, costs(vector * segments, proof)))
                if nodes is None and segments == 1:
                    worst = most
                if entry.rounds and (segments == 1 or entry.cuts) and nodes_alike(nodes) and size > 1:
                    check_costs(collective, name, size, most, segments, nodes_alike(nodes))
    except ScheduleError as fault:
        raise ScheduleError(f"{where}: {fault}") from fault
    if not ordered:
        raise ScheduleError(f"{collective} {name} does not keep rank order, but the catalogue states it")
    if alike < entry.alike:
        raise ScheduleError(f"{collective} {name} gives ranks different bits, but the catalogue states equal ones")
    return ProvedAlgorithm(collective, name, proved, worst)


def main() -> int:
    parser = ProgramParser(__doc__)
    count = at_least(1, int, 1 << 12)
    parser.add_argument("--max-size", type=count, default=64, help="largest number of ranks (default 64)")
    parser.add_argument("--collective", action="append", choices=list(catalog.CATALOG), help="only this one")
    parser.add_argument("--algorithm", type=words, metavar="NAME,...", help="only these, or file.py:function")
    arguments = parser.parse_args()
    collectives = arguments.collective or list(catalog.CATALOG)
    if arguments.algorithm and not arguments.collective:  # others may not have it
        parser.error("--algorithm: expected --collective NAME as well")
    try:
        entries = [
            (collective, entry_name(collective, name))
            for collective in collectives
            for name in arguments.algorithm or catalog.names(collective)
        ]
    except ValueError as error:
        parser.error(f"--algorithm: {error}")
    began, size = time.perf_counter(), arguments.max_size
    try:
        rows = [
            prove_algorithm(collective, name, size) for collective, name in followed(entries, "proving", "algorithm")
        ]
    except ScheduleError as fault:
        print(fault, file=sys.stderr)
        return 1
    print(f"At {size} ranks, in rounds and in vectors of n bytes (of the busiest rank); bounds in brackets:\n")
    print(f"{'collective':<16}{'algorithm':<20}{'rounds':>14}{'volume':>18}{'combined':>18}  rank order")
    print(*(row.line(size) for row in rows), sep="\n")
    proved, seconds = sum(row.schedules for row in rows), time.perf_counter() - began
    print(f"\nproved {proved} schedules of {len(entries)} algorithms for 1 to {size} ranks in {format_time(seconds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
