"""A Communicator is an mpi4py communicator: what it makes is one too, and all the rest is as inherited."""

import threading

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, communicator
from collectives.runtime.planning import agreement
from collectives.transport import waits
from collectives.transport.node import placement

pytestmark = pytest.mark.ranks(1, 2)


def works(comm):
    total = np.zeros(3)
    comm.Allreduce(np.full(3, comm.Get_rank() + 1.0), total)
    assert (total == comm.Get_size() * (comm.Get_size() + 1) / 2).all()


MAKERS = {
    "Dup": lambda c: c.Dup(),
    "Dup with info": lambda c: c.Dup(MPI.INFO_NULL),
    "Dup_with_info": lambda c: c.Dup_with_info(MPI.INFO_NULL),
    "Clone": lambda c: c.Clone(),
    "Split": lambda c: c.Split(c.Get_rank() % 2, -c.Get_rank()),
    "Split_type": lambda c: c.Split_type(MPI.COMM_TYPE_SHARED),
    "Create": lambda c: c.Create(c.Get_group()),
    "Create_group": lambda c: c.Create_group(c.Get_group()),
    "constructor": lambda c: Communicator(MPI.Intracomm(c).Dup()),
    "mpi4py's Dup": MPI.Comm.Dup,
    "mpi4py's Clone": MPI.Comm.Clone,
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_it_makes_is_one_too(comm, name):
    made = MAKERS[name](comm)
    assert type(made) is Communicator
    works(made)
    again = made.Dup()
    assert type(again) is Communicator
    works(again)
    again.Free()
    works(made)
    request = made.Iallreduce(np.ones(2), np.zeros(2))
    request.Wait()
    bound = made.Bcast_init(np.ones(2))
    bound.Start()
    bound.Wait()
    bound.Free()
    made.Free()
    assert made == MPI.COMM_NULL
    works(comm)


@pytest.mark.parametrize("first", ["_rank", "Iallreduce", "Allreduce_init", "Dup", "empty", "allgather", "timeout"])
def test_one_made_by_mpi4py_s_class_is_finished_on_its_first_use(comm, first):
    uses = {
        "_rank": lambda made: made._rank,
        "Iallreduce": lambda made: made.Iallreduce(np.ones(2), np.zeros(2)).Wait(),
        "Allreduce_init": lambda made: made.Allreduce_init(np.ones(2), np.zeros(2)).Free(),
        "Dup": lambda made: made.Dup().Free(),
        "empty": lambda made: made.empty(3),
        "allgather": lambda made: made.allgather(None),
        "timeout": lambda made: made.Barrier(timeout=60),
    }
    made = MPI.Intracomm.Dup(comm)
    assert type(made) is Communicator and not hasattr(made, "not_there")
    uses[first](made)
    works(made)
    made.Free()
    with pytest.raises(ValueError, match="was freed"):
        made.Barrier()


def test_classes_with_a_constructor_of_their_own(comm):
    class Named(Communicator):
        def __init__(self, comm, name):
            super().__init__(comm)
            self.title = name

    class Picky(Named):
        def __new__(cls, comm, name):
            return super().__new__(cls, comm)

    for kind in (Named, Picky):
        named = kind(comm, "first")
        works(named)
        for made in (named.Dup(), named.Split(0), named.Create_group(named.Get_group())):
            assert type(made) is kind and not hasattr(made, "title")
            works(made)
            made.Free()
        named.close()


def test_the_error_at_the_limit_of_communicators_names_it(comm, monkeypatch):
    def refuse(*_):
        raise MPI.Exception(MPI.ERR_OTHER)

    monkeypatch.setattr(agreement, "MANY", 0)
    monkeypatch.setattr(communicator, "without_attributes", refuse)
    for make in (comm.Dup, lambda: Communicator(comm)):
        with pytest.raises(MemoryError, match=r"communicators are open, and each takes 2 .* Free\(\) or close\(\)"):
            make()
    monkeypatch.undo()
    works(comm)


def test_a_session_without_mpi_is_refused(world, monkeypatch):
    monkeypatch.setattr(MPI, "Is_initialized", lambda: False)
    with pytest.raises(ValueError, match="of a session, but MPI is not initialized"):
        Communicator(world)


def test_ranks_of_a_split_are_ordered_by_key(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    made = comm.Split(0, -rank)
    assert made.Get_rank() == size - 1 - rank
    everyone = np.zeros(size, "i4")
    made.Allgather(np.array([rank], "i4"), everyone)
    assert everyone.tolist() == list(range(size - 1, -1, -1))
    made.Free()


def test_ranks_left_out_get_the_null_communicator(comm):
    rank = comm.Get_rank()
    made = comm.Split(MPI.UNDEFINED if rank else 0)
    assert (made == MPI.COMM_NULL) == (rank > 0)
    if made != MPI.COMM_NULL:
        works(made)
        made.Free()
    group = comm.Get_group().Incl([0])
    for create in (comm.Create, comm.Create_group):
        if create == comm.Create_group and rank:
            continue
        made = create(group)
        assert (made == MPI.COMM_NULL) == (rank > 0)
        if made != MPI.COMM_NULL:
            works(made)
            made.Free()


def test_a_communicator_of_some_while_the_others_work_too(comm):
    """Two halves, each with collectives of its own under way at the same time as those of all."""
    rank, size = comm.Get_rank(), comm.Get_size()
    half = comm.Split(rank * 2 // size, rank)
    inner, outer = np.zeros(5), np.zeros(5)
    requests = [half.Iallreduce(np.ones(5), inner), comm.Iallreduce(np.ones(5), outer)]
    for request in requests[:: -1 if rank % 2 else 1]:
        request.Wait()
    assert (inner == half.Get_size()).all() and (outer == size).all()
    half.Free()


def test_it_is_the_same_communicator_as_the_one_it_was_made_of(world, comm):
    assert MPI.Comm.Compare(world, comm) == MPI.IDENT
    assert (comm.rank, comm.size, comm.name) == (world.rank, world.size, world.name)
    assert isinstance(comm, MPI.Intracomm)


def test_close_and_with_leave_the_mpi_communicator_alone(world):
    own = world.Dup()
    with Communicator(own) as ours:
        works(ours)
    with pytest.raises(MPI.Exception, match="this communicator was freed"):
        ours.Barrier()
    ours.close()
    assert own.allreduce(1) == world.size
    own.Free()


def test_free_in_lower_case_gives_everything_back(world):
    """mpi4py's `free` forgets what is MPI's own and calls `Free` of all else."""
    for comm in (Communicator(MPI.Intracomm(world)), Communicator(world).Dup()):
        comm.free()
        assert comm == MPI.COMM_NULL
        with pytest.raises(ValueError, match="was freed"):
            comm.Barrier()
    assert world != MPI.COMM_NULL


def test_the_mpi_s_own_communicators_are_not_freed(world):
    ours = Communicator(world)
    with pytest.raises(ValueError, match=r"MPI's own: close\(\) releases"):
        ours.Free()
    works(ours)
    ours.close()


def test_it_takes_the_place_of_mpi4py_s_constant(world):
    """mpi4py's constants ignore `free`, and `fromhandle` gives objects of the class."""
    with Communicator(MPI.COMM_WORLD) as ours:
        ours.free()
        works(ours)
        assert Communicator.fromhandle(ours.handle) == ours
        twin = ours.Dup()
        assert Communicator.fromhandle(twin.handle) is twin
        twin.Free()
        other = MPI.COMM_SELF.Dup()
        assert type(Communicator.fromhandle(other.handle)) is MPI.Intracomm
        other.Free()


def test_lower_case_methods(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    assert comm.bcast({"root": rank} if rank == size - 1 else None, root=size - 1) == {"root": size - 1}
    assert comm.allgather(rank) == list(range(size))
    assert comm.allreduce(rank + 1) == size * (size + 1) // 2
    assert comm.gather(rank) == (list(range(size)) if rank == 0 else None)
    assert comm.scatter([str(r) for r in range(size)] if rank == 0 else None) == str(rank)
    assert comm.alltoall([(rank, r) for r in range(size)]) == [(r, rank) for r in range(size)]
    comm.barrier()


def test_other_inherited_collectives(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    out, into = np.full(size, rank, "i4"), np.zeros(size, "i4")
    types = [MPI.INT] * size
    ones, places = [1] * size, [4 * r for r in range(size)]
    comm.Alltoallw([out, (ones, places), types], [into, (ones, places), types])
    assert into.tolist() == list(range(size))


def test_message_speed_is_the_same_on_all_ranks(comm):
    speed, node = comm.message_speed, comm._planner.node
    assert comm.allgather(speed) == [speed] * comm.Get_size()
    if comm.nodes is None and node is not None and comm.Get_size() > 1 and not node.shares_cores:
        assert all(seconds > 0 for seconds in speed[:4])
        assert speed.write < 1e-6  # a byte, even on a busy machine
        assert 0 <= speed.late < 1
    chosen = [comm.choice("broadcast", 1 << power) for power in range(0, 28, 3)]
    assert comm.allgather(chosen) == [chosen] * comm.Get_size()


def test_network_speed_is_measured_between_nodes_only(comm):
    size = comm.Get_size()
    for nodes in ([0] * size, range(size), [rank // 2 for rank in range(size)]):
        with Communicator(comm, nodes=nodes) as placed:
            speed = placed._planner.transports.placement.network
            assert comm.allgather(speed) == [speed] * size
            assert (speed.message > 0) == (speed.barrier > 0) == (len(set(nodes)) > 1)


def test_windows(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    window = MPI.Win.Allocate(8, 8, comm=comm)
    memory = np.frombuffer(window, "f8")
    memory[0] = -1
    window.Fence()
    window.Put(np.array([float(rank)]), (rank + 1) % size)
    window.Fence()
    assert memory[0] == (rank - 1) % size
    window.Free()


def test_topologies_and_attributes(comm):
    cart = comm.Create_cart([comm.Get_size()], periods=[True])
    assert cart.Get_topo()[0] == [comm.Get_size()]
    cart.Free()
    key = MPI.Comm.Create_keyval()
    comm.Set_attr(key, "here")
    assert comm.Get_attr(key) == "here"
    comm.Delete_attr(key)
    MPI.Comm.Free_keyval(key)


def test_attributes_are_copied_once(world):
    """Users count references in the functions that copy and delete an attribute."""
    copied, deleted = [], []
    key = MPI.Comm.Create_keyval(
        lambda *given: (copied.append(given), given[-1])[1], lambda *given: deleted.append(given)
    )
    own = world.Dup()
    own.Set_attr(key, 5)
    with Communicator(own, debug=True):
        assert not copied
    ours = Communicator(own)
    twin = ours.Dup()
    assert len(copied) == 1 and twin.Get_attr(key) == 5
    for comm in (twin, ours):
        comm.Free()
    assert len(deleted) == 2
    MPI.Comm.Free_keyval(key)


def test_our_messages_never_meet_the_user_s(comm):
    """Receives from anyone with any tag, posted before collectives of every kind, get only the user's message."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    boxes = [np.full(300, -1.0) for _ in range(3)]
    posted = [comm.Irecv(box, MPI.ANY_SOURCE, MPI.ANY_TAG) for box in boxes]
    everyone = np.zeros(size)
    bound = comm.Allgather_init(np.array([float(rank)]), everyone)
    for n in (1, 300, 3000):
        for algorithm in ("linear", "mst", "ring"):
            total = np.zeros(n)
            comm.Allreduce(np.ones(n), total, algorithm=algorithm)
            assert (total == size).all()
        request = comm.Iallreduce(np.ones(n), total)
        bound.Start()
        comm.Barrier()
        bound.Wait()
        request.Wait()
        assert (total == size).all() and everyone.tolist() == list(range(size))
    assert not any(request.Test() for request in posted), "a message of the library's met a receive of the user's"
    comm.Barrier()
    for number in range(3):
        comm.Isend(np.full(300, float(number)), right, number).Wait()
    statuses = [MPI.Status() for _ in posted]
    MPI.Request.Waitall(posted, statuses)
    assert [box[0] for box in boxes] == [0, 1, 2]
    assert [status.Get_source() for status in statuses] == [left] * 3
    bound.Free()


def test_messages_of_the_user_s_do_not_disturb_ours(comm):
    """Sent before the collectives with all the tags that these use themselves, received after them."""
    rank, size = comm.Get_rank(), comm.Get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    tags = [0, 1, 2, 3, 16383, 16384, 32767]
    sent = [comm.isend(("mine", tag), right, tag) for tag in tags]
    works(comm)
    request = comm.Iallreduce(np.ones(4), total := np.zeros(4))
    request.Wait()
    assert (total == size).all()
    assert [comm.recv(source=left, tag=tag) for tag in tags] == [("mine", tag) for tag in tags]
    MPI.Request.waitall(sent)


def test_two_communicators_over_the_same_ranks_do_not_meet(world):
    one, other = Communicator(world), Communicator(world)
    rank, size = world.rank, world.size
    first, second = np.zeros(4), np.zeros(4)
    requests = [one.Iallreduce(np.full(4, 1.0), first), other.Iallreduce(np.full(4, 2.0), second)]
    for request in requests[:: -1 if rank % 2 else 1]:
        request.Wait()
    assert (first == size).all() and (second == 2 * size).all()
    one.close()
    other.close()


def test_intercommunicators_are_the_mpi_s(comm):
    if comm.Get_size() < 2:
        return
    rank = comm.Get_rank()
    half = comm.Split(rank % 2, rank)
    inter = half.Create_intercomm(0, comm, 1 - rank % 2, 11)
    assert isinstance(inter, MPI.Intercomm)
    total = np.zeros(1)
    inter.Allreduce(np.ones(1), total)
    assert total[0] == inter.Get_remote_size()
    inter.Free()
    half.Free()


def test_threads_make_communicators_at_the_same_time(world):
    """mpi4py's lower-case reductions hang there when they are first used on new communicators of two threads."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI serves one thread at a time")
    bases = [world.Dup() for _ in range(2)]

    def make(base):
        for _ in range(30):
            with Communicator(base) as comm:
                comm.empty(3)

    threads = [threading.Thread(target=make, args=(base,), daemon=True) for base in bases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for base in bases:
        base.Free()


def test_nothing_of_ours_is_reduced_by_mpi4py_s_objects(world):
    """The cause of that hang, without the chance: the first reduction of objects leaves a lock's name behind."""
    with Communicator(world) as comm:
        comm.empty(3)
        plans = comm._open_planner()
        for used in [plans.comm] + ([plans.node.comm] if plans.node else []):
            assert "@commctx_intra" not in MPI._comm_lock_table(used)


@pytest.mark.parametrize("cores", [1, 1 << 10])
def test_ranks_of_emulated_nodes_share_cores(world, monkeypatch, cores):
    """Nodes that are emulated on one machine have its cores together."""
    monkeypatch.setattr(waits, "_cores_are_shared", False)
    monkeypatch.setattr(placement, "usable_cores", lambda: set(range(cores)))
    monkeypatch.setattr(placement, "machine_name", lambda: "one")
    with Communicator(world, nodes=range(world.Get_size())) as comm:
        node = comm._planner.node
        assert node is None or (node.cores, node.shares_cores) == (cores, cores < world.Get_size())


def test_some_of_the_ranks_that_share_cores_know_of_the_others(world, monkeypatch):
    """A communicator of some ranks waits as one of all, which have fewer cores; algorithms are chosen for its own."""
    monkeypatch.setattr(waits, "_cores_are_shared", False)
    monkeypatch.setattr(placement, "usable_cores", lambda: set(range(max(1, world.Get_size() - 1))))
    with Communicator(world) as comm:
        some = comm.Split(int(comm.Get_rank() == 0))
        node = some._planner.node
        assert node is None or (node.crowded, node.shares_cores) == (False, world.Get_size() > 1)
        some.Free()
