"""Compiled programs whose messages go between nodes, over MPI: the same results and errors as in Python."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import entries, use_interpreter
from support.exchange_cases import BY_TURNS, TABLE, Question, perform

from collectives import Communicator
from collectives.engine.extension import available
from collectives.engine.instructions import Kind
from collectives.errors import Mismatch


def apart(size):
    """A node for each rank."""
    return list(range(size))


def in_pairs(size):
    return [rank // 2 for rank in range(size)]


@pytest.fixture(params=[apart, in_pairs])
def nodes(request, world):
    return request.param(world.Get_size())


@pytest.fixture
def quick(world, nodes):
    """A communicator of several nodes whose programs are compiled."""
    with Communicator(world, nodes=nodes) as comm:
        yield comm


def uses_network(comm):
    """True if messages of the MPI and of shared memory meet in one program."""
    return comm.Get_size() > 1 and comm._planner.nodes is not None and comm._planner.node is not None


@pytest.mark.parametrize("nbytes", [0, 1000, 300_000])
@pytest.mark.parametrize(("method", "algorithm"), BY_TURNS)
def test_every_algorithm(quick, method, algorithm, nbytes):
    line, size = TABLE[method], quick.Get_size()
    whole = line.collective in ("broadcast", "reduce", "allreduce", "scan", "exscan")
    count = -(-nbytes // 4 // (1 if whole else size))
    for root, in_place in enumerate((False, True) if line.in_place else (False,)):
        asked = Question(quick.Get_rank(), size, root % size, count, np.dtype("f"), in_place)
        perform(quick, "blocking", method, line.make(asked), turns=5, algorithm=algorithm)


@pytest.mark.parametrize("count", [1, 1000, 100_000])
def test_messages_between_nodes_are_compiled(quick, count):
    if not uses_network(quick) or not available():
        pytest.skip("nothing is compiled")
    size = quick.Get_size()
    for turn in range(8):
        mine, total = np.full(count, float(turn)), np.zeros(count)  # elsewhere in each turn
        quick.Allreduce(mine, total)
        assert (total == size * turn).all()
    sends = any({Kind.NET_SEND, Kind.NET_RECV} & program.kinds for _, program in entries(quick))
    assert any(quick.allgather(sends))


@pytest.mark.parametrize("longest", [40, 3000, 200_000])
def test_programs_for_any_length(quick, longest, monkeypatch):
    """Lengths that no call had before, beside a rank that binds each call for its length."""
    rank, size = quick.Get_rank(), quick.Get_size()
    if rank == size - 1 and longest == 3000:
        monkeypatch.setattr(type(quick._planner._builder), "bind_any_length", lambda *_: None)
    lengths, programs = np.random.default_rng(longest).integers(1, longest, 40), []
    for count in lengths.tolist():
        mine, all_, one = np.arange(count) + float(rank), np.zeros(count * size), np.zeros(count)
        quick.Allreduce(mine, one)
        assert (one == size * np.arange(count) + size * (size - 1) // 2).all()
        quick.Allgather(mine, all_)
        assert all((all_[count * peer :][:count] == np.arange(count) + peer).all() for peer in range(size))
        quick.Reduce_scatter_block(all_, one)
        assert (one == size * (np.arange(count) + rank)).all()
        quick.Scan(mine, one)
        assert (one == (rank + 1) * np.arange(count) + rank * (rank + 1) // 2).all()
        requests = [quick.Ialltoall(all_, other := np.zeros_like(all_)), quick.Ibcast(mine, size - 1)]
        for request in requests:
            request.Wait()
        assert (other.reshape(size, count) == np.arange(count) + rank).all()
        assert (mine == np.arange(count) + size - 1).all()
        programs.append(sum(len(cache.bound) for cache in (quick._planner.cache, quick._planner.nonblocking)))
    if longest == 40 and available() and size > 1:
        assert programs[-1] <= programs[10] + 8  # non-blocking calls take the channels in turn
    if size == 3 and longest == 40 and available():
        assert any(program.scale is not None and Kind.NET_SEND in program.kinds for _, program in entries(quick))


def test_a_compiled_rank_and_one_that_is_not(world, nodes, monkeypatch):
    if world.Get_rank() % 2 == 0:
        use_interpreter(monkeypatch)
    with Communicator(world, nodes=nodes) as comm:
        rank, size = comm.Get_rank(), comm.Get_size()
        for turn in range(60):
            mine, total = np.full(1 + turn % 3 * 500, float(rank + turn)), np.zeros(1 + turn % 3 * 500)
            if turn % 7 == rank % 7:
                time.sleep(0.002)
            comm.Allreduce(mine, total)
            assert (total == size * (size - 1) // 2 + size * turn).all()


@pytest.mark.parametrize("longer", [0, 1])
def test_messages_of_another_length(world, longer):
    """A receiver that expects more raises `Mismatch`; of one that expects less MPI itself raises."""
    if world.Get_size() < 2:
        pytest.skip("needs two ranks")
    comm, rank = Communicator(world, nodes=apart(world.Get_size())), world.Get_rank()
    for count in (4, 8):
        for _ in range(6):
            comm.Bcast(np.zeros(count), algorithm="linear")
    error = None
    try:
        comm.Bcast(np.zeros(4 if (rank == 0) == bool(longer) else 8), algorithm="linear")
    except (Mismatch, MPI.Exception) as raised:
        error = raised
    if rank == 0:
        assert error is None
    elif longer:
        assert isinstance(error, Mismatch) and "of 64 bytes" in str(error), error
    else:
        assert error is not None and error.Get_error_class() == MPI.ERR_TRUNCATE
    if rank:
        with pytest.raises(RuntimeError, match="go on with a new Communicator"):
            comm.Barrier()
    comm.close()
    world.Barrier()


@pytest.mark.skipif(MPI.Query_thread() != MPI.THREAD_MULTIPLE, reason="this MPI is not for several threads")
def test_threads_with_a_communicator_each(world, nodes):
    """Their programs run at the same time, without the interpreter's lock (GIL)."""

    def work(comm):
        for turn in range(100):
            mine, total = np.full(1 + turn % 3 * 700, float(turn)), np.zeros(1 + turn % 3 * 700)
            comm.Allreduce(mine, total)
            assert (total == comm.Get_size() * turn).all()

    with Communicator(world, nodes=nodes) as one, Communicator(world, nodes=nodes) as other:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, (one, other)))
        assert not uses_network(one) or not available() or entries(one)


def test_other_threads_run_while_a_call_waits(quick):
    """A wait for a message of another node, which is late, leaves them the interpreter."""
    if not uses_network(quick):
        pytest.skip("needs two nodes")
    for _ in range(6):
        quick.Barrier()
    turns, ended = [], threading.Event()

    def count():
        while not ended.wait(0.001):
            turns.append(None)

    thread = threading.Thread(target=count)
    thread.start()
    if quick.Get_rank() == 0:
        time.sleep(0.3)
    before = len(turns)
    quick.Barrier()
    waited = len(turns) - before
    ended.set()
    thread.join()
    assert quick.Get_rank() == 0 or waited > 10
