"""Attention over a sequence that is divided over the ranks of the job, by messages of MPI."""

import numpy as np
import pytest
from support.context_cases import ALGORITHMS, CASES, check

from parallel.sharding.context.ulysses_attention import refusal
from parallel.sharding.device_mesh import DeviceMesh
from parallel.sharding.mesh import Mesh

pytestmark = pytest.mark.ranks(3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_whole_sequence(comm, algorithm, case):
    case, size = CASES[case], comm.Get_size()
    if algorithm == "ulysses" and refusal(case.heads, case.kv_heads, size):
        pytest.skip("heads that the ranks do not divide")
    with DeviceMesh(comm, Mesh({"cp": size})) as mesh:
        for name in ("contiguous", "zigzag"):
            for dtype in (np.float64, np.float32):
                check(mesh.axis("cp"), algorithm, name, case, dtype)


def test_two_groups(comm):
    """Each group of ranks has sequences of its own."""
    size = comm.Get_size()
    if size % 2:
        pytest.skip("an odd number of ranks")
    with DeviceMesh(comm, Mesh({"dp": 2, "cp": size // 2})) as mesh:
        for algorithm in ALGORITHMS:
            check(mesh.axis("cp"), algorithm, "zigzag", CASES["causal"], np.float64)
