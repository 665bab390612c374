"""The table of compiled calls while Ctrl-C or another thread interrupts changes of it."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives.engine.extension import available
from collectives.engine.instructions import REFUSED, WAITING
from collectives.runtime.arguments.argument_keys import CallKey, key_fields
from collectives.runtime.execution.program import Program
from collectives.runtime.planning.program_cache import ProgramCache
from collectives.transport.wire import NoMessages

pytestmark = pytest.mark.skipif(not available(), reason="this installation has no compiled engine")

ARGUMENTS = np.zeros(3), np.zeros(3), MPI.SUM, 0, "auto", None


def key_of(*arguments):
    return CallKey(*key_fields("Reduce", *arguments), arguments)


def program():
    """Program of the engine without rows."""
    return Program([], NoMessages())


@pytest.fixture
def cache():
    return ProgramCache(0)


def test_a_call_that_is_forgotten(cache):
    """Numbers of calls are those of the programs that `started` returns."""
    programs = [program() for _ in range(3)]
    for number, one in enumerate(programs):
        cache.compiled_calls.add({0: one}, key_of(*ARGUMENTS[:3], number, *ARGUMENTS[4:]), 0)
    cache.compiled_calls.discard(programs[0])
    run = cache.compiled_calls.run["Reduce"]
    assert [run(*ARGUMENTS[:3], number, *ARGUMENTS[4:]) == REFUSED for number in range(3)] == [True, False, False]


def test_a_call_that_another_thread_has_just_started_as_one_is_aborted(cache):
    started, aborted = program(), program()
    cache.compiled_calls.add({0: started}, key_of(*ARGUMENTS), 0)
    cache.poison("Bcast", None, aborted)
    assert cache.compiled_calls.started("Reduce", WAITING)[0] is started
    assert cache.compiled_calls.run["Reduce"](*ARGUMENTS) == REFUSED


class Number:
    """An object that stands for an integer, and can change it."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("item", [Number(1), np.ma.array(1)])
def test_counts_that_can_change_their_value(cache, item):
    key = key_of([np.zeros(3), [2, item]], *ARGUMENTS[1:])
    cache.compiled_calls.add({0: program()}, key, 0)
    assert not cache.compiled_calls._methods["Reduce"].entries
    for constant in (1, np.int32(1), True):
        cache.compiled_calls.add({0: program()}, key_of([np.zeros(3), [2, constant]], *ARGUMENTS[1:]), 0)
    assert len(cache.compiled_calls._methods["Reduce"].entries) == 3


@pytest.mark.parametrize("change", [lambda m: m.__setitem__(0, np.zeros(3)), lambda m: m[1].reverse(), list.pop])
def test_lists_that_another_thread_changes_while_the_call_runs(cache, change):
    message = [np.zeros(3), [2, 1]]
    key = key_of(message, *ARGUMENTS[1:])
    assert key.is_current
    change(message)
    assert not key.is_current
    cache.compiled_calls.add({0: program()}, key, 0)
    assert not cache.compiled_calls._methods["Reduce"].entries
