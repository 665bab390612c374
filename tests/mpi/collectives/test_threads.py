"""Threads with a communicator each, under MPI.THREAD_MULTIPLE: whatever one does, the others' operations go on."""

import threading
import time
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from mpi4py import MPI
from support.tiers import default

from collectives import Communicator, Request
from collectives.transport.node.mailbox_layout import NONBLOCKING

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("frequent_switches"),
    pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="this MPI is not for several threads"),
]

TURNS = 150


def blocking(comm, size, dtype="f8"):
    total = np.zeros(4, dtype)
    for turn in range(TURNS):
        comm.Allreduce(np.full(4, turn % 5, dtype), total)
        assert (total == size * (turn % 5)).all()


def long_blocking(comm, size):
    total = np.zeros(150_000)
    for turn in range(TURNS // 10):
        comm.Allreduce(np.full(150_000, float(turn)), total)
        assert (total == size * turn).all()


def persistent(comm, size):
    mine, total = np.zeros(4), np.zeros(4)
    bound = comm.Allreduce_init(mine, total)
    for turn in range(TURNS):
        mine[:] = turn
        bound.Start()
        bound.Wait()
        assert (total == size * turn).all()
    bound.Free()


def polled(comm, size):
    mine, totals = np.zeros(4), [np.zeros(4) for _ in range(3)]
    bound = [comm.Allreduce_init(mine, total) for total in totals]
    for turn in range(TURNS // 3):
        mine[:] = turn
        for request in bound:
            request.Start()
        while not all([request.Test() for request in bound]):
            pass
        assert all((total == size * turn).all() for total in totals)
    for request in bound:
        request.Free()


def nonblocking(comm, size):
    for turn in range(TURNS):
        total = np.zeros(3 + turn % 7)
        request = comm.Iallreduce(np.full(3 + turn % 7, float(turn)), total)
        request.Wait()
        assert (total == size * turn).all()


def mixed(comm, size):
    """Blocking calls between a persistent and a non-blocking one under way, long enough to queue for room."""
    mine, total = np.zeros(70_000), np.zeros(70_000)
    bound = comm.Allreduce_init(mine, total)
    for turn in range(TURNS // 10):
        mine[:] = turn
        bound.Start()
        everyone = np.zeros(5 * size)
        request = comm.Iallgather(np.full(5, float(turn)), everyone)
        sum_ = np.zeros(30_000)
        comm.Allreduce(np.full(30_000, 2.0), sum_)
        bound.Wait()
        request.Wait()
        assert (sum_ == 2 * size).all() and (everyone == turn).all() and (total == size * turn).all()
    bound.Free()


WORKS = [blocking, long_blocking, persistent, polled, nonblocking, mixed]


def run(world, calls):
    """Each of the calls ``work(comm, size)`` in a thread of its own; the first error of any is raised here."""
    comms, errors = [Communicator(world) for _ in calls], []

    def guarded(call, comm):
        try:
            call(comm, world.size)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=each, daemon=True) for each in zip(calls, comms, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert errors or not thread.is_alive(), "a thread hangs"
    for error in errors:
        raise error
    for comm in comms:
        comm.close()


PAIRS = list(combinations_with_replacement(WORKS, 2))
NEXT = dict(pairwise([*WORKS, WORKS[0]]))  # every kind of work beside another one, in the default tier


@pytest.mark.parametrize(
    "pair",
    default(PAIRS, *((one, other) for one, other in PAIRS if NEXT[one] is other or NEXT[other] is one)),
    ids=lambda pair: f"{pair[0].__name__}-{pair[1].__name__}",
)
def test_two_threads(world, pair):
    run(world, pair)


def test_all_at_once(world):
    run(world, WORKS)


def test_threads_that_compile_for_different_types(world):
    """Short calls that are made often are compiled, for one type while those of another are called."""
    dtypes = ["f4", "f8", "i4", "i8", "u1"]
    run(world, [lambda comm, size, dtype=dtype: blocking(comm, size, dtype) for dtype in dtypes])


def test_a_thread_waits_while_another_starts_more(comm):
    """The program of a request that one thread waits for is not started again by another thread."""
    with Communicator(comm) as own:
        rank, size = own.Get_rank(), own.Get_size()
        mine = np.zeros(3)
        totals = [np.zeros(3) for _ in range(3 * NONBLOCKING)]
        for turn in range(20):
            mine[:] = turn + rank
            comm.Barrier()
            if rank == turn % size:
                time.sleep(0.002)  # the others wait for this rank
            requests = [own.Iallreduce(mine, totals[0])]
            waiting = threading.Thread(target=requests[0].Wait)
            waiting.start()
            requests += [own.Iallreduce(mine, total) for total in totals[1:]]
            Request.Waitall(requests[1:])
            waiting.join()
            expected = size * turn + size * (size - 1) // 2
            assert all((total == expected).all() for total in totals)
            for total in totals:
                total[:] = -1
