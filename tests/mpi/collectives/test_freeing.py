"""Communicators are given back by every rank in its own time and order, with operations under way; and their copies."""

import copy
import errno
import gc
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.buffers.staging import PackedStaging
from collectives.errors import InvalidArgument, NotCopied
from collectives.runtime.requests.program_end import open_communicators
from collectives.transport.memory import shared_node
from collectives.transport.node import placement

pytestmark = pytest.mark.ranks(1, 2)


def refuse(pid, number):
    raise PermissionError(errno.EACCES, "a sandbox")


def works(comm):
    size, total = comm.Get_size(), np.zeros(3)
    for n in (3, 2000):
        total = np.zeros(n)
        comm.Allreduce(np.full(n, comm.Get_rank() + 1.0), total)
        assert (total == size * (size + 1) / 2).all()
    request = comm.Iallreduce(np.ones(3), total := np.zeros(3))
    request.Wait()
    assert (total == size).all()


def turned(items, rank):
    """The items in an order of its own on every rank."""
    items = items[rank % len(items) :] + items[: rank % len(items)]
    return items[::-1] if rank % 2 else items


@pytest.fixture(params=["shared", "unmapped", "apart", "debug"])
def settings(request, monkeypatch):
    """Keywords of a Communicator; "unmapped": ranks may not map each other's memory."""
    if request.param == "unmapped":
        monkeypatch.setattr(placement, "open_nodes", {})
        monkeypatch.setattr(shared_node, "open_file", refuse)
    return {"apart": {"shared": False}, "debug": {"debug": True}}.get(request.param, {})


@pytest.mark.parametrize("way", ["Free", "close", "Disconnect"])
def test_in_another_order_on_every_rank(world, settings, way):
    """Each rank goes on, without the others, to a communicator that these are still to use."""
    rank = world.Get_rank()
    for _ in range(3):
        made = [Communicator(world.Dup(), **settings) for _ in range(4)]
        last = made.pop()
        for comm in made:
            works(comm)
        if way == "Disconnect":  # it waits for all, natively too
            for comm in made:
                comm.Disconnect()
        else:
            for comm in turned(made, rank):
                getattr(comm, way)()
        works(last)
        last.Free()


def test_of_different_ranks(world, settings):
    rank = world.Get_rank()
    comm = Communicator(world, **settings)
    for turn in range(4):
        halves = [comm.Split((rank + turn) % 2, rank), comm.Split(rank // 2, -rank), comm.Dup()]
        for half in halves:
            works(half)
        for half in turned(halves, rank):
            half.Free()
    works(comm)
    comm.close()


def test_one_rank_goes_on_with_the_next_while_others_still_use_the_last(world, settings):
    """Nobody waits in Free for rank 0, which comes to it last."""
    first, second = Communicator(world.Dup(), **settings), Communicator(world.Dup(), **settings)
    rank, size = world.Get_rank(), world.Get_size()
    works(first)
    if rank:
        first.Free()
        second.send(rank, 0)
    else:
        assert sorted(second.recv() for _ in range(1, size)) == list(range(1, size))
        first.Free()
    works(second)
    second.Free()


def _mappings():
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="not Linux")
def test_memory_is_given_back(world):
    before = _mappings()
    for _ in range(5):
        made = [Communicator(world.Dup()) for _ in range(3)]
        for comm in made:
            works(comm)
            comm.Allreduce_init(np.ones(4), np.zeros(4))
        for comm in turned(made, world.Get_rank()):
            comm.Free()
        del made, comm
        assert _mappings() <= before


# ------------------------------------------------------------------------------------------ operations under way


def begin(comm, number):
    total = np.zeros(4)
    return comm.Iallreduce(np.full(4, number + 1.0), total, algorithm="linear"), total, number + 1


@pytest.mark.parametrize("way", ["Free", "close"])
def test_what_is_under_way_comes_to_its_end(world, settings, way):
    rank, size = world.Get_rank(), world.Get_size()
    for late in range(2):
        comm = Communicator(world.Dup(), **settings)
        started = [begin(comm, number) for number in range(3)]
        total = np.zeros(5)
        bound, idle = (comm.Allreduce_init(np.full(5, 2.0), total) for _ in range(2))
        bound.Start()
        if rank % 2 == late:
            for request, *_ in started:
                request.Wait()
        getattr(comm, way)()
        with pytest.raises(InvalidArgument, match="this communicator was freed"):
            comm.Barrier()
        for request, sum_, factor in started[::-1]:
            request.Wait()
            assert (sum_ == factor * size).all()
        bound.Wait()
        assert (total == 2 * size).all()
        assert comm._number not in open_communicators, "nothing is under way, and yet not all was given back"
        for request in (bound, idle):
            assert request.Test() and request.Wait()
            with pytest.raises(InvalidArgument, match="Start of <persistent request of allreduce, of a freed comm"):
                request.Start()
            request.Free()


def test_an_idle_request_cannot_start_once_its_communicator_is_closed(world):
    comm, total = Communicator(world), np.zeros(5)
    idle, bound = (comm.Allreduce_init(np.ones(5), total) for _ in range(2))
    if world.Get_rank() == 0:
        time.sleep(0.05)  # all others close while one is active
    bound.Start()
    comm.close()
    with pytest.raises(InvalidArgument, match="of a freed comm"):
        idle.Start()
    bound.Wait()
    assert (total == world.Get_size()).all() and comm._number not in open_communicators


def test_memory_of_packed_copies_does_not_wait_for_the_garbage_collector(world):
    with Communicator(world) as comm:
        column, size = MPI.DOUBLE.Create_vector(50, 1, 2).Commit(), comm.Get_size()
        x, y = np.ones(100), np.zeros(100 * size)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                comm.Allgather([x, 1, column], [y, 1, column])
                comm.Iallgather([x, 1, column], [y, 1, column]).Wait()
            assert not any(isinstance(one, PackedStaging) for one in gc.get_objects())
        finally:
            gc.enable()
        column.Free()


def test_the_mpi_s_own_duplicates(world):
    with Communicator(world) as comm:
        for start in (comm.Idup, lambda: comm.Idup_with_info(MPI.INFO_NULL)):
            other, request = start()
            request.Wait()
            other.Allreduce(np.ones(2), total := np.zeros(2))
            assert (total == world.Get_size()).all()
            other.Free()


def test_a_persistent_one_alone_under_way(world):
    comm, total = Communicator(world.Dup()), np.zeros(5)
    bound = comm.Allreduce_init(np.ones(5), total)
    bound.Start()
    comm.Free()
    bound.Wait()
    assert (total == world.Get_size()).all() and comm._number not in open_communicators
    bound.Free()


def test_disconnect_waits_for_what_is_under_way(world):
    comm = Communicator(world.Dup())
    request, total, factor = begin(comm, 1)
    comm.Disconnect()
    assert (total == factor * world.Get_size()).all() and not request.active


# ------------------------------------------------------------------------------------------ copies


COPIES = {"copy": copy.copy, "deepcopy": lambda comm: copy.deepcopy([comm])[0]}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_the_mpi_s_own_are_the_same_object(comm, name):
    """mpi4py copies COMM_WORLD and no communicator that a program has made."""
    assert COPIES[name](comm) is comm
    works(COPIES[name](comm))
    made = comm.Dup()
    with pytest.raises(ValueError, match="cannot serialize"):
        COPIES[name](MPI.Intracomm(made))
    with pytest.raises(NotCopied, match=r"cannot be copied by one rank alone: Dup\(\) makes another"):
        COPIES[name](made)
    works(made)
    made.Free()
    assert COPIES[name](made) is made


def test_pickling(comm):
    """By name if it has the place of mpi4py's constant, else refused, as mpi4py does."""
    made = comm.Dup()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps({"comm": comm}, protocol))["comm"] is comm
        with pytest.raises(TypeError, match="a Communicator cannot be pickled") as caught:
            pickle.dumps({"comm": made}, protocol)
        assert isinstance(caught.value, ValueError), "what mpi4py raises"
    works(made)
    made.Free()
