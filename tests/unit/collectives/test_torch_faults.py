"""Programs of torch.distributed in which a rank fails: errors name rank and call, and all ranks end."""

import re
import time

import pytest
from support.launches import ended, needs_mpiexec, start_ranks
from support.tiers import default

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'chorus-mpi[torch]'")

pytestmark = [needs_mpiexec, pytest.mark.timeout(120)]

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
import collectives.torch

collectives.torch.init(timeout=3, overlap=OVERLAP)
x, rank = torch.ones(4), dist.get_rank()
dist.all_reduce(x)
try:
    if rank == 1:
        FAULT
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x)
except dist.DistBackendError as error:
    print(f"rank {rank}: {error}", flush=True)
    sys.exit(3)
"""

FAULTS = {
    "dist.broadcast(torch.ones(99), 0, async_op=True).wait()": r"broadcast #2 on rank 1 of 2 in group 0: rank 1 ",
    "time.sleep(6)": r"allreduce #2 on rank 0 of 2 in group 0: timeout in allreduce",
    "sys.exit(4)": r"allreduce #2 on rank 0 .*rank 1 has left the program|rank 1 expected no message from rank 0",
    "raise RuntimeError('no data')": r"RuntimeError: no data",
    "os.kill(os.getpid(), signal.SIGKILL)": "",
}
"""What rank 1 does, and a pattern of what is printed. The launcher ends all ranks at once if one is killed; after an
exit it depends on time which rank notices first."""


@pytest.mark.parametrize("overlap", default([False, True], False))
@pytest.mark.parametrize("fault", default(FAULTS, "time.sleep(6)", "sys.exit(4)"))
def test_a_rank_that_fails(tmp_path, fault, overlap):
    path, begin = tmp_path / "program.py", time.monotonic()
    path.write_text(PROGRAM.replace("FAULT", fault).replace("OVERLAP", str(overlap)))
    text = ended(process := start_ranks(2, [path]))
    assert process.returncode, text
    assert re.search(FAULTS[fault], text), text
    assert time.monotonic() - begin < 60
