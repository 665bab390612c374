"""MPI.IN_PLACE in both of mpi4py's spellings, and numbers that equal it; roots in all forms that count as numbers."""

import numpy as np
import pytest
from mpi4py import MPI
from support.exchange_cases import FORMS, TABLE, Question, perform

from collectives import Communicator
from collectives.errors import InvalidType

pytestmark = pytest.mark.ranks(1, 2)

METHODS = [method for method, line in TABLE.items() if line.in_place]
EQUAL = {"int": int(MPI.IN_PLACE), "-1": -1, "1": 1, "True": True}  # MPI.IN_PLACE is -1 or 1, depending on the MPI


@pytest.fixture
def quick(world, monkeypatch):
    """A communicator that compiles what it does for the third time."""
    with Communicator(world) as comm:
        yield comm


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_none_is_in_place(comm, method, form):
    """Where there is nothing to send in place, as a root is elsewhere, None goes on to be no buffer at all."""
    size = comm.Get_size()
    for n in (0, 1, 5, 3000):
        for root in {0, size - 1}:
            exchange = TABLE[method].make(Question(comm.Get_rank(), size, root, n, np.dtype("i4"), in_place=True))
            exchange.args = [None if arg is MPI.IN_PLACE else arg for arg in exchange.args]
            perform(comm, form, method, exchange, turns=4)


@pytest.mark.parametrize("number", EQUAL.values(), ids=EQUAL)
def test_a_number_is_no_buffer(quick, number):
    """Nor is it one after calls in place that are known again, and compiled."""
    x = np.ones(2)
    for _ in range(8):
        with pytest.raises(InvalidType, match=r"sendbuf: expected an array.*found '(int|bool)'"):
            quick.Allreduce(number, x)
        with pytest.raises(InvalidType, match=r"sendbuf: expected an array.*found '(int|bool)'"):
            quick.Exscan(number, x)
        quick.Allreduce(MPI.IN_PLACE, x)
        quick.Exscan(MPI.IN_PLACE, np.ones(2))
    assert x.tolist() == [float(quick.Get_size() ** 8)] * 2


class Last:
    """Something that is no number, but counts as one."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


@pytest.mark.parametrize("number", [np.array, np.int8, np.uint64, Last], ids=lambda kind: kind.__name__)
def test_roots_and_segments_are_what_counts_as_a_number(comm, number):
    rank, size = comm.Get_rank(), comm.Get_size()
    for root in range(size):
        for _ in range(3):
            x = np.full(4, rank)
            comm.Bcast(x, root=number(root))
            assert (x == root).all()
            total = np.zeros(4, int)
            comm.Reduce(np.full(4, rank), total, root=number(root), algorithm="chain", segments=number(2))
            assert (total == (size * (size - 1) // 2 if rank == root else 0)).all()
        request = comm.Ibcast(x := np.full(4, rank), number(root), segments=number(1))
        request.Wait()
        assert (x == root).all()
        block = np.zeros(1, int)
        comm.Scatterv(np.arange(size) if rank == root else None, block, number(root))
        assert block.tolist() == [rank]
    for wrong in (number(size), np.array([0]), np.array(0.5), "0"):
        with pytest.raises((ValueError, TypeError), match="root: expected a rank"):
            comm.Bcast(np.zeros(1), root=wrong)
