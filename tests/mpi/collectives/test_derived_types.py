"""Derived datatypes and operations of users: repeated calls run their programs, on any memory, until they are freed."""

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import find, use_interpreter

from collectives import Communicator
from collectives.engine.extension import available
from collectives.runtime.binding import packing
from collectives.transport.node.mailbox_layout import NONBLOCKING

pytestmark = pytest.mark.ranks(1, 2)

N = 12


def resized():
    column = MPI.DOUBLE.Create_vector(3, 1, 2)
    made = column.Create_resized(-16, 64).Commit()
    column.Free()
    return made


LAYOUTS = {
    "vector": lambda: MPI.DOUBLE.Create_vector(N, 1, 2).Commit(),
    "blocks": lambda: MPI.DOUBLE.Create_indexed([2, 0, 3], [9, 0, 1]).Commit(),
    "backwards": lambda: MPI.DOUBLE.Create_hindexed([1] * N, [8 * (N - 1 - at) for at in range(N)]).Commit(),
    "struct": lambda: MPI.Datatype.Create_struct([2, 3], [0, 24], [MPI.DOUBLE, MPI.INT64_T]).Commit(),
    "subarray": lambda: MPI.DOUBLE.Create_subarray([6, 5], [2, 3], [1, 2]).Commit(),
    "resized": resized,
}
"""Datatypes; one element fits 40 doubles from the eighth of 48 on."""

PLACES = {
    "vector": range(0, 2 * N, 2),
    "blocks": [9, 10, 1, 2, 3],
    "backwards": range(N)[::-1],
    "struct": [0, 1, 3, 4, 5],
    "subarray": [7, 8, 9, 12, 13, 14],
    "resized": [0, 2, 4],
}
"""Places of the numbers of an element, in order. The MPI's own collectives are no reference: those of Intel MPI are
wrong at times for such datatypes."""


def numbers_of(memory, layout):
    """Numbers of an element that begins at the eighth number of a memory."""
    return memory[8:][PLACES[layout]]


def with_numbers(memory, layout, numbers):
    """The memory with other numbers in an element; those in the gaps stay."""
    changed = memory.copy()
    changed[8:][PLACES[layout]] = numbers
    return changed


@pytest.fixture(params=["compiled", "interpreted", "mixed"])
def own(request, world, monkeypatch):
    if request.param == "interpreted" or (request.param == "mixed" and world.rank % 2):
        use_interpreter(monkeypatch)
    with Communicator(world) as comm:
        yield comm


@pytest.fixture(params=[1024, 1], ids=["copied", "packed by MPI"])
def runs(request, monkeypatch):
    monkeypatch.setattr(packing, "MOST_RUNS", request.param)


def combining(ufunc):
    """Operation of a user's, by a function of NumPy."""

    def combine(left, into, _):
        ufunc(np.frombuffer(left), np.frombuffer(into), out=np.frombuffer(into))

    return MPI.Op.Create(combine, commute=True)


def fresh(rank, turn):
    return np.arange(48.0) + 100 * rank + 10_000 * turn


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["Bcast", "Ibcast", "Bcast_init"])
def test_broadcasts(own, runs, layout, form):
    """The numbers of the root arrive, and the gaps stay unchanged."""
    datatype = LAYOUTS[layout]()
    for turn in range(3 * NONBLOCKING):
        mine, root = fresh(own.rank, turn), turn % 2 % own.size
        expected = with_numbers(mine, layout, numbers_of(fresh(root, turn), layout))
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
        assert np.array_equal(mine, expected)
    datatype.Free()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_into_other_layouts(own, runs, layout):
    """A derived type on one side, dense memory on the other."""
    datatype, count = LAYOUTS[layout](), len(PLACES[layout])
    for turn in range(3):
        mine, found = fresh(own.rank, turn), np.full((own.size, count), -1.0)
        own.Allgather([mine[8:], 1, datatype], [found, MPI.DOUBLE])
        assert np.array_equal(found, [numbers_of(fresh(rank, turn), layout) for rank in range(own.size)])
        back = fresh(0, turn)
        expected = with_numbers(back, layout, found[own.rank])
        own.Scatter([found, MPI.DOUBLE], [back[8:], 1, datatype], 0)
        assert np.array_equal(back, expected)
    datatype.Free()


def test_columns_of_a_matrix(own, runs):
    column = MPI.DOUBLE.Create_vector(4, 1, own.size).Create_resized(0, 8).Commit()
    ranks = np.arange(float(own.size))
    for turn in range(3):
        mine = np.full((4, own.size), float(own.rank + turn))
        own.Allgather(MPI.IN_PLACE, [mine, 1, column])
        assert np.array_equal(mine, np.tile(ranks + turn, (4, 1)))
        counts, displs = [1] * own.size, list(range(own.size))[::-1]
        into = np.zeros((4, own.size))
        own.Allgatherv(np.full(4, float(own.rank)), [into, counts, displs, column])
        assert np.array_equal(into, np.tile(ranks[::-1], (4, 1)))
        displs.reverse()
        own.Allgatherv(np.full(4, float(own.rank)), [into, counts, displs, column])
        assert np.array_equal(into, np.tile(ranks, (4, 1)))
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


def test_datatypes_made_for_every_call_hold_little_memory(own):
    """Programs of datatypes that were freed stay for a while, but none with long copies."""
    mine = np.zeros(2 * 50_000)
    for _ in range(6):
        datatype = MPI.DOUBLE.Create_vector(50_000, 1, 2).Commit()
        request = own.Ibcast([mine, 1, datatype], 0)
        datatype.Free()
        request.Wait()
    assert own._planner.nonblocking.nbytes < 400_000 and len(own._planner.nonblocking.bound) == 0
