"""Cutting and laying out: nothing is lost, nothing overlaps, and pieces are as equal as can be."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.schedule.chunks import ChunkLayout, MemorySpan, aligned, even, joined, split
from collectives.schedule.steps import NOTHING, one, span

fast = settings(deadline=None, max_examples=200)


@pytest.mark.parametrize(
    ("elements", "parts", "grain", "lengths"),
    [
        (10, 4, 1, (3, 3, 2, 2)),
        (2, 4, 1, (1, 1, 0, 0)),
        (0, 3, 1, (0, 0, 0)),
        (7, 1, 1, (7,)),
        (8, 4, 1, (2, 2, 2, 2)),
        (64, 2, 16, (32, 32)),
        (70, 2, 16, (32, 38)),
        (80, 2, 16, (48, 32)),
        (31, 2, 16, (16, 15)),  # too little for the grain
        (32, 2, 16, (16, 16)),
        (33, 2, 16, (16, 17)),
    ],
)
def test_even(elements, parts, grain, lengths):
    assert even(elements, parts, grain) == lengths


@fast
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_even_parts_differ_by_one_at_most_and_longer_ones_come_first(elements, parts):
    lengths = even(elements, parts)
    assert sum(lengths) == elements and len(lengths) == parts
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True)


@fast
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 64))
def test_even_with_a_grain_starts_every_part_on_it(elements, parts, grain):
    lengths = even(elements, parts, grain)
    assert sum(lengths) == elements and len(lengths) == parts
    if elements >= parts * grain:
        assert all(start % grain == 0 for start in accumulate(lengths[:-1]))
        assert max(lengths) - min(lengths) < 2 * grain
        assert all(lengths)
    else:
        assert lengths == even(elements, parts)


def test_a_layout_measures_scratch_like_the_chunks_it_mirrors():
    layout = ChunkLayout.packed((5, 3, 2))
    assert layout.length(NOTHING) == 0
    assert layout.length(one(1)) == layout.length(one(4)) == layout.length(one(7)) == 3
    assert layout.length(span(0, 3)) == layout.length(span(2, 5)) == 10


# Places are compared element by element: the list of (memory, position) that they cover.


def elements(places):
    return [(memory, position) for memory, start, stop in places for position in range(start, stop)]


@st.composite
def columns(draw):
    """A few columns of places, equally long all in all, in memories of their own."""
    total = draw(st.integers(0, 30))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
        column = []
        for start, stop in pairwise([0, *cuts, total]):
            shift = draw(st.sampled_from([0, 0, 0, 100]))
            column.append(MemorySpan(draw(st.integers(0, 1)), start + shift, stop + shift))
        found.append(column)
    return found


@fast
@given(columns())
def test_joined_covers_the_same_in_the_fewest_runs(several):
    for column in several:
        runs = joined(column)
        assert elements(runs) == elements(column)
        assert all(start < stop for _, start, stop in runs)
        assert not any(a.memory == b.memory and a.stop == b.start for a, b in pairwise(runs))


@fast
@given(columns())
def test_aligned_rows_cover_every_column_with_equal_lengths(several):
    rows = list(aligned(*several))
    for index, column in enumerate(several):
        assert elements(row[index] for row in rows) == elements(column)
    assert all(len({stop - start for _, start, stop in row}) == 1 for row in rows)
    for one_row, next_row in pairwise(rows):  # no row could be longer
        assert any(a.memory != b.memory or a.stop != b.start for a, b in zip(one_row, next_row))


@fast
@given(columns(), st.data())
def test_split_portions_have_the_lengths_asked_for(several, data):
    rows = list(aligned(*several))
    total = sum(stop - start for (_, start, stop), *_ in rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=5)))
    lengths = [b - a for a, b in pairwise([0, *cuts, total])]
    portions = list(split(rows, lengths))
    assert [sum(row[0].stop - row[0].start for row in portion) for portion in portions] == lengths
    for index, column in enumerate(several):
        assert elements(row[index] for portion in portions for row in portion) == elements(column)
