"""Chunk numbers: ranges that name them, join them, go round the circle, and print."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.schedule.steps import (
    NOTHING,
    Copy,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    cyclic,
    freeze,
    numbers,
    one,
    scattered,
    show,
    span,
)

fast = settings(deadline=None, max_examples=200)


@pytest.mark.parametrize(
    ("chunks", "meant", "shown"),
    [
        (NOTHING, [], "nothing"),
        (one(0), [0], "0"),
        (one(7), [7], "7"),
        (span(2, 5), [2, 3, 4], "2-4"),
        (span(2, 3), [2], "2"),
        (span(2, 2), [], "nothing"),
        (span(3, 2), [], "nothing"),
        (cyclic(6, 4, 8), [6, 7, 0, 1], "6-7,0-1"),
        (cyclic(7, 1, 8), [7], "7"),
        (cyclic(-1, 2, 8), [7, 0], "7,0"),
        (cyclic(0, 8, 8), list(range(8)), "0-7"),
        (cyclic(3, 0, 8), [], "nothing"),
        (scattered([4, 5, 1, 2, 3, 0]), [4, 5, 1, 2, 3, 0], "4-5,1-3,0"),
        (scattered([]), [], "nothing"),
    ],
)
def test_chunks_mean_and_show(chunks, meant, shown):
    assert list(numbers(chunks)) == meant
    assert show(chunks) == shown


@fast
@given(st.integers(-40, 40), st.integers(1, 20), st.data())
def test_cyclic_goes_round_in_at_most_two_ranges(start, size, data):
    count = data.draw(st.integers(0, size))
    chunks = cyclic(start, count, size)
    assert list(numbers(chunks)) == [(start + i) % size for i in range(count)]
    assert len(chunks) <= 2
    assert all(part for part in chunks)


@fast
@given(st.lists(st.integers(0, 9)))
def test_scattered_keeps_order_in_as_few_ranges_as_can_be(chunks):
    found = scattered(chunks)
    assert list(numbers(found)) == chunks
    assert len(found) == sum(
        after != before + 1 for before, after in zip([None, *chunks], chunks) if before is not None
    ) + bool(chunks)


def test_a_schedule_is_data():
    rounds = [[Send(1, one(0)), RecvReduce(2, one(1))], [], [Recv(0, one(2)), Copy(one(0), one(1))]]
    schedule = freeze(iter(rounds))
    assert schedule == ((Send(1, one(0)), RecvReduce(2, one(1), "left")), (), (Recv(0, one(2)), Copy(one(0), one(1))))
    assert hash(schedule) == hash(freeze(rounds))


def test_steps_of_different_kinds_are_told_apart_by_type():
    """They are tuples, so that equal fields compare equal; whoever asks for the kind must ask for the type."""
    assert isinstance(Send(1, one(0)), Send) and not isinstance(Send(1, one(0)), Recv)
    assert Reduce(one(0), one(1)).side == RecvReduce(0, one(1)).side == "left"
