"""Positions of every rank, and pairs of queries and keys that it computes."""

from itertools import pairwise

import numpy as np
import pytest
from support.operator_cases import seen_keys

from parallel.nn.attention_mask import CAUSAL, FULL, AttentionMask
from parallel.sharding.context.sequence_division import DIVISIONS, SequenceDivision

MASKS = [CAUSAL, FULL, AttentionMask(window=4), AttentionMask(False, window=3), AttentionMask(documents=(2, 9, 10))]


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("length, ranks, parts", [(24, 3, 0), (24, 2, 8), (17, 4, 0), (3, 5, 0), (0, 2, 4), (1, 1, 0)])
def test_every_position_once(name, length, ranks, parts):
    division = SequenceDivision(name, length, ranks, parts)
    positions = [division.positions(rank) for rank in range(ranks)]
    assert sorted(np.concatenate(positions).tolist()) == list(range(length))
    assert division.sizes == tuple(map(len, positions))
    for rank, own in enumerate(positions):
        cut = [own[place] for place in division.part_slices(rank)]
        blocks = [division.part_blocks(part) for part in division.parts_of(rank)]
        assert [part.tolist() for part in cut] == [[at for block in some for at in block] for some in blocks]


def test_sizes_differ_by_one_chunk_position():
    assert SequenceDivision("contiguous", 17, 4).sizes == (5, 4, 4, 4)
    assert SequenceDivision("striped", 17, 4).sizes == (5, 4, 4, 4)
    assert SequenceDivision("zigzag", 17, 2).sizes == (9, 8)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_parts_do_not_depend_on_the_ranks(name):
    """What a rank of two holds is what its four of eight hold, in the same order."""
    eight = SequenceDivision(name, 64, 8)
    for ranks in (1, 2, 4, 8):
        division = SequenceDivision(name, 64, ranks, 8)
        for rank in range(ranks):
            own = [eight.positions(part) for part in division.parts_of(rank)]
            assert np.array_equal(division.positions(rank), np.concatenate(own))


@pytest.mark.parametrize("n", [1, 4, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_zigzag_is_balanced(ranks, n):
    """2 n^2 pairs on every rank in every step; the diagonals of the first step have n more."""
    division = SequenceDivision("zigzag", 2 * ranks * n, ranks)
    for rank in range(ranks):
        pairs = [division.pairs(rank, step, CAUSAL) for step in range(ranks)]
        assert pairs == [2 * n**2 + n] + [2 * n**2] * (ranks - 1)


def test_the_others_are_not():
    """Contiguous: all or nothing in each step. Striped: half of all pairs, less the diagonal on the ranks before."""
    n, ranks = 6, 4
    for rank in range(ranks):
        contiguous, striped = (
            [SequenceDivision(name, n * ranks, ranks).pairs(rank, step, CAUSAL) for step in range(ranks)]
            for name in ("contiguous", "striped")
        )
        half = n * (n + 1) // 2
        assert contiguous == [half] + [n * n if step <= rank else 0 for step in range(1, ranks)]
        assert striped == [half if step <= rank else half - n for step in range(ranks)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("name", DIVISIONS)
def test_key_ranges_are_the_mask(name, mask):
    """All blocks of all ranks against the mask by pairs of positions."""
    division, seen = SequenceDivision(name, 19, 3), seen_keys(mask, 19)
    blocks = [block for rank in range(3) for block in division.blocks(rank)]
    for queries in blocks:
        for keys in blocks:
            low, high = mask.key_ranges(queries, keys)
            places = np.arange(len(keys))
            found = (low[:, None] <= places) & (places < high[:, None])
            assert np.array_equal(found, seen[np.ix_(list(queries), list(keys))])
    pairs = sum(division.pairs(rank, step, mask) for rank in range(3) for step in range(3))
    assert pairs == seen.sum()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SequenceDivision("diagonal", 8, 2), "expected one of contiguous, zigzag, striped; found 'diagonal'"),
        (lambda: SequenceDivision("zigzag", 8, 3, 8), "expected parts that 3 ranks divide, found 8"),
        (lambda: SequenceDivision("zigzag", -1, 1), "no negative length"),
        (lambda: AttentionMask(window=-1), "window: expected an integer from 0 on, found -1"),
        (lambda: AttentionMask(documents=(4, 4)), "expected ascending positions above 0"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_blocks_are_ascending():
    for name in DIVISIONS:
        for block in SequenceDivision(name, 23, 4).blocks(2):
            assert all(first < second for first, second in pairwise(block))
