"""Requests of several threads: one thread may move what another waits for, at the most awkward moment."""

import threading
import time

import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import RanksDisagree
from collectives.runtime.execution.local_steps import call_rounds
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.progress import active_requests, progress
from collectives.runtime.planning import program_cache
from collectives.runtime.requests.request import Request
from collectives.transport.wire import NoMessages
from collectives.types import Wait


class _Owner:
    rank, timeout = 0, None

    def release(self, request):
        pass


def request(test, wait=lambda: None, persistent=False):
    program = Program(call_rounds([lambda: None, Wait(wait, test)]), NoMessages())
    return Request("test", program, _Owner(), None, persistent)


@pytest.mark.parametrize("begins_another", [False, True])
def test_wait_while_another_thread_ends_the_request(begins_another):
    """The thread that waits sees its own request alone under way, while the other thread is just ending it."""
    ending, waited = threading.Event(), []

    def ends():
        ending.set()
        time.sleep(0.3)  # the waiting thread comes to the point where it takes the request over
        if begins_another and not later.active:
            later.begin(None)
        return True

    bound = request(ends, lambda: waited.append("twice"), persistent=True)
    later = request(lambda: False)
    bound.Start()
    mover = threading.Thread(target=progress, daemon=True)
    mover.start()
    ending.wait()
    bound.Wait()
    mover.join()
    assert not waited, "what one thread has ended, the other ended once more"
    assert not bound.active
    try:
        assert active_requests == ([later] if begins_another else []), "lost: nothing moves it any more"
    finally:
        active_requests.clear()
    bound.Start()
    bound.Wait()
    assert not bound.active
    bound.Free()


def test_a_program_that_a_thread_completes_by_itself_is_not_freed(monkeypatch):
    """Meanwhile another thread makes more programs than are kept, and closes the communicator."""
    waits, goes_on, freed = threading.Event(), threading.Event(), []

    def wait():
        waits.set()
        goes_on.wait()

    monkeypatch.setattr(program_cache, "MAX_PROGRAMS", 0)
    bound = request(lambda: False, wait, persistent=True)
    monkeypatch.setattr(bound.program, "free", lambda: freed.append(bound.active))
    comm = Communicator(MPI.COMM_SELF)
    owner = bound.owner = comm._planner
    owner.nonblocking.bound["of another call"] = bound.program
    bound.Start()
    waiter = threading.Thread(target=bound.Wait, daemon=True)
    waiter.start()
    waits.wait()
    owner.nonblocking.free_surplus(owner._active())
    comm.close()
    assert not freed, "its memory is still in use"
    goes_on.set()
    waiter.join()
    assert freed and not active_requests
    assert comm._closing.active == 0


def test_a_request_that_breaks_off_in_another_thread_is_not_over():
    """`Test` of the request raises the error, and no call of the other thread does."""
    ending, moved = threading.Event(), []

    def breaks():
        if threading.current_thread() is not mover:
            return False
        ending.set()
        time.sleep(0.3)  # the other thread comes to where it moves all requests itself
        raise ArithmeticError("no such sum")

    def move():
        progress()
        moved.append(True)

    mover = threading.Thread(target=move, daemon=True)
    broken = request(breaks)
    broken.begin(None)
    mover.start()
    ending.wait()
    with pytest.raises(ArithmeticError, match="no such sum"):
        broken.Test()
    mover.join()
    assert moved and not active_requests
    for verb in (broken.Test, broken.Wait):
        with pytest.raises(RanksDisagree, match="broken off"):
            verb()


@pytest.mark.parametrize("raising", ["program", "release"])
def test_an_error_is_raised_by_its_own_request(raising):
    """Another request completes beside it."""

    def raises(*_):
        broken.holds_program = False
        raise ArithmeticError("no such sum")

    goes_on = []
    broken, other = request(lambda: goes_on and (raising == "release" or raises())), request(lambda: goes_on)
    broken.owner = _Owner()
    if raising == "release":
        broken.owner.release = raises
    broken.begin(None)
    other.begin(None)
    goes_on.append(True)
    assert other.Wait() is True
    with pytest.raises(ArithmeticError, match="no such sum"):
        broken.Wait()
    assert not active_requests
