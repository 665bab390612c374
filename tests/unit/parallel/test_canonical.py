"""The canonical tree, with the ranks played in one process: who has which leaves never shows in the digits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.runtime.tree_sum import TreeNode, TreeSum, VectorPool, in_order, tree_forecast


def leaf(number):
    """Values whose sum depends on the order."""
    return np.random.default_rng(number).normal(size=3).astype(np.float32) * np.float32(10.0 ** (number % 7))


def by_the_book(first, last, level):
    """A node's sum, straight from the definition: left half plus right half, what is missing is left out."""
    if level == 0:
        return leaf(first)
    middle = first + (1 << level - 1)
    left = by_the_book(first, min(last, middle), level - 1)
    return left if middle >= last else left + by_the_book(middle, last, level - 1)


def counter():
    return TreeSum(VectorPool(lambda: np.empty(3, np.float32)))


def summed(ranks):
    """Every rank adds up what it has; someone adds up the nodes of all."""
    together = counter()
    for numbers in ranks:
        own = counter()
        for number in numbers:
            own.push(TreeNode(0, number), leaf(number), ours=True)
        assert tuple(in_order(own.sums)) == tree_forecast(tuple(numbers)).nodes
        for node, vector in own.sums.items():
            together.push(node, vector, ours=False)
    return together.total()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 13])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 8, 11, 16, 23])
def test_as_the_definition_says(count, size):
    expected = by_the_book(0, count, (count - 1).bit_length())
    contiguous = [range(rank * count // size, (rank + 1) * count // size) for rank in range(size)]
    interleaved = [range(rank, count, size) for rank in range(size)]
    for ranks in (contiguous, interleaved):
        np.testing.assert_array_equal(summed(ranks), expected)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_any_division_in_any_order(owners, random):
    ranks = [[number for number, owner in enumerate(owners) if owner == rank] for rank in range(5)]
    for numbers in ranks:
        random.shuffle(numbers)
    random.shuffle(ranks)
    expected = by_the_book(0, len(owners), (len(owners) - 1).bit_length())
    np.testing.assert_array_equal(summed(ranks), expected)


def test_the_order_matters():
    """Or the tests above would say nothing."""
    one_after_another = leaf(0)
    for number in range(1, 23):
        one_after_another = one_after_another + leaf(number)
    assert not np.array_equal(one_after_another, by_the_book(0, 23, 5))


def test_nothing():
    assert counter().total() is None
    assert tree_forecast(()) == ((), 0, 0)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 21])
@pytest.mark.parametrize("ours", [False, True])
def test_as_many_vectors_as_foreseen(count, ours):
    made = []

    def make():
        made.append(np.empty(3, np.float32))
        return made[-1]

    sums = TreeSum(VectorPool(make))
    for _ in range(3):  # again and again in the same memory
        for number in range(count):
            vector = leaf(number)
            if ours:
                taken = sums.pool.take()
                taken[...] = vector
                vector = taken
            sums.push(TreeNode(0, number), vector, ours)
        sums.pool.give(sums.total())
    foreseen = tree_forecast(tuple(range(count)))
    assert len(made) == (foreseen.taken if ours else foreseen.kept)


def test_vectors_of_others_are_only_read():
    sums, vectors = counter(), [leaf(number) for number in range(6)]
    for number, vector in enumerate(vectors):
        vector.flags.writeable = False
        sums.push(TreeNode(0, number), vector, ours=False)
    np.testing.assert_array_equal(sums.total(), by_the_book(0, 6, 3))
