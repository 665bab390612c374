"""Axes, coordinates and lines of ranks."""

import math
import re
from itertools import combinations

import numpy as np
import pytest

from parallel.sharding.mesh import Mesh

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


# The groups of 16 ranks with t=2, p=4 in Megatron-LM's documentation of its initialisation.
PUBLISHED = {"tp": [0, 1], "dp": [0, 2], "pp": [0, 4, 8, 12]}


def test_groups_of_the_published_example():
    mesh = Mesh.parse("pp=4,dp=2,tp=2")
    assert {name: mesh.lines(name)[0] for name in PUBLISHED} == PUBLISHED
    assert mesh.lines("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]


@pytest.mark.parametrize("text", [*MESHES, "pp=2,dp=3,cp=1,tp=2"])
def test_groups_of_any_axes_divide_the_ranks(text):
    mesh = Mesh.parse(text)
    for count in range(len(mesh.sizes) + 1):
        for axes in combinations(mesh.sizes, count):
            groups = mesh.groups(axes)
            assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
            assert {len(group) for group in groups} == {math.prod(mesh.sizes[name] for name in axes)}
            for group in groups:
                others = [{**mesh.coordinates(rank), **dict.fromkeys(axes, 0)} for rank in group]
                assert group == sorted(group) and all(place == others[0] for place in others)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("dp=2,tp=2", 6, "is for 4 ranks, found 6; dp=3,tp=2 or dp=2,tp=3 would fit"),
        ("pp=3,tp=2", 8, "is for 6 ranks, found 8; pp=4,tp=2 would fit"),
        ("dp=2,tp=2", 7, "is for 4 ranks, found 7; axes with a product of 7 would fit"),
        ("dp=2,xp=2", 4, "expected axes of pp, dp, cp, tp, ep, etp, found xp in dp=2,xp=2"),
        ("tp=2,ep=2", 4, "tp=2,ep=2 is for 2 ranks without ep, found 4; dp=2,tp=2,ep=2 would fit"),
        ("tp=2", 4, "is for 2 ranks, found 4; tp=4 or dp=2,tp=2 would fit"),
        ("dp=2,ep=2", 4, "dp=2,ep=2 is for 2 ranks without ep, found 4; dp=4,ep=2 would fit"),
        ("ep=2", 2, "dp=1,ep=2 is for 1 ranks without ep, found 2; dp=2,ep=2 would fit"),
        ("dp=4,ep=3", 4, "expected ep to be a divisor of the 4 ranks along dp, found dp=4,ep=3; ep=2 or ep=4 would"),
        (
            "dp=2,tp=2,ep=3",
            4,
            "4 ranks along dp and tp, and a multiple of the 2 along tp with different experts, found",
        ),
        ("dp=2,tp=4,ep=2", 8, "found dp=2,tp=4,ep=2; ep=4 or ep=8 or ep=2,etp=2 would fit"),
        ("cp=3,ep=2", 3, "mesh: expected ep to be a divisor of the 3 ranks along cp, found cp=3,ep=2; ep=3 would fit"),
        ("cp=2,tp=2,ep=3", 4, "divisor of the 4 ranks along cp and tp, and a multiple of the 2 along tp with"),
        ("cp=2,dp=2,ep=2", 8, "is for 4 ranks without ep, found 8; cp=4,dp=2,ep=2 or cp=2,dp=4,ep=2 would fit"),
        ("cp=1,dp=2,ep=2", 6, "is for 2 ranks without ep, found 6; cp=3,dp=2,ep=2 or cp=1,dp=6,ep=2 would fit"),
        ("tp=4,etp=3", 4, "mesh: expected etp to be a divisor of the 4 ranks along tp, found tp=4,etp=3"),
        ("tp=4,etp=2", 4, "a multiple of the 2 along tp with different experts, found tp=4,etp=2; ep=2 would fit"),
    ],
)
def test_refused_meshes(text, ranks, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Mesh.parse(text).expect(ranks)
    Mesh.parse("pp=2,dp=2,tp=2").expect(8)


def test_experts_are_folded_over_the_other_axes():
    mesh = Mesh.parse("pp=2,zero1=4,tp=2,ep=4")
    assert (mesh.size, mesh.replicas, str(mesh)) == (16, "zero1", "pp=2,zero1=4,tp=2,ep=4")
    assert (mesh.expert_shards, mesh.expert_replicas) == (2, 2)
    assert mesh.expert_groups("ep")[:3] == [[0, 2], [4, 6], [1, 3]] and mesh.expert_groups("edp")[0] == [0, 4]
    assert str(Mesh.parse("ep=1")) == "dp=1"
    with pytest.raises(ValueError, match="expected axes of dp, found ep in dp=2,ep=2"):
        Mesh.parse("dp=2,ep=2").expect(2, ["dp"])


@pytest.mark.parametrize(
    ("text", "shards", "replicas"),
    [
        ("dp=2,tp=2", 1, 1),
        ("tp=2,ep=2", 2, 1),
        ("tp=4,etp=2,ep=2", 2, 1),
        ("tp=2,etp=2", 1, 1),
        ("dp=2,tp=2,etp=2,ep=2", 1, 2),
        ("dp=4,cp=1,tp=2,ep=8", 2, 4),
    ],
)
def test_folded_experts(text, shards, replicas):
    mesh = Mesh.parse(text)
    mesh.expect(mesh.size)
    assert (mesh.expert_shards, mesh.expert_replicas) == (shards, replicas)
    for name in ("ep", "edp"):
        groups = mesh.expert_groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert all(len(group) == replicas for group in mesh.expert_groups("ep"))


def test_axes_by_what_their_ranks_share():
    mesh = Mesh.parse("tp=2,pp=2,zero1=3,cp=2,ep=4")
    assert [str(some) for some in (mesh.samples, mesh.summed, mesh.alike)] == [
        "zero1=3",
        "zero1=3,cp=2",
        "pp=2,zero1=3,cp=2",
    ]
    assert mesh.teams == mesh.groups(["pp", "cp", "tp"]) and len(mesh.teams) == 3


def test_nodes_of_the_axes():
    mesh, nodes = Mesh.parse("pp=2,dp=2,tp=2"), [0, 0, 0, 0, 1, 1, 1, 1]
    assert [mesh.nodes_of(name, nodes) for name in mesh.sizes] == [2, 1, 1]
    assert Mesh.parse("tp=2,pp=4").spread(nodes) == "mesh tp=2,pp=4: tp over 2 nodes, pp within a node"
