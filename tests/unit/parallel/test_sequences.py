"""Sequences of differing lengths: padding without targets, and steps and micro-batches up to a number of tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.data.sampler import overlapping
from parallel.data.sequences import PaddedSequences, TokenSampler
from parallel.nn.loss import SoftmaxCrossEntropy

LENGTHS = st.lists(st.integers(1, 40), max_size=60).map(lambda some: np.array(some, np.int64))


def test_padding_has_no_targets():
    sequences = [np.arange(count, dtype=np.uint16) + 10 for count in (2, 5, 3)]
    data = PaddedSequences(sequences)
    x, y = data.take(np.array([2, 0, 1]))
    assert x.dtype == y.dtype == np.int64 and x.shape == y.shape == (3, 4)
    assert x.tolist() == [[10, 11, 0, 0], [10, 0, 0, 0], [10, 11, 12, 13]]
    assert y.tolist() == [[11, 12, -1, -1], [11, -1, -1, -1], [11, 12, 13, 14]]
    assert SoftmaxCrossEntropy().count(y) == data.lengths.sum() == 7
    assert data.take(np.zeros(0, np.int64))[0].shape == (0, 0)
    assert len(PaddedSequences([])) == 0
    with pytest.raises(ValueError, match="expected 2 tokens or more in each, found 1 in number 1"):
        PaddedSequences([np.arange(2), np.arange(1)])


@given(LENGTHS, st.integers(1, 100), st.integers(1, 60), st.integers(0, 3), st.booleans())
@settings(deadline=None)
def test_steps_hold_what_fits(lengths, global_tokens, micro_tokens, epoch, shuffle):
    sampler = TokenSampler(lengths, global_tokens, micro_tokens, seed=3, shuffle=shuffle)
    steps = list(sampler.steps(epoch))
    order, at = sampler.order(epoch), 0
    for number, step in enumerate(steps):
        assert step.number == number
        mine = np.concatenate(step.parts)
        assert sorted(mine) == sorted(order[at : at + len(mine)])
        at += len(mine)
        assert lengths[mine].sum() <= global_tokens or len(mine) == 1
        if at < len(order):  # one more would not have fitted
            assert lengths[mine].sum() + lengths[order[at]] > global_tokens
        for part in step.parts:
            assert len(part) * lengths[part].max() <= micro_tokens or len(part) == 1
        assert (np.diff(lengths[mine]) <= 0).all()
    assert at == len(lengths) and len(steps) == sampler.steps_in(epoch)


@given(LENGTHS, st.integers(1, 100), st.integers(1, 60), st.integers(1, 5))
@settings(deadline=None)
def test_no_step_has_more_micro_batches_than_planned(lengths, global_tokens, micro_tokens, most):
    """With the smallest limit that suffices; steps that have no more are as without."""
    plain = TokenSampler(lengths, global_tokens, micro_tokens)
    sampler = TokenSampler(lengths, global_tokens, micro_tokens, most=most)
    for one, step in zip(plain.steps(0), sampler.steps(0), strict=True):
        if len(one.parts) <= most:
            assert [list(part) for part in one.parts] == [list(part) for part in step.parts]
            continue
        assert len(step.parts) <= most and list(np.concatenate(step.parts)) == list(np.concatenate(one.parts))
        limit = max(len(part) * lengths[part].max() for part in step.parts if len(part) > 1)  # one alone may be longer
        below = TokenSampler(lengths, global_tokens, int(limit) - 1).at(0, step.number)
        assert len(below.parts) > most


def test_a_position_goes_on_where_epochs_have_different_numbers_of_steps():
    lengths = np.random.default_rng(0).integers(1, 30, 50)
    sampler = TokenSampler(lengths, 60, seed=1)
    assert len({sampler.steps_in(epoch) for epoch in range(10)}) > 1
    steps = iter(sampler.ahead())
    for _ in range(40):
        sampler.done(next(steps))
    again = TokenSampler(lengths, 60, seed=1)
    again.load(sampler.position())
    following, same = next(steps), next(again.ahead())
    assert (following.epoch, following.number) == (same.epoch, same.number)
    assert np.concatenate(following.parts).tolist() == np.concatenate(same.parts).tolist()
    with pytest.raises(IndexError, match="an epoch of 50 samples has"):
        sampler.at(0, 1000)


@given(st.integers(0, 40), st.integers(1, 8), st.floats(0, 3))
@settings(deadline=None)
def test_overlapping_shares(count, size, fraction):
    shares = [overlapping(count, rank, size, fraction) for rank in range(size)]
    assert set().union(*shares) == set(range(count))
    for rank, share in enumerate(shares):
        own = (rank + 1) * count // size - rank * count // size
        assert len(share) == len(set(share)) == min(count, own + int(np.ceil(fraction * own)))
        assert all((after - before) % count == 1 % count for before, after in pairwise(share))
