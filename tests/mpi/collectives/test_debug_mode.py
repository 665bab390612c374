"""With debug=True or CHORUS_DEBUG=1 ranks that do not agree all get an error that names two calls and their lines."""

import inspect
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.exchange_cases import FORMS, TABLE, Question, perform

from collectives import Communicator, wait_all
from collectives.errors import InvalidArgument, InvalidType, RanksDisagree


@pytest.fixture(scope="module")
def checked(world):
    with Communicator(world, debug=True) as comm:
        yield comm


def numbers(n=4, dtype="f8"):
    return np.zeros(n, dtype)


def ended(request):
    request.Wait()


mine = MPI.Op.Create(lambda a, b, t: None, commute=True)

# what differs -> (the call of rank 0, the call of all others, what the error says)
DISAGREEMENTS = {
    "collectives": (
        lambda c: c.Allreduce(numbers(), numbers()),
        lambda c: c.Bcast(numbers()),
        "collective: allreduce / broadcast",
    ),
    "a barrier": (
        lambda c: c.Barrier(),
        lambda c: c.Allreduce(numbers(), numbers()),
        "collective: barrier / allreduce",
    ),
    "roots": (lambda c: c.Bcast(numbers(), 0), lambda c: c.Bcast(numbers(), 1), "root: 0 / 1"),
    "roots of a reduction": (
        lambda c: c.Reduce(numbers(), numbers(), root=1),
        lambda c: c.Reduce(numbers(), numbers(), root=0),
        "root: 1 / 0",
    ),
    "counts": (
        lambda c: c.Allreduce(numbers(4), numbers(4)),
        lambda c: c.Allreduce(numbers(5), numbers(5)),
        "bytes: 32 / 40",
    ),
    "counts of a broadcast": (lambda c: c.Bcast(numbers(4)), lambda c: c.Bcast(numbers(6)), "bytes: 32 / 48"),
    "dtypes": (
        lambda c: c.Allreduce(numbers(4), numbers(4)),
        lambda c: c.Allreduce(numbers(4, "i8"), numbers(4, "i8")),
        "dtype: float64 / int64",
    ),
    "operations": (
        lambda c: c.Allreduce(numbers(), numbers()),
        lambda c: c.Allreduce(numbers(), numbers(), MPI.MAX),
        "op: SUM / MAX",
    ),
    "operations of one's own": (
        lambda c: c.Allreduce(numbers(), numbers(), mine),
        lambda c: c.Allreduce(numbers(), numbers()),
        "op: user-defined, commutative / SUM",
    ),
    "algorithms": (
        lambda c: c.Allreduce(numbers(), numbers(), algorithm="ring"),
        lambda c: c.Allreduce(numbers(), numbers(), algorithm="mst"),
        "algorithm: ring / mst",
    ),
    "segments": (
        lambda c: c.Bcast(numbers(), algorithm="mst", segments=2),
        lambda c: c.Bcast(numbers(), algorithm="mst", segments=3),
        "segments: 2 / 3",
    ),
    "forms": (
        lambda c: c.Allreduce(numbers(), numbers()),
        lambda c: ended(c.Iallreduce(numbers(), numbers())),
        "form: blocking / non-blocking",
    ),
    "forms of binding": (
        lambda c: c.Barrier_init(),
        lambda c: ended(c.Ibarrier()),
        "form: persistent / non-blocking",
    ),
    "lengths of blocks": (
        lambda c: c.Allgatherv(numbers(3), [numbers(3 + c.Get_size()), [3] + [1] * (c.Get_size() - 2) + [2]]),
        lambda c: c.Allgatherv(
            numbers((c.Get_rank() == 1 and 3) or 1), [numbers(3 + c.Get_size()), [2, 3] + [1] * (c.Get_size() - 2)]
        ),
        "lengths: ",
    ),
    "the length of a rank's block": (
        lambda c: c.Scatterv([numbers(2 * c.Get_size()), [2] * c.Get_size()], numbers(2)),
        lambda c: c.Scatterv(None, numbers(3)),
        "bytes for rank 1: 16 / 24",
    ),
    "a gatherv": (
        lambda c: c.Gatherv(numbers(2), [numbers(2 * c.Get_size()), [2] * c.Get_size()]),
        lambda c: c.Gatherv(numbers(1), None),
        "bytes for rank 1: 16 / 8",
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_differ_in(checked, what):
    if checked.Get_size() == 1:
        return
    first, others, told = DISAGREEMENTS[what]
    if what == "lengths of blocks" and checked.Get_rank() > 1:
        others = lambda c: c.Allgatherv(numbers(1), [numbers(3 + c.Get_size()), [2, 3] + [1] * (c.Get_size() - 2)])  # noqa: E731
    with pytest.raises(InvalidArgument) as caught:
        (others if checked.Get_rank() else first)(checked)
    message = str(caught.value)
    assert "ranks make different calls: rank 0 calls " in message and ", rank 1 calls " in message
    assert told in message
    assert message.count("test_debug_mode.py:") == 2, "the source lines of both calls"
    assert len(set(MPI.Intracomm(checked).allgather(message))) == 1, "the same on all ranks"
    total = numbers(1)
    checked.Allreduce(np.ones(1), total)
    assert total[0] == checked.Get_size(), "and the next call works"


def test_the_lines_are_those_of_the_calls(checked):
    if checked.Get_size() == 1:
        return
    with pytest.raises(InvalidArgument) as caught:
        if checked.Get_rank() == 0:
            checked.Barrier()
        else:
            checked.Bcast(numbers())
    here = inspect.getsourcelines(test_the_lines_are_those_of_the_calls)[1]
    for number in (here + 5, here + 7):
        assert f"test_debug_mode.py:{number} in test_the_lines" in str(caught.value)


def test_one_rank_among_many(checked):
    """Only the last rank differs: all hear of it."""
    if checked.Get_size() < 3:
        return
    last = checked.Get_size() - 1
    with pytest.raises(InvalidArgument, match=rf"rank {last} calls allreduce, .*bytes: 8 / 16"):
        n = 1 + (checked.Get_rank() == last)
        checked.Allreduce(numbers(n), numbers(n))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", TABLE)
def test_calls_that_agree_work_as_ever(checked, method, form):
    rank, size = checked.Get_rank(), checked.Get_size()
    for n in (0, 3, 2000):
        for in_place in {False, TABLE[method].in_place}:
            exchange = TABLE[method].make(Question(rank, size, size - 1, n, np.dtype("d"), in_place))
            perform(checked, form, method, exchange)


def test_several_under_way_are_compared_in_order(checked):
    rank, size = checked.Get_rank(), checked.Get_size()
    totals = [numbers(3) for _ in range(30)]
    requests = [checked.Iallreduce(np.full(3, float(rank + i)), total) for i, total in enumerate(totals)]
    for request in requests[:: -1 if rank % 2 else 1]:
        request.Wait()
    for i, total in enumerate(totals):
        assert (total == size * (size - 1) // 2 + size * i).all()


def test_a_disagreement_among_non_blocking_ones(checked):
    if checked.Get_size() == 1:
        return
    good = checked.Iallreduce(np.ones(2), total := numbers(2))
    bad = checked.Ibcast(numbers(), int(checked.Get_rank() == 0))
    with pytest.raises(InvalidArgument, match="root: 1 / 0"):
        bad.Wait()
    good.Wait()
    assert (total == checked.Get_size()).all()


def test_native_ones_begin_in_the_order_of_the_calls(checked):
    """Also before collectives of the library itself, which use the same communicator."""
    rank, size, mine, totals = checked.Get_rank(), checked.Get_size(), numbers(3) + 1, np.zeros((3, 3))
    for late in range(min(size, 2)):
        for other in (lambda: checked.empty(3), lambda: checked.Allreduce_init(numbers(), numbers()).Free()):
            totals[:] = 0
            requests = [checked.Iallreduce(mine, total, algorithm="native") for total in totals]
            if rank == late:
                time.sleep(0.05)
            other()
            for request in requests:
                request.Wait()
            assert (totals == size).all()


def test_a_non_blocking_call_after_one_that_was_broken_off_on_one_rank(world):
    with Communicator(world, debug=True) as comm:
        rank, whole = comm.Get_rank(), comm._planner.nonblocking
        whole.broken = "a non-blocking allreduce was broken off" if rank == 0 else None
        with pytest.raises((RanksDisagree, InvalidArgument), match="a non-blocking allreduce was broken off"):
            comm.Iallreduce(np.ones(2), numbers(2)).Wait()
        whole.broken = None
        comm.Iallreduce(np.ones(2), total := numbers(2)).Wait()
        assert (total == comm.Get_size()).all()


def test_debug_mode_is_passed_on(checked):
    if checked.Get_size() == 1:
        return
    for made in (checked.Dup(), checked.Split(0, 0)):
        with pytest.raises(InvalidArgument, match="ranks make different calls"):
            made.Barrier() if made.Get_rank() else made.Bcast(numbers())
        made.Free()


ON, OFF = ("1", "true", "True", "yes", "ON", " on "), ("0", "false", "FALSE", "no", "off", "", " ", None)


@pytest.mark.parametrize(("value", "on"), [*((value, True) for value in ON), *((value, False) for value in OFF)])
def test_the_environment_decides_where_nothing_is_said(world, monkeypatch, value, on):
    if value is None:
        monkeypatch.delenv("CHORUS_DEBUG", raising=False)
    else:
        monkeypatch.setenv("CHORUS_DEBUG", value)
    for given, expected in ((None, on), (True, True), (False, False)):
        comm = Communicator(world, debug=given)
        assert (comm._checker is not None) == expected
        comm.close()


@pytest.mark.parametrize("value", ["2", "maybe", "-1", "o n"])
def test_an_environment_that_means_nothing_is_refused(world, monkeypatch, value):
    """By all ranks, also if one of them alone has it; not where the argument decides."""
    for number in {0, world.Get_size() - 1}:
        monkeypatch.setenv("CHORUS_DEBUG", value if world.Get_rank() == number else "1")
        with pytest.raises(InvalidArgument, match=f"CHORUS_DEBUG: expected 1, .*found {value!r} on rank {number}"):
            Communicator(world)
    for given in (True, False):
        monkeypatch.setenv("CHORUS_DEBUG", value)
        with Communicator(world, debug=given) as comm:
            assert (comm._checker is not None) == given


def test_one_rank_that_wants_it_is_enough(world, monkeypatch):
    """Launchers may give the environment to some ranks only."""
    last = world.Get_rank() == world.Get_size() - 1
    monkeypatch.setenv("CHORUS_DEBUG", "1" if last else "0")
    with Communicator(world) as comm:
        assert comm._checker is not None
        comm.Barrier()
    monkeypatch.delenv("CHORUS_DEBUG")
    with Communicator(world, debug=True if last else None) as comm:
        assert comm._checker is not None
        comm.Barrier()


def test_reduce_scatter_without_counts(checked):
    """The counts are asked for before the calls are compared; a rank elsewhere must not leave the others hanging."""
    rank, size = checked.Get_rank(), checked.Get_size()
    got = numbers(2)
    checked.Reduce_scatter(np.ones(2 * size), got)
    assert (got == size).all()
    if size > 1:
        with pytest.raises(InvalidArgument, match="ranks make different calls"):
            checked.Reduce_scatter(np.ones(2 * size), got) if rank else checked.Barrier()


# the call of rank 0, which is refused there; the call of all others; the error of rank 0; what the others hear of it
REFUSALS = {
    "a root": (
        lambda c: c.Bcast(numbers(), c.Get_size()),
        lambda c: c.Bcast(numbers(), 0),
        InvalidArgument,
        "InvalidArgument: root: expected a rank from 0 to",
    ),
    "a root with an error of many bytes": (
        lambda c: c.Bcast(numbers(), "ä" * 400),
        lambda c: c.Bcast(numbers(), 0),
        InvalidType,
        "InvalidType: root: expected a rank, found 'ää",
    ),
    "buffers that overlap": (
        lambda c: c.Allreduce((both := numbers(12))[:8], both[4:]),
        lambda c: c.Allreduce(numbers(8), numbers(8)),
        InvalidArgument,
        "sendbuf and recvbuf overlap",
    ),
    "overlapping buffers of a non-blocking call": (
        lambda c: c.Iallreduce((both := numbers(12))[:8], both[4:]),
        lambda c: c.Iallreduce(numbers(8), numbers(8)).Wait(),
        InvalidArgument,
        "sendbuf and recvbuf overlap",
    ),
    "overlapping buffers of a persistent call": (
        lambda c: c.Allreduce_init((both := numbers(12))[:8], both[4:]),
        lambda c: c.Allreduce_init(numbers(8), numbers(8)),
        InvalidArgument,
        "sendbuf and recvbuf overlap",
    ),
    "no buffer": (
        lambda c: c.Allreduce("no buffer", numbers()),
        lambda c: c.Allreduce(numbers(), numbers()),
        InvalidType,
        "InvalidType: sendbuf: ",
    ),
    "too few arguments": (
        lambda c: c.Allgather(numbers()),
        lambda c: c.Allgather(numbers(), numbers(4 * c.Get_size())),
        TypeError,
        "TypeError: ",
    ),
    "an algorithm": (
        lambda c: c.Scan(numbers(), numbers(), algorithm="none"),
        lambda c: c.Scan(numbers(), numbers()),
        InvalidArgument,
        "algorithm",
    ),
    "segments": (
        lambda c: c.Alltoall(numbers(c.Get_size()), numbers(c.Get_size()), segments=0),
        lambda c: c.Alltoall(numbers(c.Get_size()), numbers(c.Get_size())),
        InvalidArgument,
        "segments: expected at least 1",
    ),
    "another collective": (
        lambda c: c.Bcast(numbers(), c.Get_size()),
        lambda c: c.Allreduce(numbers(), numbers()),
        InvalidArgument,
        "calls bcast, form blocking at ",
    ),
    "of a reduce_scatter, before counts are asked for": (
        lambda c: c.Reduce_scatter(numbers(), "no buffer"),
        lambda c: c.Reduce_scatter(numbers(2 * c.Get_size()), numbers(2)),
        InvalidType,
        "InvalidType: recvbuf: ",
    ),
    "of a reduce_scatter, after counts were asked for": (
        lambda c: c.Reduce_scatter("no buffer", numbers(2)),
        lambda c: c.Reduce_scatter(numbers(2 * c.Get_size()), numbers(2)),
        InvalidType,
        "InvalidType: sendbuf: ",
    ),
    "of a non-blocking call": (
        lambda c: c.Iallreduce("no buffer", numbers()),
        lambda c: c.Iallreduce(numbers(), numbers()).Wait(),
        InvalidType,
        "InvalidType: sendbuf: ",
    ),
    "of a persistent call": (
        lambda c: c.Gather_init(numbers(), None, c.Get_size()),
        lambda c: c.Gather_init(numbers(), None, 0),
        InvalidArgument,
        "InvalidArgument: root: ",
    ),
    "a non-blocking call among blocking ones": (
        lambda c: c.Iallreduce("no buffer", numbers()),
        lambda c: c.Allreduce(numbers(), numbers()),
        InvalidType,
        "calls allreduce, form non-blocking at ",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_arguments_that_one_rank_refuses(checked, what):
    """That rank raises its own error, and all others one that names it."""
    first, others, kind, told = REFUSALS[what]
    if checked.Get_rank():
        with pytest.raises(InvalidArgument) as caught:
            others(checked)
        message = str(caught.value)
        assert "rank 0 calls " in message and "and refuses its arguments: " in message and told in message
        assert "test_debug_mode.py:" in message
    else:
        with pytest.raises(kind):
            first(checked)
    requests = [checked.Iallreduce(np.ones(1), total) for total in (numbers(1), numbers(1))]
    total = numbers(1)
    checked.Allreduce(np.ones(1), total)
    wait_all(requests)
    assert total[0] == checked.Get_size(), "and the next calls work"


def test_arguments_that_all_ranks_refuse(checked):
    with pytest.raises(InvalidArgument, match="root: expected a rank from 0 to"):
        checked.Bcast(numbers(), checked.Get_size())
    with pytest.raises(InvalidType, match="sendbuf"):
        checked.Iallreduce("no buffer", numbers())
    checked.Barrier()


def test_a_subclass_that_calls_another_collective(world):
    """The refusal of the inner call is told once."""

    class Mine(Communicator):
        def Bcast(self, buf, root=0, **options):
            self.Allreduce(numbers(), numbers() if self.Get_rank() else "no buffer")

    with Mine(world, debug=True) as comm:
        with pytest.raises(InvalidArgument if comm.Get_rank() else InvalidType):
            comm.Bcast(numbers())
        comm.Barrier()
