"""Many non-blocking calls at once: more than there are channels and slots, so that most wait for those before."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from collectives.runtime.execution.progress import progress

pytestmark = pytest.mark.ranks(1, 2)

N = 100


@pytest.fixture
def total(on_engines):
    """Sum of the ranks' numbers, which start at 1."""
    size = on_engines.Get_size()
    return size * (size + 1) // 2


@pytest.mark.parametrize("end", ["in order", "in reverse", "Waitall", "Test"])
@pytest.mark.parametrize("count", [1, 4, 16, 64, 256, 1024])
def test_all_end(on_engines, total, count, end):
    rank = on_engines.Get_rank()
    inputs = [np.full(N, (rank + 1.0) * number) for number in range(count)]
    results = [np.zeros(N) for _ in inputs]
    for _ in range(2):
        for result in results:
            result[:] = -1
        requests = [on_engines.Iallreduce(*pair) for pair in zip(inputs, results)]
        if end == "Waitall":
            MPI.Request.Waitall(requests)
        for request in requests[::-1] if end == "in reverse" else requests:
            while end == "Test" and not request.Test():
                pass
            request.Wait()
        for number, result in enumerate(results):
            assert (result == total * number).all(), number


def test_in_place_beside_broadcasts(on_engines, total):
    rank, count = on_engines.Get_rank(), 60
    for turn in range(4):
        sums = [np.full(N, (rank + 1.0) * (number + turn)) for number in range(count)]
        copies = [np.full(N, float((rank == 0) * (number + turn))) for number in range(count)]
        requests = [on_engines.Iallreduce(MPI.IN_PLACE, one) for one in sums]
        requests += [on_engines.Ibcast(one, 0) for one in copies]
        for request in requests:
            request.Wait()
        for number in range(count):
            assert (sums[number] == total * (number + turn)).all()
            assert (copies[number] == number + turn).all()


def test_bytearrays(on_engines, total):
    """A queued call keeps its buffers where they are."""
    results = [bytearray(8 * N) for _ in range(40)]
    for turn in range(3):
        mine = [np.full(N, on_engines.Get_rank() + 1.0 + turn) for _ in results]
        pairs = [([one, MPI.DOUBLE], [result, MPI.DOUBLE]) for one, result in zip(mine, results)]
        requests = [on_engines.Iallreduce(*pair) for pair in pairs]
        for request in requests:
            request.Wait()
        for result in results:
            assert (np.frombuffer(result) == total + turn * on_engines.Get_size()).all()
            result.extend(b"12345678")  # no view of it is left
            del result[-8:]


def test_dropped_requests(on_engines, total):
    """They end without an owner, and none is left."""
    mine, results = np.full(N, on_engines.Get_rank() + 1.0), np.zeros((200, N))
    for _ in range(2):
        results[:] = -1
        for result in results:
            on_engines.Iallreduce(mine, result)
        deadline = time.monotonic() + 60
        while not (results == total).all():
            assert time.monotonic() < deadline
            progress()
        on_engines.Barrier()
    assert not list(on_engines._planner._active())
