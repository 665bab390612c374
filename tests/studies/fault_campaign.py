"""Campaign of seeded faults, in real runs and in simulated ones: check that the rank and a call are named in time.

python tests/studies/fault_campaign.py --simulated 1000
python tests/studies/fault_campaign.py --times 40 --seed 1
python tests/studies/fault_campaign.py --programs training-pp,training-ps --kinds kill,stop --ranks 4

Each real run has a random program, kind of fault, rank, call and number of ranks. A line for each, then a table by
kind. The exit status is 1 if a fault was not reported as it should be. The MPI is that of this Python: call each one's
in turn.
"""

import os
import random
import re
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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

ENDS = 10.0
"""Seconds at most from a fault to the end."""

CONDITIONS = {
    "stop": "is stopped",
    "exit": "has left (the program|a call in the middle: SystemExit)",
    "raise": "has ended by InjectedFault",
}


def wrong(planned: Fault, found: Outcome) -> str:
    """Text on what is wrong with the report of a fault, or with its time. Empty if nothing is."""
    kind, rank, report = planned.kind, rf"\brank {planned.rank}\b", found.report
    if found.status is None or found.ended > ENDS:
        return f"ended after {found.ended:.1f} s"
    if kind == "delay":
        return f"status {found.status}" if found.status else ""
    # the last call, or one whose data other ranks do not need; a program may not look at its data
    if kind == "corrupt" or (kind in ("skip", "more", "diverge") and not found.status):
        return ""
    if not found.status or not report:
        return "no report"
    if found.reported > TIMEOUT + 2:
        return f"reported after {found.reported:.1f} s"
    if kind in CONDITIONS and not re.search(rf"{rank} {CONDITIONS[kind]}", found.text + report):
        return "not its rank"
    if kind == "kill" and not re.search(rf"{rank} has died|{rank}.*(killed|signal)", found.text + report, re.I):
        return "not its rank"
    if is_own_error(planned, found):
        return ""
    if kind in ("skip", "more", "diverge") and not re.search(rank, report):
        return "not its rank"
    has_call = "#" in report or "before its first call" in report or "a call in the middle" in found.text
    if not has_call and not (kind == "kill" and "killed" in report):
        return "no call"
    return "" if kind != "raise" or re.search(r'program\.py", line \d+', found.text) else "no line"


def is_own_error(planned: Fault, found: Outcome) -> bool:
    """True if the data of a wrong call have led to an error of the program itself, at a line of it."""
    is_other = "rank" in found.report or found.report.startswith("collectives.")
    return planned.kind in ("skip", "more", "diverge") and not is_other and 'program.py", line' in found.text


class Drilled(NamedTuple):
    """Program and number of ranks, of an undisturbed run that made so many calls on each rank."""

    path: Path
    ranks: int
    seconds: float
    calls: dict[int, int]

    @classmethod
    def of(cls, path: Path, ranks: int) -> "Drilled":
        with tempfile.TemporaryDirectory(prefix="chorus-campaign-") as name:
            found = launch(ranks, [str(path)], Path(name), 120.0)
            if found.status != 0:
                raise SystemExit(f"{path.name} on {ranks} ranks: status {found.status}\n{found.text}")
            return cls(path, ranks, found.ended, {one.rank: int(one.header["last"]) for one in in_folder(Path(name))})

    def struck(self, planned: Fault) -> Outcome:
        """Outcome of a run with a fault."""
        with tempfile.TemporaryDirectory(prefix="chorus-campaign-") as name:
            longest = self.seconds + TIMEOUT + LONGEST
            return launch(self.ranks, [str(self.path)], Path(name), longest, planned)


def parse(words: Sequence[str] | None = None) -> Namespace:
    parser = ProgramParser(__doc__)
    add = parser.add_argument
    add("--programs", type=names_of("program", PROGRAMS), default=list(PROGRAMS), metavar="LIST")
    add("--kinds", type=names_of("fault", KINDS), default=list(KINDS), metavar="LIST")
    add("--times", type=at_least(1, int), default=40, metavar="N")
    add("--seed", type=at_least(0, int), default=0)
    add("--ranks", type=at_least(2, int), nargs="+", default=[2, 3, 4])
    add("--simulated", type=at_least(1, int), metavar="N", help="faults of simulated ranks, in place of real runs")
    return parser.parse_args(words)


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
    with tempfile.TemporaryDirectory(prefix="chorus-programs-") as folder:
        for _ in range(options.times):
            name, kind, ranks = (rng.choice(some) for some in (options.programs, options.kinds, options.ranks))
            ranks += ranks % 2 if name in EVEN else 0
            if (name, ranks) not in usual:
                (path := Path(folder) / name / "program.py").parent.mkdir(exist_ok=True)
                path.write_text(PROGRAMS[name])
                usual[name, ranks] = Drilled.of(path, ranks)
            drilled = usual[name, ranks]
            rank = rng.choice([rank for rank, count in sorted(drilled.calls.items()) if count])
            planned = Fault(kind, rank, rng.randint(1, drilled.calls[rank]))
            found = drilled.struck(planned)
            problem = wrong(planned, found)
            reported = f"{found.reported:.1f} s" if found.report else "-"
            text = f"{name:<14} {ranks} ranks {planned!s:<13} {reported:>6} {found.ended:5.1f} s {problem or 'right'}"
            print(f"{text}: {found.report[:160]}", flush=True)
            if problem:
                print(found.text)
            table[kind, "missed" if problem else "own error" if is_own_error(planned, found) else "right"] += 1
            longest[kind] = max(longest[kind], found.ended)
    return print_table(options.kinds, table, longest)


if __name__ == "__main__":
    sys.exit(main())
