"""Run mpi4py's own tests with `collectives.Communicator` in the place of COMM_WORLD and COMM_SELF.

    python scripts/mpi4py_tests.py --ranks 1,2,3,4
    python scripts/mpi4py_tests.py --ranks 3 test_cco_buf test_request

The tests come from the source distribution of the installed mpi4py, which pip downloads the first time. Each file is an
mpiexec of its own, under the MPI of this Python's environment; MPIEXEC names another. A file with failures runs once
more on the MPI's own communicators: tests that fail there too are shown and do not count. Files and the cases left out,
with reasons, are the tables of collectives/conformance/test_files.py. Ends with status 1 if a test fails.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from collectives.cli.arguments import rank_counts
from collectives.cli.launcher import ProgramParser
from collectives.conformance.launches import Launch, describe_end, find_mpiexec
from collectives.conformance.test_files import EXCLUDED, FILES, fetched


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


def run(mpiexec: str, ranks: int, module: str, seconds: float, native: bool = False) -> dict[str, Outcome]:
    """Run one test module of mpi4py on `ranks` ranks; return outcomes by test, and the launch's if that failed.

    A test that ends or holds up the ranks costs the launch; the tests after it run in another one.
    """
    outcomes: dict[str, Outcome] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "known").write_text("\n".join(outcomes))
            launch = Launch(mpiexec, ranks, "collectives.conformance.test_rank", Path(folder))
            status, output = launch.run([str(fetched()), module, str(seconds), *["--native"] * native], 10 * seconds)
            found, ended = collected(launch)
        outcomes |= found
        if status == 0 and ended:
            return outcomes
        if ended or not found:
            outcomes[f"{module} (the launch)"] = Outcome("failed", describe_end(status, output))
            return outcomes


def cell(outcomes: dict[str, Outcome], also_natively: set[str]) -> str:
    count = Counter("native" if name in also_natively else kind for name, (kind, _) in outcomes.items())
    words = {"passed": "", "failed": " FAILED", "native": " failed, natively too", "skipped": " skipped"}
    words["excluded"] = " left out"
    return ", ".join(f"{count[kind]}{word}" for kind, word in words.items() if count[kind] or kind == "passed")


def main(argv: list[str] | None = None) -> int:
    """Run the test files and print the table; return 1 if a test fails that passes on mpi4py's communicators."""
    parser = ProgramParser(__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="test modules of mpi4py (default: all of the table)")
    ranks = "numbers of ranks (default 1,2,3,4)"
    parser.add_argument("--ranks", type=rank_counts, default="1,2,3,4", metavar="LIST", help=ranks)
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="for each test (default 60)")
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
    faults = passed = 0
    began = time.perf_counter()
    for module in files:
        for size in args.ranks:
            outcomes = run(mpiexec, size, module, args.limit)
            failed = {name for name, (kind, _) in outcomes.items() if kind == "failed"}
            natively = run(mpiexec, size, module, args.limit, native=True) if failed else {}
            also = {name for name in failed if name in natively and natively[name].kind == "failed"}
            also.discard(f"{module} (the launch)")
            print(f"{module:22} {size} ranks  {cell(outcomes, also)}", flush=True)
            for name in sorted(failed - also):
                messages.setdefault(name, outcomes[name].text)
                print(f"    {name}", flush=True)
            faults += len(failed - also)
            passed += sum(kind == "passed" for kind, _ in outcomes.values())
    for name, text in messages.items():
        print(f"\n---- {name}, {text}")
    print(f"\n{passed} passed, {faults} failed ({time.perf_counter() - began:.0f} s)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
