"""Communicators along the axes of a mesh."""

import pytest

from parallel.mesh import Mesh


def test_a_communicator_for_each_line(world):
    size, rank = world.Get_size(), world.Get_rank()
    rows = next(count for count in (2, 3, 1) if size % count == 0)
    mesh = Mesh.parse(f"a={rows},b={size // rows}")
    for name in mesh.sizes:
        line = mesh.split(world, name)
        assert line.allgather(rank) == list(mesh.line(rank, name))
        assert line.Get_rank() == mesh.coordinates(rank)[name]
        line.Free()


def test_more_ranks_than_there_are(world):
    with pytest.raises(ValueError, match="the communicator has"):
        Mesh.parse(f"dp={world.Get_size() + 1}").split(world, "dp")
