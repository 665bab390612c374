"""Run test files of a package on one rank by pytest, and write the outcome of every test.

    python -m package_rank FOLDER SECONDS --tests file ... --programs file ...
    python -m collectives -m package_rank FOLDER SECONDS ...

Writes lines of JSON to FOLDER/rank-N as mpi4py_rank does. A program is one test. A test that takes longer than SECONDS
ends the process with its stacks in FOLDER/stack-N. Tests that FOLDER/known names are not run.
"""

import argparse
import faulthandler
import json
import re
import runpy
import shlex
import sys
import traceback
from contextlib import chdir
from pathlib import Path
from typing import TextIO

import pytest
from mpi4py import MPI


class Outcomes:
    """Plugin of pytest: writes outcomes at once, so that those before a crash or a hang are known."""

    def __init__(self, lines: TextIO, stack: TextIO, seconds: float, known: set[str]) -> None:
        self._lines, self._stack, self._seconds, self._known = lines, stack, seconds, known
        self._outcome, self._text = "passed", ""

    def write(self, **line: str) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def begin(self, name: str) -> None:
        self._outcome, self._text = "passed", ""
        self.write(test=name, outcome="failed")  # until it ends
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stack)

    def set_outcome(self, outcome: str, text: str) -> None:
        if outcome != "passed" and self._outcome != "failed":
            self._outcome, self._text = outcome, text

    def end(self, name: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.write(test=name, outcome=self._outcome, text=self._text)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if plain_name(item.nodeid) not in self._known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.begin(plain_name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
        self.set_outcome(report.outcome, text)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.end(plain_name(nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            name = f"{report.nodeid} (collection)"
            self.begin(name)
            skip = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.set_outcome(report.outcome, str(skip))
            self.end(name)


def plain_name(name: str) -> str:
    """Name of a test without its rank, which some packages add.

    >>> plain_name("tests/test_halo.py::test_halo[par0][Rank 3]")
    'tests/test_halo.py::test_halo[par0]'
    """
    return re.sub(r"\[Rank \d+\]", "", name)


def run_program(file: str, outcomes: Outcomes) -> None:
    """Run a file as a program, in its folder: one test. It passes if it ends without an exception, or with status 0."""
    outcomes.begin(file)
    path = Path(file).resolve()
    sys.argv[:] = [str(path)]
    sys.path.insert(0, str(path.parent))
    try:
        with chdir(path.parent):  # some read files beside them
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        outcomes.set_outcome("failed" if end.code else "passed", f"exit status {end.code}")
    except Exception:
        outcomes.set_outcome("failed", traceback.format_exc())
    outcomes.end(file)


def main() -> None:
    """Run the files on this rank; write outcomes and stacks to the rank's files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    for option in ("--programs", "--tests"):
        parser.add_argument(option, nargs="*", default=[])
    parser.add_argument("--pytest", default="", metavar="OPTIONS")
    args = parser.parse_args()
    rank = MPI.COMM_WORLD.Get_rank()
    known = set(Path(args.folder, "known").read_text().splitlines())
    with open(args.folder / f"rank-{rank}", "w") as lines, open(args.folder / f"stack-{rank}", "w") as stack:
        outcomes = Outcomes(lines, stack, args.seconds, known)
        if args.tests:
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:mpi", "-p", "no:timeout", "--rootdir=."]
            status = pytest.main([*options, *shlex.split(args.pytest), *args.tests], plugins=[outcomes])
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                outcomes.write(test="pytest", outcome="failed", text=f"pytest ended with {status}")
        for file in args.programs:
            if file not in known:
                run_program(file, outcomes)
        outcomes.write(test="", outcome="end")
    faulthandler.dump_traceback_later(args.seconds, exit=True)  # the end of the process may hang, too


if __name__ == "__main__":
    main()
