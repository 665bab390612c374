"""Calls without the compiled engine on all ranks, or on some of them."""

import time

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import order_weakly, use_interpreter
from support.exchange_cases import BY_TURNS, FORMS, TABLE, Question, perform

from collectives import Communicator
from collectives.engine.instructions import REFUSED
from collectives.errors import Mismatch, RanksDisagree
from collectives.runtime.requests.request import Request
from collectives.transport.node.mailbox_layout import NONBLOCKING

ENGINES = {
    "interpreted": lambda world, patch: use_interpreter(patch),
    "mixed": lambda world, patch: use_interpreter(patch) if world.rank % 2 else None,
    "weakly ordered": lambda world, patch: order_weakly(patch),
}


@pytest.fixture
def comm(world, monkeypatch):
    """Communicator whose calls are not compiled."""
    use_interpreter(monkeypatch)
    with Communicator(world) as made:
        yield made


@pytest.fixture(params=ENGINES)
def engines(world, monkeypatch, request):
    """Let ranks run programs in Python."""
    ENGINES[request.param](world, monkeypatch)


@pytest.mark.parametrize("per_node", [None, 1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("method", "algorithm"), BY_TURNS)
def test_every_algorithm(world, engines, method, algorithm, form, per_node):
    """In one node, and between nodes of one rank or two."""
    nodes = None if per_node is None else [rank // per_node for rank in range(world.Get_size())]
    line, size = TABLE[method], world.Get_size()
    whole = line.collective in ("broadcast", "reduce", "allreduce", "scan", "exscan")
    with Communicator(world, nodes=nodes) as comm:
        for number, nbytes in enumerate((0, 8, 1000, 40_000, 300_000)):
            count, in_place = -(-nbytes // 4 // (1 if whole else size)), line.in_place and number % 2 == 1
            asked = Question(comm.Get_rank(), size, number % size, count, np.dtype("f"), in_place)
            perform(comm, form, method, line.make(asked), turns=2 * NONBLOCKING, algorithm=algorithm)


@pytest.mark.parametrize("dtype", ["i1", "f2", "f8", "F"])
@pytest.mark.parametrize("name", ["SUM", "PROD", "MAX", "LXOR", "user-defined"])
def test_operations(world, engines, dtype, name):
    """All ranks have the same bits, whichever engine has made them."""
    is_known = not ((dtype == "F" and name in ("MAX", "LXOR")) or (dtype in ("f2", "f8") and name == "LXOR"))
    if not is_known:
        return
    op = MPI.Op.Create(add_bytes) if name == "user-defined" else getattr(MPI, name)
    for count in (3, 700, 30_000):
        mine, total = np.arange(count) % 11 - world.rank, np.zeros(count, dtype)
        if name == "user-defined":
            mine, total = mine.astype("u1"), total.astype("u1")
        with Communicator(world) as comm:
            for _ in range(3):
                comm.Allreduce(mine.astype(total.dtype), total, op)
        assert len(set(world.allgather(total.tobytes()))) == 1
        if name in ("SUM", "user-defined"):
            expected = sum((np.arange(count) % 11 - rank).astype(total.dtype) for rank in range(world.size))
            assert (total == expected.astype(total.dtype)).all()
    if name == "user-defined":
        op.Free()


def add_bytes(left, inout, datatype):
    mine = np.frombuffer(inout, "u1")
    mine += np.frombuffer(left, "u1")


def test_symmetric_arrays_and_a_rank_that_is_late(world, engines):
    """They are read where they are; a late rank takes in messages that have waited."""
    with Communicator(world) as comm:
        mine, total = comm.zeros(20_000), comm.zeros(20_000)
        for turn in range(3 * NONBLOCKING):
            if turn % world.size == world.rank:
                time.sleep(0.003)
            mine[:] = world.rank + turn
            request = comm.Iallreduce(mine, total)
            vector = np.full(5000, float(world.rank))
            comm.Bcast(vector, turn % world.size)
            request.Wait()
            assert (vector == turn % world.size).all()
            assert (total == turn * world.size + world.size * (world.size - 1) // 2).all()


def case(name, rank, size):
    """Arguments of a call, the array that is sent with its values, and the result with its expected values."""
    counts = [1 + block for block in range(size)]
    own, all_blocks = np.zeros(counts[rank]), np.zeros(sum(counts))
    owners = np.repeat(np.arange(size) + 1.0, counts)
    if name == "Allreduce":
        return (own[:1], all_blocks[:1]), (own, rank + 1.0), (all_blocks[:1], [size * (size + 1) / 2])
    if name == "Scatterv":
        return ([all_blocks, counts], own), (all_blocks, owners), (own, own + rank + 1)
    expected = owners if name == "Allgatherv" or rank == 0 else None
    return (own, [all_blocks, counts]), (own, rank + 1.0), (all_blocks, expected)


@pytest.mark.parametrize("name", ["Allreduce", "Allgatherv", "Gatherv", "Scatterv"])
def test_found_by_arguments(comm, name):
    arguments, (sent, values), (result, expected) = case(name, comm.Get_rank(), comm.Get_size())
    sent[:] = values
    key = name, *arguments, MPI.SUM, 0, "auto", None
    for _ in range(4 * NONBLOCKING):
        getattr(comm, name)(*arguments)
        getattr(comm, f"I{name.lower()}")(*arguments).Wait()
    for start in (lambda: comm._run_cached(REFUSED, *key), lambda: comm._start_cached(REFUSED, *key)):
        result[:] = 0
        found = start()
        assert found == () or isinstance(found, Request)
        if found:
            found.Wait()
        if expected is not None:
            assert result.tolist() == list(expected)


def test_arrays_at_other_addresses(comm):
    """A program bound to memory is not used for other arrays like it."""
    counts = [2] * comm.Get_size()
    for turn in range(4 * NONBLOCKING):
        x, y = np.full(2, turn), np.empty((comm.Get_size(), 2), int)
        comm.Iallgatherv(x, [y, counts]).Wait()
        assert (y == turn).all()
        comm.Allgatherv(-x, [y, counts])
        assert (y == -turn).all()


@pytest.mark.ranks(2)
@pytest.mark.skipif(MPI.COMM_WORLD.Get_size() != 2, reason="a third rank would wait for messages that are not sent")
def test_ranks_disagree(comm):
    """The call of another operation is refused as it starts or in its wait, and so are all later ones."""
    x, y = np.ones(3), np.zeros(3)
    for _ in range(4 * NONBLOCKING):
        comm.Iallreduce(x, y, MPI.SUM).Wait()
        comm.Iallreduce(x, y, MPI.MAX).Wait()
    with pytest.raises(Mismatch):
        comm.Iallreduce(x, y, MPI.SUM if comm.Get_rank() % 2 else MPI.MAX).Wait()
    with pytest.raises(RanksDisagree):
        comm.Iallreduce(x, y)
