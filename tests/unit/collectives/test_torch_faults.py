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
x, rank = torch.ones(8, 4), dist.get_rank()
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
step = lambda: net(x).sum().backward()
USE
step()
try:
    if rank == 1:
        FAULT
    step()
    dist.broadcast(x, 0)
except dist.DistBackendError as error:
    print(f"rank {rank}: {error}", flush=True)
    sys.exit(3)
"""

USES = {
    "collectives": "step = lambda: dist.all_reduce(x, async_op=True).wait()",
    "DDP": "net = torch.nn.parallel.DistributedDataParallel(net)",
    "FSDP2": "from torch.distributed.fsdp import fully_shard; fully_shard(net)",
}
"""What the ranks use: lines that replace `net` or `step`."""

CALL = r"\w+ #\d+ on rank {} of 2 in group \w+: "
DIFFERS = CALL.format("[01]") + r"(?s:.)*(of another call|bytes from rank [01], found|ranks make different calls"
DIFFERS += "|ranks wait for each other in different calls)"
ABSENT = CALL.format(0) + "(?s:.)*(rank 1 has (left|ended)|rank 1 expected no message from rank 0)"

FAULTS = {
    "dist.broadcast(torch.ones(99), 0, async_op=True).wait()": DIFFERS,
    "dist.all_reduce(torch.ones(99))": DIFFERS,
    "dist.all_reduce(torch.ones(8, 4, dtype=torch.int32))": DIFFERS,
    "step(), step()": f"{DIFFERS}|{CALL.format(1)}(?s:.)*rank 0 has left the program",
    "time.sleep(6)": CALL.format(0) + "timeout in",
    "sys.exit(4)": ABSENT,
    "raise RuntimeError('no data')": r"RuntimeError: no data",
    "os.kill(os.getpid(), signal.SIGKILL)": "",
}
"""What rank 1 does, and a pattern of what is printed. The launcher ends all ranks at once if one is killed; after an
exit it depends on time which rank notices first."""


@pytest.mark.parametrize("overlap", default([False, True], False))
@pytest.mark.parametrize("use", default(USES, "collectives"))
@pytest.mark.parametrize("fault", default(FAULTS, "time.sleep(6)", "sys.exit(4)"))
def test_a_rank_that_fails(tmp_path, fault, use, overlap):
    path, begin = tmp_path / "program.py", time.monotonic()
    path.write_text(PROGRAM.replace("FAULT", fault).replace("OVERLAP", str(overlap)).replace("USE", USES[use]))
    text = ended(process := start_ranks(2, [path]))
    assert process.returncode, text
    assert re.search(FAULTS[fault], text), text
    assert time.monotonic() - begin < 60


AT_EXIT = """
import sys, threading, time
import torch, torch.distributed as dist
import collectives.torch

collectives.torch.init(timeout=60, overlap=True)
x, rank, is_running = torch.ones(8, 4), dist.get_rank(), threading.Event()
CALL
ENDING
"""

CALLS = {
    "a callback that runs": "dist.all_reduce(x, async_op=True).get_future().then(lambda _: (is_running.set(), "
    "time.sleep(1)))\nis_running.wait()",
    "a call of one rank": "handle = rank == 0 and dist.all_reduce(x, async_op=True)\ntime.sleep(1)",
}
"""What the thread does at the end of the program."""

ENDINGS = ["", "sys.exit(3)", "1 / 0", "raise KeyboardInterrupt", "if rank == 0: 1 / 0\ntime.sleep(60)"]


@pytest.mark.parametrize("ending", default(ENDINGS, "", "1 / 0"))
@pytest.mark.parametrize("call", CALLS)
def test_the_thread_ends_before_the_interpreter(tmp_path, call, ending):
    """The end of the interpreter would abort the process where the thread is in C++ code."""
    path, begin = tmp_path / "program.py", time.monotonic()
    path.write_text(AT_EXIT.replace("CALL", CALLS[call]).replace("ENDING", ending))
    text = ended(process := start_ranks(2, [path]))
    assert "terminate called" not in text and "Aborted (signal" not in text, text
    assert bool(process.returncode) == bool(ending or call == "a call of one rank"), text
    assert time.monotonic() - begin < 60
