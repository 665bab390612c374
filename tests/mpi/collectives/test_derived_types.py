"""Derived datatypes and operations of users: repeated calls run their programs, on any memory, until they are freed."""

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import find, use_interpreter

from collectives import Communicator
from collectives.buffers import staging
from collectives.engine.extension import available
from collectives.transport.mailbox_layout import NONBLOCKING

N = 12


def resized():
    column = MPI.DOUBLE.Create_vector(3, 1, 2)
    made = column.Create_resized(-16, 64).Commit()
    column.Free()
    return made


LAYOUTS = {
    "vector": lambda: MPI.DOUBLE.Create_vector(N, 1, 2).Commit(),
    "blocks": lambda: MPI.DOUBLE.Create_indexed([2, 3], [9, 1]).Commit(),
    "backwards": lambda: MPI.DOUBLE.Create_hindexed([1] * N, [8 * (N - 1 - at) for at in range(N)]).Commit(),
    "struct": lambda: MPI.Datatype.Create_struct([2, 3], [0, 24], [MPI.DOUBLE, MPI.INT64_T]).Commit(),
    "subarray": lambda: MPI.DOUBLE.Create_subarray([6, 5], [2, 3], [1, 2]).Commit(),
    "resized": resized,
}
"""Datatypes; one element fits 40 doubles from the eighth of 48 on."""


@pytest.fixture(params=["compiled", "interpreted", "mixed"])
def own(request, world, monkeypatch):
    if request.param == "interpreted" or (request.param == "mixed" and world.rank % 2):
        use_interpreter(monkeypatch)
    with Communicator(world) as comm:
        yield comm


@pytest.fixture(params=[1024, 1], ids=["copied", "packed by MPI"])
def runs(request, monkeypatch):
    monkeypatch.setattr(staging, "MOST_RUNS", request.param)


def combining(ufunc):
    """Operation of a user's, by a function of NumPy."""

    def combine(left, into, _):
        ufunc(np.frombuffer(left), np.frombuffer(into), out=np.frombuffer(into))

    return MPI.Op.Create(combine, commute=True)


def fresh(rank, turn):
    return np.arange(48.0) + 100 * rank + 10_000 * turn


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["Bcast", "Ibcast", "Bcast_init"])
def test_broadcasts(world, own, runs, layout, form):
    """As the MPI's own; the gaps stay unchanged."""
    datatype = LAYOUTS[layout]()
    for turn in range(3 * NONBLOCKING):
        mine, expected = fresh(own.rank, turn), fresh(own.rank, turn)
        root = turn % 2 % own.size
        arguments = [mine[8:], 1, datatype], root
        if form == "Bcast":
            own.Bcast(*arguments)
        elif form == "Ibcast":
            own.Ibcast(*arguments).Wait()
        else:
            request = own.Bcast_init(*arguments)
            request.Start()
            request.Wait()
            request.Free()
        world.Bcast([expected[8:], 1, datatype], root)
        assert np.array_equal(mine, expected)
    datatype.Free()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_into_other_layouts(world, own, runs, layout):
    """A derived type on one side, dense memory on the other."""
    datatype = LAYOUTS[layout]()
    count = datatype.Get_size() // 8
    for turn in range(3):
        mine = fresh(own.rank, turn)
        found, expected = (np.full((own.size, count), -1.0) for _ in range(2))
        own.Allgather([mine[8:], 1, datatype], [found, MPI.DOUBLE])
        world.Allgather([mine[8:], 1, datatype], [expected, MPI.DOUBLE])
        assert np.array_equal(found, expected)
        back, wanted = fresh(0, turn), fresh(0, turn)
        own.Scatter([found, MPI.DOUBLE], [back[8:], 1, datatype], 0)
        world.Scatter([expected, MPI.DOUBLE], [wanted[8:], 1, datatype], 0)
        assert np.array_equal(back, wanted)
    datatype.Free()


def test_rows_of_a_matrix_in_place(world, own, runs):
    column = MPI.DOUBLE.Create_vector(4, 1, own.size).Create_resized(0, 8).Commit()
    for turn in range(3):
        mine, expected = (np.full((4, own.size), float(own.rank + turn)) for _ in range(2))
        own.Allgather(MPI.IN_PLACE, [mine, 1, column])
        world.Allgather(MPI.IN_PLACE, [expected, 1, column])
        assert np.array_equal(mine, expected)
        counts, displs = [1] * own.size, list(range(own.size))[::-1]
        into, wanted = np.zeros((4, own.size)), np.zeros((4, own.size))
        own.Allgatherv(np.full(4, float(own.rank)), [into, counts, displs, column])
        world.Allgatherv(np.full(4, float(own.rank)), [wanted, counts, displs, column])
        assert np.array_equal(into, wanted)
        displs.reverse()
        own.Allgatherv(np.full(4, float(own.rank)), [into, counts, displs, column])
        world.Allgatherv(np.full(4, float(own.rank)), [wanted, counts, displs, column])
        assert np.array_equal(into, wanted)
    column.Free()


def test_a_repeated_call_is_found(world):
    if not available():
        pytest.skip("this installation has no compiled engine")
    with Communicator(world) as own:
        datatype, mine = LAYOUTS["vector"](), np.ones(48)
        op = combining(np.add)
        for _ in range(2):
            own.Gather([mine, 1, datatype], np.zeros((own.size, N)), 0)
            own.Allreduce(np.ones(3), np.zeros(3), op)
        assert find(own, "Gather", [mine.copy(), 1, datatype], np.zeros((own.size, N)))
        assert find(own, "Allreduce", np.ones(3), total := np.zeros(3), op) and (total == own.size).all()
        datatype.Free()
        op.Free()
        assert not find(own, "Gather", [mine, 1, datatype], np.zeros((own.size, N)))
        assert not find(own, "Allreduce", np.ones(3), np.zeros(3), op)


def test_what_was_freed_is_refused(own):
    datatype, mine = LAYOUTS["vector"](), np.ones(48)
    for _ in range(3):
        own.Bcast([mine, 1, datatype], 0)
    datatype.Free()
    with pytest.raises(MPI.Exception, match="DATATYPE_NULL"):
        own.Bcast([mine, 1, datatype], 0)
    op = MPI.Op.Create(lambda left, into, _: None, commute=True)
    for _ in range(3):
        own.Allreduce(mine, np.empty(48), op)
    op.Free()
    with pytest.raises(MPI.Exception, match="OP_NULL"):
        own.Allreduce(mine, np.empty(48), op)


@pytest.mark.parametrize("form", ["Allreduce", "Iallreduce"])
def test_new_operations_are_not_taken_for_freed_ones(own, form):
    """MPI gives the handles of freed operations and datatypes to new ones."""
    for turn, ufunc in enumerate([np.add, np.maximum, np.minimum, np.add] * 3):
        op, mine, found = combining(ufunc), np.arange(5.0) + own.rank, np.zeros(5)
        for _ in range(3):
            result = getattr(own, form)(mine, found, op)
            if result is not None:
                result.Wait()
        assert np.array_equal(found, ufunc.reduce([np.arange(5.0) + rank for rank in range(own.size)])), turn
        op.Free()


def test_new_datatypes_are_not_taken_for_freed_ones(own):
    for turn in range(9):
        stride, mine = 1 + turn % 3, np.arange(48.0) if own.rank == 0 else np.zeros(48)
        datatype = MPI.DOUBLE.Create_vector(8, 1, stride).Commit()
        for _ in range(3):
            own.Bcast([mine, 1, datatype], 0)
        assert np.array_equal(mine[: 8 * stride : stride], np.arange(48.0)[: 8 * stride : stride])
        assert own.rank == 0 or np.count_nonzero(mine) == 7
        datatype.Free()


def test_long_vectors(own):
    datatype = MPI.DOUBLE.Create_vector(200_000, 1, 2).Commit()
    for turn in range(3):
        mine = np.arange(400_000.0) + turn if own.rank == 0 else np.zeros(400_000)
        own.Bcast([mine, 1, datatype], 0)
        assert np.array_equal(mine[::2], np.arange(400_000.0)[::2] + turn)
        assert own.rank == 0 or not mine[1::2].any()
    datatype.Free()
