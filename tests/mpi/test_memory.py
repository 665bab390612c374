"""What the system says a training takes is what its ledger says, in every layout."""

import re
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from parallel.data import Batch
from parallel.engine import LAYOUTS, Engine
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.models import mlp
from parallel.optim import AdamW

ROLLUP = Path("/proc/self/smaps_rollup")

pytestmark = pytest.mark.skipif(not ROLLUP.exists(), reason="the system does not tell a process's share of its memory")


def taken():
    """Bytes of this process, where a page that several map counts for each of them by its share."""
    return 1024 * int(re.search(r"^Pss: +(\d+) kB", ROLLUP.read_text(), re.MULTILINE)[1])


def steps(layout, widths, comm):
    """Growth and ledger over some steps of two micro-batches a rank: with one, some vectors are never touched."""
    numbers = np.random.default_rng(comm.Get_rank())
    x, y = numbers.standard_normal((16, widths[0])).astype(np.float32), numbers.integers(0, widths[-1], 16)
    MPI.COMM_WORLD.Barrier()
    before = taken()
    MPI.COMM_WORLD.Barrier()
    with Engine(mlp(widths), SoftmaxCrossEntropy(), comm, AdamW(rate=1e-3), layout=layout) as engine:
        for _ in range(2):
            engine.step([Batch(number, x, y, np.arange(16)) for number in engine.share(2 * comm.Get_size())])
        MPI.COMM_WORLD.Barrier()  # nobody has let go of anything
        grown, ledger = taken() - before, sum(engine.ledger.allocated.values())
        MPI.COMM_WORLD.Barrier()
    return grown, ledger


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_grows_by_what_the_ledger_says(world, layout):
    with Communicator(MPI.COMM_WORLD) as comm:
        steps(layout, [64, 32, 10], comm)  # code and libraries are loaded when first used
    with Communicator(MPI.COMM_WORLD) as comm:
        grown, ledger = np.mean(world.allgather(steps(layout, [64, 2000, 2000, 10], comm)), axis=0)
    assert 0.9 < grown / ledger < 1.1, f"{grown / 1e6:.1f} MB for {ledger / 1e6:.1f} MB in the ledger"
