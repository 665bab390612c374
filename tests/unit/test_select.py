"""The choice of an algorithm: the cheapest that can do the call, from what all ranks know."""

import pytest

from collectives import catalog, select
from collectives.chunks import Layout, even
from collectives.errors import InvalidArgument
from collectives.select import BUILT_IN, choose
from collectives.semantics import MEANINGS, vector
from collectives.walk import price

COLLECTIVES = list(catalog.CATALOG)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ordered", [False, True])
def test_nothing_that_can_do_it_is_cheaper(collective, ordered):
    for size in (1, 2, 3, 8, 64):
        for nbytes in (0, 8, 4096, 1 << 20, 1 << 28):
            entries = {n: e for n, e in catalog.CATALOG[collective].items() if e.alike and not e.placed}
            able = {n: e for n, e in entries.items() if e.ordered or not ordered}
            if not able:
                continue
            chosen = able[choose(collective, size, nbytes, ordered).algorithm]
            assert chosen.seconds(size, nbytes, *BUILT_IN) == min(
                entry.seconds(size, nbytes, *BUILT_IN) for entry in able.values()
            )


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if MEANINGS[c].reduces])
def test_an_ordered_operation_gets_an_algorithm_that_keeps_order(collective):
    for size in (2, 3, 7, 16):
        for nbytes in (0, 8, 1 << 24):
            assert catalog.find(collective, choose(collective, size, nbytes, ordered=True).algorithm).ordered


@pytest.mark.parametrize("collective", ["scatter", "gather"])
def test_where_lengths_are_private_bytes_do_not_matter(collective):
    for size in (2, 5, 64):
        assert len({choose(collective, size, nbytes, private=True) for nbytes in (0, 8, 1 << 10, 1 << 28)}) == 1
    assert catalog.find(collective, choose(collective, 5, 0, private=True).algorithm).private


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_short_messages_take_few_rounds_and_long_ones_little_volume(collective):
    for size in (8, 13, 64):
        entries = {n: e for n, e in catalog.CATALOG[collective].items() if e.alike}
        short, long = (entries[choose(collective, size, nbytes).algorithm] for nbytes in (8, 1 << 34))
        fewest = min(catalog.evaluate(entry.rounds, size) for entry in entries.values())
        least = min(catalog.evaluate(entry.beta or entry.volume, size) for entry in entries.values())
        assert catalog.evaluate(short.rounds, size) == fewest
        assert catalog.evaluate(long.beta or long.volume, size) == least


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("allreduce", "star"), "algorithm: unknown algorithm 'star' for allreduce; known: linear, mst, ring"),
        (
            ("allreduce", "ring", True),
            "algorithm: 'ring' for allreduce does not keep rank order, which an operation that does not commute needs; "
            "able: linear, mst, recursive_doubling",
        ),
        (
            ("allreduce", "leaders", True, (0, 1, 0)),
            "algorithm: 'leaders' for allreduce does not keep rank order, which an operation that does not commute "
            "needs; able: linear, mst, recursive_doubling",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(arguments, message):
    with pytest.raises(InvalidArgument) as caught:
        select.check(*arguments)
    assert str(caught.value).startswith(message)


def test_what_can_be_done_is_not():
    assert select.check("allreduce", "ring") is select.check("allreduce", "leaders", True, (0, 0, 1)) is None


def test_lengths_travel_ahead_only_where_that_saves_rounds():
    assert choose("gather", 4, 0, private=True).algorithm == "linear"
    assert choose("gather", 64, 0, private=True).algorithm == "mst"
    assert choose("alltoall", 64, 0, private=True).algorithm == "pairwise"  # bruck may move far more


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_predictions_are_the_clock_s(collective):
    for name in catalog.names(collective):
        for size, nbytes in ((1, 8), (3, 1000), (4, 1 << 20)):
            blocks = catalog.blocks(collective, name, size)
            layout = Layout.packed(even(nbytes * blocks // vector(collective, size, blocks), blocks))
            found = select.predict(collective, name, size, nbytes)
            assert found == price(catalog.build_all(collective, name, size), layout, 1, BUILT_IN).seconds
            assert (found > 0) == (size > 1)


def test_segments_enter_the_prediction():
    whole = select.predict("broadcast", "linear", 4, 1 << 20)
    assert select.predict("broadcast", "linear", 4, 1 << 20, 4) != whole
