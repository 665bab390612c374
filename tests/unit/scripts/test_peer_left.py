"""A rank whose program ends while others wait for it in a collective: they raise an error that names it."""

import re
import time

import pytest
from support.launches import ended, needs_mpiexec, start_ranks
from support.tiers import default

pytestmark = [needs_mpiexec, pytest.mark.timeout(60)]

PROGRAM = """
import sys
import time
import numpy as np
from mpi4py import MPI
from collectives import Communicator
from collectives.errors import PeerLeft

comm, x = Communicator(MPI.COMM_WORLD), np.ones(100)
comm.Bcast(x, 1)
comm.Barrier()
if comm.rank == 1:
    END
began = time.monotonic()
try:
    CALL
except PeerLeft as error:
    print(f"rank {comm.rank} after {time.monotonic() - began:.0f} s: {error}", flush=True)
    raise
"""

CALLS = {
    "comm.Bcast(x, 1)": "broadcast",
    "comm.Ibcast(x, 1).Wait()": "broadcast",
    "comm.Reduce(x, np.empty(100) if comm.rank == 0 else None)": "reduce",
    "comm.Scatterv(None, x, root=1)": "scatter",
}


@pytest.mark.parametrize("end", default(["sys.exit(3)", "sys.exit()"], "sys.exit(3)"))
@pytest.mark.parametrize("call", default(CALLS, "comm.Bcast(x, 1)"))
def test_a_program_that_ends_on_one_rank(tmp_path, call, end):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("CALL", call).replace("END", end))
    text = ended(process := start_ranks(3, [path]))
    assert process.returncode, text
    assert f"s: {CALLS[call]} (" in text, text
    assert "rank 1 has left the program, and this one waits for it" in text, text
    cause = r"cause: rank 1 has left the program, after barrier \(.*\) #\d+; ranks? [02].* waits? for it in "
    assert re.search(rf"{cause}{CALLS[call]} .*, at .*program\.py:\d+ in <module>: ", text), text
    seconds = [int(found) for found in re.findall(r"rank \d after (\d+) s:", text)]
    assert max(seconds) <= 3, text


def test_a_rank_that_leaves_before_the_rest_of_its_object(tmp_path):
    """The first bytes of the object have arrived, those that do not fit there never will."""
    leaves = (
        "from collectives.runtime.methods import object_methods as it\n    it.PartMessages = lambda *_: sys.exit(3)"
    )
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("CALL", "comm.gather(b'x' * 100_000)").replace("END", leaves))
    text = ended(process := start_ranks(3, [path]))
    assert process.returncode, text
    assert re.search(r"rank 0 after [123] s: gather: rank 1 has left the program, and this one waits for it", text), (
        text
    )


def test_a_report_of_what_the_ranks_do(tmp_path):
    """After `CHORUS_PATIENCE` seconds without progress: by one of them, with the line of the one that makes no call."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("CALL", "comm.Bcast(x, 1)").replace("END", "time.sleep(6)"))
    text = ended(process := start_ranks(3, [path], CHORUS_PATIENCE="3"))
    assert not process.returncode, text
    assert text.count("nothing has moved for 3 s") == 1, text
    cause = r"cause: rank 1 is in its own code .*program.py:\d+ in <module>: time.sleep\(6\); ranks 0, 2 wait for it"
    assert re.search(cause, text), text
    assert "in broadcast with root 1" in text and ", for rank 1" in text, text
    assert "rank 1 " in text and "is in its own code since" in text and "after barrier" in text, text


HANGS = """
import atexit, os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
from collectives import Communicator

comm, x, y = Communicator(MPI.COMM_WORLD), np.ones(100), np.empty(100)
for _ in range(5):
    comm.Allreduce(x, y)
other, is_last = comm.Dup(), comm.rank == comm.size - 1
began = time.monotonic()
PROGRAM
"""

ALONE, WAIT = r"rank {last} ", r"; ranks? [\d, ]+ waits? for it in allreduce \(.*\) #\d+"

THREAD = """
def work():
    comm.Allreduce(x, y)
    if is_last:
        raise ValueError("mine")
    comm.Allreduce(x, y)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""

AT_EXIT = """
@atexit.register
def work():
    if is_last:
        raise ValueError("mine")
    comm.Allreduce(x, y)
"""

LEFT = ALONE + r"has left the program, after allreduce \(.*\) #\d+"

ROWS = {
    "exit": ("if is_last: sys.exit(3)\ncomm.Allreduce(x, y)", LEFT),
    "thread": (THREAD, LEFT + "; an exception before: ValueError: mine"),
    "at exit": (AT_EXIT, LEFT + "; an exception before: ValueError: mine"),
    "raise": ("if is_last: raise ValueError('mine')\ncomm.Allreduce(x, y)", ALONE + "has ended by ValueError: mine"),
    "no call": ("if is_last: time.sleep(60)\ncomm.Allreduce(x, y)", ALONE + r"is in its own code.*sleep\(60\)" + WAIT),
    "one more": ("comm.Allreduce(x, y)\nif is_last: comm.Allreduce(x, y)", r"rank \d has left the program, after"),
    "order": (
        "for one in (other, comm) if is_last else (comm, other): one.Allreduce(x, y)",
        r"wait for each other in different calls: rank \d waits .* of communicator \d.*of communicator \d",
    ),
    "receive": (
        "comm.Recv(x, source=0) if is_last else comm.Allreduce(x, y)",
        ALONE + r"is in its own code.*comm.Recv\(x, source=0\)" + ".*" + WAIT,
    ),
    "root": (
        "comm.Reduce(x, y, root=1 if is_last else 0)",
        r"ranks make different calls: rank \d reduce with root 0 \(.*\) #6, rank {last} reduce with root 1 \(.*\) #6",
    ),
    "stopped": (
        "if is_last: os.kill(os.getpid(), signal.SIGSTOP)\ncomm.Allreduce(x, y)",
        ALONE + r"is stopped, and is in its own code" + ".*" + WAIT,
    ),
    "exit with an unread message": (
        "if is_last: sys.exit(3)\ncomm.Bcast(x, 0)\ncomm.Allreduce(x, y)",
        LEFT + WAIT + r".*program.py:\d+ in",
    ),
    "exit before the first call": (
        "third = comm.Dup()\nif is_last: sys.exit(3)\nthird.Bcast(x, 0)\nthird.Allreduce(x, y)",
        LEFT + WAIT + r".*program.py:\d+ in",
    ),
    "exit of a request": (
        "if is_last: sys.exit(3)\nMPI.Request.Waitall([comm.Iallreduce(x, y)])",
        LEFT,
    ),
    "native": (
        "if is_last: time.sleep(60)\ncomm.Allreduce(x, y, algorithm='native')",
        ALONE + r"is in its own code.*sleep\(60\); ranks? [\d, ]+ waits? for it in allreduce \(native, .*\) #6",
    ),
}
"""Programs that hang, or end on one rank only, and the cause that is named."""


@pytest.mark.parametrize("ranks", default([2, 3], 3))
@pytest.mark.parametrize("row", default(ROWS, "exit", "thread", "no call", "order", "root"))
def test_hangs_end_with_their_cause(tmp_path, row, ranks):
    program, cause = ROWS[row]
    path = tmp_path / "program.py"
    path.write_text(HANGS.replace("PROGRAM", program))
    began = time.monotonic()
    text = ended(process := start_ranks(ranks, [path], CHORUS_PATIENCE="3", CHORUS_TIMEOUT="6"))
    assert time.monotonic() - began < LONGEST, text
    assert process.returncode, text
    assert re.search(cause.replace("{last}", str(ranks - 1)), text), text
    assert row in ("root", "order") or "Mismatch" not in text, text


LONGEST = 20.0
"""Seconds of a program: 8, the time to start, and room for machines with much else to do."""
