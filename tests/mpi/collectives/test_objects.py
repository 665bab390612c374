"""Collectives of Python objects: results as mpi4py's, errors on all ranks that would receive."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from collectives.errors import InvalidArgument
from collectives.runtime.methods.object_methods import FRAME, HEAD

LENGTHS = [0, 1, 300, *range(FRAME - HEAD - 30, FRAME - HEAD + 2), 5000, 300_000]


@pytest.fixture(params=LENGTHS)
def value(request):
    """An object of this rank; packed objects of these lengths end before, at and after the end of a frame."""
    return MPI.COMM_WORLD.rank, b"x" * request.param, None


def test_results_of_mpi4py(comm, value):
    plain, size = MPI.COMM_WORLD, comm.Get_size()
    items = [(value, place) for place in range(size)]
    for root in {0, size - 1}:
        mine = items if comm.rank == root else None
        assert comm.bcast(value, root) == plain.bcast(value, root)
        assert comm.gather(value, root) == plain.gather(value, root)
        assert comm.scatter(mine, root) == plain.scatter(mine, root)
    assert comm.allgather(value) == plain.allgather(value)
    assert comm.alltoall(items) == plain.alltoall(items)


def test_long_object_of_one_rank(comm):
    value = b"y" * (100_000 if comm.rank == comm.Get_size() - 1 else 3)
    assert [len(one) for one in comm.allgather(value)] == [3] * (comm.Get_size() - 1) + [100_000]


def test_objects_are_copies(comm):
    mine = [comm.rank, np.arange(3)]
    for found in (comm.bcast(mine), comm.allgather(mine)[comm.rank], comm.alltoall([mine] * comm.Get_size())[0]):
        assert found is not mine
        np.testing.assert_array_equal(found[1], mine[1])


CALLS = {
    "bcast": lambda comm, value: comm.bcast(value, comm.Get_size() - 1),
    "scatter": lambda comm, value: comm.scatter([value] * comm.Get_size(), comm.Get_size() - 1),
    "gather": lambda comm, value: comm.gather(value, 0),
    "allgather": lambda comm, value: comm.allgather(value),
    "alltoall": lambda comm, value: comm.alltoall([value] * comm.Get_size()),
}


@pytest.mark.parametrize("call", CALLS)
def test_object_that_cannot_be_pickled(comm, call):
    """On its rank pickle's own error, on all that would receive it one that names the rank; the next call is right."""
    last = comm.Get_size() - 1
    if comm.rank == last:
        with pytest.raises(Exception, match="lambda"):
            CALLS[call](comm, lambda: 0)
    elif call == "gather" and comm.rank:
        CALLS[call](comm, 1)
    else:
        with pytest.raises(InvalidArgument, match=f"{call}: rank {last} has no object: .*lambda"):
            CALLS[call](comm, 1)
    assert comm.allgather(comm.rank) == list(range(last + 1))


class Unencodable:
    """Its error has a text that is no UTF-8."""

    def __reduce__(self):
        raise ValueError("no \ud800")


@pytest.mark.parametrize("call", CALLS)
def test_error_that_cannot_be_encoded(comm, call):
    last = comm.Get_size() - 1
    if call == "gather" and 0 < comm.rank < last:
        CALLS[call](comm, 1)
    else:
        with pytest.raises((ValueError, InvalidArgument), match="no "):
            CALLS[call](comm, Unencodable() if comm.rank == last else 1)
    assert comm.bcast(comm.rank) == 0


@pytest.fixture
def views():
    """Pickling of bytes that keeps what it is given."""
    MPI.pickle.__init__(lambda value, protocol=None: value, memoryview)
    yield
    MPI.pickle.__init__()


def test_bytes_that_are_kept(comm, views):
    """The next call does not change them."""
    first = comm.bcast(b"first"), *comm.allgather(b"first")
    comm.bcast(b"other")
    comm.allgather(b"other")
    assert [bytes(one) for one in first] == [b"first"] * (1 + comm.Get_size())


@pytest.mark.parametrize("count", [0, 1])
def test_wrong_number_of_objects(comm, count):
    items = [0] * (comm.Get_size() + count) if count else []
    with pytest.raises((ValueError, InvalidArgument), match=f"expected {comm.Get_size()} objects"):
        comm.alltoall(items)
    with pytest.raises((ValueError, InvalidArgument), match=f"expected {comm.Get_size()} objects"):
        comm.scatter(items)
    assert comm.bcast(comm.rank) == 0


def test_progress_of_requests_while_a_rank_is_late(comm):
    """The sum ends in this call on the other ranks, though the late rank waits for it alone."""
    total, mine = np.zeros(50_000), np.full(50_000, comm.rank + 1.0)
    request = comm.Iallreduce(mine, total)
    if comm.rank == 0:
        time.sleep(0.05)
        request.Wait()
    assert comm.allgather(comm.rank) == list(range(comm.Get_size()))
    request.Wait()
    assert (total == sum(range(1, comm.Get_size() + 1))).all()
