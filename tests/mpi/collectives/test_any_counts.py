"""V-forms whose counts change with each call: results of the MPI, and one program for all counts."""

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import interpreter

from collectives import Communicator
from collectives.engine.extension import available

LONGEST = [3, 2000, 40_000]
"""Elements of the longest block."""


class Counted:
    """Calls of one communicator with blocks of `counts[sender, receiver]` elements, `gap` elements apart."""

    def __init__(self, comm, dtype, counts, gap):
        self.comm, self.rank, self.size = comm, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self.counts, self.gap = counts, gap
        room = 2 * self.size * (int(counts.max()) + gap)
        self.x = (np.arange(room) + 100 * self.rank).astype(dtype)
        self.y = np.full(room, 1, dtype)

    def spec(self, array, counts):
        """A buffer of blocks in one of the forms of arguments."""
        counts = counts.tolist()
        displs = (np.cumsum([0, *counts[:-1]]) + self.gap * np.arange(self.size)).tolist()
        if not self.gap:
            return [array, counts]
        return [array, (counts, displs)] if self.gap == 1 else [array, np.array(counts), np.array(displs), "d"]

    def alltoallv(self):
        sent, received = self.counts[self.rank], self.counts[:, self.rank]
        self.comm.Alltoallv(self.spec(self.x, sent), self.spec(self.y, received))

    def ialltoallv(self):
        sent, received = self.counts[self.rank], self.counts[:, self.rank]
        z = np.full_like(self.y, 1)
        requests = [
            self.comm.Ialltoallv(self.spec(self.x, sent), self.spec(self.y, received)),
            self.comm.Ialltoallv(self.spec(self.x, sent // 2), self.spec(z, received // 2)),
        ]
        for request in requests:
            request.Wait()
        self.y = np.concatenate([self.y, z])

    def allgatherv(self):
        self.comm.Allgatherv(self.x[: self.counts[0, self.rank]], self.spec(self.y, self.counts[0]))

    def allgatherv_in_place(self):
        self.y[:] = self.x
        self.comm.Allgatherv(MPI.IN_PLACE, self.spec(self.y, self.counts[0]))

    def gatherv(self):
        for root in range(self.size):
            spec = self.spec(self.y, self.counts[root]) if self.rank == root else None
            self.comm.Gatherv([self.x, self.counts[root, self.rank]], spec, root)

    def scatterv(self):
        for root in range(self.size):
            spec = self.spec(self.x, self.counts[root]) if self.rank == root else None
            self.comm.Scatterv(spec, self.y[: self.counts[root, self.rank]], root)

    def reduce_scatter(self):
        counts = self.counts[0].tolist()
        self.comm.Reduce_scatter(self.x[: sum(counts)], self.y[: counts[self.rank]], counts)


CALLS = ["alltoallv", "ialltoallv", "allgatherv", "allgatherv_in_place", "gatherv", "scatterv", "reduce_scatter"]


PLACES = {
    "one node": lambda size: None,
    "pairs": lambda size: [rank // 2 for rank in range(size)],
    "apart": lambda size: list(range(size)),
}
"""Nodes of the ranks."""


@pytest.fixture(params=PLACES)
def placed(request, comm):
    """A communicator of one node or several."""
    nodes = PLACES[request.param](comm.size)
    if nodes is None:
        yield comm
    else:
        with Communicator(MPI.COMM_WORLD, nodes=nodes) as found:
            yield found


def drawn_counts(seed, longest):
    """Counts of a call, some of them 0."""
    rng, size = np.random.default_rng(seed), MPI.COMM_WORLD.size
    counts = rng.integers(0, longest + 1, (size, size))
    counts[rng.random((size, size)) < 0.3] = 0
    return counts


def run(comm, call, dtype, seed, longest, gap):
    """Memory after a call."""
    made = Counted(comm, dtype, drawn_counts(seed, longest), gap)
    getattr(made, call)()
    return made.y


@pytest.mark.parametrize("longest", LONGEST)
@pytest.mark.parametrize("call", CALLS)
def test_results_of_the_mpi(placed, call, longest):
    for seed in range(8):
        dtype, gap = (np.float64, seed % 3) if seed != 5 else (np.int32, 1)
        expected = run(MPI.COMM_WORLD, call, dtype, seed, longest, gap)
        np.testing.assert_array_equal(run(placed, call, dtype, seed, longest, gap), expected)


@pytest.mark.parametrize("call", CALLS)
def test_beside_ranks_that_bind_for_their_counts(placed, call):
    """Rank 0 binds each call for its counts, as without the compiled engine."""
    for seed in range(4):
        expected = run(MPI.COMM_WORLD, call, np.float64, seed, 3000, 1)
        if placed.rank == 0:
            with interpreter():
                found = run(placed, call, np.float64, seed, 3000, 1)
        else:
            found = run(placed, call, np.float64, seed, 3000, 1)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(not available(), reason="this installation has no compiled engine")
@pytest.mark.parametrize("call", ["alltoallv", "allgatherv", "gatherv", "scatterv", "reduce_scatter"])
def test_programs_do_not_grow_in_number(placed, call):
    run(placed, call, np.float64, 0, 30, 1)
    run(placed, call, np.float64, 0, 40_000, 1)
    sizes = []
    for seed in range(40):
        run(placed, call, np.float64, seed, 30, 1)
        cache = placed._planner.cache
        sizes.append(len(cache.bound) + sum(map(len, cache.calls)))
    assert sizes[-1] <= sizes[10] + 4  # other size classes may choose other algorithms


def test_wrong_counts_raise(comm):
    size, rank = comm.Get_size(), comm.rank
    x, y = np.ones(2 * size), np.zeros(2 * size)
    comm.Alltoallv([x, [2] * size], [y, [2] * size])
    for counts, error in (([3] * size, "TRUNCATE"), ([-1] * size, "COUNT"), ([2] * (size + 1), "COUNT")):
        with pytest.raises(MPI.Exception) as caught:
            comm.Alltoallv([x, counts], [y, [2] * size])
        assert caught.value.Get_error_class() == getattr(MPI, f"ERR_{error}")
    with pytest.raises(ValueError, match="its own block of recvbuf"):
        own = [2] * size
        own[rank] = 1
        comm.Alltoallv([x, own], [y, [2] * size])
