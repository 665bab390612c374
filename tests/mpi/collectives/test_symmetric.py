"""Arrays that neighbours see: they are ordinary arrays, come and go, and mix with all others."""

import errno
import gc
import os
import stat
import time
from itertools import cycle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from support.engines import order_weakly
from support.exchange_cases import ENTRIES, FORMS, TABLE, Exchange, Question, perform

from collectives import Communicator
from collectives.engine.assembly import flat
from collectives.engine.cross_memory import CrossMemoryAttach
from collectives.engine.instructions import INLINE, Kind
from collectives.errors import InvalidArgument, OutOfMemory
from collectives.runtime.arguments import call as calls
from collectives.transport.memory import shared_heap
from collectives.transport.node import mailbox, mailbox_layout, placement


@pytest.fixture
def own(world):
    """A communicator with memory of its own."""
    with Communicator(world) as comm:
        yield comm


def summed(comm, array):
    """The array, filled with ones, goes through an allreduce in place, which needs all of it."""
    array[...] = 1
    comm.Allreduce(MPI.IN_PLACE, array)
    return bool((array == comm.Get_size()).all())


# ------------------------------------------------------------------------------------------ arrays


@pytest.mark.parametrize("shape", [(), 0, 1, (3,), (2, 3), (0, 5), (2, 0), (1000, 7)], ids=str)
@pytest.mark.parametrize("dtype", ["u1", "f8", "F", ml_dtypes.bfloat16, [("a", "i4"), ("b", "f8")], "V7"], ids=str)
def test_shapes_and_dtypes(comm, shape, dtype):
    array = comm.empty(shape, dtype)
    model = np.empty(shape, dtype)
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype, array.nbytes) == (model.shape, model.dtype, model.nbytes)
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
    array.view("u1" if array.ndim else array.dtype)[...] = np.zeros((), "u1" if array.ndim else array.dtype)
    assert array.tobytes() == bytes(array.nbytes)


def test_filled_ones(own):
    assert own.zeros((2, 3), "i4").tolist() == [[0] * 3] * 2
    assert own.full(3, 2.5).tolist() == [2.5] * 3
    assert own.full(3, 7).dtype == np.dtype(int) and own.full(3, 7, "f4").dtype == np.dtype("f4")
    model = np.arange(12, dtype="i2").reshape(3, 4)[:, ::2]
    alike = own.like(model)
    assert alike.dtype == model.dtype and (alike == model).all() and alike.flags.c_contiguous
    pairs = np.array([(1, 2.0), (3, 4.0)], [("a", "i4"), ("b", "f8")])
    assert (own.like(pairs) == pairs).all()


def test_arrays_do_not_share_cache_lines(own):
    arrays = [own.empty(n, "u1") for n in (1, 0, 5, 129, 0, 3)]
    lines = [{(a.ctypes.data + i) // shared_heap.LINE for i in range(max(1, a.size))} for a in arrays]
    assert sum(map(len, lines)) == len(set.union(*lines))


def test_ranks_may_ask_for_different_shapes(own):
    rank, size = own.Get_rank(), own.Get_size()
    for n in (rank, 100_000 * rank, 50_000 * (size - rank), 3_000_000 if rank == size - 1 else 0):
        array = own.full((n, 2), float(rank))
        assert array.shape == (n, 2) and (array == rank).all()
    assert summed(own, own.empty(200_000))


def test_a_shape_that_cannot_be(own):
    for shape in (-1, (3, -1)):
        with pytest.raises(InvalidArgument, match="no negative lengths"):
            own.empty(shape)
    with pytest.raises(TypeError):
        own.empty(2.5)
    assert summed(own, own.empty(3))


BAD = {
    "negative": ((3, -1), "f8", ValueError, r"shape: expected no negative lengths, found \(3, -1\)"),
    "no length": (2.5, "f8", TypeError, "shape: expected a number or several, found 2.5"),
    "no dtype": (3, "nonsense", TypeError, "dtype: .*nonsense"),
    "objects": (3, object, TypeError, "dtype: expected elements of one known size.*object"),
    "nothing": (3, "V0", TypeError, "dtype: expected elements of one known size"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_one_rank_asks_for_wrongly_is_told_to_all(own, bad):
    shape, dtype, kind, message = BAD[bad]
    for who in range(own.Get_size()):
        asked = (shape, dtype) if own.Get_rank() == who else (7,)
        with pytest.raises(kind, match=f"{message}.* on rank {who}"):
            own.empty(*asked)
    assert summed(own, own.empty(3))


# ------------------------------------------------------------------------------------------ coming and going


def test_memory_that_is_given_back_is_used_again(own):
    first, second = own.empty(100_000), own.empty(100_000)
    places = first.ctypes.data, second.ctypes.data
    del first
    third = own.empty(100_000)
    assert third.ctypes.data == places[0]
    del second, third
    assert own.empty(200_000).ctypes.data == places[0], "neighbours grow together again"


def test_views_keep_the_memory(own):
    array = own.zeros(1000)
    view, at = array[10:20].reshape(2, 5).T, array.ctypes.data
    del array
    gc.collect()
    other = own.full(1000, 1.0)
    assert other.ctypes.data != at and (view == 0).all()
    del view
    gc.collect()
    assert own.empty(1000).ctypes.data == at


def test_what_a_cycle_holds_comes_back(own):
    """The collector may find it at any moment, also in the middle of an allocation."""
    for _ in range(300):
        ring = [own.empty(500)]
        ring.append(ring)
    del ring
    gc.collect()
    kept = [own.empty(500) for _ in range(20)]
    gaps = own._planner.transports.heap._gaps
    assert len(gaps) == 1 and all(a.size for a in kept)
    runs = gaps[0]._runs
    assert runs == sorted(runs) and all(low < high for low, high in runs)


def test_many_allocations_leak_nothing(own):
    def state():
        return len(os.listdir("/proc/self/fd")), len(own._planner.transports.heap._mine)

    own.empty(1000)
    before = state()
    for number in range(200):
        own.empty(number % 50)
    assert state() == before


def mapped():
    return Path("/proc/self/maps").read_text().count("memfd:chorus")


needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")


@needs_proc
def test_nothing_is_mapped_after_the_end(world, monkeypatch):
    monkeypatch.setattr(placement, "open_nodes", {})  # the memory of the node stays until the end of its last one
    gc.collect()
    before = mapped()
    comm = Communicator(world)
    array, other = comm.empty(300_000), comm.empty(300_000)
    if comm.Get_size() > 1 and comm._planner.transports.heap.is_shared(array.ctypes.data, array.nbytes):
        assert mapped() > before
    comm.Allreduce(array, other)
    comm.Iallreduce(array, other).Wait()
    request = comm.Allreduce_init(array, other)
    request.Start()
    request.Wait()
    request.Free()
    del array, other, request
    comm.close()
    del comm
    gc.collect()
    world.Barrier()
    assert mapped() == before
    world.Barrier()


def test_arrays_outlive_their_communicator(world):
    for end in ("close", "Free"):
        comm = Communicator(world.Dup())
        array = comm.full(1000, 3.0)
        getattr(comm, end)()
        array += 1
        assert (array == 4).all()
        with Communicator(world) as later:
            assert summed(later, array), "memory of another communicator is memory like any other"
        del array
        gc.collect()


def test_arrays_of_one_communicator_in_another(own):
    other = own.Dup()
    mine, total = own.full(50_000, 1.0), other.empty(50_000)
    for comm in (own, other):
        comm.Allreduce(mine, total)
        assert (total == own.Get_size()).all()
    other.Free()


def test_allocating_while_others_wait(own):
    """A rank waits for a collective that needs this one, which is about to allocate."""
    for algorithm in ("mst", "ring"):
        mine, total = np.ones(3000), np.zeros(3000)
        request = own.Iallreduce(mine, total, algorithm=algorithm)
        if own.Get_rank() % 2:
            request.Wait()
        array = own.zeros(1000)
        request.Wait()
        assert (total == own.Get_size()).all() and not array.any()


# ------------------------------------------------------------------------------------------ too much


@pytest.mark.parametrize("who", ["all", "the last", "the first"])
def test_what_no_machine_has_is_refused_on_all_ranks(own, who):
    rank, size = own.Get_rank(), own.Get_size()
    greedy = {"all": range(size), "the last": [size - 1], "the first": [0]}[who]
    kept = own.full(1000, 5.0)
    for n in (1 << 50, 1 << 60):
        with pytest.raises(OutOfMemory, match=f"rank {greedy[0]} cannot have .* bytes of shared memory") as caught:
            own.empty(n if rank in greedy else 10, "u1")
        assert isinstance(caught.value, MemoryError)
        assert caught.value.Get_error_class() == MPI.ERR_NO_MEM
    at = own.empty(1000).ctypes.data
    assert own.empty(1000).ctypes.data == at, "nothing was lost"
    assert (kept == 5).all() and summed(own, own.empty(500_000))


def test_an_error_without_a_text_is_an_error_on_all_ranks(own, monkeypatch):
    def fail(nbytes):
        raise MemoryError

    if own.Get_rank() == own.Get_size() - 1:
        monkeypatch.setattr(shared_heap, "_make", fail)
    with pytest.raises(OutOfMemory, match=r"cannot have .* bytes of shared memory: MemoryError"):
        own.empty(1 << 20, "u1")


def test_where_there_is_little_segments_are_not_generous(own, monkeypatch):
    """What is left suffices for what is asked, not for as much as there is already."""
    own.empty(40 << 20, "u1")
    kept = own.empty(30 << 20, "u1")
    little = 12 << 20
    monkeypatch.setattr(shared_heap, "available_memory", lambda: little * own.Get_size())
    assert summed(own, own.empty(11 << 20, "u1")) and summed(own, own.empty(11 << 20, "u1"))
    with pytest.raises(OutOfMemory, match="bytes left"):
        own.empty(50 << 20, "u1")
    assert kept.size


def test_who_asks_for_nothing_pays_nothing(own):
    own.empty(10 << 20 if own.Get_rank() == 0 else 0, "u1")
    whole = sum(segment.memory.size for segment in own._planner.transports.heap._mine)
    assert whole == (10 << 20 if own.Get_rank() == 0 else shared_heap.PAGE)


# ------------------------------------------------------------------------------------------ where nothing is shared


def nothing_maps(monkeypatch):
    monkeypatch.setattr(shared_heap, "_map", lambda *_: None)


def one_rank_cannot_map(monkeypatch):
    if MPI.COMM_WORLD.Get_rank() == 0:
        nothing_maps(monkeypatch)


def beside_rank_0(own):
    """Is this rank on the machine of rank 0?"""
    sharing = own.Split_type(MPI.COMM_TYPE_SHARED)
    found = 0 in sharing.allgather(own.Get_rank())
    sharing.Free()
    return found


def somebody_else_s(monkeypatch):
    """The number of the process means another one here."""
    map_ = shared_heap._map

    def wrong(*arguments):
        found = map_(*arguments)
        return None if found is None else np.zeros_like(found)

    monkeypatch.setattr(shared_heap, "_map", wrong)


def no_memfd(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)


def refused_memfd(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "vm.memfd_noexec is 2")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)


def an_old_kernel(monkeypatch):
    """One that does not know how to populate memory."""
    monkeypatch.setattr(shared_heap, "POPULATE", 9999)


POORER = [nothing_maps, one_rank_cannot_map, somebody_else_s, no_memfd, refused_memfd, an_old_kernel]


@pytest.mark.parametrize("poorer", POORER, ids=lambda poorer: poorer.__name__)
@pytest.mark.parametrize("reads", [True, False], ids=["reads", "cannot read"])
def test_where_memory_cannot_be_shared_all_works(own, monkeypatch, poorer, reads):
    shows = poorer is an_old_kernel or (poorer is one_rank_cannot_map and not beside_rank_0(own))
    poorer(monkeypatch)
    if own._planner.node is not None and not reads:
        own._planner.node.reads = False
    for n in (10, 3000, 200_000):
        mine, total = own.full(n, 1.0), own.empty(n)
        own.Allreduce(mine, total)
        assert (total == own.Get_size()).all()
        assert own._planner.transports.heap.is_shared(mine.ctypes.data, mine.nbytes) == shows


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="a system without memfd")
def test_no_process_can_shorten_the_memory_of_another(own, monkeypatch):
    """Its owner would be killed by SIGBUS. The modes are the user's alone."""
    made, make = [], shared_heap._make

    def noted(nbytes):
        descriptor, memory = make(nbytes)
        made.append(os.dup(descriptor))
        return descriptor, memory

    monkeypatch.setattr(shared_heap, "_make", noted)
    array = own.full(100_000, 1.0)
    (descriptor,) = made
    try:
        size = os.fstat(descriptor).st_size
        assert size >= array.nbytes and stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
        for length in (0, size - 4096, size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, length)
    finally:
        os.close(descriptor)
    assert summed(own, array)


def test_where_ranks_share_nothing(world):
    with Communicator(world, shared=False) as comm:
        assert summed(comm, comm.empty(100_000))
        with pytest.raises(OutOfMemory):
            comm.empty(1 << 60, "u1")
    with Communicator(world, nodes=range(world.Get_size())) as comm:
        assert summed(comm, comm.empty(100_000))


# ------------------------------------------------------------------------------------------ all kinds of memory, mixed


def memories(comm):
    """How arrays are made, by the number of the array in a call: all, some, those of some ranks lie where all see."""
    rank = comm.Get_rank()
    return {
        "symmetric": lambda number: True,
        "of odd ranks": lambda number: rank % 2 == 1,
        "first only": lambda number: number == 0,
        "all but the first": lambda number: number > 0,
    }


class Mixed(Question):
    """A question whose arrays lie in memory of the communicator, or not, as is said."""

    def room(self, count):
        made = self.made
        symmetric = made["which"](made["number"])
        made["number"] += 1
        array = made["pool"](max(1, count * self.dtype.itemsize)) if symmetric else None
        if array is None:
            return np.empty(count, self.dtype)
        return array[: count * self.dtype.itemsize].view(self.dtype)


def pool(comm, blocks, nbytes):
    """Arrays of the communicator, made by all ranks alike; which gives one of them."""
    arrays = [comm.empty(nbytes, "u1") for _ in range(blocks)]
    return lambda wanted: arrays.pop() if wanted <= nbytes and arrays else None


LIMITS = (INLINE, 4096, mailbox.RENDEZVOUS_BYTES, mailbox_layout.CELL, 4 * mailbox_layout.CELL)


def mixed(comm, which, line, n, dtype, root, in_place):
    asked = Mixed(comm.Get_rank(), comm.Get_size(), root, n, np.dtype(dtype), in_place)
    room = (n + 2) * comm.Get_size() * np.dtype(dtype).itemsize
    asked.made = {"which": memories(comm)[which], "number": 0, "pool": pool(comm, 3, room)}
    return line.make(asked)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("method", "algorithm"), [entry for entry in ENTRIES if entry[0] != "Barrier"])
@pytest.mark.parametrize(("nbytes", "segments"), [(mailbox.RENDEZVOUS_BYTES, None), (mailbox_layout.CELL + 64, 2)])
def test_every_algorithm(comm, method, algorithm, nbytes, segments):
    """Lengths around which messages begin to travel otherwise; one of a few kinds of memory and one form each."""
    line, size, number = TABLE[method], comm.Get_size(), len(algorithm) + (segments is None)
    kinds = list(memories(comm))
    count = nbytes // 4 // (1 if line.reduces else size) + 1
    exchange = mixed(comm, kinds[number % len(kinds)], line, count, "f", 0, line.in_place and number % 2 == 1)
    form = FORMS[(number + len(method)) % 3]
    perform(comm, form, method, exchange, turns=2, algorithm=algorithm, segments=segments)


@pytest.mark.parametrize("which", memories(MPI.COMM_SELF))
@pytest.mark.parametrize("method", ["Allreduce", "Bcast", "Reduce", "Allgather", "Reduce_scatter_block", "Alltoallv"])
def test_lengths_around_every_limit(comm, method, which):
    line, size = TABLE[method], comm.Get_size()
    around = (-4, 0, 4) if size <= 3 else (4,)
    for number, nbytes in enumerate(limit + more for limit in LIMITS for more in around):
        exchange = mixed(comm, which, line, nbytes // 4, "f", number % size, line.in_place and number % 3 == 2)
        perform(comm, FORMS[number % 3], method, exchange, turns=2 if number % 2 else 1)


@pytest.mark.parametrize("which", memories(MPI.COMM_SELF))
@pytest.mark.parametrize("method", ["Allreduce", "Bcast", "Allgather"])
def test_several_megabytes(comm, method, which):
    line = TABLE[method]
    exchange = mixed(comm, which, line, 700_000 // (1 if line.reduces else comm.Get_size()), "d", 0, False)
    perform(comm, "blocking", method, exchange, turns=2)


def places():
    """Every algorithm, in place and not where it can be: one of the two is in the default tests."""
    for number, (method, algorithm) in enumerate(entry for entry in ENTRIES if entry[0] != "Barrier"):
        for in_place in (False, True) if TABLE[method].in_place else (False,):
            other = TABLE[method].in_place and in_place != (number % 2 == 1)
            yield pytest.param(method, algorithm, in_place, marks=[pytest.mark.full] if other else [])


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("method", "algorithm", "in_place"), list(places()))
def test_every_algorithm_bound_to_arrays_that_all_see(comm, method, algorithm, in_place):
    """Whole messages between the cells of persistent channels and what is read where it lies."""
    line, size = TABLE[method], comm.Get_size()
    exchange = mixed(comm, "symmetric", line, 50_001 // (1 if line.reduces else size), "f", 0, in_place)
    perform(comm, "persistent", method, exchange, turns=3, algorithm=algorithm, segments=1)


def arrives_whole(request, messages):
    """True if so many messages come to this rank over shared memory in a bound program, and none of them in parts."""
    received = [one for one in flat(request.program.rounds) if one.kind == Kind.RECV]
    return len(received) == messages and not any(one.part for one in received)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("plain", ["none", "rank 0's", "all"])
def test_what_all_see_is_not_cut_if_all_know(own, plain, in_place):
    """A single array of another kind, and the messages of all ranks are cut alike, unless too long to be cut at all."""
    rank, size, node = own.Get_rank(), own.Get_size(), own._planner.node
    mine, total = own.full(100_000, 1.0, "f"), own.full(100_000, 1.0, "f")
    shared = (
        size > 1
        and node is not None
        and node.reads
        and own._planner.transports.heap.is_shared(total.ctypes.data, total.nbytes)
    )
    seen = own.allreduce(shared, MPI.LAND) and plain == "none"
    if plain == "all" or (plain == "rank 0's" and rank == 0):
        total = total.copy()
    arguments = MPI.IN_PLACE if in_place else mine, total
    sight = own._planner.visibility(calls.allreduce(*arguments, MPI.SUM, rank, size))
    assert sight.shared == seen and (sight.in_place == in_place or not seen)
    request = own.Allreduce_init(*arguments, algorithm="ring")
    if node is not None and own.nodes is None:
        long = node.reads and total.nbytes // size > node.streamed_reduced
        assert arrives_whole(request, 2 * (size - 1)) == (seen or long or size == 1)
    request.Start()
    request.Wait()
    assert (total == size).all()
    request.Free()


def cannot_read(node):
    node.reads = node.writes = False
    node.readers = [CrossMemoryAttach(-1) for _ in node.readers]  # others of this process use the node's own


@pytest.mark.parametrize("other", ["nothing can be read", "weakly ordered"])
@pytest.mark.parametrize("method", ["Allreduce", "Bcast", "Allgather", "Alltoall"])
def test_on_other_machines(own, monkeypatch, method, other):
    """Where the kernel lets no rank read another's memory, and where processors order stores weakly."""
    if other == "weakly ordered":
        order_weakly(monkeypatch)
    elif own._planner.node is not None:
        cannot_read(own._planner.node)
    line, size, kinds = TABLE[method], own.Get_size(), cycle(memories(own))
    for number, nbytes in enumerate((8, *LIMITS, 1_500_000)[:: 1 if size <= 3 else 3]):
        exchange = mixed(own, next(kinds), line, nbytes // 4 + 1, "f", number % size, line.in_place and number % 2)
        perform(own, ("persistent", "blocking")[number % 2], method, exchange, turns=2)


@pytest.mark.parametrize("form", FORMS)
def test_elements_larger_than_a_cell_where_nothing_can_be_read(own, form):
    """They cannot be cut, and no cell holds them."""
    if own._planner.node is not None:
        cannot_read(own._planner.node)
    datatype = MPI.DOUBLE.Create_contiguous(40_000).Commit()
    op = MPI.Op.Create(add_doubles, commute=True)
    rank, size = own.Get_rank(), own.Get_size()
    exchange = Exchange(
        [[mine := np.zeros(80_000), 2, datatype], [total := np.zeros(80_000), 2, datatype]],
        [(mine, lambda turn: np.arange(80_000.0) + rank * turn)],
        [(total, lambda turn: np.arange(80_000.0) * size + size * (size - 1) // 2 * turn)],
        op=op,
    )
    perform(own, form, "Allreduce", exchange, turns=3)
    op.Free()
    datatype.Free()


def add_doubles(left, inout, datatype):
    mine = np.frombuffer(inout)
    mine += np.frombuffer(left)


def test_arrays_may_change_as_soon_as_a_call_is_over(comm):
    """What is told by its address is read before the sender goes on; a slow receiver makes it wait."""
    rank, size = comm.Get_rank(), comm.Get_size()
    for n in (1500, 5000, 100_000):
        mine, all_of_them = comm.empty(n), comm.empty(n * size)
        for turn in range(4):
            mine[:] = rank + turn
            if (rank + turn) % size == 0:
                time.sleep(0.002)
            comm.Allgather(mine, all_of_them)
            mine[:] = -1
            assert (all_of_them.reshape(size, n) == np.arange(size)[:, None] + turn).all()
            comm.Bcast(all_of_them[:n], turn % size)
            all_of_them[:] = -2


def test_parts_of_symmetric_arrays(comm):
    """Rows, and all of it transposed, sent to parts of others."""
    size = comm.Get_size()
    mine, theirs = comm.like(np.add.outer(np.arange(60.0), np.arange(400)) + comm.Get_rank()), comm.empty((60, 400))
    expected = size * (size - 1) // 2 + size * np.add.outer(np.arange(60), np.arange(400))
    for part in (np.s_[3:50], np.s_[2:4, :], np.s_[7, 9:], np.s_[:]):
        theirs[...] = -1
        comm.Allreduce(mine[part].T, theirs[part].T)
        assert (theirs[part] == expected[part]).all()
        theirs[part] = -1
        assert (theirs == -1).all(), "memory beside it was written to"
