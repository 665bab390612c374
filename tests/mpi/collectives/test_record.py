"""The record of each rank: calls that belong together have equal numbers, on all ranks and in all forms."""

import numpy as np
import pytest

from collectives import Communicator
from collectives.engine.instructions import CallState
from collectives.runtime.record.writer import record


def calls_of(made):
    """(collective, form, channel, turn, bytes, state) of the calls that a function made, and their communicators."""
    found = record()
    assert found is not None
    before = found.last
    made()
    entries = [one for one in found.entries if one["number"] > before]
    entries.sort(key=lambda one: one["number"])
    fields = ("collective", "form", "channel", "turn", "nbytes", "state")
    return [tuple(one[name].item() for name in fields) for one in entries], {
        int(one["communicator"]) for one in entries
    }


@pytest.mark.parametrize("shared", [True, False], ids=["node", "network"])
def test_calls_have_the_same_numbers_on_all_ranks(comm, shared):
    with Communicator(comm, shared=shared) as first, first.Dup() as second:
        x, y = np.ones(4), np.empty(4)

        def made():
            for one in (first, second):
                for _ in range(3):
                    one.Allreduce(x, y)
                one.Bcast(x, 0)
                requests = [one.Iallreduce(x, np.empty(4)) for _ in range(6)]
                for request in requests[::-1]:
                    request.Wait()
                request = one.Allreduce_init(x, y)
                request.Start()
                request.Wait()
                request.Free()

        found, communicators = calls_of(made)
        assert len(communicators) == 2
        assert comm.allgather(communicators) == [communicators] * comm.size
        assert comm.allgather(sorted(found)) == [sorted(found)] * comm.size
        assert {state for *_, state in found} == {CallState.HAS_ENDED}
        assert sorted(name for name, *_ in found) == sorted(2 * [*[b"allreduce"] * 10, b"broadcast"])
        assert all(nbytes == 32 for *_, nbytes, _ in found)


def test_lengths_of_calls_that_share_a_program(comm):
    with Communicator(comm) as ours:
        lengths = [1, 5, 1000, 3, 1000]

        def made():
            for length in lengths:
                ours.Allreduce(np.ones(length), np.empty(length))

        found, _ = calls_of(made)
        assert [nbytes for *_, nbytes, _ in found] == [8 * length for length in lengths]
