"""A rank whose program ends while others wait for it in a collective: they raise an error that names it."""

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
    assert f"s: {CALLS[call]} (" in text and "rank 1 has left the program, and this one waits for it" in text, text
    seconds = [int(line.split(" after ")[1].split()[0]) for line in text.splitlines() if " after " in line]
    assert max(seconds) <= 3, text


def test_a_report_of_what_the_ranks_do(tmp_path):
    """After `CHORUS_PATIENCE` seconds without progress: by one of them, with the line of the one that makes no call."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("CALL", "comm.Bcast(x, 1)").replace("END", "time.sleep(6)"))
    text = ended(process := start_ranks(3, [path], CHORUS_PATIENCE="3"))
    assert not process.returncode, text
    assert text.count("nothing has moved for 3 s") == 1, text
    assert "in broadcast with root 1" in text and ", for rank 1" in text, text
    assert "rank 1 " in text and "is in its own code since" in text and "after barrier" in text, text
