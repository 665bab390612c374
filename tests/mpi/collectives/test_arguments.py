"""The forms in which mpi4py takes buffers, all of them, for data that comes out as it would there."""

import array

import numpy as np
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.ranks(1, 2)

N = 6


class OnlyDLPack:
    """An array that offers nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


# name -> a function from an int32 array of N elements to (argument, the elements that it names)
VECTORS = {
    "array": lambda x: (x, x),
    "[array, datatype]": lambda x: ([x, MPI.INT], x),
    "[array, typecode]": lambda x: ([x, "i"], x),
    "[array, count]": lambda x: ([x, 4], x[:4]),
    "[array, (count, displacement)]": lambda x: ([x, (3, 2)], x[2:5]),
    "[array, count, datatype]": lambda x: ([x, 4, MPI.INT], x[:4]),
    "[array, None, datatype]": lambda x: ([x, None, MPI.INT], x),
    "[array, (count, displacement), datatype]": lambda x: ([x, (4, 1), MPI.INT], x[1:5]),
    "[array, count, displacement, datatype]": lambda x: ([x, 4, 2, MPI.INT], x[2:6]),
    "memoryview": lambda x: (memoryview(x), x),
    "[memoryview, count, datatype]": lambda x: ([memoryview(x), 5, MPI.INT], x[:5]),
    "DLPack": lambda x: (OnlyDLPack(x), x),
    "[DLPack, count, datatype]": lambda x: ([OnlyDLPack(x), 2, MPI.INT], x[:2]),
    "two dimensions": lambda x: (x.reshape(2, 3), x),
    "Fortran order": lambda x: (x.reshape(3, 2).T, x),
    "part of an array": lambda x: (x[1:4], x[1:4]),
    "0-d": lambda x: (x[2:3].reshape(()), x[2:3]),
    "nothing": lambda x: (x[:0], x[:0]),
    "[array, 0, datatype]": lambda x: ([x, 0, MPI.INT], x[:0]),
    "None": lambda x: ([None, 0, MPI.INT], x[:0]),
    "None with a typecode": lambda x: ([None, "i"], x[:0]),
}


def brought(rank, n=N):
    return (np.arange(n) * 3 + rank * 7 + 1).astype("i4")


@pytest.mark.parametrize("form", VECTORS)
def test_vectors(comm, form):
    """As the send side and as the receive side of a reduction, and as the one side of a broadcast."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, total = brought(rank), np.full(N, -1, "i4")
    send, _ = VECTORS[form](mine)
    recv, received = VECTORS[form](total)
    comm.Allreduce(send, recv)
    whole = sum(VECTORS[form](brought(r))[1].astype(int) for r in range(size))
    assert received.tolist() == whole.tolist()
    assert (total == -1).sum() == N - received.size, "more was written than was named"
    assert mine.tolist() == brought(rank).tolist()
    vector = brought(rank)
    buf, named = VECTORS[form](vector)
    comm.Bcast(buf, root=size - 1)
    assert named.tolist() == VECTORS[form](brought(size - 1))[1].tolist()
    marks = np.zeros(N, "i4")
    VECTORS[form](marks)[1][...] = 1
    assert (vector[marks == 0] == brought(rank)[marks == 0]).all(), "more was written than was named"


def test_arrays_of_the_standard_library(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    for code in "bhilqBHILQfd":
        mine, total = array.array(code, [rank, 1, 2]), array.array(code, [0, 0, 0])
        comm.Allreduce(mine, total)
        assert total.tolist() == [size * (size - 1) // 2, size, 2 * size]
    letters = bytearray(b"abc") if rank == 0 else bytearray(3)
    comm.Bcast(letters)
    assert letters == b"abc"
    room = bytearray(2 * size)
    comm.Allgather(b"%x!" % rank, room)
    assert room == b"".join(b"%x!" % r for r in range(size))


# name -> a function from an array of int32 and the counts to the argument
SEVERAL = {
    "[array, counts]": lambda x, counts, displs: ([x, counts], False),
    "[array, counts, datatype]": lambda x, counts, displs: ([x, counts, MPI.INT], False),
    "[array, counts as an array, datatype]": lambda x, counts, displs: ([x, np.array(counts), MPI.INT], False),
    "[array, (counts, None), datatype]": lambda x, counts, displs: ([x, (counts, None), MPI.INT], False),
    "[array, counts, None, datatype]": lambda x, counts, displs: ([x, counts, None, MPI.INT], False),
    "[array, (counts, displs)]": lambda x, counts, displs: ([x, (counts, displs)], True),
    "[array, (counts, displs), typecode]": lambda x, counts, displs: ([x, (counts, displs), "i"], True),
    "[array, counts, displs, datatype]": lambda x, counts, displs: ([x, counts, displs, MPI.INT], True),
    "[DLPack, counts, displs, datatype]": lambda x, counts, displs: ([OnlyDLPack(x), counts, displs, MPI.INT], True),
}


@pytest.mark.parametrize("form", SEVERAL)
def test_blocks_of_any_length(comm, form):
    """With ranks that have nothing, and blocks in reverse order with gaps where there are displacements."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [(2 * r + 1) % 4 if r % 3 != 1 else 0 for r in range(size)]
    displs = [5 * (size - 1 - r) for r in range(size)]
    room = np.full(5 * size, -1, "i4")
    spec, apart = SEVERAL[form](room, counts, displs)
    starts = displs if apart else np.concatenate([[0], np.cumsum(counts)[:-1]]).tolist()
    expected = np.full(5 * size, -1, "i4")
    for r, (count, start) in enumerate(zip(counts, starts)):
        expected[start : start + count] = brought(r)[:count]
    mine = brought(rank)[: counts[rank]]
    comm.Gatherv(mine, spec if rank == 0 else None)
    assert room.tolist() == (expected.tolist() if rank == 0 else [-1] * (5 * size))
    room[:] = -1
    comm.Allgatherv(mine, spec)
    assert room.tolist() == expected.tolist()
    room[:] = expected
    back = np.full(counts[rank], -2, "i4")
    comm.Scatterv(spec if rank == 0 else None, back)
    assert back.tolist() == mine.tolist()


def test_an_array_without_counts_is_shared_out(comm):
    """As in mpi4py the first ranks get one more where it does not divide."""
    rank, size = comm.Get_rank(), comm.Get_size()
    n = 2 * size + 1
    mine = np.full(2 + (rank < 1), rank, "f8")
    room = np.zeros(n)
    comm.Allgatherv(mine, room)
    assert room.tolist() == [r for r in range(size) for _ in range(2 + (r < 1))]
    back = np.zeros(mine.size)
    comm.Scatterv(room, back)
    assert back.tolist() == mine.tolist()


def test_counts_per_rank_of_equal_blocks(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    room = np.zeros(2 * size, "i4")
    comm.Allgather([brought(rank), 2, MPI.INT], [room, 2, MPI.INT])
    assert room.tolist() == [x for r in range(size) for x in brought(r)[:2]]


@pytest.mark.parametrize("form", ["Allgatherv", "Iallgatherv", "Allgatherv_init"])
def test_negative_displacements_reach_the_array_that_a_part_is_of(comm, form):
    """Also in calls that are cached. Memory before an array of its own is no part of it, whatever went before."""
    rank, size = comm.Get_rank(), comm.Get_size()
    spec = [2] * size, [-2 * (r + 1) for r in range(size)], MPI.INT
    method = getattr(comm, form)
    for _ in range(120 if form == "Allgatherv" else 3):
        whole = np.full(2 * size + 3, -1, "i4")
        request = method(brought(rank)[:2], [whole[2 * size :], *spec])
        if form == "Allgatherv_init":
            request.Start()
        if request is not None:
            request.Wait()
        received = [x for r in reversed(range(size)) for x in brought(r)[:2].tolist()]
        assert whole.tolist() == [*received, -1, -1, -1]
    with pytest.raises(ValueError, match=r"block 0 .* begins 8 bytes before the buffer"):
        method(brought(rank)[:2], [np.zeros(3, "i4"), *spec])


def test_a_root_that_is_a_float(comm):
    """As in mpi4py, for ``size / 2``."""
    root = float(comm.Get_size() - 1)
    vector = brought(comm.Get_rank())
    comm.Bcast(vector, root)
    assert vector.tolist() == brought(comm.Get_size() - 1).tolist()
    with pytest.raises(TypeError, match=r"root: expected a rank, found 0\.5"):
        comm.Bcast(vector, 0.5)


# ------------------------------------------------------------------------------------------ derived datatypes


@pytest.fixture
def made():
    """make(datatype) commits it and frees it after the test."""
    kept = []

    def make(datatype):
        kept.append(datatype.Commit())
        return datatype

    yield make
    for datatype in kept:
        datatype.Free()


def test_a_column_is_broadcast(comm, made):
    table = np.zeros((4, 3), "i4")
    column = made(MPI.INT.Create_vector(4, 1, 3))
    if comm.Get_rank() == comm.Get_size() - 1:
        table[:, 1] = [1, 2, 3, 4]
    for _ in range(2):
        comm.Bcast([table.ravel()[1:], 1, column], root=comm.Get_size() - 1)
    assert table[:, 1].tolist() == [1, 2, 3, 4]
    assert table[:, [0, 2]].sum() == 0


def test_ranks_describe_the_same_data_differently(comm, made):
    """A column here, a row there, bytes elsewhere: only the packed bytes need agree."""
    rank, size = comm.Get_rank(), comm.Get_size()
    column = made(MPI.INT.Create_vector(4, 1, 3))
    pairs = made(MPI.INT.Create_contiguous(2))
    table, row = np.zeros((4, 3), "i4"), np.zeros(4, "i4")
    spec = ([table, 1, column], [row, MPI.INT], [row.view("u1"), MPI.BYTE], [row, 2, pairs])[rank % 4]
    if rank == 0:
        table[:, 0] = [5, 6, 7, 8]
    for form in (comm.Bcast, lambda buf: comm.Ibcast(buf).Wait()):
        form(spec)
        assert (table[:, 0] if rank % 4 == 0 else row).tolist() == [5, 6, 7, 8]
    whole = np.zeros(4 * size, "i4")
    comm.Gather(spec, [whole, 4, MPI.INT] if rank == 0 else None)
    if rank == 0:
        assert whole.tolist() == [5, 6, 7, 8] * size
    comm.Allgather(spec, whole)
    assert whole.tolist() == [5, 6, 7, 8] * size


def test_structures(comm, made):
    """A byte and a double with seven bytes between them that must stay as they are."""
    rank, size = comm.Get_rank(), comm.Get_size()
    kind = np.dtype([("flag", "u1"), ("value", "f8")], align=True)
    pair = made(MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.BYTE, MPI.DOUBLE]))
    mine, everyone = np.zeros(2, kind), np.zeros(2 * size, kind)
    mine["flag"], mine["value"] = rank + 1, [rank / 2, rank]
    everyone.view("u1")[:] = 0xAA
    comm.Allgather([mine, 2, pair], [everyone, 2, pair])
    assert everyone["flag"].tolist() == [r + 1 for r in range(size) for _ in range(2)]
    assert everyone["value"].tolist() == [x for r in range(size) for x in (r / 2, r)]
    gaps = everyone.view("u1").reshape(-1, 16)[:, 1:8]
    assert (gaps == 0xAA).all()


def test_a_reduction_of_structures_by_an_operation_of_one_s_own(comm, made):
    """Complex numbers multiplied as pairs; and the same pairs with a gap between them."""
    rank, size = comm.Get_rank(), comm.Get_size()

    def multiply(left, inout, datatype):
        step = datatype.Get_extent()[1] // 8
        a, b = np.frombuffer(left, "f8"), np.frombuffer(inout, "f8")
        for i in range(0, len(b), step):
            re, im = a[i] * b[i] - a[i + 1] * b[i + 1], a[i] * b[i + 1] + a[i + 1] * b[i]
            b[i], b[i + 1] = re, im

    op = MPI.Op.Create(multiply, commute=True)
    dense = made(MPI.DOUBLE.Create_contiguous(2))
    wide = MPI.DOUBLE.Create_contiguous(2).Create_resized(0, 24)
    wide = made(wide)
    expected = np.prod([complex(1, r % 3) for r in range(size)])
    for datatype, extent in ((dense, 2), (wide, 3)):
        mine, total = np.full(4 * extent, -1.0), np.full(4 * extent, -7.0)
        mine[0::extent], mine[1::extent] = 1, rank % 3
        comm.Allreduce([mine, 4, datatype], [total, 4, datatype], op)
        assert (total[0::extent] == expected.real).all() and (total[1::extent] == expected.imag).all()
        if extent == 3:
            assert (total[2::3] == -7).all(), "the gap was written to"
    op.Free()


def test_reductions_of_a_datatype_without_data(comm, made):
    op = MPI.Op.Create(lambda left, inout, datatype: None, commute=True)
    nothing = made(MPI.INT.Create_contiguous(0))
    mine, total = np.zeros(3, "i4"), np.ones(3, "i4")
    comm.Allreduce([mine, 3, nothing], [total, 3, nothing], op)
    comm.Ireduce([mine, 3, nothing], [total, 3, nothing], op).Wait()
    comm.Scan([mine, 3, nothing], [total, 3, nothing], op)
    assert (total == 1).all()
    op.Free()


def test_blocks_of_derived_datatypes_with_displacements(comm, made):
    """Every other number of a vector, gathered to every third place of another."""
    rank, size = comm.Get_rank(), comm.Get_size()
    other = made(MPI.INT.Create_resized(0, 8))
    third = made(MPI.INT.Create_resized(0, 12))
    counts = [r % 3 for r in range(size)]
    displs = [sum(counts[:r]) for r in range(size)]
    mine = np.zeros(2 * counts[rank], "i4")
    mine[::2] = brought(rank)[: counts[rank]]
    room = np.full(3 * sum(counts), -1, "i4")
    comm.Allgatherv([mine, counts[rank], other], [room, (counts, displs), third])
    assert room[::3].tolist() == [x for r in range(size) for x in brought(r)[: counts[r]]]
    assert (np.delete(room, slice(None, None, 3)) == -1).all()


def test_a_datatype_may_be_freed_while_the_call_is_under_way(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    column = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    table, total = np.full((3, 2), float(rank)), np.zeros((3, 2))
    request = comm.Iallgather([np.full(3, float(rank)), MPI.DOUBLE], room := np.zeros(3 * size))
    sent = comm.Ibcast([table if rank == 0 else total, 1, column])
    column.Free()
    request.Wait()
    sent.Wait()
    assert room.tolist() == [float(r) for r in range(size) for _ in range(3)]
    assert total.sum() == 0


@pytest.mark.parametrize("form", ["non-blocking", "persistent"])
def test_a_datatype_may_be_freed_before_the_lengths_of_a_v_form_are_known(comm, form):
    """Blocks that pass through other ranks: the data's part of the program is bound when all lengths are there."""
    rank, size = comm.Get_rank(), comm.Get_size()
    counts = [r % 2 + 1 for r in range(size)]
    column = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()  # two numbers with a gap between them
    mine = np.full((counts[rank], 3), float(rank))
    room = np.full((sum(counts), 3), -1.0)
    begin = comm.Igatherv if form == "non-blocking" else comm.Gatherv_init
    request = begin([mine, counts[rank], column], [room, counts, None, column] if rank == 0 else None, algorithm="mst")
    column.Free()
    for _ in range(1 if form == "non-blocking" else 2):
        if form == "persistent":
            request.Start()
        request.Wait()
        if rank == 0:
            assert room[:, 0].tolist() == room[:, 2].tolist() == [r for r in range(size) for _ in range(counts[r])]
            assert (room[:, 1] == -1).all()
    request.Free()
