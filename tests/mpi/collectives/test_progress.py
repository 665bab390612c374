"""A rank that waits in any call helps along what it was given before: others may hang on that."""

import os
import time

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.runtime.execution.progress import active_requests, progress_lock, progress_thread


@pytest.mark.parametrize("form", ["Allreduce", "Barrier", "Bcast"])
def test_a_send_goes_on_while_its_rank_is_in_a_collective(comm, form):
    """The receiver comes to the collective only when all messages, more than MPI can buffer, are there."""
    size, rank = comm.Get_size(), comm.Get_rank()
    if size == 1:
        pytest.skip("nobody to send to")
    message, total = np.full(1000, rank + 1.0), np.zeros(3)
    if rank == 0:
        requests = [comm.Isend(message, 1) for _ in range(3000)]
    elif rank == 1:
        for _ in range(3000):
            message[-1] = 0
            MPI.Intracomm(comm).Recv(message, 0)
            assert message[-1] == 1
    if form == "Allreduce":
        comm.Allreduce(np.ones(3), total)
    elif form == "Bcast":
        comm.Bcast(total, size - 1)
    else:
        comm.Barrier()
    if rank == 0:
        MPI.Request.Waitall(requests)


def waits_inside(comm, call):
    """Others come to the call only when a collective is over that rank 0 moves while it is in there."""
    size, rank = comm.Get_size(), comm.Get_rank()
    total = np.zeros(4)
    request = comm.Iallreduce(np.full(4, rank + 1.0), total, algorithm="linear")
    if rank:
        request.Wait()
    result = call(comm)
    request.Wait()
    assert (total == size * (size + 1) / 2).all()
    return result


OBJECTS = {
    "barrier": (lambda c: c.barrier(), lambda n, rank: None),
    "bcast": (lambda c: c.bcast({"of": c.rank}, root=c.size - 1), lambda n, rank: {"of": n - 1}),
    "gather": (lambda c: c.gather(c.rank), lambda n, rank: None if rank else list(range(n))),
    "scatter": (lambda c: c.scatter(list("abcdefgh"[: c.size]), c.size - 1), lambda n, rank: "abcdefgh"[rank]),
    "allgather": (lambda c: c.allgather(sendobj=c.rank), lambda n, rank: list(range(n))),
    "alltoall": (lambda c: c.alltoall([c.rank] * c.size), lambda n, rank: list(range(n))),
    "reduce": (lambda c: c.reduce([c.rank]), lambda n, rank: None if rank else list(range(n))),
    "allreduce": (lambda c: c.allreduce(c.rank, op=MPI.MAX), lambda n, rank: n - 1),
    "scan": (lambda c: c.scan(1), lambda n, rank: rank + 1),
    "exscan": (lambda c: c.exscan(1), lambda n, rank: rank or None),
}


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "no threads"])
@pytest.mark.parametrize("name", OBJECTS)
def test_collectives_on_objects_move_what_is_under_way(comm, name, threads, monkeypatch):
    if not threads:
        monkeypatch.setattr(comm, "_threads", False)
    call, expected = OBJECTS[name]
    for _ in range(3):
        assert waits_inside(comm, call) == expected(comm.Get_size(), comm.Get_rank())


def alltoallw(comm):
    ones, places, types = [1] * comm.size, [8 * r for r in range(comm.size)], [MPI.DOUBLE] * comm.size
    comm.Alltoallw([np.ones(comm.size), (ones, places), types], [np.ones(comm.size), (ones, places), types])


def asking_for_counts(comm):
    total = np.zeros(1)
    comm.Reduce_scatter(np.ones(comm.size), total)
    assert total[0] == comm.size


MAKERS = {
    "a new Communicator": lambda c: Communicator(MPI.Intracomm(c)),
    "Dup": lambda c: c.Dup(),
    "Clone": lambda c: c.Clone(),
    "Split": lambda c: c.Split(0, c.rank),
    "Split_type": lambda c: c.Split_type(MPI.COMM_TYPE_SHARED),
    "Create": lambda c: c.Create(c.Get_group()),
    "Create_group": lambda c: c.Create_group(c.Get_group()),
    "Create_cart": lambda c: c.Create_cart([c.size]),
    "empty": lambda c: c.empty(3),
    "Alltoallw": alltoallw,
    "Reduce_scatter": asking_for_counts,
}


@pytest.mark.parametrize("name", MAKERS)
def test_other_collectives_of_the_mpi_move_what_is_under_way(comm, name):
    made = waits_inside(comm, MAKERS[name])
    if name == "a new Communicator":
        made.close()
    elif isinstance(made, MPI.Comm):
        made.Free()


def replaced(comm, box):
    status = MPI.Status()
    comm.Sendrecv_replace(box, 1, 4, 1, 3, status)
    assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)) == (1, 3, box.nbytes)


RECEIVES = {
    "Mprobe": lambda c, box: c.Mprobe(1, 3).Recv(box),
    "mprobe": lambda c, box: c.mprobe(1, 3).Recv(box),
    "Sendrecv_replace": replaced,
}


@pytest.mark.parametrize("name", RECEIVES)
def test_other_receives_move_what_is_under_way(comm, name):
    rank, box = comm.Get_rank(), np.zeros(2)
    if comm.Get_size() == 1:
        pytest.skip("nobody to receive from")
    total = np.zeros(4)
    request = comm.Iallreduce(np.ones(4), total, algorithm="linear")
    if rank == 0:
        RECEIVES[name](comm, box)
        assert box.tolist() == [1, 1]
    request.Wait()
    if rank == 1:
        comm.Send(np.ones(2), 0, 3)
        if name == "Sendrecv_replace":
            comm.Recv(np.zeros(2), 0, 4)
    comm.Barrier()


def fence(comm, window):
    window.Fence()
    window.Fence()


def neighbours(comm, ring):
    got = np.zeros(2)
    ring.Neighbor_allgather(np.ones(1), got)
    assert got.tolist() == [1, 1]


OF_THE_MPI = {
    "Barrier of the plain communicator": (lambda c: MPI.Intracomm(c), lambda c, plain: plain.Barrier()),
    "Ibarrier of the plain communicator": (lambda c: MPI.Intracomm(c), lambda c, plain: plain.Ibarrier().Wait()),
    "bcast of the plain communicator": (lambda c: MPI.Intracomm(c), lambda c, plain: plain.bcast(1, c.size - 1)),
    "a window": (lambda c: MPI.Win.Create(np.zeros(1), comm=c), fence),
    "a new window": (lambda c: None, lambda c, _: MPI.Win.Allocate(8, comm=c).Free()),
    "neighbours": (lambda c: c.plain.Create_cart([c.size], [True]), neighbours),
}


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "messages"])
@pytest.mark.parametrize("name", OF_THE_MPI)
def test_persistent_requests_progress_in_calls_that_are_not_ours(world, name, shared):
    """Rank 0 is inside the MPI, where only the progress thread can advance the request that the others wait for."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI is not for several threads")
    make, call = OF_THE_MPI[name]
    with Communicator(world, shared=shared) as comm:
        rank, size, total = comm.Get_rank(), comm.Get_size(), np.zeros(4)
        made = make(comm)
        bound = comm.Allreduce_init(np.full(4, rank + 1.0), total, algorithm="linear")
        if rank:
            time.sleep(0.01)  # so that rank 0 does not complete it at its start
        bound.Start()
        if rank:
            bound.Wait()
        call(comm, made)
        bound.Wait()
        assert (total == size * (size + 1) / 2).all()
        bound.Free()
        if isinstance(made, (MPI.Win, MPI.Cartcomm)):
            made.Free()


def test_a_forked_process_has_no_requests(comm):
    """A lock that the progress thread holds at the fork is free in the new process."""
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")
    total = np.zeros(4)
    request = Communicator(MPI.COMM_SELF).Allreduce_init(np.ones(4), total)
    request.Start()
    child = os.fork()
    if child == 0:
        free = progress_lock.acquire(timeout=10) and not active_requests and progress_thread.thread is None
        os._exit(0 if free else 1)
    assert os.waitpid(child, 0)[1] == 0
    request.Wait()
    assert (total == 1).all()
