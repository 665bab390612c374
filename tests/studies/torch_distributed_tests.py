"""Run PyTorch's own tests of torch.distributed over the backend "chorus", and over gloo.

    python tests/studies/torch_distributed_tests.py --ranks 2,3
    python tests/studies/torch_distributed_tests.py --ranks 2 test_all_reduce_sum test_barrier

The tests are those of torch.testing._internal.distributed.distributed_test, in the installed PyTorch; they need the
package expecttest. Tests that fail run once more over gloo: those that fail there too do not count. The last lines are
a table of the outcomes by number of ranks. Ends with status 1 if a test fails that passes over gloo.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mpi4py_tests import Outcome, cell, collected, counted, summary
from mpi_launches import Launch, describe_end, find_mpiexec

from collectives.cli.arguments import rank_counts
from collectives.cli.launcher import ProgramParser


def run(mpiexec: str, ranks: int, backend: str, only: Iterable[str], seconds: float, end: float) -> dict[str, Outcome]:
    """Run tests over a backend; return outcomes by test. A test that ends the ranks, or hangs, costs the launch."""
    outcomes: dict[str, Outcome] = {}
    while time.perf_counter() < end:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "known").write_text("\n".join(outcomes))
            Path(folder, "only").write_text("\n".join(only))
            launch = Launch(mpiexec, ranks, "torch_distributed_rank", Path(folder))
            status, output = launch.run([backend, str(seconds)], max(1, end - time.perf_counter()))
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
    budget = "for each number of ranks and backend (default 1800)"
    parser.add_argument("--budget", type=float, default=1800, metavar="SECONDS", help=budget)
    args = parser.parse_args(argv)
    if (mpiexec := find_mpiexec()) is None:
        parser.error("there is no mpiexec: set MPIEXEC to one")
    totals: dict[int, Counter[str]] = {}
    times: dict[int, float] = {}
    skips: Counter[str] = Counter()
    for ranks in args.ranks:
        start = time.perf_counter()
        outcomes = run(mpiexec, ranks, "chorus", args.tests, args.limit, start + args.budget)
        failed = {name for name, (kind, _) in outcomes.items() if kind == "failed"}
        again = time.perf_counter() + args.budget
        over_gloo = run(mpiexec, ranks, "gloo", sorted(failed), args.limit, again) if failed else {}
        also = {name for name in failed if name in over_gloo and over_gloo[name].kind == "failed"}
        totals[ranks], times[ranks] = counted(outcomes, also), time.perf_counter() - start
        print(f"{ranks} ranks  {cell(outcomes, also)} (natively: over gloo)", flush=True)
        for name in sorted(failed):
            print(f"\n---- {name}{', over gloo too' * (name in also)}, {outcomes[name].text}", flush=True)
        skips.update(text.partition("\n")[2] for kind, text in outcomes.values() if kind == "skipped")
    print("\nskipped by PyTorch's tests, over gloo too:")
    for text, count in skips.most_common():
        print(f"{count:7}  {text}")
    print(f"\n{summary(totals, times)}")
    return int(any(total["failed"] for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
