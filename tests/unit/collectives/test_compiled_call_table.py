"""The table of compiled calls while Ctrl-C or another thread interrupts changes of it."""

from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives.runtime import compiled_calls
from collectives.runtime import program_table as table
from collectives.runtime.argument_keys import CallKey, key_fields
from collectives.runtime.program_cache import ProgramCache

pytest.importorskip("numba")

ARGUMENTS = np.zeros(3), np.zeros(3), MPI.SUM, 0, "auto", None


def key_of(*arguments):
    return CallKey(*key_fields("Reduce", *arguments), arguments)


def program(address):
    return SimpleNamespace(program=object(), address=address, note=lambda result: None)


@pytest.fixture
def cache():
    return ProgramCache(0)


def test_ctrl_c_as_a_call_is_forgotten(cache, monkeypatch):
    """Words of entries that are read are those of the programs that `started` returns."""
    programs = [program(address) for address in (8, 16, 24)]
    for one in programs:
        cache.compiled_calls.add(one, key_of(*ARGUMENTS), 0)
    stored = []

    def interrupted(array):
        stored.append(array)
        if len(stored) == 2:
            raise KeyboardInterrupt
        return MPI.Get_address(array)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compiled_calls, "MPI", SimpleNamespace(Get_address=interrupted))
        cache.compiled_calls.discard(programs[0].program)
    method = cache.compiled_calls._methods["Reduce"]
    words = method._words[table.ENTRIES :].reshape(-1, table.ENTRY_WORDS)[: method._words[table.ENTRY_COUNT]]
    assert [one.program.address for one in method.entries][: len(words)] == words[:, table.TABLE].tolist()


def test_a_call_that_another_thread_has_just_started_as_one_is_aborted(cache):
    started, aborted = program(8), program(16)
    cache.compiled_calls.add(started, key_of(*ARGUMENTS), 0)
    cache.poison("Bcast", None, aborted)
    assert cache.compiled_calls.started("Reduce", table.WAITING)[0] is started
    assert cache.compiled_calls.run["Reduce"](*ARGUMENTS) == table.REFUSED


class Number:
    """An object that stands for an integer, and can change it."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("item", [Number(1), np.ma.array(1)])
def test_counts_that_can_change_their_value(cache, item):
    key = key_of([np.zeros(3), [2, item]], *ARGUMENTS[1:])
    cache.compiled_calls.add(program(8), key, 0)
    assert not cache.compiled_calls._methods["Reduce"].entries
    for constant in (1, np.int32(1), True):
        cache.compiled_calls.add(program(8), key_of([np.zeros(3), [2, constant]], *ARGUMENTS[1:]), 0)
    assert len(cache.compiled_calls._methods["Reduce"].entries) == 3


@pytest.mark.parametrize("change", [lambda m: m.__setitem__(0, np.zeros(3)), lambda m: m[1].reverse(), list.pop])
def test_lists_that_another_thread_changes_while_the_call_runs(cache, change):
    message = [np.zeros(3), [2, 1]]
    key = key_of(message, *ARGUMENTS[1:])
    assert key.is_current
    change(message)
    assert not key.is_current
    cache.compiled_calls.add(program(8), key, 0)
    assert not cache.compiled_calls._methods["Reduce"].entries
