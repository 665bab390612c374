"""Observers on real ranks: `allreduce` gives everyone what one rank would have seen."""

import numpy as np
import pytest

from quant import INT8
from quant.observers import OBSERVERS


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("own", [True, False], ids=["Communicator", "mpi4py"])
def test_allreduce(name, own, comm, world):
    used = comm if own else world
    x = np.random.default_rng(0).standard_normal((3, 7 * comm.size)).astype(np.float32)
    alone, mine = OBSERVERS[name](INT8), OBSERVERS[name](INT8)
    for batch in x:
        alone.observe(batch)
        mine.observe(batch[comm.rank :: comm.size])
    found = mine.allreduce(used)
    assert [bound.tolist() for bound in found.range()] == [bound.tolist() for bound in alone.range()]
    assert found.parameters(INT8)["scales"] == alone.parameters(INT8)["scales"]
