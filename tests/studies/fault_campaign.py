"""Campaign of seeded faults, in real runs and in simulated ones: check that rank, call and line are named in time.

python tests/studies/fault_campaign.py --simulated 1000
python tests/studies/fault_campaign.py --times 40 --seed 1
python tests/studies/fault_campaign.py --programs training-pp,training-ps --kinds kill,stop --ranks 4
python tests/studies/fault_campaign.py --times 40 --per-host 2,2

Each real run has a random program, kind of fault, rank, call and number of ranks. A line for each, then a table by
kind. The exit status is 1 if a fault was not reported as it should be (`fault_reports`). The MPI is that of this
Python: call each one's in turn. With --per-host runs are on an emulated cluster (`scripts/cluster`).
"""

import os
import random
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fault_reports import is_own_error, wrong
from mpi_launches import ROOT
from simulated_faults import SimulatedRun
from simulated_faults import wrong as not_named

from collectives.cli.arguments import names_of
from collectives.cli.drill import LONGEST, TIMEOUT, Outcome, launch
from collectives.cli.faults import KINDS, Fault
from collectives.cli.launcher import ProgramParser, at_least
from collectives.runtime.record.reader import in_folder
from parallel.cli.main import LAUNCH_DEFAULTS

CALLS = """
import sys
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
n, x, y = comm.size, np.ones(1000), np.empty(1000)
every = np.empty(1000 * n)
for turn in range(15):
"""

TRAINING = """
import numpy as np
from mpi4py import MPI
from parallel import AdamW, Engine, nn
x, y = np.ones((8, 4), np.float32), np.arange(8) % 3
with Engine(nn.mlp([4, 8, 8, 3]), nn.SoftmaxCrossEntropy(), MPI.COMM_WORLD, AdamW(lr=0.01), LAYOUT) as engine:
    for _ in range(10):
        engine.step(x, y)
"""

LAYOUTS = {
    "training": 'layout="zero3"',
    "training-dp": 'layout="dp"',
    "training-zero1": 'layout="zero1"',
    "training-pp": 'layout="pp", stages=2',
    "training-ps": 'layout="ps"',
    "training-tp": 'layout="dp", mesh=f"tp={MPI.COMM_WORLD.Get_size()}"',
}

PROGRAMS = {
    "collectives": CALLS + """
    comm.Allreduce(x, y)
    assert (y == n).all(), "wrong"
    comm.Bcast(x, root=turn % n)
    comm.allgather({"rank": comm.rank})
    comm.Alltoall(every, every.copy())
""",
    "non-blocking": CALLS + """
    requests = [comm.Iallreduce(x, y), comm.Ibarrier(), comm.Iallgather(x, every)]
    for request in requests:
        request.Wait()
    assert (y == n).all(), "wrong"
""",
    "v-forms": CALLS + """
    counts = [100 * (rank + 1) for rank in range(n)]
    mine, joined = np.ones(counts[comm.rank]), np.empty(sum(counts))
    comm.Allgatherv(mine, [joined, counts])
    comm.Gatherv(mine, [joined, counts], root=turn % n)
    comm.Scatterv([joined, counts], mine, root=turn % n)
    assert (joined == 1).all() and (mine == 1).all(), "wrong"
""",
    "network": CALLS.replace("comm = MPI.COMM_WORLD", """
from collectives import Communicator
comm = Communicator(MPI.COMM_WORLD, shared=False)
""") + """
    comm.Allreduce(x, y)
    assert (y == n).all(), "wrong"
    comm.Bcast(x, root=turn % n)
""",
    **{name: TRAINING.replace("LAYOUT", options) for name, options in LAYOUTS.items()},
}  # fmt: skip

EVEN = ("training-pp", "training-tp")
"""Programs for even numbers of ranks."""


class Drilled(NamedTuple):
    """Program and number of ranks, of an undisturbed run that made these calls on each rank.

    `start` is the beginning of its command, if that is another one than ``chorus run``.
    """

    path: Path
    ranks: int
    start: Sequence[str]
    seconds: float = 120.0
    calls: Mapping[int, np.ndarray] = {}

    def measured(self) -> "Drilled":
        """Run the program without a fault."""
        with tempfile.TemporaryDirectory(prefix="chorus-campaign-") as name:
            found = launch(self.ranks, [str(self.path)], Path(name), self.seconds, start=self.start)
            if found.status != 0:
                raise SystemExit(f"{self.path.name} on {self.ranks} ranks: status {found.status}\n{found.text}")
            calls = {one.rank: one.calls for one in in_folder(Path(name))}
            return self._replace(seconds=found.ended, calls=calls)

    def struck(self, planned: Fault) -> Outcome:
        """Outcome of a run with a fault."""
        with tempfile.TemporaryDirectory(prefix="chorus-campaign-") as name:
            longest = self.seconds + TIMEOUT + LONGEST
            return launch(self.ranks, [str(self.path)], Path(name), longest, planned, self.start)


def parse(words: Sequence[str] | None = None) -> Namespace:
    parser = ProgramParser(__doc__)
    add = parser.add_argument
    add("--programs", type=names_of("program", PROGRAMS), default=list(PROGRAMS), metavar="LIST")
    add("--kinds", type=names_of("fault", KINDS), default=list(KINDS), metavar="LIST")
    add("--times", type=at_least(1, int), default=40, metavar="N")
    add("--seed", type=at_least(0, int), default=0)
    add("--ranks", type=at_least(2, int), nargs="+", default=[2, 3, 4])
    add("--per-host", metavar="N,N", help="emulated hosts with so many ranks each, in place of this one")
    add("--simulated", type=at_least(1, int), metavar="N", help="faults of simulated ranks, in place of real runs")
    options = parser.parse_args(words)
    if options.per_host:
        options.ranks = [sum(map(int, options.per_host.split(",")))]
    return options


Table = Counter[tuple[str, str]]
"""Faults by kind and outcome: "right", "own error" of the program, "missed"."""


def print_table(kinds: Sequence[str], table: Table, longest: dict[str, float]) -> int:
    """Print a table by kind. Returns 1 if faults were missed."""
    print(f"{'kind':<10}{'right':>8}{'own error':>11}{'missed':>8}{'longest end':>14}")
    for kind in kinds:
        right, own, bad = (table[kind, how] for how in ("right", "own error", "missed"))
        took = f"{longest[kind]:.1f} s" if kind in longest else "-"
        print(f"{kind:<10}{right:>8}{own:>11}{bad:>8}{took:>14}")
    missed = sum(count for (_, how), count in table.items() if how == "missed")
    print(f"{table.total() - missed} of {table.total()} as they should be")
    return int(missed > 0)


def simulated(times: int, seed: int, kinds: tuple[str, ...]) -> int:
    """Campaign in simulated ranks."""
    table = Table()
    for number in range(seed, seed + times):
        run = SimulatedRun(number, kinds)
        found = run.run()
        if problem := not_named(run, found):
            print(f"seed {number}: {run.fault}: {problem}: {found}")
        table[run.fault.kind, "missed" if problem else "right"] += 1
    return print_table(kinds, table, {})


def main() -> int:
    options = parse()
    if options.simulated:
        return simulated(options.simulated, options.seed, tuple(options.kinds))
    for name, value in LAUNCH_DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = str(ROOT)
    rng, table = random.Random(options.seed), Table()
    longest = dict.fromkeys(options.kinds, 0.0)
    usual: dict[tuple[str, int], Drilled] = {}
    cluster = [str(ROOT / "scripts/cluster"), "--per-host", options.per_host, "--", "python", "-m", "collectives"]
    start = cluster if options.per_host else []
    with tempfile.TemporaryDirectory(prefix="chorus-programs-") as folder:
        for _ in range(options.times):
            name, kind, ranks = (rng.choice(some) for some in (options.programs, options.kinds, options.ranks))
            ranks += ranks % 2 if name in EVEN else 0
            if (name, ranks) not in usual:
                (path := Path(folder) / name / "program.py").parent.mkdir(exist_ok=True)
                path.write_text(PROGRAMS[name])
                usual[name, ranks] = Drilled(path, ranks, start).measured()
            drilled = usual[name, ranks]
            rank = rng.choice([rank for rank, calls in sorted(drilled.calls.items()) if len(calls)])
            planned = Fault(kind, rank, rng.randint(1, int(drilled.calls[rank]["number"][-1])))
            found = drilled.struck(planned)
            problem = wrong(planned, found, drilled.calls, PROGRAMS[name])
            reported = f"{found.reported:.1f} s" if found.report else "-"
            text = f"{name:<14} {ranks} ranks {planned!s:<13} {reported:>6} {found.ended:5.1f} s {problem or 'right'}"
            print(f"{text}: {found.report[:160]}", flush=True)
            if problem:
                print(found.text)
            table[kind, "missed" if problem else "own error" if is_own_error(found) else "right"] += 1
            longest[kind] = max(longest[kind], found.ended)
    return print_table(options.kinds, table, longest)


if __name__ == "__main__":
    sys.exit(main())
