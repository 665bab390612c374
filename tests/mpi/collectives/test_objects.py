"""Collectives of Python objects: results as mpi4py's, errors on all ranks that would receive."""

import pickle
import time

import numpy as np
import pytest
from mpi4py import MPI

from collectives.errors import InvalidArgument
from collectives.runtime.methods.object_messages import LEAST_BUFFER, MOST_BUFFERS, ROOM, lower_blocks, tree
from collectives.runtime.methods.object_methods import LONG, MOST_REDUCED

pytestmark = pytest.mark.ranks(1, 2)

LENGTHS = [0, 1, 300, *range(ROOM - 30, ROOM + 2), 5000, 300_000]


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


ARRAYS = {
    "none": [],
    "short": [np.arange(3.0)],
    "at the limit": [np.ones(LEAST_BUFFER - 1, np.int8), np.ones(LEAST_BUFFER, np.int8)],
    "long": [np.arange(LONG // 8 + 1.0)],
    "in Fortran order": [np.asfortranarray(np.arange(1e4).reshape(100, 100))],
    "with gaps": [np.arange(1e5)[::2]],
    "read-only": [np.broadcast_to(1.0, 9000).copy()],
    "many": [np.full(LEAST_BUFFER, at, np.int8) for at in range(MOST_BUFFERS + 2)],
}
ARRAYS["read-only"][0].flags.writeable = False


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_in_objects(comm, kind):
    """Equal to mpi4py's, in memory of their own; ranks other than the last have none."""
    size, last = comm.Get_size(), comm.Get_size() - 1
    mine = {"rank": comm.rank, "arrays": ARRAYS[kind] if comm.rank == last else []}
    plain = MPI.COMM_WORLD
    for call in CALLS.values():
        for found, expected in zip(flat(call(comm, mine)), flat(call(plain, mine)), strict=True):
            assert found["rank"] == expected["rank"] and len(found["arrays"]) == len(expected["arrays"])
            for one, other in zip(found["arrays"], expected["arrays"], strict=True):
                np.testing.assert_array_equal(one, other, strict=True)
                assert one.flags.num == other.flags.num
                assert not any(np.shares_memory(one, array) for array in mine["arrays"])
    assert comm.allgather(comm.rank) == list(range(size))


def flat(found):
    return found if isinstance(found, list) else [] if found is None else [found]


def joined(left, right):
    return f"({left}{right})"


@pytest.mark.parametrize("name", ["reduce", "allreduce", "scan", "exscan"])
def test_reductions_in_the_order_of_mpi4py(comm, name):
    """The same operands in the same order, up to the largest number of ranks that reduce all themselves and beyond."""
    for value in (chr(97 + comm.rank), chr(97 + comm.rank) * 1000):
        assert getattr(comm, name)(value, joined) == getattr(MPI.COMM_WORLD, name)(value, joined)
    assert comm.reduce([comm.rank], root=comm.Get_size() - 1) == MPI.COMM_WORLD.reduce(
        [comm.rank], root=comm.Get_size() - 1
    )


def test_operation_that_raises(comm):
    """All ranks of an allreduce raise, where mpi4py's other ranks would wait for ever."""
    if comm.Get_size() == 1:
        return
    for value in (comm.rank, str(comm.rank) * 1000):
        with pytest.raises((ZeroDivisionError, InvalidArgument), match="division"):
            comm.allreduce(value, lambda left, right: 1 // 0)
    if comm.rank == comm.Get_size() - 1:
        with pytest.raises(Exception, match="lambda"):
            comm.allreduce(lambda: 0)
    else:
        with pytest.raises(InvalidArgument, match=r"has no object: .*lambda"):
            comm.allreduce(1)
    assert comm.allreduce(1) == comm.Get_size()


@pytest.mark.parametrize("size", range(1, MOST_REDUCED + 1))
def test_order_of_reductions(size):
    """As mpi4py's steps give it, for every number of ranks."""
    partial = [[chr(97 + rank)] * 2 for rank in range(size)]
    step = 1
    while step < size:
        before = [tuple(one) for one in partial]
        for rank in range(size):
            if (target := rank ^ step) < size:
                pair = (before[target][0], before[rank][0])
                partial[rank][0] = joined(*(pair if rank > target else pair[::-1]))
                if rank > target:
                    partial[rank][1] = joined(before[target][0], before[rank][1])
        step *= 2
    items = [chr(97 + rank) for rank in range(size)]
    for rank in range(size):
        found = items[rank]
        for block in lower_blocks(items[: rank + 1], joined):
            found = joined(block, found)
        assert found == partial[rank][1]
    assert tree(items, joined) == partial[0][0]


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


SHARED = [1, "text"]
TEXT = "a text that several places refer to"
PLAIN = {
    "numbers": (None, True, 1.5, -(1 << 200), float("inf"), 0),
    "strings": ["", "a", "é", "\u20ac", "\U0001f600", "\ud800", b"", b"bytes", "x" * 600],
    "dictionaries": {"a": [{"b": (1, [2.5, None])}], (1, "key"): {}, 3: (), None: []},
    "long": [{"number": i, "name": f"n{i}"} for i in range(300)],
    "shared": [SHARED, SHARED, {"again": SHARED}, TEXT, TEXT],
    "very long text": "x" * ((1 << 20) + 1),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_objects_of_pythons_own_types(comm, kind):
    value = PLAIN[kind]
    for found in (comm.bcast(value), comm.allgather(value)[-1], comm.scatter([value] * comm.Get_size())):
        assert found == value and repr(found) == repr(value)
        assert list(map(type, found)) == list(map(type, value))
        assert isinstance(value, tuple | str) or found is not value
    if kind == "shared":
        for found in comm.allgather(value):
            assert found[0] is found[1] is found[2]["again"] is not SHARED and found[3] is found[4]


def test_copies_are_deep(comm):
    value = [{"a": [1]}, ([2],), {"b": ()}]
    found = comm.bcast(value, comm.rank) if comm.Get_size() == 1 else comm.allgather(value)[comm.rank]
    found[0]["a"].append(3)
    found[1][0].append(4)
    found[2]["c"] = 5
    assert value == [{"a": [1]}, ([2],), {"b": ()}]


class Words(list):
    """A list with an attribute."""


def test_objects_that_are_left_to_pickle(comm):
    inner = []
    inner.append(inner)
    for found in comm.allgather([inner, (inner,)]):
        assert found[0] is found[0][0] is found[1][0]
    words = Words("ab")
    words.name = "name"
    for found in comm.allgather([1, words, {2, 3}, bytearray(b"x"), np.float64(1.5), range(3)]):
        assert found == [1, ["a", "b"], {2, 3}, bytearray(b"x"), 1.5, range(3)]
        assert type(found[1]) is Words and found[1].name == "name"
        assert list(map(type, found[2:])) == [set, bytearray, np.float64, range]
    deep = []
    for _ in range(80):
        deep = [deep]
    assert comm.bcast(deep) == deep


@pytest.mark.parametrize("value", [["text"], {"a": 1}, "text"], ids=repr)
def test_functions_of_the_program_see_all_but_numbers(comm, value):
    seen = []

    def dumps(value, *options):
        seen.append(value)
        return pickle.dumps(value, *options)

    MPI.pickle.__init__(dumps, pickle.loads)
    try:
        assert comm.allgather(value) == [value] * comm.Get_size()
        comm.allgather(1.5)
    finally:
        MPI.pickle.__init__()
    assert seen in ([value], [value, value], [value, 1.5])
