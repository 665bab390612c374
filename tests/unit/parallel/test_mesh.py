"""Axes, coordinates and lines of ranks."""

import math

import pytest

from parallel.mesh import Mesh, MeshAxis

MESHES = ["dp=1", "dp=2,pp=2", "pp=3,dp=2", "a=2,b=3,c=4"]


@pytest.mark.parametrize("text", MESHES)
def test_coordinates_and_ranks_are_each_others_inverse(text):
    mesh = Mesh.parse(text)
    assert str(mesh) == text and mesh.size == math.prod(mesh.sizes.values())
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    assert [tuple(place.values()) for place in places] == sorted(tuple(place.values()) for place in places)


@pytest.mark.parametrize("text", MESHES)
def test_lines_divide_the_ranks(text):
    mesh = Mesh.parse(text)
    for name, size in mesh.axes:
        lines = mesh.lines(name)
        assert sorted(rank for line in lines for rank in line) == list(range(mesh.size))
        for line in lines:
            assert [mesh.coordinates(rank)[name] for rank in line] == list(range(size))
            assert all(mesh.line(rank, name) == line for rank in line)


def test_the_last_axis_has_neighbours():
    mesh = Mesh((MeshAxis("pp", 2), MeshAxis("dp", 3)))
    assert mesh.lines("dp") == ((0, 1, 2), (3, 4, 5))
    assert mesh.lines("pp") == ((0, 3), (1, 4), (2, 5))


@pytest.mark.parametrize("text", ["", "dp", "dp=", "=2", "dp=two", "dp=2;pp=2", "dp=-1", "dp=2,"])
def test_what_is_no_mesh(text):
    with pytest.raises(ValueError, match="expected axes as in"):
        Mesh.parse(text)


def test_axes_without_a_meaning():
    with pytest.raises(ValueError, match="every axis once"):
        Mesh.parse("dp=2,dp=2")
    with pytest.raises(ValueError, match="at least one rank along pp"):
        Mesh.parse("dp=2,pp=0")
    mesh = Mesh.parse("dp=2,pp=2")
    with pytest.raises(ValueError, match="rank: expected 0 to 3"):
        mesh.coordinates(4)
    with pytest.raises(ValueError, match="pp from 0 to 1, found 2"):
        mesh.rank({"dp": 0, "pp": 2})
    with pytest.raises(ValueError, match="one for each axis"):
        mesh.rank({"dp": 0})
