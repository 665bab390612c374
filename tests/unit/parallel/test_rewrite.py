"""Copies of models with other operators in some places."""

from typing import NamedTuple

from parallel.nn.activation import GELU, ReLU
from parallel.nn.compose import Residual, Sequential
from parallel.nn.linear import Linear
from parallel.nn.operator import Operator
from parallel.nn.rewrite import replaced


class Pair(NamedTuple):
    left: object
    right: object


class Holder(Operator):
    """Operators in every kind of container, and values that are none."""

    def __init__(self, shared):
        self.items = [shared, (ReLU(), {"inner": Residual(ReLU())})]
        self.pair = Pair(shared, 3)
        self.width = (1, 2)


def test_replaced_in_all_containers():
    """An operator that occurs twice is replaced once; the original stays as it is, parameters are shared."""
    shared, linear = ReLU(), Linear(2, 2)
    model = Sequential([Holder(shared), linear])
    ours = replaced(model, lambda operator: GELU() if isinstance(operator, ReLU) else None)
    holder = ours.items[0]
    new = [holder.items[0], holder.items[1][0], holder.items[1][1]["inner"].inner, holder.pair.left]
    assert all(isinstance(one, GELU) for one in new) and new[0] is new[3]
    assert type(holder.pair) is Pair and holder.pair.right == 3 and holder.width == (1, 2)
    assert isinstance(model.items[0].pair.left, ReLU) and model.items[0].items[0] is shared
    assert ours.items[1] is not linear and ours.items[1].weight is linear.weight


def test_containers_without_operators_are_shared():
    """What a user changes in them counts for the copy too."""
    model = Holder(ReLU())
    model.table = {"of": [1, (2, 3)]}
    assert replaced(model, lambda operator: None).table is model.table
