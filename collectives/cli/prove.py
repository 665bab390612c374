"""Prove every algorithm in the catalogue for every number of ranks, and show what it costs against the bounds.

    chorus prove collectives --max-size 64

Runs in one process. Roots are all of them up to 16 ranks and a sample above; up to 16 ranks every schedule is also
proved when it is pipelined over 2 and 3 segments, and those that look at which ranks share a node on many placements,
with equal and unequal nodes, in order and interleaved. Ends with a status other than 0 at the first fault.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from fractions import Fraction
from typing import TypeAlias

from tqdm import tqdm

from collectives.algorithms import catalog
from collectives.analysis.prove import Proof, ScheduleError, prove
from collectives.cli.launcher import ProgramParser
from collectives.schedule import semantics
from collectives.schedule.topology import Nodes, numbered

SEGMENTS = (1, 2, 3)
"""Into how many segments the data is cut in the proofs of few ranks."""


def roots(collective: str, size: int, nodes: Nodes | None = None) -> list[int]:
    """The roots to try: all up to 16 ranks, above that the ends, the middle and two drawn by chance; few on nodes."""
    if not semantics.MEANINGS[collective].rooted:
        return [0]
    if nodes is not None:
        return sorted({0, size // 2, size - 1})
    if size <= 16:
        return list(range(size))
    drawn = random.Random(size).sample(range(size), 2)
    return sorted({0, 1, size // 2, size - 1, *drawn})


def placements(size: int) -> list[Nodes | None]:
    """One node; nodes of 1, 2, 3 and more ranks, in order and interleaved; up to 16 ranks some drawn by chance."""
    drawn = random.Random(size)
    widths = [width for width in (1, 2, 3, 4, 5, 8) if width < size]
    found = [numbered(rank // width for rank in range(size)) for width in widths if size <= 16 or width in (3, 8)]
    found += [numbered(rank % width for rank in range(size)) for width in widths if size <= 16 or width == 5]
    if size <= 16:
        found += [numbered(drawn.randrange(most) for _ in range(size)) for most in (2, 3, size)]
    return [None, *dict.fromkeys(nodes for nodes in found if nodes)]


def nodes_alike(nodes: Nodes | None) -> int:
    """Number of nodes if all have equally many ranks, else 0."""
    if nodes is None:
        return 1
    ranks = Counter(nodes).values()
    return len(ranks) if len(set(ranks)) == 1 else 0


Costs: TypeAlias = tuple[Fraction, ...]
"""Rounds, volume, combined."""


def costs(vector: int, proof: Proof) -> Costs:
    """Costs of one schedule; volumes of the busiest rank, in vectors."""
    return (
        Fraction(proof.rounds),
        Fraction(max(*proof.sent, *proof.received), vector),
        Fraction(max(proof.combined), vector),
    )


def check_costs(collective: str, name: str, size: int, done: Costs, segments: int = 1, nodes: int = 1) -> None:
    """Compare the costs at the worst root with the catalogue and the lower bounds."""
    entry, bound = catalog.find(collective, name), catalog.BOUNDS[collective]
    for what, value, formula, least in zip(
        ("rounds", "volume", "combined"),
        done,
        (entry.rounds, entry.volume, entry.combined),
        bound,
        strict=True,
    ):
        says = catalog.evaluate(formula, size, segments, nodes)
        if value > says or (entry.exact and value < says):
            raise ScheduleError(f"{what} {value} where the catalogue says {formula} = {says}")
        if size > 1 and value < catalog.evaluate(least, size):
            raise ScheduleError(f"{what} {value} is below the lower bound {least} = {catalog.evaluate(least, size)}")


def main() -> int:
    parser = ProgramParser(__doc__)
    parser.add_argument("--max-size", type=int, default=64, help="largest number of ranks (default 64)")
    parser.add_argument("--collective", action="append", choices=list(catalog.CATALOG), help="only this one")
    arguments = parser.parse_args()
    if arguments.max_size < 1:
        parser.error("--max-size must be at least 1")
    collectives = arguments.collective or list(catalog.CATALOG)
    entries = [(collective, name) for collective in collectives for name in catalog.names(collective)]
    began, proved, rows = time.perf_counter(), 0, []
    for collective, name in tqdm(entries, desc="proving", unit="algorithm", disable=None):
        ordered = alike = True  # so far, where it must be
        entry = catalog.find(collective, name)
        for size in range(1, arguments.max_size + 1):
            blocks = catalog.blocks(collective, name, size)
            vector = semantics.vector(collective, size, blocks)
            cases = [
                (nodes, segments) for nodes in (placements(size) if entry.placed else [None]) for segments in SEGMENTS
            ]
            try:
                for nodes, segments in cases:
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
                    if (segments == 1 or entry.cuts) and nodes_alike(nodes) and size > 1:
                        check_costs(collective, name, size, most, segments, nodes_alike(nodes))
            except ScheduleError as fault:
                print(f"{where}: {fault}", file=sys.stderr)
                return 1
        if not ordered:
            print(f"{collective} {name} does not keep rank order, but the catalogue says so", file=sys.stderr)
            return 1
        if alike < entry.alike:
            print(f"{collective} {name} gives ranks other bits, but the catalogue says the same", file=sys.stderr)
            return 1
        rows.append((collective, name, entry.ordered, worst))

    size = arguments.max_size
    print(f"At {size} ranks, in rounds and in vectors of n bytes (of the busiest rank); bounds in brackets:\n")
    print(f"{'collective':<16}{'algorithm':<20}{'rounds':>14}{'volume':>18}{'combined':>18}  rank order")
    for collective, name, ordered, worst in rows:
        bounds = [catalog.evaluate(formula, size) for formula in catalog.BOUNDS[collective]]
        rounds, volume, combined = (
            f"{float(value):.4g} ({float(bound):.4g})" for value, bound in zip(worst, bounds, strict=True)
        )
        order = "kept" if ordered and semantics.MEANINGS[collective].reduces else ""
        print(f"{collective:<16}{name:<20}{rounds:>14}{volume:>18}{combined:>18}  {order}".rstrip())
    seconds = time.perf_counter() - began
    print(f"\nproved {proved} schedules of {len(entries)} algorithms for 1 to {size} ranks in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
