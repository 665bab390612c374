"""What is kept for calls to come is bounded: programs, tags, memory; and what was kept never shows in results."""

import gc
import resource
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, wait_all
from collectives.runtime.planning import program_cache as kept
from collectives.transport.mpi.mpi_transport import MpiTransport
from collectives.transport.node import mailbox_layout

pytestmark = pytest.mark.ranks(1, 2)


@pytest.fixture
def own(world):
    """A communicator that has kept nothing yet."""
    with Communicator(world) as comm:
        yield comm


def resident():
    """Bytes of memory that this process has now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_programs_of_blocking_calls_are_bounded(own):
    size = own.Get_size()
    arrays = [np.ones(1000 + n) for n in range(kept.MAX_PROGRAMS + 100)]
    total = np.zeros(2000)
    for array in arrays:
        own.Allreduce(array, total[: array.size])
        assert (total[: array.size] == size).all()
    for n in range(1, kept.MAX_PROGRAMS + 100):
        own.Bcast(arrays[0][:n])
    assert len(own._planner.cache.bound) <= kept.MAX_PROGRAMS
    assert len(own._planner.cache.calls[0]) <= 4 * kept.MAX_PROGRAMS
    own.Allreduce(arrays[0], total[:1000])
    assert (total[:1000] == size).all()


@pytest.mark.parametrize("wrong", [1.0, "1", [1]], ids=repr)
def test_segments_that_are_no_integer_find_no_program(own, wrong):
    """Also if they are equal to those of a call before."""
    mine, total = np.ones(2000), np.zeros(2000)
    for method in (own.Allreduce, own.Iallreduce):
        for _ in range(3):
            request = method(mine, total, algorithm="ring", segments=1)
            if request is not None:
                request.Wait()
        with pytest.raises(TypeError, match="segments: expected an integer"):
            method(mine, total, algorithm="ring", segments=wrong)


def test_programs_of_non_blocking_calls_are_bounded(own):
    size = own.Get_size()
    totals = [np.zeros(10 + n % 7) for n in range(kept.MAX_PROGRAMS + 200)]
    for _ in range(2):
        requests = [own.Iallreduce(np.ones(total.size), total) for total in totals]
        for request in requests:
            request.Wait()
        assert all((total == size).all() for total in totals)
    assert len(own._planner.nonblocking.bound) <= kept.MAX_PROGRAMS
    assert not own._planner._active()


def test_persistent_ones_keep_nothing_when_they_are_freed(own):
    for _ in range(300):
        request = own.Allreduce_init(np.ones(4), np.zeros(4))
        request.Start()
        request.Wait()
        request.Free()
    assert not own._planner._persistent


def test_scratch_of_kept_programs_is_bounded(own, monkeypatch):
    monkeypatch.setattr(kept, "MAX_BYTES", 100_000)
    arrays = [np.ones(2000) for _ in range(40)]
    for array in arrays:
        own.Allreduce(array, np.zeros(2000))
    assert own._planner.cache.nbytes <= 100_000 or len(own._planner.cache.bound) == 1


def test_tags_come_round(own, monkeypatch):
    """A few tags only: they are used again and again, while several operations are under way."""
    own._planner.transports._tags = 12
    size = own.Get_size()
    for _ in range(10):
        totals = [np.zeros(3) for _ in range(8)]
        requests = [own.Iallreduce(np.full(3, float(i)), total) for i, total in enumerate(totals)]
        for request in requests[:: -1 if own.Get_rank() % 2 else 1]:
            request.Wait()
        for i, total in enumerate(totals):
            assert (total == size * i).all()


def test_results_do_not_depend_on_what_went_before(own):
    """The same memory with another shape, dtype, operation and root; freed memory that comes back as another array."""
    rank, size = own.Get_rank(), own.Get_size()
    memory = np.zeros(4096, "u1")
    for turn in range(60):
        dtype = np.dtype("bhilfd"[turn % 6])
        n = (1, 7, 100, 512)[turn % 4]
        view = memory[: n * dtype.itemsize].view(dtype)
        view[:] = rank + turn % 3
        total = np.empty(n, dtype)
        op, expected = ((MPI.SUM, size * (size - 1) // 2 + size * (turn % 3)), (MPI.MAX, size - 1 + turn % 3))[turn % 2]
        own.Allreduce(view, total, op)
        assert (total == expected).all()
        own.Bcast(view, turn % size)
        assert (view == turn % size + turn % 3).all()


def call(comm, kind, n):
    """One small collective on fresh arrays."""
    mine, total = np.ones(n), np.empty(n)
    if kind == "blocking":
        comm.Allreduce(mine, total)
    elif kind == "non-blocking":
        comm.Iallreduce(mine, total).Wait()
    elif kind == "forms":
        comm.Bcast([mine, n, MPI.DOUBLE])
    else:
        comm.Barrier()
    return total


@pytest.mark.timeout(180)
@pytest.mark.parametrize("calls", [4_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_no_memory_is_lost_over_many_calls(own, calls):
    """Addresses vary, because older arrays are kept for a while; at most 8,000 calls where ranks share cores."""
    calls = calls if own.Get_size() <= 2 else min(calls, 8_000)
    kept, before = [], 0
    for number in range(calls):
        if number == calls // 4:
            gc.collect()
            before = resident()
        kind = ("blocking", "non-blocking", "forms", "barrier")[number % 4]
        kept.append(call(own, kind, 1 + number % 5))
        if len(kept) > 100:
            del kept[:: 1 + number % 3]
    gc.collect()
    grown = resident() - before
    assert grown < 4_000_000, f"{grown} bytes more after {calls} calls"


@pytest.mark.parametrize("calls", [100, pytest.param(400, marks=pytest.mark.full)])
def test_no_memory_is_lost_over_large_arrays_that_come_and_go(own, calls):
    before = 0
    for number in range(calls):
        if number == calls // 4:
            gc.collect()
            before = resident()
        mine, total = np.ones(5000 + number % 50), np.empty(5000 + number % 50)
        own.Allreduce(mine, total)
        own.Iallreduce(mine, total).Wait()
    gc.collect()
    assert resident() - before < 60_000_000


def test_no_memory_is_lost_over_communicators(comm):
    before = 0
    for number in range(60):
        if number == 20:
            gc.collect()
            before = resident()
        own = comm.Dup()
        own.Allreduce(np.ones(3000), np.zeros(3000))
        own.Ibarrier().Wait()
        own.Free()
    gc.collect()
    assert resident() - before < 8_000_000


CHANNELS = mailbox_layout.CHANNELS - mailbox_layout.NONBLOCKING - 1
"""Channels of persistent requests."""


def wired(request):
    """Whether its messages go through the node's memory, rather than being MPI's."""
    return not isinstance(request.program.wire, MpiTransport)


@pytest.mark.parametrize("how", ["Free", "del"])
def test_persistent_requests_give_their_channels_back(own, how):
    """Many more than there are channels, of different collectives, some of them kept: all go through shared memory."""
    rank, size, few = own.Get_rank(), own.Get_size(), CHANNELS - 3
    shared = own._planner.node is not None
    mine, kept = np.full(40, rank + 1.0), []
    for turn in range(3 * CHANNELS):
        total = np.zeros(40)
        made = [own.Allreduce_init(mine, total), own.Bcast_init(vector := np.full(300, float(rank)), turn % size)]
        assert all(wired(request) == shared for request in made)
        for _ in range(3):
            for request in made:
                request.Start()
            for request in made[:: -1 if rank % 2 else 1]:
                request.Wait()
            assert (total == size * (size + 1) // 2).all() and (vector == turn % size).all()
        if turn < few // 2:
            kept += made
        elif how == "Free":
            for request in made[:: -1 if rank % 2 else 1]:
                request.Free()
        del made, request
        if turn == few // 2:
            for request in kept[::2]:
                request.Free()
            kept = kept[1::2]
    for request in kept:
        request.Start()
        request.Wait()
        request.Free()


def test_channels_that_one_rank_holds_are_nobody_s(own):
    """The last rank frees nothing: all agree that none is left, nobody hangs, and MPI carries the rest."""
    last, shared = own.Get_rank() == own.Get_size() - 1, own._planner.node is not None
    mine, total, held, others = np.ones(3), np.zeros(3), [], []
    for turn in range(CHANNELS + 5):
        request = own.Allreduce_init(mine, total)
        assert wired(request) == (shared and turn < CHANNELS)
        others.append(own.Iallreduce(mine, total.copy()))  # whoever waits for one hangs on the others' progress
        request.Start()
        request.Wait()
        if (turn + own.Get_rank()) % 3 == 0:
            wait_all(others)
        assert (total == own.Get_size()).all()
        if last:
            held.append(request)
        else:
            request.Free()
    wait_all(others)
    for request in held:
        request.Free()
    request = own.Allreduce_init(mine, total)
    assert wired(request) == shared
    request.Start()
    request.Wait()
    request.Free()
