"""Profiles of ``python -m collectives --profile``: do they name planted faults, and how much time do they take?

    python tests/studies/profile_study.py --ranks 2,3 --cases 10
    python tests/studies/profile_study.py --ranks 2 --overhead --launches 5      # on an idle machine

In each case one rank comes late to a barrier, and one collective has an array of 12 MiB where others have 96 bytes. The
profile must name that rank and the barrier's line by their waiting, and that collective by its time beside waiting. The
overhead is measured on blocks of steps with and without a profile, in turns in one launch. The times of the calls that
the profile repeats are part of it. The launches' medians are printed. The step "calls" has nothing beside its call, and
does not count. Ends with status 1 if a profile names anything else, or if another step takes 2 % longer with a profile.
"""

import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median

from mpi_launches import describe_end, find_mpiexec, run_ranks
from profile_rank import CALLS

from collectives.cli.arguments import rank_counts
from collectives.cli.launcher import ProgramParser, at_least

RANK = Path(__file__).with_name("profile_rank.py")

LIMIT = 300.0
"""Seconds of a launch, without the measured time."""

MOST = 0.02
"""Largest share of a program's time that a profile may take."""


def named(numbers: Path) -> tuple[str, int | None, str]:
    """Collective with the longest waiting, its late rank, and the collective that takes most time beside waiting."""
    lines = json.loads(numbers.read_text())["lines"]
    longest = max(lines, key=lambda line: line["waiting"])
    slowest = max(lines, key=lambda line: line["seconds"] - line["waiting"])
    return f"{longest['collective']}:{longest['site'].rpartition(':')[2]}", longest["late_rank"], slowest["collective"]


def find_planted(mpiexec: str, ranks: int, cases: int) -> int:
    """Profile programs with another late rank and slow collective in each case; return the number not named."""
    waits = "        comm.Barrier()  # waits for the late rank"
    line = 1 + RANK.read_text().splitlines().index(waits)
    wrong = 0
    for case in range(cases):
        late, slow = case % ranks, [*CALLS][case % len(CALLS)]
        with tempfile.TemporaryDirectory() as folder:
            options = ["-m", "collectives", "--profile", "--profile-files", f"{folder}/found"]
            status, output = run_ranks(mpiexec, ranks, [*options, str(RANK), "planted", str(late), slow], LIMIT)
            found = named(Path(folder, "found.json")) if status == 0 else describe_end(status, output)
        if found != (f"barrier:{line}", late, slow):
            wrong += 1
            print(f"    expected rank {late} late at line {line}, and {slow} slow; found {found}", flush=True)
    print(f"{ranks} ranks: {cases - wrong} of {cases} profiles name the late rank and the slow collective", flush=True)
    return wrong


def measure(mpiexec: str, ranks: int, launches: int, seconds: float) -> int:
    """Print overheads of all steps; return the number of steps that take too much more time with a profile."""
    found: list[dict[str, dict[str, float]]] = []
    for _ in range(launches):
        status, output = run_ranks(mpiexec, ranks, [str(RANK), "overhead", str(seconds)], LIMIT + 10 * seconds)
        if status != 0:
            print(describe_end(status, output))
            return 1
        found.append(json.loads(output.splitlines()[-1]))
    too_much = 0
    print(f"\nranks  step       us without     with  us a step  overhead  (least, most of {launches} launches)")
    for name in found[0]:
        rows = [one[name] for one in found]
        shares = sorted(row["with"] / row["without"] - 1 for row in rows)
        without, profiled = (1e6 * median(row[key] / row["steps"] for row in rows) for key in ("without", "with"))
        cells = f"{ranks:5}  {name:9}  {without:10.1f}  {profiled:7.1f}  {profiled - without:9.1f}"
        print(f"{cells}  {median(shares):8.2%}  ({shares[0]:.2%}, {shares[-1]:.2%})", flush=True)
        too_much += name != "calls" and median(shares) >= MOST
    return too_much


def parse() -> Namespace:
    parser = ProgramParser(__doc__)
    parser.add_argument("--ranks", type=rank_counts, default="2,3", metavar="LIST", help="(default 2,3)")
    parser.add_argument("--cases", type=at_least(1, int), default=10, metavar="N", help="(default 10)")
    parser.add_argument("--overhead", action="store_true", help="measure the time that a profile takes")
    parser.add_argument("--launches", type=at_least(1, int), default=5, metavar="N", help="(default 5)")
    parser.add_argument("--seconds", type=at_least(0.1, float), default=10.0, metavar="S", help="a step (default 10)")
    return parser.parse_args()


def main() -> int:
    """Plant faults, or measure the overhead, with each number of ranks."""
    args, mpiexec = parse(), find_mpiexec()
    if mpiexec is None:
        sys.exit("there is no mpiexec: set MPIEXEC to one")
    if args.overhead:
        return int(any([measure(mpiexec, ranks, args.launches, args.seconds) for ranks in args.ranks]))
    return int(any([find_planted(mpiexec, ranks, args.cases) for ranks in args.ranks]))


if __name__ == "__main__":
    sys.exit(main())
