"""A program ends cleanly, whatever it left open: nothing printed, nothing leaked, status 0.

Each test runs a small program under mpiexec. MPICH's own search for leaks is on, where it was built in; and a last look
of our own, after all else, at every request and every communicator that the library ever made.
"""

import json
import subprocess
import time
from pathlib import Path

import pytest
from support.launches import ended, needs_mpiexec, start_ranks
from support.tiers import default

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [needs_mpiexec, pytest.mark.timeout(120)]

START = """
import atexit, sys
import numpy as np
from mpi4py import MPI

made = []

@atexit.register  # before the library registers its own, so that it comes after
def last_look():
    for thing in made:
        if thing not in (MPI.REQUEST_NULL, MPI.COMM_NULL):
            sys.stdout.write(f"left: {thing!r}\\n")

from collectives import Communicator, wait_all
from collectives.runtime.builders import native
from collectives.runtime.planning import planner

def noting(function, what):
    def wrapped(*arguments):
        result = function(*arguments)
        made.append(what(arguments, result))
        return result
    return wrapped

native._persistent = noting(native._persistent, lambda arguments, result: result)
planner.Planner.__init__ = noting(planner.Planner.__init__, lambda arguments, result: arguments[1].comm)
comm = Communicator(MPI.COMM_WORLD, shared=SHARED)
n = comm.Get_size()
small, large, total = np.ones(4), np.ones(100_000), np.zeros(4)
"""

WORK = """
for _ in range(3):
    comm.Allreduce(small, total)
    comm.Allreduce(large, np.zeros_like(large))
    comm.Bcast([np.ones((4, 3)), 1, column])
    wait_all([comm.Ibarrier(), comm.Iallreduce(small, np.zeros(4)), comm.Iallgather(small, np.zeros(4 * n))])
"""

COLUMN = "column = MPI.DOUBLE.Create_vector(4, 1, 3).Commit()\n"

ENDINGS = {
    "nothing was done": "",
    "all was given back": COLUMN
    + WORK
    + """
request = comm.Allreduce_init(small, total)
request.Start()
request.Wait()
request.Free()
column.Free()
comm.close()
""",
    "the communicator is left open": COLUMN + WORK + "column.Free()\n",
    "persistent requests are left": COLUMN
    + WORK
    + """
requests = [comm.Allreduce_init(small, total), comm.Bcast_init(large)]
requests[0].Start()
requests[0].Wait()
column.Free()
""",
    "several communicators, some freed": COLUMN
    + WORK
    + """
others = [comm.Dup(), comm.Split(0, 0), comm.Dup()]
for other in others:
    other.Allreduce(large, np.zeros_like(large))
others[1].Free()
column.Free()
for other in (others[0], others[2]):
    other.Free()
""",
    "in debug mode": "comm.close()\ncomm = Communicator(MPI.COMM_WORLD, debug=True)\n"
    + COLUMN
    + WORK
    + "column.Free()\n",
    "operations of one's own": """
op = MPI.Op.Create(lambda a, b, t: None, commute=False)
for _ in range(3):
    comm.Allreduce(small, total, op)
    comm.Iallreduce(small, total, op).Wait()
op.Free()
""",
    "pairs and small floats": """
import ml_dtypes
pairs = np.zeros(5, np.dtype([("val", "f8"), ("loc", "i4")], align=True))
comm.Allreduce(pairs, pairs.copy(), MPI.MAXLOC)
comm.Allreduce(np.ones(5, ml_dtypes.bfloat16), np.ones(5, ml_dtypes.bfloat16))
""",
    "symmetric arrays are left, some used by what is bound": """
kept = [comm.empty(1000), comm.zeros((300, 300)), comm.like(large)]
comm.Allreduce(kept[2], kept[2].copy())
request = comm.Allreduce_init(kept[2], comm.empty(kept[2].size))
request.Start()
request.Wait()
later = comm.Dup()
more = later.empty(5000)
later.Free()
""",
    "MPI is ended by the program": "comm.Allreduce(small, total)\ncomm.close()\nMPI.Finalize()\n",
}


def run(source, ranks=2, shared=True, **more):
    program = START.replace("SHARED", str(shared)) + source
    words = ("-X", "dev", "-W", "error", "-c", program)
    process = start_ranks(ranks, words, MPIR_CVAR_ENABLE_LEAK_CHECK="1", **more)
    output = ended(process)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@pytest.mark.parametrize(
    "ending", default(ENDINGS, "nothing was done", "persistent requests are left", "several communicators, some freed")
)
@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.full)], ids=["shared", "apart"])
def test_a_program_ends_in_silence(ending, shared):
    done = run(ENDINGS[ending], shared=shared)
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() == ""


def test_what_is_left_under_way_is_told_and_the_program_ends():
    """The barrier lacks a rank, which has ended before; nobody waits for it."""
    done = run("import time\nif comm.Get_rank():\n    time.sleep(0.5)\n    comm.Ibarrier()\n")
    assert done.stdout.count("InvalidArgument: 1 collectives are still under way") == 1, done.stdout


def test_the_last_look_sees_what_is_left():
    done = run(
        "kept = comm.Allreduce_init(small, total, algorithm='native')\n"
        "atexit.unregister(Communicator.__init__.__globals__['close_all'])\n",
        shared=False,
    )
    assert done.stdout.count("left: <mpi4py.MPI.Prequest") >= 2
    assert done.stdout.count("left: <mpi4py.MPI.Intracomm") == 2


def test_debug_mode_from_the_environment():
    done = run(
        "import sys\ntry:\n    comm.Barrier() if comm.Get_rank() else comm.Bcast(small)\nexcept ValueError as error:\n"
        "    sys.stdout.write(str(error) + chr(10))\n",
        CHORUS_DEBUG="1",
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ranks make different calls: rank 0 calls broadcast") == 2


KILLED = """
import json, os, signal

def shared():
    lines = [line.split(maxsplit=5) for line in open("/proc/self/maps")]
    return {(line[4], line[5].strip()) for line in lines if line[1].endswith("s") and len(line) > 5}

before = shared()
ours = comm.Dup()
big = ours.full(300_000, 1.0)
ours.Allreduce(MPI.IN_PLACE, big)
ours.Allreduce_init(big, ours.empty(300_000)).Start()
ours.Allreduce(small, total)
names = [sorted({name for _, name in its}) for its in (before, shared() - before)]
sys.stdout.write("mapped " + json.dumps(names) + chr(10))
sys.stdout.flush()
ours.Barrier()
if comm.Get_rank() == n - 1:
    os.kill(os.getpid(), signal.SIGKILL)
ours.Barrier()
ours.Barrier()
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_a_rank_that_is_killed_leaves_no_shared_memory_behind():
    """Symmetric memory and mailboxes have no names and end with the last process. What MPICH leaves of a killed
    program, with Chorus or without it, this test removes."""
    done = run(KILLED, ranks=3)
    told = [json.loads(line.partition("mapped ")[2]) for line in done.stdout.splitlines() if "mapped [" in line]
    assert len(told) == 3 and done.returncode != 0, done.stdout
    assert any("memfd:chorus" in name for _, ours in told for name in ours)
    deadline = time.monotonic() + 100
    while left := [name for _, ours in told for name in ours if Path(name).exists()]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    for name in {name for its, _ in told for name in its if name.startswith("/dev/shm/")}:
        Path(name).unlink(missing_ok=True)
