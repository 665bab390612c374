"""Run PyTorch's own tests of torch.distributed over the backend "chorus", and over gloo.

    python tests/studies/torch_distributed_tests.py --ranks 2,3
    python tests/studies/torch_distributed_tests.py --ranks 2 test_all_reduce_sum test_barrier

The tests are those of torch.testing._internal.distributed.distributed_test, in the installed PyTorch; they need the
package expecttest. They see the backend under the name "gloo", so that all of them run that run over gloo; those that
run only over MPI do so once more under the name "mpi". Tests that fail run over gloo, too: those that fail there do not
count. The last lines are the reasons of those that are skipped, and a table of the outcomes by number of ranks. Ends
with status 1 if a test fails that passes over gloo.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpi4py_tests import Outcome, cell, collected, counted, summary
from mpi_launches import Launch, describe_end, find_mpiexec

from collectives.cli.arguments import rank_counts
from collectives.cli.launcher import ProgramParser


class Tests(NamedTuple):
    """Tests to run on `ranks` ranks, over a backend that they see under a name; all if `only` is empty."""

    mpiexec: str
    ranks: int
    seconds: float
    budget: float

    def run(self, backend: str, name: str, only: Iterable[str] = ()) -> dict[str, Outcome]:
        """Outcomes by test. A test that ends the ranks, or hangs, costs the launch."""
        outcomes: dict[str, Outcome] = {}
        end = time.perf_counter() + self.budget
        while time.perf_counter() < end:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "known").write_text("\n".join(outcomes))
                Path(folder, "only").write_text("\n".join(only))
                launch = Launch(self.mpiexec, self.ranks, "torch_distributed_rank", Path(folder))
                status, output = launch.run([backend, name, str(self.seconds)], max(1, end - time.perf_counter()))
                found, ended = collected(launch)
            outcomes |= found
            if status == 0 and ended:
                return outcomes
            if ended or not found:
                outcomes["(the launch)"] = Outcome("failed", describe_end(status, output))
                return outcomes
        outcomes["(the rest)"] = Outcome("failed", "no time was left")
        return outcomes


def main(argv: list[str] | None = None) -> int:
    """Run the tests and print the table; return 1 if a test fails that passes over gloo."""
    parser = ProgramParser(__doc__)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="names of tests (default: all)")
    parser.add_argument("--ranks", type=rank_counts, default="2,3", metavar="LIST", help="default 2,3")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="for each test (default 60)")
    budget = "for each number of ranks and name (default 1800)"
    parser.add_argument("--budget", type=float, default=1800, metavar="SECONDS", help=budget)
    args = parser.parse_args(argv)
    if (mpiexec := find_mpiexec()) is None:
        parser.error("there is no mpiexec: set MPIEXEC to one")
    totals: dict[int, Counter[str]] = {}
    times: dict[int, float] = {}
    skips: Counter[str] = Counter()
    for ranks in args.ranks:
        start = time.perf_counter()
        tests = Tests(mpiexec, ranks, args.limit, args.budget)
        outcomes = tests.run("chorus", "gloo", args.tests)
        skipped = {name for name, (kind, text) in outcomes.items() if kind == "skipped" and "MPI" in text}
        if ranks < 3:  # only under other names they are skipped on few ranks: they make a group of ranks 1 and 2
            skipped -= {name for name in skipped if name.endswith("_group")}
        if skipped:
            found = tests.run("chorus", "mpi", skipped)
            outcomes |= {name: outcome for name, outcome in found.items() if outcome.kind != "skipped"}
        failed = {name for name, (kind, _) in outcomes.items() if kind == "failed"}
        over_gloo = tests.run("gloo", "gloo", failed) if failed else {}
        also = {name for name in failed if name in over_gloo and over_gloo[name].kind == "failed"}
        totals[ranks], times[ranks] = counted(outcomes, also), time.perf_counter() - start
        print(f"{ranks} ranks  {cell(outcomes, also)} (natively: over gloo)", flush=True)
        for name in sorted(failed):
            print(f"\n---- {name}{', over gloo too' * (name in also)}, {outcomes[name].text}", flush=True)
        skips.update(text.partition("\n")[2] for kind, text in outcomes.values() if kind == "skipped")
    print("\nskipped by PyTorch's tests, under both names:")
    for text, count in skips.most_common():
        print(f"{count:7}  {text}")
    print(f"\n{summary(totals, times)}")
    return int(any(total["failed"] for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
