"""Collectives under way: any number, of any kind, ended in any order, beside anything else that the program does."""

import random
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.exchange_cases import TABLE, Question

import collectives
from collectives import Request, start_all, wait_all
from collectives.errors import InvalidArgument

METHODS = list(TABLE)


def begin(comm, number, n=5):
    """The `number`-th of a long line of non-blocking collectives: (request, what must have come out)."""
    method = METHODS[number % len(METHODS)]
    size = comm.Get_size()
    dtype = np.dtype("idf"[number % 3])
    asked = Question(comm.Get_rank(), size, number % size, n, dtype, TABLE[method].in_place and number % 4 == 3)
    exchange = TABLE[method].make(asked)
    exchange.fill(number)
    request = getattr(comm, f"I{method.lower()}")(*exchange.args, **exchange.keywords)
    return request, lambda: exchange.check(number)


def finish(under_way):
    for _, check in under_way:
        check()


@pytest.mark.timeout(120)
def test_a_thousand_at_once_ended_in_another_order_on_every_rank(comm):
    under_way = [begin(comm, number, n=(0, 1, 5, 700)[number % 4]) for number in range(1000)]
    random.Random(comm.Get_rank()).shuffle(under_way)
    for request, check in under_way:
        request.Wait()
        check()


def test_all_of_them_by_wait_all(comm):
    under_way = [begin(comm, number) for number in range(60)]
    wait_all([request for request, _ in under_way])
    finish(under_way)
    assert not any(request.active for request, _ in under_way)
    wait_all([])


def test_the_mpi_s_own_requests_among_them(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    got, total = np.zeros(3), np.zeros(1)
    under_way = [begin(comm, number) for number in range(10)]
    requests = [request for request, _ in under_way]
    requests[3:3] = [comm.Irecv(got, left, 7), comm.Isend(np.full(3, float(rank)), right, 7)]
    requests.append(MPI.Intracomm(comm).Iallreduce(np.ones(1), total))
    random.Random(rank).shuffle(requests)
    wait_all(requests)
    finish(under_way)
    assert got.tolist() == [left] * 3 and total[0] == size


def test_test_loops(comm):
    under_way = [begin(comm, number) for number in range(30)]
    pending = [request for request, _ in under_way]
    while pending:
        pending = [request for request in pending if not request.Test()]
    finish(under_way)
    under_way = [begin(comm, number) for number in range(30)]
    while not collectives.test_all([request for request, _ in under_way]):
        pass
    finish(under_way)


def test_a_test_does_not_wait(comm):
    """Nobody is through before rank 0 has come."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank:
        request = comm.Ibarrier()
        over = [request.Test() for _ in range(20)]
        MPI.Intracomm(comm).send(None, 0, 5)
        request.Wait()
        assert not any(over)
    else:
        for peer in range(1, size):
            MPI.Intracomm(comm).recv(source=peer, tag=5)
        comm.Ibarrier().Wait()


@pytest.mark.parametrize("method", METHODS)
def test_a_blocking_collective_while_others_are_under_way(comm, method):
    """Begun before, ended after, and the other way round on half of the ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    under_way = [begin(comm, number, n=40) for number in range(6)]
    exchange = TABLE[method].make(Question(rank, size, size - 1, 9, np.dtype("d")))
    for turn in range(3):
        exchange.fill(turn)
        getattr(comm, method)(*exchange.args, **exchange.keywords)
        exchange.check(turn)
        if rank % 2:
            under_way[turn][0].Wait()
    wait_all([request for request, _ in under_way])
    finish(under_way)


def test_large_ones_side_by_side(comm):
    """Several cut in parts, a blocking one between them."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine = [np.full(100_000, rank + i, "f8") for i in range(4)]
    sums = [np.zeros(100_000) for _ in range(4)]
    requests = [comm.Iallreduce(a, b, algorithm=name) for a, b, name in zip(mine, sums, ["ring", "mst", "linear"] * 2)]
    total = np.zeros(100_000)
    comm.Allreduce(mine[0], total)
    wait_all(requests[::-1] if rank % 2 else requests)
    for i in range(len(requests)):
        assert (sums[i] == size * (size - 1) // 2 + size * i).all()
    assert (total == size * (size - 1) // 2).all()


def test_messages_between_ranks_while_collectives_are_under_way(comm):
    """Whoever waits for a message moves the collectives on that others wait for."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    for number in range(10):
        under_way = [begin(comm, 7 * number + i) for i in range(4)]
        if rank % 2:
            for request, check in under_way:
                request.Wait()
                check()
        if size > 1:
            assert comm.sendrecv((rank, number), right, source=left) == (left, number)
            box = np.zeros(2)
            comm.Sendrecv(np.array([rank, number], float), right, recvbuf=box, source=left)
            assert box.tolist() == [left, number]
        wait_all([request for request, _ in under_way])
        finish(under_way)


def test_a_rank_waits_for_a_message_that_hangs_on_its_collective(comm):
    """Rank 1 sends only when the collective is over, which goes on only while rank 0 waits for that message."""
    rank = comm.Get_rank()
    if comm.Get_size() == 1:
        return
    request, check = begin(comm, METHODS.index("Allreduce"))
    if rank == 0:
        assert comm.recv(source=1, tag=3) == "over"
        comm.Send(np.ones(2), 1, 4)
        request.Wait()
    elif rank == 1:
        request.Wait()
        comm.send("over", 0, 3)
        comm.Recv(np.zeros(2), 0, 4)
    else:
        request.Wait()
    check()


def test_arrays_are_kept_alive(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    totals = [np.zeros(2000) for _ in range(20)]
    requests = [comm.Iallreduce(np.full(2000, float(rank + i)), total) for i, total in enumerate(totals)]
    noise = [np.full(2000, -1.0) for _ in range(50)]
    wait_all(requests)
    assert len(noise) == 50
    for i, total in enumerate(totals):
        assert (total == size * (size - 1) // 2 + size * i).all()


# ------------------------------------------------------------------------------------------ persistent ones


@pytest.mark.parametrize("method", METHODS)
def test_persistent_ones_start_again_and_again_beside_each_other(comm, method):
    rank, size = comm.Get_rank(), comm.Get_size()
    exchanges = [TABLE[method].make(Question(rank, size, i % size, 6, np.dtype("d"))) for i in range(3)]
    requests = [getattr(comm, f"{method}_init")(*e.args, **e.keywords) for e in exchanges]
    for turn in range(4):
        for exchange in exchanges:
            exchange.fill(turn)
        start_all(requests)
        wait_all(requests[::-1] if rank % 2 else requests)
        for exchange in exchanges:
            exchange.check(turn)
    for request in requests:
        request.Free()


def test_a_persistent_one_among_blocking_and_non_blocking_ones(comm):
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, total = np.zeros(4), np.zeros(4)
    bound = comm.Allreduce_init(mine, total)
    for turn in range(5):
        mine[:] = rank + turn
        bound.Start()
        request, check = begin(comm, turn)
        comm.Barrier()
        (bound if rank % 2 else request).Wait()
        wait_all([request, bound])
        check()
        assert (total == size * (size - 1) // 2 + size * turn).all()
    bound.Free()


def test_what_requests_refuse(comm):
    mine, total = np.ones(4), np.zeros(4)
    bound = comm.Allreduce_init(mine, total)
    assert bound.Test() and bound.Wait() is True, "one that was not started is over"
    last = comm.Get_rank() == comm.Get_size() - 1  # until it starts, nothing ends on the other ranks
    if not last:
        bound.Start()
        with pytest.raises(InvalidArgument, match="only an idle persistent request starts"):
            bound.Start()
        with pytest.raises(
            InvalidArgument,
            match=r"Free of <persistent request of allreduce, under way: waits in round .*>: wait for it",
        ):
            bound.Free()
    comm.barrier()
    if last:
        bound.Start()
    bound.Wait()
    with pytest.raises(InvalidArgument, match="only an idle persistent request starts"):
        start_all([bound, comm.Iallreduce(mine, total.copy())])
    assert not bound.active, "one of several cannot start, so none does"
    with pytest.raises(InvalidArgument, match="requests: expected each of them once"):
        start_all([bound, bound])
    assert not bound.active, "nor does one that is there twice"
    bound.Free()
    for verb in ("Start", "Test", "Wait", "Free"):
        with pytest.raises(InvalidArgument, match="freed"):
            getattr(bound, verb)()
    with pytest.raises(InvalidArgument, match="freed"):
        wait_all([bound])
    once = comm.Ibarrier()
    with pytest.raises(InvalidArgument, match="only an idle persistent request starts"):
        once.Start()
    once.Wait()
    assert once.Wait() is True and once.Test(), "what is over stays over"
    once.Free()
    comm.Barrier()


def test_lower_case_spellings_and_what_they_show(comm):
    request = comm.Barrier_init()
    assert isinstance(request, Request)
    assert repr(request) == "<persistent request of barrier, idle>"
    request.start()
    assert request.wait() is None and request.test() == (True, None), "as in mpi4py, with the message: none"
    request.free()
    assert repr(request) == "<persistent request of barrier, freed>"


@pytest.mark.parametrize("algorithm", [name for name in collectives.algorithms("scan") if name != "native"])
@pytest.mark.parametrize("method", ["Scan_init", "Exscan_init"])
def test_a_persistent_scan_whose_last_rank_is_late(comm, method, algorithm):
    """A rank receives from one rank and sends to another, which does not follow: more messages than there is room."""
    rank, size = comm.Get_rank(), comm.Get_size()
    mine, total = np.ones(5), np.zeros(5)
    bound = getattr(comm, method)(mine, total, algorithm=algorithm)
    if rank == size - 1:
        time.sleep(0.1)
    for turn in range(1, 6):
        mine[:] = turn
        bound.Start()
        bound.Wait()
        if rank or method == "Scan_init":
            assert (total == turn * (rank + (method == "Scan_init"))).all()
    bound.Free()
