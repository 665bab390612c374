"""The shared pool: every number once, for any number of ranks, and fewer for a rank that is slow."""

import time
from itertools import chain
from pathlib import Path

import pytest
from mpi4py import MPI

from parallel.data.work_queue import WorkQueue

pytestmark = pytest.mark.ranks(3)


@pytest.fixture
def pool(comm):
    with WorkQueue(comm) as pool:
        yield pool


def everyone(comm, drawn):
    return comm.allgather(list(drawn))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_every_number_once(comm, pool, count):
    lists = everyone(comm, pool.draw(count))
    assert sorted(chain(*lists)) == list(range(count))
    assert all(numbers == sorted(numbers) for numbers in lists)


def test_many_rounds_begin_at_zero(comm, pool):
    for round in range(50):
        lists = everyone(comm, pool.draw(round % 7))
        assert sorted(chain(*lists)) == list(range(round % 7))


def test_rounds_without_anything_in_between(comm, pool):
    """Fast ranks begin the next round while slow ones end the last."""
    rounds = [list(pool.draw(5)) for _ in range(200)]
    for lists in zip(*comm.allgather(rounds)):
        assert sorted(chain(*lists)) == list(range(5))


def test_a_slow_rank_gets_fewer(comm, pool):
    """The last rank holds each number until all others are out of work: it gets one, or none."""
    if comm.size == 1:
        assert list(pool.draw(5)) == [0, 1, 2, 3, 4]
        return
    count, drawn = 40, []
    slow = comm.size - 1
    to_wait_for = list(range(slow)) if comm.rank == slow else []
    for number in pool.draw(count):
        drawn.append(number)
        while to_wait_for:
            comm.recv(source=to_wait_for.pop(), tag=5)
    if comm.rank != slow:
        comm.send(None, dest=slow, tag=5)
    while to_wait_for:
        comm.recv(source=to_wait_for.pop(), tag=5)
    lists = comm.allgather(drawn)
    assert sorted(chain(*lists)) == list(range(count))
    assert len(lists[-1]) <= 1
    assert sum(map(len, lists[:-1])) >= count - 1


def test_draws_need_no_help_of_a_rank_that_computes(comm, pool, tmp_path):
    """On one node others draw all there is while rank 0, where the counter lies, calls no MPI."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    neighbours = node.Get_size()
    node.Free()
    if comm.allreduce(neighbours, MPI.MIN) < comm.size:
        pytest.skip("ranks are on several hosts, where draws may wait until rank 0 enters MPI")
    folder = Path(comm.bcast(str(tmp_path)))
    numbers = pool.draw(30)
    if comm.rank == 0:
        deadline = time.monotonic() + 100
        while len(list(folder.iterdir())) < comm.size - 1:
            assert time.monotonic() < deadline, "the others wait for rank 0"
            time.sleep(0.001)
    drawn = list(numbers)
    (folder / str(comm.rank)).touch()
    lists = comm.allgather(drawn)
    assert sorted(chain(*lists)) == list(range(30))
    assert comm.size == 1 or lists[0] == []


def test_leaving_early_leaves_the_rest_to_others(comm, pool):
    numbers = pool.draw(10)
    drawn = [next(numbers)] if comm.rank == 0 else []
    comm.Barrier()
    if comm.rank == comm.size - 1:
        drawn += numbers
    assert sorted(chain(*comm.allgather(drawn))) == list(range(10))


def test_an_iterator_of_an_earlier_round_is_refused(comm, pool):
    old = pool.draw(10_000)
    new = pool.draw(3)
    with pytest.raises(RuntimeError, match="belongs to round 1, and round 2"):
        next(old)
    assert sorted(chain(*everyone(comm, new))) == [0, 1, 2]


def test_closed(comm):
    pool = WorkQueue(comm)
    numbers = pool.draw(1)
    pool.close()
    pool.close()
    for use in (lambda: pool.draw(1), lambda: next(numbers)):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_count_below_zero(pool):
    with pytest.raises(ValueError, match="count: expected 0 or more, found -1"):
        pool.draw(-1)
