"""Native requests whose programs are played: mpi4py waits for them, and the helper thread moves them."""

import threading

import pytest
from mpi4py import MPI

from collectives.errors import InvalidArgument, RanksDisagree
from collectives.runtime.execution.local_steps import call_rounds
from collectives.runtime.execution.program import Program
from collectives.runtime.execution.progress import active_requests
from collectives.runtime.requests.native_requests import new_request
from collectives.runtime.requests.request import Request
from collectives.transport.wire import NoMessages
from collectives.types import Wait


class _Owner:
    rank, timeout = 0, None

    def release(self, request):
        pass


def request(test):
    """A request that is over when the test says so."""
    program = Program(call_rounds([lambda: None, Wait(lambda: None, test)]), NoMessages())
    return new_request("test", program, _Owner(), None)


def test_the_helper_thread_ends_what_mpi_waits_for():
    movers, answers = [], iter([False] * 20 + [True])

    def test():
        movers.append(threading.current_thread().name)
        return next(answers)

    waited = request(test)
    waited.begin(None)
    assert waited and active_requests == [waited]
    MPI.Request.Waitall([waited])
    assert not waited and not active_requests and movers[-1] == "chorus-progress" and len(movers) == 21
    assert waited.Wait() and waited.Test()


def test_an_error_reaches_those_who_wait():
    """mpi4py raises for the list, and the request raises the error itself, once."""
    turns = iter([False])

    def breaks():
        if not next(turns, True):
            return False
        raise ArithmeticError("no such sum")

    broken = request(breaks)
    broken.begin(None)
    with pytest.raises(MPI.Exception):
        MPI.Request.Waitall([broken])
    with pytest.raises(ArithmeticError, match="no such sum"):
        broken.Wait()
    with pytest.raises(RanksDisagree, match="broken off"):
        broken.Test()
    assert not active_requests


def test_an_error_of_a_persistent_one_beside_it():
    """The helper thread moves that too, and whoever waits for it gets the error."""

    def breaks():
        if threading.current_thread().name != "chorus-progress":
            return False
        raise ArithmeticError("no such sum")

    program = Program(call_rounds([lambda: None, Wait(lambda: None, breaks)]), NoMessages())
    bound = Request("test", program, _Owner(), None, persistent=True)
    bound.Start()
    beside = request(lambda: not bound.active)
    beside.begin(None)
    MPI.Request.Waitall([beside])
    with pytest.raises(ArithmeticError, match="no such sum"):
        bound.Wait()
    assert not active_requests


def test_what_is_freed_takes_no_part():
    freed = request(lambda: True)
    freed.begin(None)
    freed.Free()
    with pytest.raises(InvalidArgument, match="freed"):
        freed.Wait()
    assert not freed
    assert MPI.Request.Waitall([freed]), "as a null handle"
