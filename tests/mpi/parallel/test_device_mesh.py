"""Communicators along the axes of a mesh, made once and freed."""

from itertools import combinations

import numpy as np
import pytest

from collectives import Communicator
from parallel.sharding.device_mesh import DeviceMesh
from parallel.sharding.mesh import Mesh


def mesh_for(ranks):
    """Mesh of so many ranks with as even axes as there are."""
    least = next((divisor for divisor in range(2, ranks) if ranks % divisor == 0), 1)
    return Mesh({"dp": ranks // least, "tp": least})


def test_communicators_of_any_axes(comm):
    mesh = mesh_for(comm.Get_size())
    with DeviceMesh(comm, mesh) as ours:
        assert ours.coordinates == mesh.coordinates(comm.Get_rank())
        for axes in [(), *combinations(mesh.sizes, 1), tuple(mesh.sizes), ("pp",)]:
            axis = ours.axis(*axes)
            group = next(group for group in mesh.groups(axes) if comm.Get_rank() in group)
            assert (axis.rank, axis.size) == (group.index(comm.Get_rank()), len(group))
            found = np.empty(axis.size, np.int64)
            axis.comm.Allgather(np.array([comm.Get_rank()]), found)
            assert found.tolist() == group
            again = ours.axis(*axes[::-1])
            assert again.comm is axis.comm and again[:3] == axis[:3]


def test_a_mesh_of_other_ranks(comm):
    with pytest.raises(ValueError, match="is for"):
        DeviceMesh(comm, Mesh({"dp": comm.Get_size() + 1}))


def test_axes_over_nodes(world):
    ranks = world.Get_size()
    with Communicator(world, nodes=list(range(ranks))) as apart, DeviceMesh(apart, Mesh({"tp": ranks})) as mesh:
        advice = "; at most tp=1 stays within a node" if ranks > 1 else ""
        expected = (f"mesh tp={ranks}: tp over {ranks} nodes{advice}",) if ranks > 1 else ()
        assert mesh.remarks == expected
        assert mesh.axis("tp").comm.nodes == apart.nodes
