"""Intercommunicators between Chorus communicators: all collectives have the results of mpi4py's own."""

import numpy as np
import pytest
from mpi4py import MPI


@pytest.fixture
def pair(comm):
    """Intercommunicator between the even and the odd ranks, made by Chorus, and another one made by mpi4py."""
    if comm.Get_size() < 2:
        pytest.skip("two groups need two ranks")
    made = []
    for base in (comm, MPI.COMM_WORLD):
        half = base.Split(base.rank % 2, base.rank)
        made.append(half.Create_intercomm(0, base, 1 - base.rank % 2, 11))
        half.Free()
    yield made
    for inter in made:
        inter.Free()


def values(inter, count):
    return np.arange(count) + 100.0 * MPI.COMM_WORLD.rank


def root_of(inter):
    """Root argument of a call whose root is rank 0 of the even ranks."""
    if MPI.COMM_WORLD.rank % 2:
        return 0
    return MPI.ROOT if inter.rank == 0 else MPI.PROC_NULL


def bcast(inter):
    x = values(inter, 5)
    inter.Bcast(x, root_of(inter))
    return x


def to_root(method):
    def call(inter):
        found = np.zeros(3 if method == "Reduce" else 3 * inter.remote_size)
        arguments = [values(inter, 3), found, *([MPI.MAX] if method == "Reduce" else []), root_of(inter)]
        if method == "Gatherv":
            arguments[1] = [found, [3] * inter.remote_size]
        getattr(inter, method)(*arguments)
        return found

    return call


def from_root(method):
    def call(inter):
        found, sent = np.zeros(3), values(inter, 3 * inter.remote_size)
        arguments = [[sent, [3] * inter.remote_size] if method == "Scatterv" else sent, found]
        getattr(inter, method)(*arguments, root_of(inter))
        return found

    return call


def to_all(method):
    def call(inter):
        found = np.zeros(3 if method == "Allreduce" else 3 * inter.remote_size)
        getattr(inter, method)(values(inter, 3), found)
        return found

    return call


def exchanged(method):
    def call(inter):
        found, counts = np.zeros(2 * inter.remote_size), [2] * inter.remote_size
        sides = [values(inter, len(found)), found]
        if method != "Alltoall":
            sides = [[side, counts] for side in sides]
        if method == "Alltoallw":
            starts = [16 * at for at in range(inter.remote_size)]
            sides = [[side, counts, starts, [MPI.DOUBLE] * inter.remote_size] for side, _ in sides]
        getattr(inter, method)(*sides)
        return found

    return call


def reduce_scatter(inter):
    total = 2 * inter.size * inter.remote_size
    found = np.zeros(total // inter.size)
    inter.Reduce_scatter_block(values(inter, total), found)
    return found


def request(inter):
    found = np.zeros(3)
    inter.Iallreduce(values(inter, 3), found, MPI.MIN).Wait()
    return found


def joined(left, right):
    return f"({left}{right})"


CALLS = {
    "Barrier": lambda inter: inter.Barrier(),
    "Bcast": bcast,
    **{name: to_root(name) for name in ("Gather", "Gatherv", "Reduce")},
    **{name: from_root(name) for name in ("Scatter", "Scatterv")},
    **{name: to_all(name) for name in ("Allgather", "Allreduce")},
    **{name: exchanged(name) for name in ("Alltoall", "Alltoallv", "Alltoallw")},
    "Reduce_scatter_block": reduce_scatter,
    "Iallreduce": request,
    "bcast": lambda inter: inter.bcast(("object", inter.rank), root_of(inter)),
    "gather": lambda inter: inter.gather(("object", inter.rank), root_of(inter)),
    "scatter": lambda inter: inter.scatter([(inter.rank, at) for at in range(inter.remote_size)], root_of(inter)),
    "allgather": lambda inter: inter.allgather(("object", inter.rank)),
    "alltoall": lambda inter: inter.alltoall([(inter.rank, at) for at in range(inter.remote_size)]),
    "reduce": lambda inter: inter.reduce(chr(97 + inter.rank), joined, root_of(inter)),
    "allreduce": lambda inter: inter.allreduce(chr(97 + inter.rank), joined),
}


@pytest.mark.parametrize("call", CALLS)
def test_collectives(pair, call):
    ours, plain = pair
    assert isinstance(ours, MPI.Intercomm)
    np.testing.assert_equal(CALLS[call](ours), CALLS[call](plain))


def test_requests_progress_during_a_collective(comm, pair):
    """The last rank completes its request first; the others meet it in the collective of the intercommunicator."""
    total = np.zeros(50_000)
    request = comm.Iallreduce(np.ones(50_000), total)
    if comm.rank == comm.size - 1:
        request.Wait()
    assert len(pair[0].allgather(comm.rank)) == pair[0].remote_size
    request.Wait()
    assert (total == comm.size).all()


def test_merged(comm, pair):
    """An intracommunicator of mpi4py again, of which a Communicator can be made."""
    merged = pair[0].Merge(bool(comm.rank % 2))
    with type(comm)(merged) as made:
        assert made.allreduce(1) == comm.size
    merged.Free()
