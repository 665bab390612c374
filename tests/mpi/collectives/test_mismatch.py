"""Ranks that make different calls, without debug mode: a rank that receives another message than it expects raises.

Every case has two ranks and a communicator of its own, which is of no further use. The rank that only sends returns.
"""

import time
from contextlib import suppress

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, algorithms
from collectives.errors import Mismatch, RanksDisagree
from collectives.transport.node.mailbox import SLOTS


@pytest.fixture(params=["shared memory", "messages"])
def pair(request, world):
    """The first two ranks of the world."""
    plain = MPI.Intracomm(world)
    if plain.Get_size() == 1:
        pytest.skip("one rank agrees with itself")
    two = plain.Split(0 if plain.Get_rank() < 2 else MPI.UNDEFINED)
    if two == MPI.COMM_NULL:
        yield None
    else:
        comm = Communicator(two, debug=False, shared=request.param == "shared memory", tuning=False)
        comm.way = request.param
        yield comm
        with suppress(Mismatch):  # a message that the other rank sent and this one did not expect
            comm.close()
        two.Free()


def numbers(n, dtype="f8"):
    return np.ones(n, dtype)


def bcast(n, root=0):
    return lambda c: c.Bcast(numbers(n), root)


def allreduce(n, dtype="f8", op=MPI.SUM, **options):
    return lambda c: c.Allreduce(numbers(n, dtype), numbers(n, dtype), op, **options)


# the call of rank 0, the call of rank 1, the ranks that see it
LENGTHS = {
    "a broadcast longer than expected": (bcast(6), bcast(4), {1}),
    "a broadcast shorter than expected": (bcast(4), bcast(6), {1}),
    "a middle one": (bcast(400), bcast(300), {1}),
    "short and long": (bcast(4), bcast(40_000), {1}),
    "allreduces": (allreduce(4), allreduce(5), {0, 1}),
    "allreduces that are both middle": (allreduce(40), allreduce(50), {0, 1}),
    "compiled allreduces": (allreduce(1), allreduce(2), {0, 1}),
    "a gather": (lambda c: c.Gather(numbers(3), numbers(6)), lambda c: c.Gather(numbers(2), None), {0}),
    "a gatherv": (
        lambda c: c.Gatherv(numbers(2), [numbers(5), [2, 3]]),
        lambda c: c.Gatherv(numbers(2), None),
        {0},
    ),
    "a scatterv": (
        lambda c: c.Scatterv([numbers(4), [2, 2]], numbers(2)),
        lambda c: c.Scatterv(None, numbers(3)),
        {1},
    ),
    "allgathers": (
        lambda c: c.Allgather(numbers(3), numbers(6)),
        lambda c: c.Allgather(numbers(2), numbers(4)),
        {0, 1},
    ),
    "an alltoallv": (
        lambda c: c.Alltoallv([numbers(4), [2, 2]], [numbers(4), [2, 2]]),
        lambda c: c.Alltoallv([numbers(4), [2, 2]], [numbers(5), [3, 2]][:1] + [[3, 2]]),
        {1},
    ),
    "collectives of other lengths": (bcast(4), lambda c: c.Reduce(numbers(2), numbers(2), root=1), {1}),
    "element types of other widths": (allreduce(4, "f4"), allreduce(4, "f8"), {0, 1}),
}

MARKS = {
    "element types": (allreduce(4, "f8"), allreduce(4, "i8"), {0, 1}),
    "operations": (allreduce(4, op=MPI.MAX), allreduce(4), {0, 1}),
    "algorithms": (
        allreduce(4, algorithm="recursive_doubling"),
        lambda c: c.Allgather(numbers(4), numbers(8)),
        {0, 1},
    ),
    "collectives": (bcast(4), lambda c: c.Scatter(None if c.Get_rank() else numbers(8), numbers(4)), {1}),
}


def disagree(pair, case):
    if pair is None:
        return
    rank = pair.Get_rank()
    if case[rank] is None:
        return
    if rank not in case[2]:
        case[rank](pair)
        return
    with pytest.raises(MPI.Exception) as caught:
        case[rank](pair)
    assert caught.value.Get_error_class() == MPI.ERR_TRUNCATE
    if pair.way == "shared memory":
        assert isinstance(caught.value, Mismatch) and isinstance(caught.value, ValueError)
    if isinstance(caught.value, Mismatch):
        assert f"rank {rank} expected a message of " in str(caught.value)
        assert f" bytes from rank {1 - rank}, found " in str(caught.value) and "debug=True" in str(caught.value)
    with pytest.raises(RanksDisagree, match="go on with a new Communicator"):
        pair.Barrier()


@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_that_differ(pair, case):
    disagree(pair, LENGTHS[case])


@pytest.mark.parametrize("pair", ["shared memory"], indirect=True)
@pytest.mark.parametrize("case", MARKS)
def test_arguments_that_differ_while_lengths_are_alike(pair, case):
    disagree(pair, MARKS[case])


FORMS = {
    "blocking": lambda comm, name, *arguments: getattr(comm, name)(*arguments),
    "non-blocking": lambda comm, name, *arguments: getattr(comm, f"I{name.lower()}")(*arguments).Wait(),
    "persistent": lambda comm, name, *arguments: started(getattr(comm, f"{name}_init")(*arguments)),
}


def started(request):
    request.Start()
    request.Wait()


def from_root(comm, name, form, root, n=3):
    """A broadcast or scatter of `n` numbers from a root."""
    size = comm.Get_size()
    arguments = (numbers(n),) if name == "Bcast" else (numbers(n * size), numbers(n))
    FORMS[form](comm, name, *arguments, root)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("agreed", [0, 40])
@pytest.mark.parametrize("form", ["blocking", "non-blocking"])
@pytest.mark.parametrize("name", ["Bcast", "Scatter"])
@pytest.mark.parametrize("pair", ["shared memory"], indirect=True)
def test_both_ranks_are_roots(pair, name, form, agreed, first):
    """Each sends and neither receives: the later one finds that at once, the other one at its next call.

    The calls before, on which both agree, are compiled if possible.
    """
    if pair is None:
        return
    rank, plain = pair.Get_rank(), MPI.Intracomm(pair)
    for _ in range(agreed):
        from_root(pair, name, form, first)
    plain.Barrier()
    if rank == first:
        from_root(pair, name, form, rank)
        plain.Barrier()
    else:
        plain.Barrier()
        with pytest.raises(Mismatch, match=f"rank {rank} expected no message from rank {first}, found 24 bytes"):
            from_root(pair, name, form, rank)
        with pytest.raises(RanksDisagree):
            from_root(pair, name, form, rank)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pair", ["shared memory"], indirect=True)
def test_roots_that_differ_again_and_again(pair):
    """A rank finds it before the messages of the other one have filled the mailbox."""
    if pair is None:
        return
    passed = False
    with suppress(Mismatch):
        for _ in range(SLOTS):
            pair.Bcast(numbers(3), pair.Get_rank())
        passed = True
    assert not all(MPI.Intracomm(pair).allgather(passed))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["Bcast", "Scatter"])
def test_the_end_finds_a_message_of_the_last_call(pair, name, form):
    """Of two ranks that have sent, the one that closes last finds a message at least."""
    if pair is None:
        return
    rank, plain = pair.Get_rank(), MPI.Intracomm(pair)
    if form == "persistent":  # their creation compares nothing, and uses messages of its own
        plain.Barrier()
    errors = []
    try:
        from_root(pair, name, form, rank)
    except MPI.Exception as error:
        errors.append(error)
    plain.Barrier()
    time.sleep(0.05 * rank)
    try:
        pair.close()
    except Mismatch as error:
        errors.append(error)
    with pytest.raises(MPI.Exception):
        pair.Barrier()
    assert any(plain.allgather(bool(errors)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", [name for name in algorithms("broadcast") if name != "native"])
def test_late_roots_are_no_mismatch(comm, algorithm):
    """Other ranks are ahead by as many calls as they can be, of all lengths, with other collectives in between."""
    rank, size = comm.Get_rank(), comm.Get_size()
    rng = np.random.default_rng(3)
    for turn in range(60):
        root, n = int(rng.integers(size)), int(rng.choice([0, 1, 2, 3, 7, 100, 5000]))
        if rank == rng.integers(size):
            time.sleep(0.002)
        mine = np.full(n, turn if rank == root else -1)
        comm.Bcast(mine, root, algorithm=algorithm)
        assert (mine == turn).all()
        block = np.zeros(n)
        comm.Scatter(np.full(n * size, turn + 0.5) if rank == root else None, block, root)
        assert (block == turn + 0.5).all()
        if turn % 3 == 0:
            comm.Reduce(mine, np.zeros_like(mine), root=root)


@pytest.mark.parametrize("root", [True, 1.0, np.float64(1), np.float32(1), np.int8(1), np.bool_(True), np.array(1)])
def test_roots_of_other_types(comm, root):
    if comm.Get_size() == 1:
        return
    mine = np.full(3, comm.Get_rank())
    comm.Bcast(mine, root)
    assert (mine == 1).all()


@pytest.mark.parametrize("root", [1.5, "1", None, np.array([1]), np.float64(0.5), 1j])
def test_roots_that_are_no_ranks(comm, root):
    with pytest.raises(TypeError, match="root: expected a rank"):
        comm.Bcast(np.zeros(3), root)


@pytest.mark.parametrize("turns", [3, 3000])
@pytest.mark.parametrize("pair", ["shared memory"], indirect=True)
def test_one_call_among_many_that_agreed(pair, turns):
    """The one that differs is found, also when the calls before it were compiled."""
    if pair is None:
        return
    rank = pair.Get_rank()
    mine, total = numbers(1), numbers(1)
    for _ in range(turns):
        pair.Allreduce(mine, total)
    other = numbers(1) if rank else numbers(1, "i8")
    with pytest.raises(Mismatch):
        pair.Allreduce(other, other.copy())


def test_non_blocking_and_persistent_calls(pair):
    if pair is None:
        return
    rank = pair.Get_rank()
    n = 3 + rank
    bound = pair.Allreduce_init(numbers(n), numbers(n))
    bound.Start()
    with pytest.raises(MPI.Exception) as caught:
        bound.Wait()
    assert caught.value.Get_error_class() == MPI.ERR_TRUNCATE
    if rank:
        with pytest.raises(Mismatch, match="expected a message of 32 bytes from rank 0, found 24 bytes"):
            pair.Ibcast(numbers(n), 0).Wait()
    else:
        pair.Ibcast(numbers(n), 0).Wait()


@pytest.mark.parametrize("pair", ["shared memory"], indirect=True)
def test_arrays_that_the_receiver_sees(pair):
    """Messages of which only the address travels have lengths and marks too."""
    if pair is None:
        return
    mine = pair.empty(2000 + pair.Get_rank())
    mine[:] = 1
    if pair.Get_rank():
        with pytest.raises(Mismatch, match="expected a message of 16008 bytes from rank 0, found 16000 bytes"):
            pair.Bcast(mine)
    else:
        pair.Bcast(mine)
