"""Long messages that receiver and sender copy together."""

import numpy as np
import pytest
from mpi4py import MPI
from support.engines import use_interpreter
from support.exchange_cases import FORMS

from collectives import Communicator
from collectives.engine.extension import available
from collectives.errors import Mismatch
from collectives.transport.node import mailbox

pytestmark = [
    pytest.mark.ranks(1, 2),
    pytest.mark.skipif(not available(), reason="this installation has no compiled engine"),
]

CHUNK, CHUNKS = 1 << 16, 16
LEAST = 2 * CHUNK
"""Bytes of a chunk, the most chunks of a message, and the shortest message that is offered, as in ``mailbox.c``."""

LENGTHS = [LEAST, 3 * CHUNK + 5, (2 * CHUNKS + 5) * CHUNK - 1]


@pytest.fixture
def pair(world, monkeypatch):
    """Communicator of two ranks, whose messages above a cell all go by address; None on the other ranks."""
    monkeypatch.setattr(mailbox, "share_cores", lambda: None)
    comm = world.Split(world.Get_rank() > 1)
    if world.Get_size() < 2 or world.Get_rank() > 1:
        yield None
    else:
        with Communicator(comm) as ours:
            node = ours._planner.node
            if not node.writes:
                pytest.skip("ranks may not write each other's memory")
            node.shares_cores = False  # as offers are made only then
            node.streamed = node.streamed_both_ways = node.streamed_reduced = 0
            yield ours
    comm.Free()


def edge(comm):
    """The link of the blocking calls to the other rank."""
    (rank,) = {0, 1} - {comm.Get_rank()}
    return comm._planner.transports.edges[0][rank]


def bcast_twice(comm, data):
    """Let the next broadcast run compiled."""
    for _ in range(4):
        comm.Bcast(data)


def calls(comm, form, data, root):
    """Broadcast in a form of the call."""
    if form == "blocking":
        comm.Bcast(data, root)
    elif form == "nonblocking":
        comm.Ibcast(data, root).Wait()
    else:
        request = comm.Bcast_init(data, root)
        for _ in range(4):
            request.Start()
            request.Wait()
        request.Free()


@pytest.mark.parametrize("nbytes", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_all_bytes_arrive(pair, form, nbytes):
    if pair is None:
        return
    for turn in range(4):
        root = turn % 2
        sent = np.random.default_rng(turn).integers(0, 256, nbytes).astype(np.uint8)
        data = np.concatenate([sent if pair.Get_rank() == root else np.zeros(nbytes, np.uint8), [7]]).astype(np.uint8)
        calls(pair, form, data[:-1], root)
        assert (data[:-1] == sent).all() and data[-1] == 7


@pytest.mark.parametrize("busy", ["receiver", "sender"])
def test_a_busy_rank_leaves_all_chunks_to_the_other(pair, busy):
    """The busy one only starts its call, and computes: the other copies everything."""
    if pair is None:
        return
    chunks, receiver = 9, pair.Get_rank() == 1
    data = np.full(chunks * CHUNK, 0 if receiver else 3, np.uint8)
    bcast_twice(pair, data)
    (call,) = pair._planner.cache.calls[0].values()
    program = call.program
    data[:] = 0 if receiver else 5
    program.engine.begin()
    is_busy = receiver == (busy == "receiver")
    if is_busy:
        program.advance()  # makes the offer, or sends the address
    MPI.Intracomm(pair).Barrier()
    while receiver and not (data == 5).all():  # it sees what is written, in calls or without one
        if not is_busy:
            program.advance()
    if busy == "sender":
        MPI.Intracomm(pair).Barrier()
    program.finish()
    assert (data == 5).all()
    assert not receiver or edge(pair).link["taken"][0] == (0 if busy == "receiver" else chunks)


def test_with_a_rank_that_is_not_compiled(pair, monkeypatch):
    if pair is None:
        return
    for slow in range(2):
        if pair.Get_rank() == slow:
            use_interpreter(monkeypatch)
        else:
            monkeypatch.undo()
        data = np.full(LEAST + slow, pair.Get_rank() + 1, np.uint8)
        bcast_twice(pair, data)
        assert (data == 1).all()


def test_messages_of_other_lengths_and_calls_are_not_written(pair):
    """The receiver has offered memory for another message: it raises, and the memory is as it was."""
    if pair is None:
        return
    rank, chunk = pair.Get_rank(), CHUNK
    for count in (4 * chunk, 5 * chunk):
        bcast_twice(pair, np.zeros(count, np.uint8))
    data = np.full((4 if rank else 5) * chunk, 1 - rank, np.uint8)
    if rank:
        with pytest.raises(Mismatch):
            pair.Bcast(data)
        assert not data.any()
    else:
        pair.Bcast(data)


@pytest.mark.parametrize("method", ["Gather", "Scatter", "Alltoall", "Allgather", "Allreduce"])
def test_collectives(pair, method):
    if pair is None:
        return
    block = 5 * CHUNK // 8 + 3
    whole, part = np.arange(2.0 * block), np.zeros(block)
    rank = pair.Get_rank()
    for turn in range(6):
        if method == "Gather":
            into = np.zeros(2 * block)
            pair.Gather(whole[rank * block :][:block] + turn, into)
            assert rank or (into == whole + turn).all()
        elif method == "Scatter":
            pair.Scatter(whole + turn, part)
            assert (part == whole[rank * block :][:block] + turn).all()
        elif method == "Alltoall":
            into = np.zeros(2 * block)
            pair.Alltoall(whole + turn + rank, into)
            own = whole[rank * block :][:block] + turn
            assert (into == np.concatenate([own, own + 1])).all()
        elif method == "Allgather":
            into = np.zeros(2 * block)
            pair.Allgather(whole[rank * block :][:block] + turn, into)
            assert (into == whole + turn).all()
        else:
            into = np.zeros(2 * block)
            pair.Allreduce(whole + turn * rank, into)
            assert (into == 2 * whole + turn).all()
