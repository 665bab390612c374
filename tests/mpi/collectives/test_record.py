"""The record of each rank: calls that belong together have equal numbers, on all ranks and in all forms."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from collectives import Communicator
from collectives.engine.instructions import CallState
from collectives.errors import Mismatch, Timeout
from collectives.runtime.record.writer import record

pytestmark = pytest.mark.ranks(1, 2)


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


def test_collectives_of_the_mpi_and_of_objects(comm):
    with Communicator(comm) as ours:
        x, y = np.ones(4), np.empty(4)

        def made():
            for _ in range(4):
                ours.Allreduce(x, y, algorithm="native")
            ours.allgather({"rank": 1})

        found, _ = calls_of(made)
        objects = [b"allgather"] * (ours.size > 1)  # one rank copies its object, without a call
        assert [name for name, *_ in found] == [b"allreduce"] * 4 + objects
        assert [turn for _, _, _, turn, *_ in found] == list(range(found[0][3], found[0][3] + len(found)))
        assert {state for *_, state in found} == {CallState.HAS_ENDED}


def test_lengths_of_blocks_are_exchanged_in_a_call_of_their_own(comm):
    """Ranks wait there, too."""
    with Communicator(comm) as ours:
        mine = np.ones(3)
        found, _ = calls_of(lambda: ours.Gatherv(mine, [np.empty(3 * comm.size), [3] * comm.size], algorithm="mst"))
    assert [name for name, *_ in found] == [b"gather"] * len(found)
    assert comm.allgather([turn for _, _, _, turn, *_ in found]) == [[1, 2][: len(found)]] * comm.size


def resources():
    """Descriptors, threads, shared memory files of Chorus that are mapped, and pages of this process."""
    files = len({line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "chorus" in line})
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), files, pages


@pytest.mark.full
@pytest.mark.parametrize("shared", [True, False], ids=["node", "network"])
def test_ten_thousand_calls_need_no_more_resources(comm, monkeypatch, shared):
    """With a watcher that is due at each wait of a second's tenth."""
    x, y = np.ones(1), np.empty(1)
    monkeypatch.setenv("CHORUS_PATIENCE", "0.1")
    with Communicator(comm, shared=shared) as ours:

        def calls(count):
            for _ in range(count):
                ours.Allreduce(x, y)
                ours.Iallreduce(x, y).Wait()
                ours.bcast(None)
            for late in range(comm.size):
                time.sleep(0.3 * (comm.rank == late))  # the others wait long, and look for the cause
                ours.Barrier()

        calls(1000)
        *before, pages = resources()
        calls(3334)
        *after, more = resources()
        ours.Barrier()
    grown = [new - old for old, new in zip(before, after)]
    # a leak would be thousands: threads that have nothing to do end, and a rank's record is mapped once it is looked at
    assert max(grown) < 2 + comm.size and more - pages < 100, (before, after, more - pages)


def test_a_call_that_a_rank_has_left(world):
    with suppress(Mismatch), Communicator(world) as ours:

        def made():
            if world.Get_rank():
                return
            with suppress(Timeout):
                ours.Reduce(np.ones(4), np.empty(4), algorithm="linear", timeout=0.2)

        found, _ = calls_of(made)
        ended = CallState.HAS_ENDED if world.Get_size() == 1 else CallState.WAS_LEFT
        assert [state for *_, state in found] == [ended] * (world.Get_rank() == 0)
        world.Barrier()
