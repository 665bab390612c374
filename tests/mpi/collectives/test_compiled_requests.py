"""Requests that compiled code starts and ends, and that Python code takes back."""

import gc
import random
import threading
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator, wait_all
from collectives.engine.extension import available
from collectives.engine.instructions import HAS_THREAD
from collectives.errors import InvalidArgument
from collectives.runtime.execution.progress import active_requests, progress_words
from collectives.runtime.requests import request
from collectives.runtime.requests.native_requests import EndedRequest
from collectives.transport.node.mailbox_layout import NONBLOCKING

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.skipif(
        MPI.Query_thread() != MPI.THREAD_MULTIPLE or not available(), reason="all is left to Python then"
    ),
]


@pytest.fixture
def quick(world):
    """Communicator of several ranks whose calls and persistent requests are compiled soon."""
    if world.Get_size() == 1:
        pytest.skip("one rank sends no messages")
    with Communicator(world) as comm:
        yield comm


class Sum:
    """Persistent sum of vectors of ones times a factor, run until compiled code manages it."""

    def __init__(self, comm, n=5):
        self.mine, self.total, self.size = np.ones(n), np.zeros(n), comm.Get_size()
        self.request = comm.Allreduce_init(self.mine, self.total)
        for factor in range(5):
            self.start(factor)
            self.request.Wait()
            self.check(factor)
        assert self.request.program.is_compiled

    def start(self, factor):
        self.factor, self.mine[:] = factor, factor
        self.request.Start()
        program = self.request.program
        assert program.is_startable or program.engine.runs_for(self.request)

    def check(self, factor):
        assert (self.total == factor * self.size).all()


def test_starts_and_waits(quick):
    bound = Sum(quick)
    for factor in range(200):
        bound.start(factor)
        status = MPI.Status()
        assert bound.request.Wait(status) is True and status.Get_count(MPI.BYTE) == 0
        bound.check(factor)
        assert not bound.request.active and bound.request.Wait() and bound.request.Test()
    assert bound.request not in active_requests


def test_starts_without_a_progress_thread(quick, world, monkeypatch):
    """Compiled code starts requests while the thread rests, and wakes it if they are still active."""
    bound = Sum(quick)

    def complete(factor):
        while not bound.request.Test():  # `Wait` might leave the request to Python code
            pass
        bound.check(factor)

    bound.start(1)
    complete(1)
    monkeypatch.setattr(request.Request, "_start", lambda _: pytest.fail("Python code has started it"))
    for factor in range(3):
        deadline = time.monotonic() + 60
        while progress_words[HAS_THREAD]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        world.Barrier()
        if world.Get_rank() == 0:
            bound.start(factor)
            assert bound.request.active and progress_words[HAS_THREAD], "the other ranks have not started"
        world.Barrier()
        if world.Get_rank() > 0:
            bound.start(factor)
        complete(factor)


@pytest.mark.parametrize("n", [1, 1000, 100_000])
def test_several_in_any_order(quick, n):
    several = [Sum(quick, n) for _ in range(4)]
    order = random.Random(quick.Get_rank())
    for factor in range(20):
        for bound in several:
            bound.start(factor)
        shuffled = order.sample(several, len(several))
        for bound in shuffled[:2]:
            bound.request.Wait()
        while not collectives.test_all([bound.request for bound in shuffled]):
            pass
        for bound in several:
            bound.check(factor)


def test_an_active_one_does_not_start(quick):
    bound = Sum(quick)
    if quick.Get_rank() == 0:
        bound.start(3)
        if bound.request.active:  # the others have not started it
            with pytest.raises(InvalidArgument, match="only an idle persistent request starts"):
                bound.request.Start()
            with pytest.raises(InvalidArgument, match="wait for it first"):
                bound.request.Free()
    quick.Barrier()
    if quick.Get_rank():
        bound.start(3)
    bound.request.Wait()
    bound.check(3)


def test_progress_while_the_program_waits_in_mpi(quick, world):
    """Rank 0 waits in a receive for ranks that need its part of the collective."""
    bound, plain, word = Sum(quick, 1 << 17), MPI.Intracomm(world), np.zeros(1)
    for factor in range(5):
        bound.start(factor)
        if world.Get_rank() == 0:
            for _ in range(1, world.Get_size()):
                plain.Recv(word, MPI.ANY_SOURCE, 7)
            bound.request.Wait()
        else:
            bound.request.Wait()
            plain.Send(word, 0, 7)
        bound.check(factor)


def test_another_thread_waits(quick):
    bound = Sum(quick)
    for factor in range(50):
        bound.start(factor)
        waiter = threading.Thread(target=bound.request.Wait)
        waiter.start()
        while not bound.request.Test():
            pass
        waiter.join()
        bound.check(factor)


def test_freed(quick):
    bound = Sum(quick)
    bound.request.Free()
    for use in (bound.request.Start, bound.request.Wait, bound.request.Test):
        with pytest.raises(InvalidArgument):
            use()


def test_a_communicator_closed_before_the_end(quick):
    bound = [Sum(quick, 1 << 15) for _ in range(2)]
    for one in bound:
        one.start(2)
    quick.close()
    wait_all([one.request for one in bound])
    for one in bound:
        one.check(2)
        with pytest.raises(InvalidArgument, match="freed"):
            one.request.Start()


def test_requests_are_not_kept(quick):
    bound = Sum(quick)
    bound.start(1)
    bound.request.Wait()
    gone = weakref.ref(bound.request)
    del bound
    gc.collect()
    assert gone() is None


def test_non_blocking_calls(quick):
    mine, total = np.ones(3), np.zeros(3)
    for factor in range(200):
        mine[:], total[:] = factor, -1
        request = quick.Iallreduce(mine, total)
        assert isinstance(request, MPI.Request)
        if factor % 3 == 0:
            assert request.Wait() is True
        elif factor % 3 == 1:
            MPI.Request.Waitall([request])
        else:
            while not request.Test():
                pass
        assert (total == factor * quick.Get_size()).all() and request == MPI.REQUEST_NULL
        assert request.Wait() and request.Test() and request not in active_requests


def test_non_blocking_calls_on_new_arrays(quick):
    for factor in range(40):
        total = np.zeros(3000)
        request = quick.Iallreduce(np.full(3000, float(factor)), total)
        request.Wait()
        assert (total == factor * quick.Get_size()).all()
    assert isinstance(request, EndedRequest) or request.program.is_compiled


def test_an_ended_call_is_freed_once(quick):
    mine, total = np.ones(3), np.zeros(3)
    for _ in range(20):
        request = quick.Iallreduce(mine, total)
        quick.Barrier()
        request.Wait()
        request.Free()
        with pytest.raises(InvalidArgument, match="freed"):
            request.Wait()


@pytest.mark.parametrize("before", [0, 6], ids=["new", "compiled"])
def test_an_array_replaced_in_its_list_is_kept(quick, before):
    """The list is the user's; the array in it is memory that messages are written to."""
    n, rank = 1000, quick.Get_rank()
    spec = [np.zeros(n), n, MPI.DOUBLE]
    for _ in range(before * NONBLOCKING):
        quick.Ibcast(spec, 0).Wait()
    if rank == 1:  # the root waits for this rank
        request, replaced = quick.Ibcast(spec, 0), weakref.ref(spec[0])
        spec[0] = np.zeros(n)
        gc.collect()
        assert request.active and replaced() is not None
        quick.send(None, 0)
        request.Wait()
        return
    if rank == 0:
        quick.recv(source=1)
    quick.Ibcast(spec, 0).Wait()
