"""Tiers of the tests."""

import pytest


def default(names, *chosen):
    """Values of a parameter for `parametrize`, of which the default tier takes only the chosen ones."""
    assert all(one in names for one in chosen), chosen
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.full) for name in names]


def combinations(cases):
    """Combinations for `parametrize`, of which the default tier takes a few with every value of every parameter."""
    few = covering({case: set(enumerate(map(id, case))) for case in cases})
    return [case if case in few else pytest.param(*case, marks=pytest.mark.full) for case in cases]


def covering(values):
    """A few cases in which all values occur: again and again one with the most values that do not occur yet."""
    chosen, missing = set(), set().union(*values.values())
    candidates = {len(missing): list(values)}  # by at least as many missing values as they have
    for count in range(len(missing), 0, -1):
        for item in candidates.get(count, ()):
            new = len(values[item] & missing)
            if new == count:
                chosen.add(item)
                missing -= values[item]
            else:
                candidates.setdefault(new, []).append(item)
    return chosen
