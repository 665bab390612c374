"""Tiers of the tests."""

import pytest


def default(names, *chosen):
    """Values of a parameter for `parametrize`, of which the default tier takes only the chosen ones."""
    assert all(one in names for one in chosen), chosen
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.full) for name in names]
