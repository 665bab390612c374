"""A rank whose program ends while others wait for it in an engine: they raise an error that names it."""

import pytest
from support.launches import ended, needs_mpiexec, start_ranks
from support.tiers import default

pytestmark = [needs_mpiexec, pytest.mark.timeout(120)]

PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
from parallel import AdamW, Engine, nn
from parallel.runtime.consistency_check import RankLeft

x, y = np.ones((8, 4), np.float32), np.arange(8) % 3
engine = Engine(nn.mlp([4, 8, 3]), nn.SoftmaxCrossEntropy(), MPI.COMM_WORLD, AdamW(lr=0.01), layout="LAYOUT")
engine.step(x, y)
if MPI.COMM_WORLD.rank == 1:
    END
try:
    for _ in range(20):
        engine.step(x, y)
    engine.evaluate(x, y)
except RankLeft as error:
    print(f"on rank {MPI.COMM_WORLD.rank}: {error}", flush=True)
    RAISE
"""

ENDS = {
    "sys.exit(3)": "the program",
    "sys.exit()": "the program",
    "raise KeyError('lost')": "the program: KeyError: 'lost'",
}


@pytest.mark.parametrize("layout", default(["dp", "zero3", "ps", "local", "sgp"], "dp"))
@pytest.mark.parametrize("end", default(ENDS, "sys.exit(3)"))
@pytest.mark.parametrize("reaction", default(["raise", "pass"], "raise"))
def test_a_program_that_ends_on_one_rank(tmp_path, layout, end, reaction):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("LAYOUT", layout).replace("END", end).replace("RAISE", reaction))
    text = ended(process := start_ranks(3, [path]))
    if reaction == "raise":
        assert process.returncode, text
    assert f"nothing was updated; rank 1 has left {ENDS[end]}" in text, text
