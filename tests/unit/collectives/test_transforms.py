"""Schedules made from schedules: backwards, in segments, among some ranks."""

import pytest

from collectives.algorithms import linear, mst, ring
from collectives.analysis.prove import prove
from collectives.schedule.steps import Copy, Recv, RecvReduce, Reduce, Send, freeze, one, span
from collectives.schedule.transforms import on, reverse, segmented

SIZES = [1, 2, 3, 5, 8, 13]


def roots(sizes):
    return [(size, root) for size in sizes for root in {0, size // 2, size - 1}]


@pytest.mark.parametrize(("size", "root"), roots(SIZES))
@pytest.mark.parametrize("family", [linear, mst])
def test_backwards_a_broadcast_reduces_and_a_scatter_gathers(family, size, root):
    reduce = [freeze(reverse(family.broadcast(rank, size, root), rank, reducing=True)) for rank in range(size)]
    gather = [freeze(reverse(family.scatter(rank, size, root), rank, reducing=False)) for rank in range(size)]
    prove("reduce", reduce, root)
    prove("gather", gather, root)


@pytest.mark.parametrize(("size", "root"), roots(SIZES))
def test_the_reversed_tree_keeps_rank_order(size, root):
    schedules = [freeze(reverse(mst.broadcast(rank, size, root), rank, reducing=True)) for rank in range(size)]
    assert prove("reduce", schedules, root).ordered


def test_backwards_twice_is_forwards():
    for rank in range(7):
        once = list(mst.scatter(rank, 7, 3))
        assert freeze(reverse(reverse(once, rank, reducing=False), rank, reducing=False)) == freeze(once)


@pytest.mark.parametrize("step", [RecvReduce(1, one(0)), Copy(one(0), one(1)), Reduce(one(0), one(1))])
def test_only_messages_that_move_data_run_backwards(step):
    with pytest.raises(ValueError, match="cannot run backwards"):
        list(reverse([[step]], 0, reducing=False))


def test_steps_of_a_round_run_backwards_too():
    (steps,) = reverse([[Send(1, one(0)), Recv(2, one(1))]], 1, reducing=False)
    assert steps == [Send(2, one(1)), Recv(1, one(0))]
    assert [type(step) for step in steps] == [Send, Recv]


def test_some_ranks_play_as_if_they_were_all():
    """A broadcast among ranks 4, 1, 3 of five, on chunk 2 only; the others do nothing."""
    ranks = [4, 1, 3]
    schedules = [()] * 5
    for place, rank in enumerate(ranks):
        rounds = mst.broadcast(place, 3, 0)
        schedules[rank] = freeze(on(ranks, rounds, lambda chunks: one(2)))
    assert schedules[4] == ((Send(3, one(2)),), (Send(1, one(2)),))
    assert schedules[1] == ((), (Recv(4, one(2)),))
    assert schedules[3] == ((Recv(4, one(2)),), ())


def test_every_kind_of_step_is_renamed():
    steps = [Send(0, one(0)), Recv(1, one(1)), RecvReduce(0, one(2), "right")]
    steps += [Reduce(one(0), one(1), "right"), Copy(one(1), one(0))]
    (found,) = on([7, 9], [steps], lambda chunks: one(chunks[0].start + 10))
    assert found == [
        Send(7, one(10)),
        Recv(9, one(11)),
        RecvReduce(7, one(12), "right"),
        Reduce(one(10), one(11), "right"),
        Copy(one(11), one(10)),
    ]
    assert [type(step) for step in found] == [type(step) for step in steps]


def test_segments_follow_each_other():
    rounds = [[Send(1, one(0))], [Send(2, one(0))]]
    assert list(segmented(rounds, 3, 1, vector=True)) == [
        [Send(1, one(0))],
        [Send(2, one(0)), Send(1, one(1))],
        [Send(2, one(1)), Send(1, one(2))],
        [Send(2, one(2))],
    ]


def test_a_vector_is_cut_before_it_has_chunks_and_blocks_after():
    rounds = [[Send(1, span(1, 3))]]
    assert list(segmented(rounds, 2, 3, vector=True)) == [[Send(1, (range(1, 3),))], [Send(1, (range(4, 6),))]]
    blocks = list(segmented(rounds, 2, 3, vector=False))
    assert blocks == [[Send(1, (range(2, 3), range(4, 5)))], [Send(1, (range(3, 4), range(5, 6)))]]


def test_scratch_copies_are_cut_like_the_vector():
    """Of 3 chunks, number 4 is chunk 1 of the first spare copy; cut in two, a copy has 6 chunks."""
    (first, second) = segmented([[Copy(span(2, 5), one(8))]], 2, 3, vector=True)
    assert first == [Copy((range(2, 3), range(6, 8)), one(12 + 2))]
    assert second == [Copy((range(5, 6), range(9, 11)), one(12 + 5))]
    (first, second) = segmented([[Copy(one(4), one(1))]], 2, 3, vector=False)
    assert (first, second) == ([Copy(one(8), one(2))], [Copy(one(9), one(3))])


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize(
    ("collective", "generate", "vector"),
    [("allreduce", ring.allreduce, True), ("allgather", ring.allgather, False), ("allgather", mst.allgather, False)],
)
def test_segments_move_as_much_in_more_messages(collective, generate, vector, segments):
    size = 5
    once = prove(collective, [freeze(generate(rank, size)) for rank in range(size)])
    cut = prove(
        collective,
        [freeze(segmented(generate(rank, size), segments, size, vector)) for rank in range(size)],
        parts=segments,
    )
    assert cut.messages == segments * once.messages
    assert cut.sent == tuple(sent * segments for sent in once.sent)
    assert cut.combined == tuple(combined * segments for combined in once.combined)
