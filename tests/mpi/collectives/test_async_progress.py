"""Long messages of non-blocking and persistent collectives that the progress thread copies while the program works."""

import os
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import use_interpreter
from support.exchange_cases import TABLE, Question

from collectives import Communicator, wait_all
from collectives.errors import InvalidArgument
from collectives.runtime.builders.program_builder import DEFERRED_BYTES
from collectives.runtime.execution.progress import progress_lock, progress_thread
from collectives.transport.node import mailbox_layout

pytestmark = pytest.mark.ranks(1, 2)

LONG = DEFERRED_BYTES // 8


@pytest.fixture(params=["compiled", "interpreted"])
def quick(world, request, monkeypatch):
    """A communicator with asynchronous progress, with and without the compiler."""
    if request.param == "interpreted":
        use_interpreter(monkeypatch)
    with Communicator(world, async_progress=True) as comm:
        yield comm


def exchange(comm, method, n):
    case = TABLE[method].make(Question(comm.Get_rank(), comm.Get_size(), comm.Get_size() - 1, n, np.dtype("d"), False))
    return case, f"{method[0].lower()}{method[1:]}"


@pytest.mark.parametrize("n", [0, 5, LONG + 1])
@pytest.mark.parametrize("method", TABLE)
def test_every_collective_in_both_forms(quick, method, n):
    case, name = exchange(quick, method, n)
    bound = getattr(quick, f"{method}_init")(*case.args, **case.keywords)
    for number in range(2):
        for start in (lambda: bound.Start() or bound, lambda: getattr(quick, f"I{name}")(*case.args, **case.keywords)):
            case.fill(number)
            request = start()
            if number:
                time.sleep(1e-3)  # otherwise `Wait` may do the work
            request.Wait()
            case.check(number)
    bound.Free()


def test_reduced_messages_longer_than_the_short_cells_of_many_ranks(world, monkeypatch):
    """They are sent by address, however short they are."""
    monkeypatch.setattr(mailbox_layout, "OTHER_BUDGET", 0)
    rank, size = world.Get_rank(), world.Get_size()
    with Communicator(world, async_progress=True) as comm:
        mine, total = np.full(500, rank + 1.0), np.zeros(500)
        bound = comm.Allreduce_init(mine, total, algorithm="ring")
        for _ in range(12):
            total[:] = 0
            bound.Start()
            bound.Wait()
            assert (total == size * (size + 1) // 2).all()
        bound.Free()


@pytest.mark.parametrize("form", ["Allreduce_init", "Iallreduce"])
def test_the_thread_ends_a_collective_while_the_program_sleeps(quick, form):
    """No call of this package drives it. `Start` has not touched the result."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("requests are completed by the program")
    rank, size = quick.Get_rank(), quick.Get_size()
    mine, total = np.full(LONG, rank + 1.0), np.zeros(LONG)
    with progress_lock:  # the thread cannot begin
        request = getattr(quick, form)(mine, total)
        if form == "Allreduce_init":
            request.Start()
        assert not total.any()
    deadline = time.monotonic() + 30
    while request.active and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert not request.active
    assert (total == size * (size + 1) / 2).all()
    request.Wait()


def test_more_requests_than_channels_at_once(quick):
    size, rank = quick.Get_size(), quick.Get_rank()
    lengths = [LONG * (number % 3) + number for number in range(20)]
    inputs = [np.full(n, float(rank + number)) for number, n in enumerate(lengths)]
    totals = [np.zeros(n) for n in lengths]
    requests = [quick.Iallreduce(*pair) for pair in zip(inputs, totals)]
    quick.Barrier()  # a blocking call beside them
    MPI.Request.Waitall(requests[::2])
    wait_all(requests[1::2])
    for number, total in enumerate(totals):
        assert (total == size * (size - 1) / 2 + number * size).all()


def test_shared_arrays_are_allocated_meanwhile(quick):
    size, arrays = quick.Get_size(), []
    total = np.zeros(8 * LONG)
    for _ in range(12):
        request = quick.Iallreduce(np.ones(8 * LONG), total)
        arrays.append(quick.empty(LONG))
        request.Wait()
        assert (total == size).all()
        total[:] = 0


def test_each_thread_has_a_communicator(world):
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI is not for several threads")
    comms, wrong = [Communicator(world, async_progress=True) for _ in range(3)], []

    def work(comm, number):
        total = np.zeros(2 * LONG)
        for turn in range(20):
            comm.Iallreduce(np.full(2 * LONG, float(number + turn)), total).Wait()
            if not (total == comm.Get_size() * (number + turn)).all():
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(comms, range(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for comm in comms:
        comm.close()


def test_one_rank_enables_it_for_all_and_new_communicators(world):
    with Communicator(world, async_progress=world.Get_rank() == 0) as comm:
        twin = comm.Dup()
        assert comm._agreed.async_progress
        assert twin._agreed.async_progress
        twin.Free()
    with Communicator(world) as comm:
        assert not comm._agreed.async_progress


@pytest.mark.ranks(2)
def test_an_aborted_message_is_reported_by_wait(quick):
    """The ranks' lengths differ: the thread finds it, `Wait` raises."""
    if quick.Get_size() != 2:
        pytest.skip("for two ranks")
    comm = quick
    request = comm.Ibcast(np.zeros(LONG + comm.Get_rank() * 8), 0)
    time.sleep(0.02)
    if comm.Get_rank() == 1:
        with pytest.raises(MPI.Exception, match="bytes"):
            request.Wait()
    else:
        request.Wait()


def test_several_nodes_need_a_thread_safe_mpi(world, monkeypatch):
    if world.Get_size() == 1:
        pytest.skip("one rank is one node")
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    with pytest.raises(InvalidArgument, match=r"async_progress: expected MPI\.THREAD_MULTIPLE"):
        Communicator(world, nodes=range(world.Get_size()), async_progress=True)
    Communicator(world, async_progress=True).close()
    Communicator(world, nodes=range(world.Get_size())).close()


def test_test_alone_ends_a_long_message(quick):
    for n in (LONG, 8 * LONG):
        total = np.zeros(n)
        request = quick.Iallreduce(np.ones(n), total)
        while not request.Test():
            pass
        assert (total == quick.Get_size()).all()


def test_a_forked_process_has_a_free_lock(quick):
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    with progress_thread.portion:  # as in a portion of the thread
        child = os.fork()
        if child == 0:
            os._exit(not progress_thread.portion.acquire(timeout=10))
    assert os.waitpid(child, 0)[1] == 0
