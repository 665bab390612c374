"""Compiled programs that are found by the arguments of a call in compiled code."""

import weakref
from array import array
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import find

from collectives import Communicator
from collectives.engine.extension import available
from collectives.runtime.planning.compiled_calls import MAX_ENTRIES

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.skipif(not available(), reason="this installation has no compiled engine"),
]


@pytest.fixture
def quick(world):
    """Communicator of several ranks whose calls are compiled."""
    if world.Get_size() == 1:
        pytest.skip("one rank sends no messages")
    with Communicator(world) as comm:
        yield comm


def test_arrays_of_one_call(quick):
    x, y = np.ones(3), np.zeros(3)
    for _ in range(9):
        quick.Allreduce(x, y)
    y[:] = 0
    assert find(quick, "Allreduce", x, y)
    assert (y == quick.Get_size()).all()
    strided, small = np.zeros(6)[::2], np.ones(3, np.float32)
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    others = [(np.ones(4), np.zeros(4)), (small, small.copy()), (strided, y), (x, strided), (x, read_only), (x, x)]
    others += [([x, 3], y), (x, None), (None, y), ("x", y), (3, 4), (x[:, None], y)]
    for sendbuf, recvbuf in others:
        assert not find(quick, "Allreduce", sendbuf, recvbuf)
    for keywords in ({"op": MPI.MAX}, {"root": 1}, {"algorithm": "ring"}, {"segments": 1}, {"op": None}):
        assert not find(quick, "Allreduce", x, y, **keywords)


def test_in_place(quick):
    y = np.ones(3)
    for _ in range(9):
        y[:] = 1
        quick.Allreduce(MPI.IN_PLACE, y)
    y[:] = 1
    assert find(quick, "Allreduce", MPI.IN_PLACE, y)
    assert (y == quick.Get_size()).all()
    assert not find(quick, "Allreduce", None, y)


def test_counts_of_other_kinds_are_left_to_python(quick):
    size, rank = quick.Get_size(), quick.Get_rank()
    x, y = np.full(2, rank, float), np.zeros(2 * size)
    quick.Allgatherv(x, [y, [2] * size])
    for spec in ([y, [2] * size], (y, [2] * size), [y, np.full(size, 2, np.int32)], [y, array("q", [2] * size)]):
        y[:] = -1
        assert find(quick, "Allgatherv", x, spec)
        assert y.tolist() == np.repeat(np.arange(size), 2).tolist()
    places = [y, [2] * size, [2 * size - 1] * size, MPI.DOUBLE]
    for spec in ([y, (2,) * size], [y, [2] * (size + 1)], [y, [2.0] * size], [y, [-2] * size], [y, [1] * size], places):
        assert not find(quick, "Allgatherv", x, spec)
    assert not find(quick, "Allgatherv", x, [y.astype(int), [2] * size])
    assert not find(quick, "Allgatherv", y[:2], [y, [2] * size])  # the buffers overlap


def test_displacements_in_a_tuple(quick):
    size = quick.Get_size()
    counts, displs = [1] * size, list(range(0, 2 * size, 2))
    x, y = np.full(1, quick.Get_rank() + 1.0), np.zeros(2 * size)
    for _ in range(9):
        quick.Allgatherv(x, [y, (counts, displs)])
    y[:] = 0
    assert find(quick, "Allgatherv", x, [y, (counts, displs)])
    assert y.tolist() == [(place // 2 + 1.0) * (place % 2 == 0) for place in range(2 * size)]


def test_an_array_that_changes_its_type(quick):
    x, y = np.ones(4), np.zeros(4)
    for _ in range(9):
        quick.Allreduce(x, y)
    assert find(quick, "Allreduce", x, y)
    x.dtype, y.dtype = np.int64, np.int64
    assert not find(quick, "Allreduce", x, y)
    quick.Allreduce(x, y)
    assert (y == x * quick.Get_size()).all()


def test_the_oldest_calls_are_forgotten(quick):
    """Of one kind: calls that differ in their shapes have an entry for each, others a joint one."""
    shapes = [(1,) * dimensions for dimensions in range(1, MAX_ENTRIES + 3)]
    calls = [partial(quick.Bcast, np.zeros(shape), 0) for shape in shapes]
    for _ in range(9):
        for call in calls:
            call()
    found = [shape for shape in shapes if find(quick, "Bcast", *[np.zeros(shape)] * 2)]
    assert len(found) == MAX_ENTRIES
    for call in calls:
        call()


def test_arrays_are_not_kept(quick):
    class Tracked(np.ndarray):
        pass

    x, y = np.ones(3), np.zeros(3)
    for _ in range(9):
        quick.Allreduce(x, y)
    owner = np.zeros(3).view(Tracked)
    gone = weakref.ref(owner)
    z = np.asarray(owner)
    assert find(quick, "Allreduce", x, z)
    del owner, z
    assert gone() is None


def test_nothing_is_found_after_the_end(quick):
    x, y = np.ones(3), np.zeros(3)
    for _ in range(9):
        quick.Allreduce(x, y)
    quick.close()
    assert not find(quick, "Allreduce", x, y)
    with pytest.raises(ValueError, match="freed"):
        quick.Allreduce(x, y)


def test_debug_mode_checks_every_call(world):
    with Communicator(world, debug=True) as comm:
        x, y = np.ones(3), np.zeros(3)
        for _ in range(9):
            comm.Allreduce(x, y)
        assert not find(comm, "Allreduce", x, y)
