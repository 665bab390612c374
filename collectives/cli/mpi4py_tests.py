"""Run mpi4py's own tests with `collectives.Communicator` in the place of COMM_WORLD and COMM_SELF.

    python scripts/mpi4py_tests.py --ranks 1,2,3,4
    python scripts/mpi4py_tests.py --ranks 3 test_cco_buf test_request

The tests come from the source distribution of the installed mpi4py, which pip downloads the first time. Each file is an
mpiexec of its own, under the MPI of this Python's environment; MPIEXEC names another. A file with failures runs once
more on the MPI's own communicators: tests that fail there too are shown and do not count. Files and the cases left out,
with reasons, are the tables of scripts/conformance/files.py. Ends with status 1 if a test fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from collectives.cli.launcher import ProgramParser
from collectives.conformance.launches import find_mpiexec, launched
from collectives.conformance.test_files import EXCLUDED, EXCLUDED_ARRAYS, FILES
from collectives.conformance.test_sources import fetched


class Outcome(NamedTuple):
    """Outcome of one test on all ranks: passed, failed, skipped or excluded; the text of the first rank that failed."""

    kind: str
    text: str = ""


def collected(folder: str, ranks: int) -> tuple[dict[str, Outcome], bool]:
    """Read the ranks' files: the outcomes of tests that all ranks have ended, and whether all ended all tests.

    If not, the outcomes hold the first test in which a rank ended or stood, too; what ranks did beyond it says nothing.
    """
    outcomes: dict[str, Outcome] = {}
    order: dict[str, int] = {}
    stood: list[tuple[float, str, int]] = []
    for rank in range(ranks):
        file, place, position = Path(folder, f"rank-{rank}"), "the start", -1.0
        for line in file.read_text().splitlines() if file.exists() else ():
            said = json.loads(line)
            kind, place = said.get("outcome"), said["test"]
            position = order.setdefault(place, len(order))
            before = outcomes.get(place)
            if kind is None or kind == "end":
                continue
            if before is None or (kind == "failed" and before.kind != "failed") or before.kind == "skipped":
                outcomes[place] = Outcome(kind, f"rank {rank} of {ranks}:\n{said.get('text', '')}")
            place, position = "between tests", position + 0.5
        if place:
            stood.append((position, place, rank))
    if not stood:
        return outcomes, True
    position, first, _ = min(stood)
    outcomes = {name: outcome for name, outcome in outcomes.items() if order[name] <= position}
    texts = [outcomes[first].text] if first in outcomes else []
    for rank in [rank for _, place, rank in stood if place == first]:
        stack = Path(folder, f"stack-{rank}")
        texts.append(f"rank {rank} of {ranks} ended or stood in it:\n{stack.read_text() if stack.exists() else ''}")
    if first in order:
        outcomes[first] = Outcome("failed", "\n".join(texts))
    return outcomes, False


def run(mpiexec: str, ranks: int, module: str, seconds: float, native: bool = False) -> dict[str, Outcome]:
    """Run one file on so many ranks: the outcome of every test, and of the launch if that went wrong.

    A test that ends or holds up the ranks costs the launch; the tests after it run in another one.
    """
    outcomes: dict[str, Outcome] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "known").write_text("\n".join(outcomes))
            command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "collectives.conformance.test_rank"]
            command += [str(fetched()), module, folder, str(seconds), *(["--native"] if native else [])]
            status, words = launched(command, 10 * seconds)
            found, ended = collected(folder, ranks)
        outcomes |= found
        if status == 0 and ended:
            return outcomes
        if ended or not found:
            how = "did not end" if status is None else f"ended with status {status}"
            outcomes[f"{module} (the launch)"] = Outcome("failed", f"mpiexec {how}; its last lines:\n{words}")
            return outcomes


def cell(outcomes: dict[str, Outcome], also_natively: set[str]) -> str:
    """Counts of one file on so many ranks, for the table."""
    count = dict.fromkeys(("passed", "failed", "native", "skipped", "excluded"), 0)
    for name, (kind, _) in outcomes.items():
        count["native" if name in also_natively else kind] += 1
    words = {"passed": "", "failed": " FAILED", "native": " failed, natively too", "skipped": " skipped"}
    words["excluded"] = " left out"
    return ", ".join(f"{count[kind]}{word}" for kind, word in words.items() if count[kind] or kind == "passed")


def main(argv: list[str] | None = None) -> int:
    """Run the files and print the table; 1 if a test fails that passes natively."""
    parser = ProgramParser(__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="test modules of mpi4py (default: all of the table)")
    parser.add_argument("--ranks", default="1,2,3,4", metavar="LIST", help="numbers of ranks (default 1,2,3,4)")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="for each test (default 60)")
    args = parser.parse_args(argv)
    try:
        ranks = [int(word) for word in args.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks: expected numbers as in 1,2,4, found {args.ranks!r}")
    if (mpiexec := find_mpiexec()) is None:
        parser.error("there is no mpiexec: set MPIEXEC to one")
    files = [Path(name).stem for name in args.files] or list(FILES)
    try:
        tests = fetched()
    except RuntimeError as error:
        sys.exit(str(error))
    if missing := [name for name in files if not (tests / f"{name}.py").exists()]:
        parser.error(f"mpi4py has no {', '.join(missing)}")
    for pattern, why in EXCLUDED_ARRAYS + EXCLUDED:
        print(f"left out: {pattern} ({why})")
    told: dict[str, str] = {}
    faults = passed = 0
    began = time.perf_counter()
    for module in files:
        for size in ranks:
            outcomes = run(mpiexec, size, module, args.limit)
            failed = {name for name, (kind, _) in outcomes.items() if kind == "failed"}
            natively: dict[str, Outcome] = run(mpiexec, size, module, args.limit, native=True) if failed else {}
            also = {name for name in failed if name in natively and natively[name].kind == "failed"}
            also.discard(f"{module} (the launch)")
            print(f"{module:22} {size} ranks  {cell(outcomes, also)}", flush=True)
            for name in sorted(failed - also):
                told.setdefault(name, outcomes[name].text)
                print(f"    {name}", flush=True)
            faults += len(failed - also)
            passed += sum(kind == "passed" for kind, _ in outcomes.values())
    for name, text in told.items():
        print(f"\n---- {name}, {text}")
    print(f"\n{passed} passed, {faults} failed ({time.perf_counter() - began:.0f} s)")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
