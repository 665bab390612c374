"""Requests that are used in finalizers and signal handlers, at any point of other calls."""

import gc
import itertools
import signal
import sys
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import RanksDisagree
from collectives.runtime.execution.progress import mpi_is_thread_safe

pytestmark = pytest.mark.ranks(1, 2)


class UseInFinalizer:
    """Object in a cycle, which only the collector finds; its finalizer calls a method of a request."""

    def __init__(self, request, verb, seen):
        self.request, self.verb, self.seen, self.cycle = request, verb, seen, self

    def __del__(self):
        try:
            self.seen.append(getattr(self.request, self.verb)())
        except RanksDisagree as error:
            self.seen.append(error)


class Total(np.ndarray):
    """Result array whose finalizer waits for its request."""

    def __del__(self):
        request = getattr(self, "request", None)
        if request is not None:
            request.Wait()


@pytest.fixture(params=[1, 3])
def threshold(request):
    """Allocations after which the collector runs."""
    before = gc.get_threshold()
    gc.set_threshold(request.param)
    yield request.param
    gc.set_threshold(*before)


@pytest.fixture(params=["shared memory", "messages"])
def reentered(request, world):
    with Communicator(world, debug=False, shared=request.param == "shared memory", tuning=False) as comm:
        yield comm


def operands(comm, turn, n=7):
    """Send and receive array of an allreduce, and the result that is expected."""
    rank, size = comm.Get_rank(), comm.Get_size()
    return np.full(n, float(rank + turn)), np.zeros(n), size * (size - 1) / 2 + size * turn


@pytest.mark.timeout(120)
@pytest.mark.parametrize("verb", ["Wait", "Test", "Get_status"])
@pytest.mark.parametrize("form", ["non-blocking", "persistent"])
def test_finalizers_that_the_collector_calls(reentered, threshold, form, verb):
    seen, kept = [], []
    arrays = np.zeros(7), np.zeros(7)
    for turn in range(60):
        mine, _, expected = operands(reentered, turn)
        arrays[0][:] = mine
        if form == "non-blocking":
            request = reentered.Iallreduce(*arrays)
        else:
            kept = kept or [reentered.Allreduce_init(*arrays)]
            request = kept[0]
            request.Start()
        UseInFinalizer(request, verb, seen)
        request.Wait()
        assert (arrays[1] == expected).all()
    assert gc.isenabled()
    assert all(one in (True, False) or isinstance(one, RanksDisagree) for one in seen)
    gc.collect()
    reentered.Barrier()


@pytest.mark.timeout(120)
def test_finalizers_of_the_memory_of_a_request(reentered, threshold):
    """The last reference to an array goes with the request's own, as it ends."""
    for turn in range(60):
        mine, total, _ = operands(reentered, turn)
        total = total.view(Total)
        total.request = request = reentered.Iallreduce(mine, total)
        del total
        request.Wait()
    reentered.Barrier()


class Timer:
    """Context manager: a handler that runs every few milliseconds, at most one at a time."""

    def __init__(self, handler, seconds):
        self.handler, self.seconds, self.runs, self.ended = handler, seconds, 0, False

    def __call__(self, *_):
        if self.ended:  # a signal that came before the timer was stopped
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.handler()
        self.runs += 1
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, self)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def __exit__(self, *_):
        self.ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "reentered, under_way, verb",
    list(itertools.product(["shared memory", "messages"], [1, 9], ["Wait", "Test"])),
    indirect=["reentered"],
)
@pytest.mark.parametrize("seconds", [0.0005, 0.02])
def test_signal_handlers_that_use_the_requests(reentered, under_way, verb, seconds):
    """What `Wait` of a handler returns for is complete, and what is refused is completed by the interrupted call."""
    pending, unexpected = [], []

    def use():
        for request, total, expected in tuple(pending):
            try:
                if getattr(request, verb)() and not (total == expected).all():
                    unexpected.append((total, expected))
            except RanksDisagree as error:
                if "interrupted" not in str(error):
                    unexpected.append(error)

    with Timer(use, seconds) as timer:
        begin, until = 0, time.monotonic() + 0.5
        while reentered.allreduce(time.monotonic() < until, MPI.LAND):
            begin += under_way
            for turn in range(begin, begin + under_way):
                mine, total, expected = operands(reentered, turn)
                pending.append((reentered.Iallreduce(mine, total), total, expected))
            for request, total, expected in pending:
                request.Wait()
                assert (total == expected).all()
            pending.clear()
    assert not unexpected and timer.runs > 3
    reentered.Barrier()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("reentered", ["shared memory"], indirect=True)  # in MPI's own waits no handler runs
@pytest.mark.parametrize("form", ["blocking", "non-blocking"])
def test_signal_handlers_that_call_another_communicator(reentered, form):
    runs, most, wrong = [], 40, []

    with Communicator(reentered, debug=False, tuning=False) as other:

        def call():
            if len(runs) < most:
                mine, total, expected = operands(other, len(runs))
                other.Allreduce(mine, total)
                wrong.extend(total[total != expected])
                runs.append(True)

        with Timer(call, 0.002):
            for turn in range(300):
                mine, total, expected = operands(reentered, turn)
                if form == "blocking":
                    reentered.Allreduce(mine, total)
                else:
                    reentered.Iallreduce(mine, total).Wait()
                assert (total == expected).all()
            while len(runs) < most:
                time.sleep(0.001)
        assert not wrong
        other.Barrier()


@pytest.mark.timeout(120)
@pytest.mark.skipif(not mpi_is_thread_safe(), reason="threads call MPI at once")
def test_threads_whose_collector_runs(reentered, threshold):
    """Each thread has a communicator, and finalizers of one thread run in the other."""
    errors, seen = [], []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(comm):
        try:
            for turn in range(60):
                mine, total, expected = operands(comm, turn)
                request = comm.Iallreduce(mine, total)
                UseInFinalizer(request, "Test", seen)
                request.Wait()
                assert (total == expected).all()
        except BaseException as error:
            errors.append(error)

    with Communicator(reentered, debug=False, tuning=False) as other:
        threads = [threading.Thread(target=work, args=(comm,)) for comm in (reentered, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        assert not errors
        other.Barrier()
