"""Models cut over the ranks of MPI, against the whole model in float64."""

import pytest
from support.cut_models import CASES, expect_close, one_pass

from parallel.sharding.device_mesh import DeviceMesh
from parallel.sharding.mesh import Mesh
from parallel.sharding.tensor.cut_model import cut

pytestmark = pytest.mark.ranks(2, 3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("each", [1, 2])
def test_a_cut_model_equals_the_whole(comm, case, each):
    case, ranks = CASES[case], comm.Get_size()
    whole = one_pass(case, case.make(), case.loss())
    with DeviceMesh(comm, Mesh({"tp": ranks})) as mesh:
        model, loss = cut(case.make(), case.loss(), mesh.axis("tp"), ranks * each)
        expect_close(one_pass(case, model, loss), model, whole, 1e-12)
