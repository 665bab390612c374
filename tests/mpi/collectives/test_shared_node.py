"""Communicators of a node's ranks have their mailboxes in one memory file per rank, which is mapped once."""

import errno
import gc
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.transport.memory import memory_file, shared_node
from collectives.transport.memory.shared_node import SharedNode
from collectives.transport.node import placement
from collectives.transport.node.mailbox_layout import CHANNELS, FIRST_CHANNELS

pytestmark = pytest.mark.ranks(1, 2)

needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")


def works(comm, turn=0):
    rank, size = comm.Get_rank(), comm.Get_size()
    for n in (1, 40, 3000, 40_000):
        total = np.zeros(n)
        comm.Allreduce(np.full(n, rank + 1.0 + turn), total)
        assert (total == size * (size + 1) / 2 + turn * size).all()
    request = comm.Iallreduce(np.full(70, rank + 1.0), total := np.zeros(70))
    request.Wait()
    assert (total == size * (size + 1) / 2).all()


def memory_of(comm):
    return comm._planner.node


def shares(comm):
    return comm._planner is not None and comm._planner.node is not None


def maps():
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def turned(items, rank):
    """The items in an order of its own on every rank."""
    items = items[rank % len(items) :] + items[: rank % len(items)]
    return items[::-1] if rank % 2 else items


def ranges_of(comm):
    """Bytes of this rank's file that the communicator has."""
    return [(one.start, one.start + one.nbytes) for one in memory_of(comm)._ranges]


# ------------------------------------------------------------------------------------------ counts


@needs_proc
def test_many_communicators_need_no_descriptors(world):
    with Communicator(world) as comm:
        twin = comm.Dup()
        works(twin)
        before, made = (descriptors(), maps()), []
        for _ in range(20):
            made.append(comm.Dup())
            works(made[-1])
        assert descriptors() <= before[0] + 1  # what the MPI opens
        assert maps() <= before[1] + 6 * world.Get_size()  # segments double
        for one in turned(made, world.Get_rank()):
            one.Free()
        twin.Free()


@needs_proc
def test_communicators_that_come_and_go_use_the_same_memory(world):
    with Communicator(world) as comm:
        if not shares(comm):
            pytest.skip("ranks share no memory")
        file = memory_of(comm)._shared._file
        for turn in range(4):
            made = [comm.Dup(), comm.Split(world.Get_rank() % 2, -world.Get_rank()), Communicator(world.Dup())]
            for one in made:
                works(one, turn)
            for one in turned(made, world.Get_rank()):
                one.Free()
            world.Barrier()  # all have left
            if turn == 1:
                before = file._end
        assert file._end == before


@pytest.mark.parametrize("mib", [600, 1200])
def test_short_of_addresses(world, monkeypatch, mib):
    """Bounce buffers shrink, equally at both ends, and all memory is shared all the same."""
    left = [mib << 20]
    monkeypatch.setattr(shared_node, "available_addresses", lambda: left[0] // (1 + world.Get_rank()))
    monkeypatch.setattr(placement, "open_nodes", {})
    map_file = memory_file.map_file

    def counted(descriptor, start, nbytes):
        left[0] -= nbytes
        return map_file(descriptor, start, nbytes)

    for module in (memory_file, shared_node):
        monkeypatch.setattr(module, "map_file", counted)
    with Communicator(world) as comm:
        made = [comm.Dup() for _ in range(25)]
        cells = [memory_of(one).cells for one in made if shares(one)]
        assert world.allgather(cells) == [cells] * world.Get_size()
        assert len(cells) in (0, 25) and left[0] > 0
        if cells and world.Get_size() > 1:
            assert cells[-1][0] < cells[0][0] or cells[0][0] < 1 << 17
        for number, one in enumerate(made[::6]):
            works(one, number)
        for one in turned(made, world.Get_rank()):
            one.Free()


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="not a Unix")
def test_a_limit_of_the_length_of_files(world, monkeypatch):
    monkeypatch.setattr(placement, "open_nodes", {})
    monkeypatch.setattr(shared_node, "longest_file", lambda: (64 << 20) + 5)
    with Communicator(world) as comm:
        made = [comm.Dup() for _ in range(8)]
        for one in made:
            works(one)
            one.Free()


# ------------------------------------------------------------------------------------------ lifetimes


def test_a_parent_that_is_freed_before_its_children(world):
    parent = Communicator(world.Dup())
    child = parent.Dup()
    half = parent.Split(world.Get_rank() % 2, world.Get_rank())
    parent.Free()
    grandchild = half.Dup()
    half.Free()
    works(grandchild)
    works(child)
    great = child.Dup()
    child.Free()
    grandchild.Free()
    works(great)
    great.Free()


def test_children_of_a_closed_one(world):
    with Communicator(world, nodes=[rank // 2 for rank in range(world.Get_size())]) as comm:
        pass
    child = comm.Dup()
    assert child.nodes == comm._agreed.part(range(world.Get_size())).nodes or child.nodes is None
    works(child)
    child.Free()


def test_a_range_is_nobody_s_until_all_have_left(world):
    """Rank 0 goes on to other communicators while the others still read its last message."""
    rank, size = world.Get_rank(), world.Get_size()
    with Communicator(world) as comm:
        if not shares(comm) or size == 1:
            pytest.skip("needs two ranks that share memory")
        old = comm.Dup()
        text, mine = np.full(5000, 7.0) if rank == 0 else np.zeros(5000), ranges_of(old)
        if rank == 0:
            old.Bcast(text, 0, algorithm="linear")
            old.Free()
        others = [comm.Create_group(MPI.COMM_WORLD.Get_group().Incl([0])) for _ in range(3)] if rank == 0 else []
        for one in others:
            works(one)
            assert all(end <= low or high <= start for low, high in ranges_of(one) for start, end in mine)
        world.Barrier()
        if rank:
            old.Bcast(text, 0, algorithm="linear")
            assert (text == 7).all()
            old.Free()
        world.Barrier()
        again = comm.Dup()
        assert ranges_of(again)[0][0] <= mine[0][0]
        works(again)
        again.Free()
        for one in others:
            one.Free()


def test_a_range_that_is_used_again_has_no_flags(world):
    """The first messages of the next communicator have the numbers of those of the last one."""
    with Communicator(world) as comm:
        for turn in range(12):
            own = comm.Dup()
            if shares(own):
                for view in (memory_of(own).channels[0].memory[memory_of(own).place],):
                    assert not view[: memory_of(own).channels[0].cells].any()
            world.Barrier()
            for _ in range(3):
                own.Bcast(value := np.full(20, float(turn)), 0)
                assert (value == turn).all()
            works(own, turn)
            own.Free()
            world.Barrier()


def test_persistent_channels_get_memory_with_their_first_request(world):
    with Communicator(world) as comm:
        if not shares(comm):
            pytest.skip("ranks share no memory")
        own = comm.Dup()
        assert list(memory_of(own).channels) == list(FIRST_CHANNELS)
        requests = [own.Allreduce_init(np.ones(3), np.zeros(3)) for _ in range(3)]
        assert len(memory_of(own).channels) == len(FIRST_CHANNELS) + 3 <= CHANNELS
        for request in requests:
            request.Start()
            request.Wait()
            request.Free()
        again = own.Allreduce_init(np.ones(3), np.zeros(3))
        assert len(memory_of(own).channels) == len(FIRST_CHANNELS) + 4, "each one is used once before others"
        again.Free()
        own.Free()


# ------------------------------------------------------------------------------------------ derived


def test_what_a_communicator_inherits(world):
    nodes = [rank // 2 for rank in range(world.Get_size())]
    with Communicator(world, nodes=nodes, async_progress=False, tuning=None) as comm:
        twin = comm.Dup()
        assert twin.nodes == comm.nodes and twin.costs == comm.costs and twin.message_speed == comm.message_speed
        rank, size = comm.Get_rank(), comm.Get_size()
        turned_round = comm.Split(0, -rank)
        assert turned_round._planner.transports.placement.neighbours.keys() == {
            size - 1 - other for other in range(size) if nodes[other] == nodes[rank]
        }
        within = twin.Split(nodes[rank], rank)
        assert within.nodes is None and within.Get_size() == nodes.count(nodes[rank])
        across = twin.Split(rank % 2, rank)
        assert len(set(across.nodes or [0])) == across.Get_size()
        for one in (turned_round, within, across, twin):
            works(one)
            works(deeper := one.Split(one.Get_rank() // 2, one.Get_rank()))
            deeper.Free()
            one.Free()


def test_groups_that_overlap(world):
    rank, size = world.Get_rank(), world.Get_size()
    with Communicator(world) as comm:
        group, made = comm.Get_group(), []
        for first in range(size):
            members = group.Incl([(first + step) % size for step in range(min(size, 3))])
            made += [comm.Create(members), comm.Create_group(members, first)]
            members.Free()
        for one in made:
            if one != MPI.COMM_NULL:
                works(one)
        for one in turned(made, rank):
            if one != MPI.COMM_NULL:
                one.Free()
        group.Free()


@pytest.mark.parametrize("way", ["Dup", "Clone", "Dup_with_info", "Split_type"])
def test_every_way_to_make_one(world, way):
    arguments = {"Dup_with_info": [MPI.INFO_NULL], "Split_type": [MPI.COMM_TYPE_SHARED]}.get(way, [])
    for settings in ({}, {"shared": False}, {"debug": True}):
        with Communicator(world, **settings) as comm:
            made = getattr(comm, way)(*arguments)
            assert made._agreed == comm._agreed
            works(made)
            made.Free()


def test_further_ones_of_the_same_ranks_find_the_memory(world):
    with Communicator(world) as comm:
        other = Communicator(world.Dup())
        half = world.Split(world.Get_rank() % 2, world.Get_rank())
        part = Communicator(half)
        if shares(comm):
            assert memory_of(other)._shared is memory_of(part)._shared is memory_of(comm)._shared
        for one in (other, part):
            works(one)
            one.Free()


# ------------------------------------------------------------------------------------------ failures


def test_where_one_rank_has_no_room_all_use_mpi(world, monkeypatch):
    with Communicator(world) as comm:
        with monkeypatch.context() as patched:
            if world.Get_rank() == world.Get_size() - 1:
                patched.setattr(memory_file.MemoryFile, "take", no_room)
            poor = comm.Dup()
        assert not shares(poor)
        works(poor)
        rich = poor.Dup()
        assert shares(rich) == shares(comm)
        works(rich)
        rich.Free()
        poor.Free()


def no_room(*_):
    raise OSError(errno.ENOMEM, "no room")


def test_where_one_rank_cannot_map_all_use_mpi(world, monkeypatch):
    with Communicator(world) as comm:
        if not shares(comm) or world.Get_size() == 1:
            pytest.skip("needs two ranks that share memory")
        made, free = [], memory_of(comm)._shared
        with monkeypatch.context() as patched:
            if world.Get_rank() == world.Get_size() - 1:
                patched.setattr(shared_node, "open_file", no_room)
            while not made or shares(made[-1]):
                made.append(comm.Dup())
        before = [list(segment.gaps._runs) for segment in free._file.segments]
        assert sum(high - low for runs in before for low, high in runs), "what was allocated is free again"
        made.append(comm.Dup())
        assert shares(made[-1])
        for one in made[-3:]:
            works(one)
        for one in made:
            one.Free()


def test_a_request_whose_channel_has_no_room_uses_mpi(world, monkeypatch):
    with Communicator(world) as comm:
        own = comm.Dup()
        with monkeypatch.context() as patched:
            if world.Get_rank() == 0:
                patched.setattr(memory_file.MemoryFile, "take", no_room)
            request = own.Allreduce_init(np.ones(3), total := np.zeros(3))
        for _ in range(2):
            request.Start()
            request.Wait()
            assert (total == world.Get_size()).all()
        request.Free()
        own.Free()


def test_memory_that_cannot_be_cleared_is_overwritten(world, monkeypatch):
    monkeypatch.setattr(memory_file, "REMOVE", 9999)
    with Communicator(world) as comm:
        for turn in range(3):
            own = comm.Dup()
            works(own, turn)
            own.Free()
            world.Barrier()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a system without memfd")
def test_no_process_can_shorten_or_open_the_file(world):
    node = SharedNode(world, measures=False)
    found = os.fstat(node._file.descriptor)
    assert found.st_mode & 0o777 == 0o600
    for length in (0, found.st_size - 4096, found.st_size + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(node._file.descriptor, length)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_process_that_ends_frees_nothing(world):
    """Its functions of the exit run, but it has no part in the communicators."""
    with Communicator(world) as comm:
        child = os.fork()
        if not child:
            from collectives.runtime.requests.program_end import open_communicators

            os._exit(len(open_communicators))
        assert os.waitpid(child, 0)[1] == 0
        works(comm)
