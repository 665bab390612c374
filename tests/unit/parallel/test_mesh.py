"""Axes, coordinates and lines of ranks."""

import math

import numpy as np
import pytest

from parallel.mesh import Mesh

MESHES = ["dp=1", "dp=2,pp=2", "pp=3,dp=2", "a=2,b=3,c=4"]


@pytest.mark.parametrize("text", MESHES)
def test_coordinates_are_in_the_order_of_the_ranks(text):
    mesh = Mesh.parse(text)
    assert str(mesh) == text and mesh.size == math.prod(mesh.sizes.values())
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [tuple(place.values()) for place in places] == [*np.ndindex(*mesh.sizes.values())]


@pytest.mark.parametrize("text", MESHES)
def test_lines_divide_the_ranks(text):
    mesh = Mesh.parse(text)
    for name, size in mesh.sizes.items():
        lines = mesh.lines(name)
        assert sorted(rank for line in lines for rank in line) == list(range(mesh.size))
        for line in lines:
            assert [mesh.coordinates(rank)[name] for rank in line] == list(range(size))
            others = [{**mesh.coordinates(rank), name: 0} for rank in line]
            assert all(place == others[0] for place in others)


def test_the_last_axis_has_neighbours():
    mesh = Mesh({"pp": 2, "dp": 3})
    assert mesh.lines("dp") == [[0, 1, 2], [3, 4, 5]]
    assert mesh.lines("pp") == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("text", ["", "dp", "dp=", "=2", "dp=two", "dp=2;pp=2", "dp=-1", "dp=2,"])
def test_what_is_no_mesh(text):
    with pytest.raises(ValueError, match="expected axes as in"):
        Mesh.parse(text)


def test_axes_without_a_meaning():
    with pytest.raises(ValueError, match="every axis once"):
        Mesh.parse("dp=2,dp=2")
    with pytest.raises(ValueError, match="at least one rank along pp"):
        Mesh.parse("dp=2,pp=0")


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_that_a_mesh_has_not(rank):
    with pytest.raises(ValueError, match=f"rank: expected 0 to 3, found {rank}"):
        Mesh.parse("dp=2,pp=2").coordinates(rank)
