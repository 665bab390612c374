"""Alltoallw, and other collectives of datatypes whose long rows are sent and received in place."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.runtime.binding import packing

pytestmark = pytest.mark.ranks(1, 2)

SHAPES = {"short rows": (7, 5, 6), "long rows": (9, 40, 66), "one": (1, 2, 1)}


def cut(shape, axis, size):
    """Start and length of each rank's part of an axis."""
    ends = [shape[axis] * rank // size for rank in range(size + 1)]
    return list(zip(ends, np.diff(ends)))


def parts(shape, axis, size, order):
    """Datatypes of the parts that an array of a shape has for all ranks, cut along an axis."""
    found = []
    for start, length in cut(shape, axis, size):
        begin, lengths = [0] * len(shape), list(shape)
        begin[axis], lengths[axis] = start, length
        whole = length > 0
        found.append(MPI.DOUBLE.Create_subarray(shape, lengths, begin, order).Commit() if whole else MPI.DOUBLE.Dup())
    return found


class Transposition:
    """Array of a shape, cut along its first axis, that is to be cut along its last one."""

    def __init__(self, comm, shape, order):
        rank, size = comm.Get_rank(), comm.Get_size()
        letter = "C" if order == MPI.ORDER_C else "F"
        whole = np.asarray(np.arange(float(np.prod(shape))).reshape(shape), order=letter)
        (start, length), (first, width) = cut(shape, 0, size)[rank], cut(shape, 2, size)[rank]
        self.sent = np.array(whole[start : start + length], order=letter)
        self.wanted = np.array(whole[:, :, first : first + width], order=letter)
        self.found = np.zeros_like(self.wanted)
        self.sent_counts = [int(width > 0 and length > 0) for _, width in cut(shape, 2, size)]
        self.found_counts = [int(width > 0 and length > 0) for _, length in cut(shape, 0, size)]
        self.types = [parts(array.shape, axis, size, order) for array, axis in ((self.sent, 2), (self.wanted, 0))]
        zeros = [0] * size
        self.arguments = (
            [self.sent, (self.sent_counts, zeros), self.types[0]],
            [self.found, self.found_counts, zeros, self.types[1]],
        )

    def check(self):
        assert (self.found == self.wanted).all()
        self.found[...] = 0

    def free(self):
        for datatype in (*self.types[0], *self.types[1]):
            datatype.Free()


@pytest.fixture(params=["C", "F"])
def order(request):
    return MPI.ORDER_C if request.param == "C" else MPI.ORDER_F


@pytest.mark.parametrize("shape", SHAPES)
def test_transposition(comm, shape, order):
    if min(SHAPES[shape]) < 2 and comm.Get_size() > 1:
        return
    one = Transposition(comm, SHAPES[shape], order)
    for algorithm in ("auto", "pairwise", "bruck", "direct", "native"):
        for _ in range(3):
            comm.Alltoallw(*one.arguments, algorithm=algorithm)
            one.check()
        comm.Ialltoallw(*one.arguments, algorithm=algorithm).Wait()
        one.check()
    requests = [comm.Ialltoallw(*one.arguments)]
    bound = comm.Alltoallw_init(*one.arguments)
    MPI.Request.Waitall(requests)
    one.check()
    one.free()
    for _ in range(2):
        bound.Start()
        bound.Wait()
        one.check()
    bound.Free()
    with pytest.raises(ValueError, match="DATATYPE_NULL"):
        comm.Alltoallw(*one.arguments)


@pytest.mark.parametrize(
    "options", [{"debug": True}, {"shared": False}, {"nodes": "alternating"}, {"async_progress": True}]
)
def test_settings(world, options, order):
    if "nodes" in options:
        options = {"nodes": [rank % 2 for rank in range(world.Get_size())]}
    with Communicator(world, **options) as comm:
        for shape in ("short rows", "long rows"):
            one = Transposition(comm, SHAPES[shape], order)
            for call in (comm.Alltoallw, lambda *arguments: comm.Ialltoallw(*arguments).Wait()):
                call(*one.arguments)
                one.check()
            one.free()


def test_other_arrays_of_the_same_call(comm):
    """A program found by its arguments runs on arrays at other addresses."""
    size, rank = comm.Get_size(), comm.Get_rank()
    column = MPI.DOUBLE.Create_vector(50, 20, 40).Commit()
    types, ones, places = [column] * size, [1] * size, [8 * 2000 * k for k in range(size)]
    for turn in range(25):
        sent, found = np.full(2000 * size, 10.0 * rank + turn), np.full(2000 * size, -1.0)
        comm.Alltoallw([sent, ones, places, types], [found, ones, places, types])
        rows = found.reshape(size, 50, 40)
        assert (rows[:, :, 20:] == -1).all()
        assert (rows[:, :, :20] == 10.0 * np.arange(size)[:, None, None] + turn).all()
    column.Free()


def test_in_place_and_by_elements_without_gaps(comm):
    size, rank = comm.Get_size(), comm.Get_rank()
    pair = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    table = np.full((size, 3), -1.0)
    table[:, ::2] = 10 * rank + np.arange(size)[:, None]
    comm.Alltoallw(MPI.IN_PLACE, [table, [1] * size, [24 * k for k in range(size)], [pair] * size])
    assert (table[:, ::2] == 10 * np.arange(size)[:, None] + rank).all() and (table[:, 1] == -1).all()
    pair.Free()
    out, into = np.arange(size, dtype="i4") + 10 * rank, np.zeros(size, "i4")
    places = [4 * k for k in range(size)]
    comm.Alltoallw([out, [1] * size, places, [MPI.INT] * size], [into, [4] * size, places, [MPI.BYTE] * size])
    assert into.tolist() == [10 * source + rank for source in range(size)]


def test_wrong_arguments(comm):
    size, array = comm.Get_size(), np.zeros(comm.Get_size())
    good = [array, [1] * size, [8 * k for k in range(size)], [MPI.DOUBLE] * size]
    for error, bad in (
        (ValueError, array),
        (ValueError, [array, [MPI.DOUBLE] * (size + 1)]),
        (ValueError, [array, [2] * size, [8 * k for k in range(size)], [MPI.DOUBLE] * size]),
        (TypeError, [array, [1] * size, [0] * size, ["d"] * size]),
    ):
        with pytest.raises(error):
            comm.Alltoallw(bad, good)
        with pytest.raises(error):
            comm.Ialltoallw(good, bad)


@pytest.mark.parametrize("row", [600, 20], ids=["in place", "packed"])
@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])
def test_other_collectives(comm, row, form):
    """Rows of 4800 bytes are read and written where they are, rows of 160 bytes by a packed copy."""
    rank, size = comm.Get_rank(), comm.Get_size()
    block = MPI.DOUBLE.Create_subarray([8, 1000], [4, row], [2, 100]).Commit()
    spaced = block.Create_resized(0, 64_000).Commit()
    inner = slice(2, 6), slice(100, 100 + row)

    def run(name, *arguments):
        if form == "persistent":
            request = getattr(comm, f"{name}_init")(*arguments)
            request.Start()
            request.Wait()
            request.Free()
        elif form == "non-blocking":
            getattr(comm, f"I{name.lower()}")(*arguments).Wait()
        else:
            getattr(comm, name)(*arguments)

    mine = np.full((8, 1000), float(rank))
    everyone = np.full((size, 8, 1000), -1.0)
    run("Allgather", [mine, 1, block], [everyone, 1, spaced])
    assert (everyone[:, *inner] == np.arange(size)[:, None, None]).all()
    everyone[:, *inner] = -1
    assert (everyone == -1).all(), "written beside the rows"
    run("Allgather", mine[inner].copy(), [everyone, 1, spaced])
    assert (everyone[:, *inner] == np.arange(size)[:, None, None]).all()
    run("Bcast", [mine, 1, block], size - 1)
    assert (mine[inner] == size - 1).all() and (mine[0] == rank).all()
    run("Alltoall", [everyone, 1, spaced], [out := np.full((size, 8, 1000), -1.0), 1, spaced])
    assert (out[:, *inner] == rank).all() and out.sum() == rank * size * 4 * row - (8000 - 4 * row) * size
    spaced.Free()
    block.Free()


def test_layouts_kept_are_few(comm, monkeypatch):
    monkeypatch.setattr(packing, "MOST_LAYOUTS", 4)
    packing._layouts.clear()
    for length in range(1, 10):
        column = MPI.DOUBLE.Create_vector(3, length, 20).Commit()
        comm.Bcast([np.zeros(60), 1, column])
        column.Free()
    assert len(packing._layouts) <= 4
