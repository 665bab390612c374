"""Arrays of operators that forward passes change are found, wherever they are; constants and new ones are not."""

import numpy as np
import pytest

from parallel import nn
from parallel.engine.operator_records import PartRecords, step_records
from parallel.nn.compose import Recompute
from parallel.nn.gradcheck import GradientMismatch, check
from parallel.nn.operator import name_all
from parallel.nn.own_arrays import changed_arrays, watched

X = np.ones((2, 3))


class Changes(nn.Operator):
    """x, with arrays in attributes that `change` is called with in each pass."""

    def __init__(self, change):
        self.change = change
        self.array, self.held = np.zeros(3), {"deep": [np.zeros(2), (np.float64(0),)], "text": "none"}

    def forward(self, x, run):
        self.change(self)
        return x.copy(), None

    def backward(self, dy, saved, grads):
        return dy


def in_place(one):
    one.array += 1


def in_another_array(one):
    one.array = one.array + 1


def in_containers(one):
    one.held["deep"][0][1] = 5


def of_a_number(one):
    one.held["deep"][1] = (one.held["deep"][1][0] + 1,)


def to_another_shape(one):
    one.array = np.zeros(4)


CHANGES = {
    in_place: "array",
    in_another_array: "array",
    in_containers: "held.deep.0",
    of_a_number: "held.deep.1.0",
    to_another_shape: "array",
}


def passed(unit, **options):
    run = nn.PassMode(**options)
    with watched(unit, run):
        unit.forward(X, run)
    return run.changes


@pytest.mark.parametrize("change", CHANGES)
def test_what_forward_changes_is_named(change):
    unit = nn.Sequential([nn.ReLU(), Recompute(Changes(change))])
    name_all(nn.Sequential([unit]))
    (text,) = passed(unit)
    assert text.startswith(f"Changes 0.1: {CHANGES[change]} was changed by forward; expected forward to leave")
    with pytest.raises(GradientMismatch, match="was changed by forward"):
        check(Changes(change), X)


def test_what_stays_or_is_new_is_taken():
    def constant(one):
        one.table = getattr(one, "table", np.arange(5))
        one.array = one.array.copy()

    unit = Changes(constant)
    assert not any(passed(unit) for _ in range(3))
    unit.change = in_place
    assert not passed(unit)  # a pass without changes was the last one that is watched


def test_every_pass_with_changes_is_watched():
    unit = Changes(in_place)
    assert all(len(passed(unit)) == 1 for _ in range(3)) and not passed(unit, training=False)
    assert changed_arrays([nn.PassMode()]) is None


def test_an_array_that_is_made_first_and_then_changed():
    """A running mean that begins with the first batch."""

    def lazily(one):
        one.mean = one.mean + 1 if hasattr(one, "mean") else np.zeros(3)

    unit = Changes(lazily)
    assert not passed(unit) and "mean was changed" in passed(unit)[0]


def test_records_of_a_part_in_a_message():
    run = nn.PassMode()
    run.terms["1.router", "z"], run.terms["1.router #1", "z"] = np.array([0.1, 1 / 3]), np.array([1e-300])
    run.records["1.router", "chosen"] = np.array([3, 4])
    one = PartRecords.of([run])
    again = PartRecords.unpacked(one.packed())
    assert step_records([one, one], 7) == step_records([again, again], 7)
    assert step_records([again], 1).terms == {"1.router z": 0.1 + 1 / 3 + 1e-300}
    assert PartRecords.of([nn.PassMode()]).packed() == b"" and step_records([], 0) == ({}, {}, {})
