"""Experts on the ranks of the job, by messages of MPI: every route and format, on emulated nodes."""

import numpy as np
import pytest
from support.expert_cases import CASES, divided, expect_as_alone, played, tokens

from collectives import Communicator
from parallel.sharding.device_mesh import MeshAxis
from parallel.sharding.expert.dispatch import Dispatch

pytestmark = pytest.mark.ranks(3)

NODES = {"one node": lambda rank: 0, "pairs": lambda rank: rank // 2, "in turn": lambda rank: rank % 2}

SCALES = {"": 1, "int8": 1e11, "fp8": 5e11}
"""Differences by format, relative to those of exact rows."""


@pytest.mark.parametrize("apart", [False, True], ids=["one communicator", "one for the node"])
@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("dispatch", ["direct", "hierarchical", "direct:int8", "hierarchical:fp8"])
def test_as_on_one_rank(world, dispatch, nodes, apart):
    """A pass forward and backward with a shared expert; of encoded rows within their error."""
    rank, size = world.Get_rank(), world.Get_size()
    with Communicator(world, nodes=[NODES[nodes](one) for one in range(size)]) as comm:
        axis, local = MeshAxis("ep", rank, size, comm), None
        with comm.Split(NODES[nodes](rank), rank) as on_node:
            if apart:
                local = MeshAxis("ep", on_node.Get_rank(), on_node.Get_size(), on_node)
            operator = divided(axis, CASES["two experts"], False, dispatch, shared=True, local=local)
            found = world.allgather(played(operator, tokens(rank), np.float64, rank))
    expect_as_alone(found, CASES["two experts"], shared=True, scale=SCALES[Dispatch.parse(dispatch).code])
