"""``chorus drill``: faults injected into programs are reported, with their rank, and no program hangs."""

import argparse
import re
import sys

import pytest
from support.launches import launch_environment, needs_mpiexec
from support.tiers import default

from collectives.cli import drill
from collectives.cli.faults import KINDS, Fault, fault

pytestmark = [needs_mpiexec, pytest.mark.timeout(900)]

CALLS = """
import sys
import numpy as np
from mpi4py import MPI
comm = MPI.COMM_WORLD
n, x, y = comm.size, np.ones(1000), np.empty(1000)
every = np.empty(1000 * n)
for turn in range(15):
"""

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
    "training": """
import numpy as np
from mpi4py import MPI
from parallel import AdamW, Engine, nn
x, y = np.ones((8, 4), np.float32), np.arange(8) % 3
with Engine(nn.mlp([4, 8, 3]), nn.SoftmaxCrossEntropy(), MPI.COMM_WORLD, AdamW(lr=0.01), layout="zero3") as engine:
    for _ in range(10):
        engine.step(x, y)
""",
}  # fmt: skip

SILENT = ("delay", "corrupt")
"""Faults that need no report: a second's wait, and wrong data that a program may not look at."""


def drilled(tmp_path, monkeypatch, program, ranks, kinds, **options):
    """Faults and outcomes of a drill."""
    path, runs = tmp_path / "program.py", []
    path.write_text(PROGRAMS[program])
    for name, value in launch_environment().items():
        monkeypatch.setenv(name, value)
    launch = drill.launch

    def noting(*arguments):
        runs.append((arguments[4] if len(arguments) > 4 else None, launch(*arguments)))
        return runs[-1][1]

    monkeypatch.setattr(drill, "launch", noting)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert drill.main(["-n", str(ranks), "--kinds", ",".join(kinds), *words, str(path)]) == 0
    return runs[1:]


def check(planned, found):
    """A fault is reported with its rank, and soon; the program ends."""
    about = (planned, found)
    assert found.status is not None and found.ended < 10, about
    if planned.kind in SILENT:
        assert found.status == (0 if planned.kind == "delay" else found.status), about
        return
    if planned.kind in ("skip", "more", "diverge") and not found.status:
        return  # the last call, or one whose data other ranks do not need
    assert found.status, about
    assert found.report and (planned.kind == "kill" or found.reported < drill.TIMEOUT + 2), about
    names_rank = re.search(rf"\brank {planned.rank}\b", found.report)
    assert names_rank or planned.kind in ("raise", "skip", "more", "diverge", "kill"), about


@pytest.mark.parametrize("ranks", default([2, 3, 4], 3))
@pytest.mark.parametrize("program", default(PROGRAMS, "collectives"))
@pytest.mark.parametrize("kind", default(KINDS, "stop", "exit"))
def test_faults_are_reported(tmp_path, monkeypatch, capsys, program, ranks, kind):
    seed = sum(map(ord, program + kind)) + ranks
    runs = drilled(tmp_path, monkeypatch, program, ranks, [kind], seed=seed)
    for planned, found in runs:
        print(planned, found.status, f"{found.ended:.1f} s", found.report, file=sys.stderr)
        check(planned, found)
    assert f"{kind}@" in capsys.readouterr().out


def test_the_table():
    runs = [
        (Fault("stop", 1, 17), drill.Outcome(1, "cause: rank 1 is stopped", 2.04, 4.0, "")),
        (Fault("delay", 0, 3), drill.Outcome(0, "", 0.0, 2.0, "")),
        (Fault("skip", 0, 3), drill.Outcome(None, "", 0.0, 20.0, "")),
    ]
    assert drill.table(runs) == [
        "fault      reported after  ended after  status  report",
        "stop@1:17  2.0 s           4.0 s        1       cause: rank 1 is stopped",
        "delay@0:3  -               2.0 s        0       none",
        "skip@0:3   -               20.0 s       hangs   none",
    ]


def test_names_of_faults():
    assert all(fault(f"{kind}@2:17") == (kind, 2, 17) for kind in KINDS)
    for text in ("", "stop", "stop@1", "stop@1:0", "stop@x:1", "nosuch@1:1", "stop@1:-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected KIND@RANK:CALL"):
            fault(text)


@pytest.mark.parametrize("words", [[], ["-n", "2"], ["-n", "0", "x.py"], ["-n", "2", "--kinds", "nosuch", "x.py"]])
def test_wrong_command_lines(words, capsys):
    with pytest.raises(SystemExit):
        drill.main(words)
    assert "error:" in capsys.readouterr().err
