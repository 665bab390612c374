"""Run a test module of mpi4py on one rank, with a `collectives.Communicator` in place of COMM_WORLD.

    python -m mpi4py_rank FOLDER TESTS MODULE SECONDS [--native]

Runs the tests that FOLDER/known does not name. Writes a line of JSON at the start and at the end of each test to
FOLDER/rank-N. A test that takes longer than SECONDS ends the process with the stacks of its threads in FOLDER/stack-N.
"""

import faulthandler
import json
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from mpi4py import MPI
from mpi4py_files import reason

Case = unittest.TestCase


class Results(unittest.TestResult):
    """Test results that are written to a file at once, so that those before a crash or a hang are known."""

    def __init__(self, lines: TextIO, stack: TextIO, seconds: float) -> None:
        super().__init__()
        self._lines, self._stack, self._seconds = lines, stack, seconds
        self._outcome, self._text = "passed", ""

    def write(self, **line: str) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()

    def startTest(self, test: Case) -> None:
        super().startTest(test)
        self._outcome, self._text = "passed", ""
        self.write(test=test.id(), outcome="failed")  # until it ends
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stack)

    def stopTest(self, test: Case) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.write(test=test.id(), outcome=self._outcome, text=self._text)
        super().stopTest(test)

    def addError(self, test: Case, err: Any) -> None:
        if self._outcome != "failed":
            self._outcome, self._text = "failed", self._exc_info_to_string(err, test)  # type: ignore[attr-defined]

    def addFailure(self, test: Case, err: Any) -> None:
        self.addError(test, err)

    def addSubTest(self, test: Case, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: Case, reason: str) -> None:
        if self._outcome == "passed":
            self._outcome, self._text = "skipped", reason


def flatten(suite: unittest.TestSuite) -> Iterator[Any]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flatten(item)
        else:
            yield item


def loaded(module: str) -> list[Any]:
    """Test cases of a module, without arrays of libraries that need a GPU, as in mpi4py's own runner."""
    libraries = dict.fromkeys(("cupy", "numba"))
    sys.modules |= libraries  # type: ignore[arg-type]
    cases = list(flatten(unittest.defaultTestLoader.loadTestsFromName(module)))
    for library in libraries:
        del sys.modules[library]  # what is imported later may use it
    return cases


def main() -> None:
    """Run the test module on this rank; write outcomes and stacks to the rank's files."""
    folder, tests, module, seconds, *options = sys.argv[1:]
    sys.path.insert(0, tests)
    rank = MPI.COMM_WORLD.Get_rank()
    if "--native" not in options:
        from collectives import Communicator

        for name in ("COMM_WORLD", "COMM_SELF"):
            setattr(MPI, name, Communicator(getattr(MPI, name)))
    cases = loaded(module)
    for case in cases if "--native" not in options else ():
        if hasattr(case, "checkHandle"):  # of a number MPI.Comm makes an object of mpi4py's own class
            case.checkHandle = lambda comm: None
    known = set(Path(folder, "known").read_text().splitlines())
    with open(Path(folder, f"rank-{rank}"), "w") as lines, open(Path(folder, f"stack-{rank}"), "w") as stack:
        results = Results(lines, stack, float(seconds))
        for case in cases:
            if case.id() in known:
                continue
            if (why := reason(case.id())) is not None:
                results.write(test=case.id(), outcome="excluded", text=why)
            else:
                case.run(results)  # without the suite's fixtures of classes and modules: mpi4py's tests have none
        results.write(test="", outcome="end")
        MPI.COMM_WORLD.Barrier()
    faulthandler.dump_traceback_later(float(seconds), exit=True)  # the end of the process may hang, too


if __name__ == "__main__":
    main()
