"""Bad input: an error that names the argument, on the rank that made it, and nothing is sent."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import InvalidArgument

pytestmark = pytest.mark.ranks(1, 2)

X, Y = np.arange(4.0), np.zeros(4)
READ_ONLY = np.zeros(4)
READ_ONLY.flags.writeable = False
STRIDED = np.zeros(8)[::2]
FREED = MPI.Op.Create(lambda a, b, t: None)
FREED.Free()


def other(c):
    """A rank that is not 0: the next one, of which there must be two."""
    return (c.Get_rank() + 1) % c.Get_size()


# (method, arguments of the communicator -> positional and keyword ones, the kind of error, what the message says)
BAD = {
    "root too large": (
        "Bcast",
        lambda c: ((X, c.Get_size()), {}),
        ValueError,
        r"root: expected a rank from 0 to \d+, found",
    ),
    "root beyond an int": ("Bcast", lambda c: ((X, 1 << 40), {}), OverflowError, r"root: expected a rank .*found 1099"),
    "root below zero": (
        "Reduce",
        lambda c: ((X, Y), {"root": -1}),
        ValueError,
        r"root: expected a rank from 0 .*found -1",
    ),
    "root of a scatter": ("Scatter", lambda c: ((None, Y, 99), {}), ValueError, r"root: .*found 99"),
    "root of a gatherv": ("Gatherv", lambda c: ((X, None, 99), {}), ValueError, r"root: .*found 99"),
    "root that is no number": (
        "Bcast",
        lambda c: ((X, "first"), {}),
        TypeError,
        r"root: expected a rank, found 'first'",
    ),
    "root that is a list": ("Bcast", lambda c: ((X, [0]), {}), TypeError, r"root: expected a rank, found \[0\]"),
    "unequal counts": (
        "Allreduce",
        lambda c: ((X, np.zeros(3)), {}),
        ValueError,
        r"sendbuf has 4 elements .*recvbuf of 3",
    ),
    "unequal counts at the root": (
        "Reduce",
        lambda c: ((X, np.zeros(5)), {"root": c.Get_rank()}),
        ValueError,
        r"sendbuf has 4 elements .*of 5",
    ),
    "unequal dtypes": (
        "Allreduce",
        lambda c: ((X, np.zeros(4, "i8")), {}),
        TypeError,
        r"sendbuf has elements float64, but recvbuf .*int64",
    ),
    "unequal blocks": (
        "Allgather",
        lambda c: ((X, np.zeros(3 * c.Get_size())), {}),
        ValueError,
        r"sendbuf holds 32 bytes.*recvbuf holds 24",
    ),
    "unequal blocks of a scatter": (
        "Scatter",
        lambda c: ((np.zeros(2 * c.Get_size()), Y), {"root": c.Get_rank()}),
        ValueError,
        r"sendbuf holds 16 bytes, but recvbuf.* holds 32",
    ),
    "unequal blocks of a reduce-scatter": (
        "Reduce_scatter_block",
        lambda c: ((np.zeros(3 * c.Get_size()), Y), {}),
        ValueError,
        r"sendbuf has 3 elements .*of 4",
    ),
    "blocks that do not divide": (
        "Allgather",
        lambda c: ((X, np.zeros(c.Get_size() * 4 + 1)), {}),
        ValueError,
        r"recvbuf: \d+ elements cannot be divided|recvbuf holds",
    ),
    "too small a send buffer": (
        "Allreduce",
        lambda c: (([X, 5, MPI.DOUBLE], np.zeros(5)), {}),
        ValueError,
        r"sendbuf: count 5 .*needs 40 bytes.*has 32",
    ),
    "too small a receive buffer": (
        "Allreduce",
        lambda c: ((np.zeros(5), [Y, 5, MPI.DOUBLE]), {}),
        ValueError,
        r"recvbuf: count 5 .*needs 40 bytes.*has 32",
    ),
    "too small a buffer": ("Bcast", lambda c: (([Y, 9],), {}), ValueError, r"buf: count 9 .*needs 72 bytes"),
    "a displacement behind the end": (
        "Bcast",
        lambda c: (([Y, (1, 7)],), {}),
        ValueError,
        r"buf: displacement 7 is behind",
    ),
    "a negative count": ("Bcast", lambda c: (([Y, -1],), {}), ValueError, r"buf: negative count -1"),
    "a read-only target": ("Allreduce", lambda c: ((X, READ_ONLY), {}), ValueError, r"recvbuf: the array is read-only"),
    "a read-only buffer away from the root": (
        "Bcast",
        lambda c: ((READ_ONLY, other(c)), {}),
        ValueError,
        r"buf: the array is read-only",
    ),
    "a read-only bytes object": (
        "Allgather",
        lambda c: ((b"a", bytes(c.Get_size())), {}),
        ValueError,
        r"recvbuf: an object of type 'bytes' is read-only",
    ),
    "a source that is not contiguous": (
        "Allreduce",
        lambda c: ((STRIDED, Y), {}),
        ValueError,
        r"sendbuf: array of shape \(4,\).*not contiguous",
    ),
    "a target that is not contiguous": (
        "Allreduce",
        lambda c: ((X, STRIDED), {}),
        ValueError,
        r"recvbuf: array of shape \(4,\).*not contiguous",
    ),
    "objects": (
        "Allreduce",
        lambda c: ((np.array([{}] * 4, object), Y), {}),
        TypeError,
        r"sendbuf: an array of Python objects",
    ),
    "dates": (
        "Bcast",
        lambda c: ((np.zeros(4, "M8[s]"),), {}),
        TypeError,
        r"buf: dtype .* has no MPI datatype.*x.view\('i8'\)",
    ),
    "another byte order": (
        "Bcast",
        lambda c: ((np.zeros(4, ">f8"),), {}),
        TypeError,
        r"buf: dtype '>f8' is not in native",
    ),
    "no buffer": ("Allreduce", lambda c: ((12, Y), {}), TypeError, r"sendbuf: expected an array.*found 'int'"),
    "None": (
        "Allreduce",
        lambda c: ((X, None), {}),
        TypeError,
        r"recvbuf: .*None as the array needs an explicit datatype",
    ),
    "None away from the root": (
        "Reduce",
        lambda c: ((None, Y), {"root": other(c)}),
        ValueError,
        r"sendbuf: None, another name of MPI.IN_PLACE, is for the root",
    ),
    "in place in the wrong place": (
        "Allreduce",
        lambda c: ((X, MPI.IN_PLACE), {}),
        TypeError,
        r"recvbuf: MPI.IN_PLACE is not allowed",
    ),
    "in place where there is one buffer": (
        "Bcast",
        lambda c: ((MPI.IN_PLACE,), {}),
        TypeError,
        r"buf: MPI.IN_PLACE is not",
    ),
    "in place away from the root": (
        "Reduce",
        lambda c: ((MPI.IN_PLACE, Y), {"root": other(c)}),
        ValueError,
        r"sendbuf: MPI.IN_PLACE is for the root",
    ),
    "in place away from the root of a gather": (
        "Gather",
        lambda c: ((MPI.IN_PLACE, Y), {"root": other(c)}),
        ValueError,
        r"sendbuf: MPI.IN_PLACE is for the root",
    ),
    "large sources that are not contiguous": (
        "Allreduce",
        lambda c: ((BIG[::2], BIG[:1000]), {}),
        ValueError,
        r"sendbuf: .*not contiguous",
    ),
    "large targets that are not contiguous": (
        "Reduce",
        lambda c: ((BIG[:1000], BIG[::2], MPI.SUM, c.Get_rank()), {}),
        ValueError,
        r"recvbuf: .*not contiguous",
    ),
    "large buffers that are not contiguous": (
        "Bcast",
        lambda c: ((BIG[::2],), {}),
        ValueError,
        r"buf: .*not contiguous",
    ),
    "large buffers that overlap": (
        "Allreduce",
        lambda c: ((BIG[:-1], BIG[1:]), {}),
        ValueError,
        r"sendbuf and recvbuf overlap",
    ),
    "an unknown algorithm": (
        "Allreduce",
        lambda c: ((X, Y), {"algorithm": "star"}),
        ValueError,
        r"algorithm: unknown algorithm 'star' for allreduce; known: linear, mst, ring, recursive_doubling",
    ),
    "an algorithm that is no name": (
        "Allreduce",
        lambda c: ((X, Y), {"algorithm": ["ring"]}),
        TypeError,
        r"algorithm: expected a name, found \['ring'\]",
    ),
    "an algorithm without rank order": (
        "Allreduce",
        lambda c: ((X, Y, ORDERED), {"algorithm": "ring"}),
        ValueError,
        r"algorithm: 'ring' for allreduce does not keep rank order.*able: linear, mst",
    ),
    "no segments": (
        "Allreduce",
        lambda c: ((X, Y), {"segments": 0}),
        ValueError,
        r"segments: expected at least 1, found 0",
    ),
    "segments that are no number": (
        "Allreduce",
        lambda c: ((X, Y), {"segments": "two"}),
        TypeError,
        r"segments: expected an integer, found 'two'",
    ),
    "an operation that is none": (
        "Allreduce",
        lambda c: ((X, Y, "sum"), {}),
        TypeError,
        r"op: expected an MPI.Op, found 'sum'",
    ),
    "the null operation": ("Allreduce", lambda c: ((X, Y, MPI.OP_NULL), {}), ValueError, r"op: MPI.OP_NULL"),
    "a freed operation": (
        "Reduce",
        lambda c: ((X, Y, FREED), {}),
        ValueError,
        r"op: MPI.OP_NULL \(never made, or freed\)",
    ),
    "bits of floats": (
        "Allreduce",
        lambda c: ((X, Y, MPI.BAND), {}),
        TypeError,
        r"op: MPI.BAND is not defined for dtype float64",
    ),
    "the larger of complex numbers": (
        "Allreduce",
        lambda c: ((np.zeros(2, "D"), np.zeros(2, "D"), MPI.MAX), {}),
        TypeError,
        r"op: MPI.MAX is not defined",
    ),
    "places of plain numbers": (
        "Allreduce",
        lambda c: ((X, Y, MPI.MAXLOC), {}),
        TypeError,
        r"op: MPI.MAXLOC is not defined",
    ),
    "too few counts": (
        "Allgatherv",
        lambda c: ((X, [np.zeros(99), [1] * (c.Get_size() + 1)]), {}),
        ValueError,
        r"recvbuf: counts: expected \d+ items, one per rank, found",
    ),
    "negative counts": (
        "Allgatherv",
        lambda c: ((X, [np.zeros(99), [-1] * c.Get_size()]), {}),
        ValueError,
        r"recvbuf: counts: expected no negative",
    ),
    "a block behind the end": (
        "Scatterv",
        lambda c: (([X, [4] * c.Get_size(), [3] * c.Get_size(), MPI.DOUBLE], Y, c.Get_rank()), {}),
        ValueError,
        r"sendbuf: block 0 \(count 4, displacement 3\) .*needs 56 bytes",
    ),
    "a block of another length": (
        "Allgatherv",
        lambda c: ((X, [np.zeros(9 * c.Get_size()), [3] * c.Get_size()]), {}),
        ValueError,
        r"sendbuf holds 32 bytes.*recvbuf holds 24",
    ),
    "counts of another sum": (
        "Reduce_scatter",
        lambda c: ((X, Y, [5] * c.Get_size()), {}),
        ValueError,
        r"recvcounts: .* elements, but sendbuf has 4",
    ),
    "no counts in place": (
        "Reduce_scatter",
        lambda c: ((MPI.IN_PLACE, Y), {}),
        ValueError,
        r"recvcounts: MPI.IN_PLACE needs them",
    ),
}
BIG = np.zeros(2000)
ORDERED = MPI.Op.Create(lambda a, b, t: None, commute=False)


def call(comm, form, method, args, keywords):
    names = {"blocking": method, "non-blocking": f"I{method.lower()}", "persistent": f"{method}_init"}
    return getattr(comm, names[form])(*args, **keywords)


def works(comm):
    """Nobody is in the way of anybody: a few collectives of several kinds come out right."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for method in ("Allreduce", "Iallreduce"):
        mine, total = np.full(4, float(rank)), np.zeros(4)
        request = getattr(comm, method)(mine, total)
        if request:
            request.Wait()
        assert (total == size * (size - 1) / 2).all()
    everyone = np.zeros(size)
    comm.Allgather(np.array([float(rank)]), everyone)
    assert everyone.tolist() == list(range(size))
    MPI.Intracomm(comm).Barrier()
    assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


def needs_two(name):
    return "away from the root" in name


@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_on_one_rank_only(comm, name, form):
    """The rank that makes the call gets the error; the others never notice."""
    if needs_two(name) and comm.Get_size() == 1:
        return
    method, make, kind, message = BAD[name]
    if comm.Get_rank() == list(BAD).index(name) % comm.Get_size():
        args, keywords = make(comm)
        with pytest.raises(MPI.Exception, match=message) as caught:
            call(comm, form, method, args, keywords)
        assert isinstance(caught.value, kind)
        assert caught.value.Get_error_class() != MPI.SUCCESS
    works(comm)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_after_good_calls(comm, name):
    """What the library remembers of good calls must not let bad ones through."""
    if needs_two(name) and comm.Get_size() == 1:
        return
    X[:], Y[:] = np.arange(4.0), 0
    comm.Allreduce(X, Y)
    comm.Allreduce(X, Y, op=MPI.MAX)
    comm.Reduce(X, Y, root=0)
    comm.Bcast(X)
    comm.Bcast(X)
    method, make, kind, message = BAD[name]
    args, keywords = make(comm)
    with pytest.raises(MPI.Exception, match=message) as caught:
        call(comm, "blocking", method, args, keywords)
    assert isinstance(caught.value, kind)
    works(comm)


def test_an_operation_freed_after_a_call_with_it(comm):
    def add(left, inout, datatype):
        np.frombuffer(inout, "f8")[:] += np.frombuffer(left, "f8")

    op = MPI.Op.Create(add, commute=True)
    total = np.zeros(4)
    for _ in range(2):
        comm.Allreduce(np.ones(4), total, op)
    op.Free()
    with pytest.raises(InvalidArgument, match=r"op: MPI.OP_NULL \(never made, or freed\)"):
        comm.Allreduce(np.ones(4), total, op)
    works(comm)


def test_arrays_made_read_only_or_resized_after_a_call(comm):
    for n in (4, 5000):
        mine, total = np.ones(n), np.zeros(n)
        for _ in range(2):
            comm.Allreduce(mine, total)
        total.flags.writeable = False
        with pytest.raises(InvalidArgument, match="recvbuf: the array is read-only"):
            comm.Allreduce(mine, total)
        total.flags.writeable = True
        with pytest.raises(InvalidArgument, match="sendbuf has"):
            comm.Allreduce(mine[:-1], total)
        with pytest.raises(InvalidArgument, match="not contiguous"):
            comm.Allreduce(mine[::2], total[::2])
    works(comm)


def test_buffers_that_overlap_are_refused_whatever_went_before(comm):
    """Also a small call that is found by the shapes of its arrays."""
    both = np.ones(7)
    with pytest.raises(InvalidArgument, match="overlap"):
        comm.Allreduce(both, both)
    comm.Allreduce(both, np.zeros(7))
    comm.Allreduce(both, np.zeros(7))
    with pytest.raises(InvalidArgument, match="overlap"):
        comm.Allreduce(both, both)
    works(comm)


@pytest.mark.parametrize("n", [2, 5000])
def test_a_send_buffer_may_lie_in_a_gap_of_the_receive_buffer(comm, n):
    rank, size = comm.Get_rank(), comm.Get_size()
    room = np.full(2 * size * n, -1.0)  # blocks with gaps as long after them
    starts = list(range(0, len(room), 2 * n))
    mine = room[starts[rank] + n : starts[rank] + 2 * n]
    for turn in range(20):
        mine[:] = rank + turn
        comm.Allgatherv(mine, [room, ([n] * size, starts)])
        assert room[starts].tolist() == [r + turn for r in range(size)]
        assert (mine == rank + turn).all()
    with pytest.raises(InvalidArgument, match="overlap"):
        comm.Allgatherv(room[starts[rank] + n - 1 : starts[rank] + 2 * n - 1], [room, ([n] * size, starts)])
    works(comm)


def test_use_after_free(comm):
    mine, total = np.ones(4), np.zeros(4)
    gone = comm.Dup()
    gone.Allreduce(mine, total)
    gone.Free()
    for call in (
        lambda: gone.Allreduce(mine, total),
        lambda: gone.Iallreduce(mine, total),
        lambda: gone.Allreduce_init(mine, total),
        lambda: gone.Barrier(),
        lambda: gone.Reduce_scatter(np.ones(comm.Get_size()), np.ones(1)),
    ):
        with pytest.raises(InvalidArgument, match="this communicator was freed"):
            call()
    works(comm)


@pytest.mark.parametrize("argument", [None, MPI.COMM_NULL])
def test_what_is_no_communicator(argument):
    with pytest.raises(MPI.Exception, match=r"comm: (expected an MPI.Intracomm|MPI.COMM_NULL has no ranks)"):
        Communicator(argument)


@pytest.mark.parametrize("sent", [[X, MPI.INT], [X, 4, MPI.DATATYPE_NULL]], ids=["unlike", "null"])
def test_datatypes_are_refused_with_mpi4py_s_error_too(comm, sent):
    """mpi4py has a ValueError for both; a TypeError says more."""
    for kind in (ValueError, TypeError, MPI.Exception):
        with pytest.raises(kind):
            comm.Allreduce(sent, Y)
