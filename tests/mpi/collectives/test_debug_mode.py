"""With debug=True or CHORUS_DEBUG=1 ranks that do not agree all get an error that names two calls and their lines."""

import inspect

import numpy as np
import pytest
from exchanges import FORMS, TABLE, Question, perform
from mpi4py import MPI

from collectives import Communicator
from collectives.errors import InvalidArgument


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


def test_debug_mode_is_passed_on(checked):
    if checked.Get_size() == 1:
        return
    for made in (checked.Dup(), checked.Split(0, 0)):
        with pytest.raises(InvalidArgument, match="ranks make different calls"):
            made.Barrier() if made.Get_rank() else made.Bcast(numbers())
        made.Free()


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False), (None, False), ("yes", True)])
def test_the_environment_decides_where_nothing_is_said(world, monkeypatch, value, on):
    if value is None:
        monkeypatch.delenv("CHORUS_DEBUG", raising=False)
    else:
        monkeypatch.setenv("CHORUS_DEBUG", value)
    for given, expected in ((None, on), (True, True), (False, False)):
        comm = Communicator(world, debug=given)
        assert (comm._checker is not None) == expected
        comm.close()


def test_reduce_scatter_without_counts(checked):
    """The counts are asked for before the calls are compared; a rank elsewhere must not leave the others hanging."""
    rank, size = checked.Get_rank(), checked.Get_size()
    got = numbers(2)
    checked.Reduce_scatter(np.ones(2 * size), got)
    assert (got == size).all()
    if size > 1:
        with pytest.raises(InvalidArgument, match="ranks make different calls"):
            checked.Reduce_scatter(np.ones(2 * size), got) if rank else checked.Barrier()
