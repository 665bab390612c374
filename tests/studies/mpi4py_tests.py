"""Run mpi4py's own tests with `collectives.Communicator` in the place of COMM_WORLD and COMM_SELF.

    python tests/studies/mpi4py_tests.py --ranks 1,2,3,4
    python tests/studies/mpi4py_tests.py --ranks 3 test_cco_buf test_request

The tests come from the source distribution of the installed mpi4py, which pip downloads the first time. Each file is an
mpiexec of its own, under the MPI of this Python's environment; MPIEXEC names another. Tests that fail run once more on
the MPI's own communicators: those that fail there too are shown and do not count. Files and the cases left out, with
reasons, are the tables of mpi4py_files.py. The last lines are a table of the outcomes by number
of ranks. Ends with status 1 if a test fails, or if a file was left without time.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpi4py_files import EXCLUDED, FILES, fetched
from mpi_launches import Launch, describe_end, find_mpiexec

from collectives.cli.arguments import rank_counts
from collectives.cli.launcher import ProgramParser


class Outcome(NamedTuple):
    """Outcome of one test on all ranks: passed, failed, skipped or excluded; the text of the first rank that had it."""

    kind: str
    text: str = ""


KINDS = ("excluded", "skipped", "passed", "failed")
"""Kinds of outcomes; the last one of any rank is that of the test."""


def collected(launch: Launch) -> tuple[dict[str, Outcome], bool]:
    """Read a launch's result files: outcomes of tests begun on all ranks, and True if all ranks ended all tests.

    A test in which a rank ended or stood has failed. Ranks that began no test do not count for the first.
    """
    ranks = [{line["test"]: line for line in launch.lines(rank)} for rank in range(launch.ranks)]
    begun = {rank: lines for rank, lines in enumerate(ranks) if lines}  # others were ended before the first test
    outcomes: dict[str, Outcome] = {}
    for name in dict.fromkeys(name for lines in begun.values() for name in lines):
        if name and all(name in lines for lines in begun.values()):
            several = []
            for rank, lines in begun.items():
                text = lines[name].get("text", f"ended or stood in it:\n{launch.stack(rank)}")
                several.append(Outcome(lines[name]["outcome"], f"rank {rank} of {launch.ranks}:\n{text}"))
            outcomes[name] = max(several, key=lambda outcome: KINDS.index(outcome.kind))
    return outcomes, all("" in lines for lines in ranks)


def run(
    mpiexec: str,
    ranks: int,
    module: str,
    seconds: float,
    limit: float,
    native: bool = False,
    without: Iterable[str] = (),
) -> dict[str, Outcome]:
    """Run one test module of mpi4py on `ranks` ranks; return outcomes by test, and the launch's if that failed.

    A test that ends the ranks, or takes more than `seconds`, costs the launch; the tests after it run in another one.
    A launch is ended after `limit` seconds. `without`: names of tests that are not run.
    """
    outcomes: dict[str, Outcome] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "known").write_text("\n".join([*without, *outcomes]))
            launch = Launch(mpiexec, ranks, "mpi4py_rank", Path(folder))
            status, output = launch.run([str(fetched()), module, str(seconds), *["--native"] * native], limit)
            found, ended = collected(launch)
        outcomes |= found
        if status == 0 and ended:
            return outcomes
        if ended or not found or status is None:
            outcomes[f"{module} (the launch)"] = Outcome("failed", describe_end(status, output))
            return outcomes


def counted(outcomes: dict[str, Outcome], also_natively: set[str]) -> Counter[str]:
    """Numbers of tests by kind of outcome; the kind of tests that fail natively, too, is "native"."""
    return Counter("native" if name in also_natively else kind for name, (kind, _) in outcomes.items())


def cell(outcomes: dict[str, Outcome], also_natively: set[str]) -> str:
    count = counted(outcomes, also_natively)
    words = {"passed": "", "failed": " FAILED", "native": " failed, natively too", "skipped": " skipped"}
    words["excluded"] = " left out"
    return ", ".join(f"{count[kind]}{word}" for kind, word in words.items() if count[kind] or kind == "passed")


def summary(totals: dict[int, Counter[str]], seconds: dict[int, float]) -> str:
    """Table of the tests by number of ranks and outcome, of the files without time left, and of seconds.

    >>> print(summary({2: Counter(passed=40, failed=1, excluded=2)}, {2: 8.2}))
    ranks  passed  failed  natively too  skipped  left out  files not run  seconds
        2      40       1             0        0         2              0        8
    """
    columns = {"passed": "passed", "failed": "failed", "natively too": "native", "skipped": "skipped"}
    columns |= {"left out": "excluded", "files not run": "not run"}
    lines = ["  ".join(["ranks", *columns, "seconds"])]
    for ranks, count in totals.items():
        cells = [f"{count[kind]:{len(title)}}" for title, kind in columns.items()]
        lines.append("  ".join([f"{ranks:5}", *cells, f"{seconds[ranks]:7.0f}"]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the test files and print the table; return 1 if a test fails that passes on mpi4py's communicators."""
    parser = ProgramParser(__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="test modules of mpi4py (default: all of the table)")
    ranks = "numbers of ranks (default 1,2,3,4)"
    parser.add_argument("--ranks", type=rank_counts, default="1,2,3,4", metavar="LIST", help=ranks)
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="for each test (default 60)")
    budget = "for each number of ranks; files that it leaves no time for are counted as failures (default 900)"
    parser.add_argument("--budget", type=float, default=900, metavar="SECONDS", help=budget)
    args = parser.parse_args(argv)
    if (mpiexec := find_mpiexec()) is None:
        parser.error("there is no mpiexec: set MPIEXEC to one")
    files = [Path(name).stem for name in args.files] or list(FILES)
    try:
        tests = fetched()
    except RuntimeError as error:
        sys.exit(str(error))
    if missing := [name for name in files if not (tests / f"{name}.py").exists()]:
        parser.error(f"mpi4py has no {', '.join(missing)}")
    for pattern, why in EXCLUDED:
        print(f"left out: {pattern} ({why})")
    messages: dict[str, str] = {}
    skips: Counter[str] = Counter()
    totals: dict[int, Counter[str]] = {ranks: Counter() for ranks in args.ranks}
    seconds: dict[int, float] = {}
    for size, total in totals.items():
        began = time.perf_counter()
        for module in files:
            if time.perf_counter() - began > args.budget:
                total["not run"] += 1
                print(f"{module:22} {size} ranks  not run: no time is left", flush=True)
                continue
            start = time.perf_counter()
            outcomes = run(mpiexec, size, module, args.limit, max(10 * args.limit, args.budget - start + began))
            failed = {name for name, (kind, _) in outcomes.items() if kind == "failed"}
            without = outcomes.keys() - failed
            natively = run(mpiexec, size, module, args.limit, 10 * args.limit, True, without) if failed else {}
            also = {name for name in failed if name in natively and natively[name].kind == "failed"}
            also.discard(f"{module} (the launch)")
            took = time.perf_counter() - start
            print(f"{module:22} {size} ranks {took:4.0f} s  {cell(outcomes, also)}", flush=True)
            for name in sorted(failed - also):
                messages.setdefault(name, outcomes[name].text)
                print(f"    {name}", flush=True)
            total += counted(outcomes, also)
            skips.update(text.partition("\n")[2] for kind, text in outcomes.values() if kind == "skipped")
        seconds[size] = time.perf_counter() - began
    for name, text in messages.items():
        print(f"\n---- {name}, {text}")
    print("\nskipped by mpi4py's tests:" if skips else "")
    for text, count in skips.most_common():
        print(f"{count:7}  {text}")
    print(f"\n{summary(totals, seconds)}")
    return int(any(total["failed"] or total["not run"] for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
