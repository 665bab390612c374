"""Requests of collectives in mpi4py's own functions on requests, in lists with mpi4py's own."""

import queue
import random
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.tiers import default

from collectives import Communicator, Request, start_all
from collectives.engine.instructions import HAS_THREAD
from collectives.errors import InvalidArgument
from collectives.runtime.execution.progress import mpi_is_thread_safe, progress_words
from collectives.runtime.requests.native_requests import GeneralizedHandle, PendingHandle

pytestmark = pytest.mark.ranks(1, 2)

ALL = {
    "Waitall": MPI.Request.Waitall,
    "Testall": lambda requests: until(MPI.Request.Testall, requests),
    "Waitsome": lambda requests: several(MPI.Request.Waitsome, requests),
    "Testsome": lambda requests: several(MPI.Request.Testsome, requests),
    "Waitany": lambda requests: one_by_one(lambda: MPI.Request.Waitany(requests), len(requests)),
    "Testany": lambda requests: one_by_one(lambda: any_tested(requests), len(requests)),
    "Wait": lambda requests: [MPI.Request.Wait(request) for request in requests],
    "Test": lambda requests: [until(MPI.Request.Test, request) for request in requests],
    "waitall": MPI.Request.waitall,
    "ours": Request.Waitall,
    "ours, tested": lambda requests: until(Request.Testall, requests),
}


def until(test, requests):
    while not test(requests):
        pass


def several(some, requests):
    left = len(requests)
    while left:
        left -= len(some(requests) or ())


def any_tested(requests):
    over, index = False, None
    while not over:
        index, over = MPI.Request.Testany(requests)
    return index


def one_by_one(any_of, count):
    assert sorted(any_of() for _ in range(count)) == list(range(count))


@pytest.mark.parametrize("name", ALL)
def test_lists_of_all_kinds(comm, name):
    """Neighbours exchange messages too; the order in a list is another on every rank."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    mine, sums, got, total = np.full(2000, rank + 1.0), np.zeros((5, 2000)), np.zeros(3), np.zeros(1)
    requests = [comm.Iallreduce(mine, row, algorithm=a) for row, a in zip(sums, ("ring", "mst", "linear") * 2)]
    ones, sent = np.ones(1), np.full(3, float(rank))  # mpi4py does not keep what it sends from
    requests += [comm.Irecv(got, left, 7), comm.Isend(sent, right, 7)]
    requests += [MPI.Intracomm(comm).Iallreduce(ones, total), comm.Ibarrier()]
    random.Random(rank).shuffle(requests)
    assert all(isinstance(request, MPI.Request) and request for request in requests)
    ALL[name](requests)
    assert not any(requests), "all handles are given back"
    assert (sums == size * (size + 1) // 2).all() and (got == left).all() and total[0] == size
    assert all(request.Test() and request.Wait() for request in requests), "what is over stays over"


def test_a_list_that_hangs_on_another_rank_s_collective(comm):
    """Rank 1 sends only after the collective, which needs rank 0 while that waits for the message inside the MPI."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return
    total, box = np.zeros(50_000), np.zeros(1)
    request = comm.Iallreduce(np.ones(50_000), total, algorithm="ring")
    if rank == 0:
        MPI.Request.Waitall([comm.Irecv(box, 1, 5), request])
        assert box[0] == 3
    else:
        request.Wait()
        if rank == 1:
            MPI.Intracomm(comm).Send(np.full(1, 3.0), 0, 5)
    assert (total == size).all()


def test_waiting_for_the_other_one(comm):
    """What is not over is not said to be: rank 0 comes to the barrier only after a message of its neighbour."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return
    plain, box = MPI.Intracomm(comm), np.zeros(1)
    if rank == 1:
        barrier = comm.Ibarrier()
        assert MPI.Request.Waitany([barrier, plain.Irecv(box, 0, 6)]) == 1
        assert not MPI.Request.Testall([barrier]) and not barrier.Get_status() and barrier
        plain.Send(box, 0, 6)
        MPI.Request.Waitall([barrier])
    else:
        if rank == 0:
            plain.Send(np.ones(1), 1, 6)
            plain.Recv(box, 1, 6)
        comm.Ibarrier().Wait()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("turns", default([400, 1600], 400))
def test_beside_calls_that_hold_the_interpreter_s_lock(comm, turns):
    """mpi4py's first `allreduce` on a communicator waits for other ranks without releasing the GIL."""
    plain, handles, ends = MPI.Intracomm(comm).Dup(), queue.Queue(), []

    def wait_inside_mpi():
        while not ends:
            handle = PendingHandle()
            handles.put(handle)
            MPI.Request.Waitall([handle.request])
        handles.put(None)

    def complete():
        while handle := handles.get():
            handle.complete(failed=False)

    threads = [threading.Thread(target=wait_inside_mpi), threading.Thread(target=complete)]
    for thread in threads:
        thread.start()
    for _ in range(turns // plain.Get_size() ** 2):
        MPI.FLOAT.Create_contiguous(3).Free()
        other = plain.Dup()
        assert other.allreduce(1) == plain.Get_size()
        other.Free()
    ends.append(True)
    for thread in threads:
        thread.join()
    plain.Free()


@pytest.mark.timeout(120)
def test_hundreds_at_once(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    sums = np.zeros((300, 5))
    requests = [comm.Iallreduce(np.full(5, rank + float(i)), row) for i, row in enumerate(sums)]
    random.Random(rank).shuffle(requests)
    MPI.Request.Waitall(requests)
    assert (sums == (size * (size - 1) // 2 + size * np.arange(300))[:, None]).all()


def filled():
    status = MPI.Status()
    status.Set_source(3)
    status.Set_tag(4)
    status.Set_elements(MPI.BYTE, 5)
    return status


def is_clear(status):
    found = status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE), status.Get_error()
    return found == (MPI.ANY_SOURCE, MPI.ANY_TAG, 0, MPI.SUCCESS) and not status.Is_cancelled()


def test_statuses(comm):
    mine = np.ones(1)
    bound = comm.Allreduce_init(mine, np.zeros(1))
    for begin in (lambda: comm.Iallreduce(mine, np.zeros(1)), lambda: bound.Start() or bound):
        for end in ("Wait", "Test", "Get_status"):
            request, status = begin(), filled()
            while not getattr(request, end)(status):
                pass
            assert is_clear(status)
            request.Wait()
        for end in (Request.Waitall, Request.Testall):
            request, statuses = begin(), [filled()]
            while not end([request, comm.Isend(mine, MPI.PROC_NULL)], statuses):
                pass
            assert len(statuses) == 2 and is_clear(statuses[0])
    statuses = [filled()]
    MPI.Request.Waitall([comm.Iallreduce(mine, np.zeros(1))], statuses)
    if PendingHandle is GeneralizedHandle and statuses[0].source != MPI.PROC_NULL:
        assert is_clear(statuses[0])
    else:  # a message from the process itself has a source and a tag, and one that was complete at once may have
        assert statuses[0].Get_count(MPI.BYTE) == 0 and not statuses[0].Is_cancelled()
    bound.Free()


def test_truth_equality_and_hash(comm):
    mine = np.ones(1)
    one, other = comm.Iallreduce(mine, np.zeros(1)), comm.Iallreduce(mine, np.zeros(1))
    assert one and one != MPI.REQUEST_NULL and one != other and len({one, other, one}) == 2
    assert one != None  # noqa: E711
    one.Wait(), other.Wait()
    assert not one and one == MPI.REQUEST_NULL and one != other
    bound = comm.Allreduce_init(mine, np.zeros(1))
    assert bound
    bound.Start()
    bound.Wait()
    assert bound and bound != MPI.REQUEST_NULL
    bound.Free()
    assert not bound


def test_get_status_keeps_the_request(comm):
    request = comm.Ibarrier()
    while not request.Get_status():
        pass
    assert request and request.Get_status()
    request.Wait()
    assert not request and request.Get_status()


def test_collectives_cannot_be_cancelled(comm):
    bound, begun = comm.Barrier_init(), comm.Ibarrier()
    for request in (bound, begun):
        with pytest.raises(InvalidArgument, match="collectives cannot be cancelled"):
            request.Cancel()
    begun.Wait()
    bound.Free()


def test_a_request_is_freed_only_when_it_is_over(comm):
    request = comm.Ibarrier()
    while not request.Get_status():
        pass
    request.Free()
    assert not request


def test_persistent_ones_have_functions_of_their_own(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, sums = np.full(4, rank), np.zeros((3, 4), int)
    bound = [comm.Allreduce_init(mine, row) for row in sums]
    for turn in range(3):
        mine[:] = rank + turn
        Request.Startall(bound)
        Request.Waitall([*bound, comm.Ibarrier(), comm.Isend(mine, MPI.PROC_NULL)])
        assert (sums == size * (size - 1) // 2 + size * turn).all()
    for refuses in (MPI.Request.Waitall, MPI.Request.Testall, MPI.Prequest.Startall):
        with pytest.raises(TypeError, match=r"mpi4py\.MPI"):
            refuses(bound)
    for request in bound:
        request.Free()


def test_start_of_a_list_with_requests_of_both(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    sent, got, total = np.full(3, rank), np.zeros(3, int), np.zeros(3, int)
    after, before = (rank + 1) % size, (rank - 1) % size
    bound = [comm.Recv_init(got, before), comm.Allreduce_init(sent, total), comm.Send_init(sent, after)]
    for _ in range(3):
        Request.Startall(bound)
        Request.Waitall(bound)
        assert (got == before).all() and (total == size * (size - 1) // 2).all()
    with pytest.raises(InvalidArgument, match="twice"):
        Request.Startall([bound[0], bound[0]])
    for request in bound:
        request.Free()


def test_in_debug_mode(world):
    with Communicator(world, debug=True) as comm:
        total = np.zeros(3)
        MPI.Request.Waitall([comm.Ibarrier(), comm.Iallreduce(np.ones(3), total)])
        assert (total == comm.Get_size()).all()


def test_the_helper_thread_ends_when_nothing_is_under_way(comm, monkeypatch):
    def helpers():
        return [thread for thread in threading.enumerate() if thread.name == "chorus-progress"]

    MPI.Request.Waitall([comm.Ibarrier()])
    deadline = time.monotonic() + 60
    while helpers():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    total = np.zeros(2000)
    MPI.Request.Waitall([comm.Iallreduce(np.ones(2000), total, algorithm="ring")])
    assert (total == comm.Get_size()).all(), "there is another one when it is needed"
    assert len(helpers()) <= 1 and mpi_is_thread_safe()


def test_a_request_ends_the_rest_of_the_helper_thread(comm):
    total = np.zeros(2000)
    for _ in range(3):
        MPI.Request.Waitall([comm.Iallreduce(np.ones(2000), total, algorithm="ring")])
        assert (total == comm.Get_size()).all()
        deadline = time.monotonic() + 60
        while progress_words[HAS_THREAD]:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_requests_that_ended_at_their_start():
    """All methods of a call that was complete when its start returned, as it is compiled after some calls."""
    with Communicator(MPI.COMM_SELF) as alone:
        source, target = np.ones(2), np.zeros(2)
        for _ in range(40):
            request = alone.Iallreduce(source, target)
            request.Wait()
        for call in (request.Start, request.start, lambda: start_all([request])):
            with pytest.raises(InvalidArgument, match="only an idle persistent request starts"):
                call()
        assert request.Test() and request.Wait() and request.Get_status()
        with pytest.raises(InvalidArgument, match="cannot be cancelled"):
            request.Cancel()
        assert not request and request == MPI.REQUEST_NULL and "idle" in repr(request)
        request.Free()
        for verb in ("Start", "Test", "Wait", "Free"):
            with pytest.raises(InvalidArgument, match="freed"):
                getattr(request, verb)()
