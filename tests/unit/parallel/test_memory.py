"""What the system says a training takes is what its ledger says, in every layout; each in fresh processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launches import MPIEXEC, launch_environment, needs_mpiexec
from support.tiers import default

from parallel.engine.data_parallel.layouts import LAYOUTS

ROOT = Path(__file__).resolve().parents[3]
ROLLUP = Path("/proc/self/smaps_rollup")

pytestmark = [
    needs_mpiexec,
    pytest.mark.skipif(
        not ROLLUP.exists() or "Pss_Anon" not in ROLLUP.read_text(),
        reason="the system does not tell a process's share of its memory",
    ),
    pytest.mark.timeout(120),
]

PROGRAM = """
import gc, re, sys
import numpy as np
from mpi4py import MPI
from collectives import Communicator
from collectives.runtime.execution.program import Program
from parallel.data.sampler import Batch
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import mlp
from parallel.optim.optimizers import AdamW

def taken():
    "Bytes that are no file's; a page that several processes map counts for each of them by its share."
    MPI.COMM_WORLD.Barrier()
    text = open("/proc/self/smaps_rollup").read()
    MPI.COMM_WORLD.Barrier()
    return 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +([0-9]+) kB", text, re.MULTILINE)))

def scratch():
    "Scratch memory of collectives: their algorithms are chosen by measured speeds, so that no ledger predicts it."
    return sum(program.nbytes for program in gc.get_objects() if isinstance(program, Program))

def train(widths):
    numbers = np.random.default_rng(comm.Get_rank())
    x, y = numbers.standard_normal((16, widths[0])).astype(np.float32), numbers.integers(0, widths[-1], 16)
    before = taken()
    settings = Settings(layout=sys.argv[1])
    with DataParallelEngine(mlp(widths), SoftmaxCrossEntropy(), comm, AdamW(rate=1e-3), settings) as engine:
        for _ in range(2):  # two micro-batches a rank: some vectors are for the second one
            engine.step([Batch(number, x, y, np.arange(16)) for number in engine.share(2 * comm.Get_size())])
        return taken() - before, sum(engine.ledger.allocated.values()) + scratch()

comm = Communicator(MPI.COMM_WORLD)
train([64, 32, 10])  # code and libraries are loaded when first used
comm.Barrier()
grown, ledger = np.mean(MPI.COMM_WORLD.allgather(train([64, 2000, 2000, 10])), axis=0)
if comm.Get_rank() == 0:
    print(f"grown {grown:.0f} ledger {ledger:.0f}")
"""


@pytest.mark.parametrize("layout", default(LAYOUTS, "zero3"))
def test_memory_grows_by_what_the_ledger_says(layout):
    command = [MPIEXEC, "-n", "2", sys.executable, "-c", PROGRAM, layout]
    environment = launch_environment(OPENBLAS_NUM_THREADS="1")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    grown, ledger = map(int, re.search(r"grown (\d+) ledger (\d+)", done.stdout).groups())
    assert 0.9 < grown / ledger < 1.1, f"{grown / 1e6:.1f} MB for {ledger / 1e6:.1f} MB in the ledger"
