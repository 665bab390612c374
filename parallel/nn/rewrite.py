"""Copies of models in which some operators are replaced.

A user sets attributes of the operators of a model, such as `Dropout.rate`, at any time. What is made of an operator for
an engine is `linked` to it: attributes that it shares with the operator remain those of the operator.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import ref

from parallel.nn.operator import Operator

Made = TypeVar("Made", bound=Operator)


def linked(made: Made, original: Operator) -> Made:
    """Let attributes that are assigned to `original` reach `made`, which was made of it; returns `made`."""
    copies = vars(original).setdefault("_copies", [])
    copies[:] = [*filter(lambda copy: copy() is not None, copies), ref(made)]
    vars(made)["_original"] = lambda: original  # which passes on what is assigned to the operator it was made of
    return made


def copied(original: Made) -> Made:
    """Copy of one operator, linked to it."""
    return linked(copy.copy(original), original)


def inherit(made: Made, original: Operator) -> Made:
    """Give `made`, of another class, the attributes of `original`, linked to it; returns `made`."""
    vars(made).update(original.__getstate__())
    return linked(made, original)


def unlink(model: Operator) -> None:
    """End the links of all operators of a model to what was made of them."""
    for operator in operators_in(model):
        vars(operator).pop("_copies", None)


def replaced(
    operator: Operator, replacement: Callable[[Operator], Operator | None], done: dict[int, Operator] | None = None
) -> Operator:
    """Copy of an operator in which, at any depth, those with a `replacement` (None: keep) are replaced.

    Parameters are shared with the original, which is not changed. An operator that occurs twice is replaced once;
    `done` has the results by id.
    """
    done = {} if done is None else done
    if id(operator) not in done:
        ours = replacement(operator)
        if ours is None:
            ours = copied(operator)
            for name, value in operator.__getstate__().items():
                setattr(ours, name, with_operators(value, lambda one: replaced(one, replacement, done)))
        done[id(operator)] = ours
    return done[id(operator)]


def operators_in(operator: Operator) -> list[Operator]:
    """The operator and those in its attributes, at any depth, once each; also where `members` leaves them out."""
    found: dict[int, Operator] = {}

    def add(one: Operator) -> Operator:
        if id(one) not in found:
            found[id(one)] = one
            with_operators(vars(one), add)
        return one

    add(operator)
    return list(found.values())


def with_operators(value: Any, make: Callable[[Operator], Operator]) -> Any:
    """Attribute with ``make(operator)`` for every operator that it is, or holds in lists, tuples and dicts.

    The attribute itself if it has none.
    """
    if isinstance(value, Operator):
        return make(value)
    if isinstance(value, dict):
        made = {key: with_operators(one, make) for key, one in value.items()}
        return made if any(made[key] is not one for key, one in value.items()) else value
    if isinstance(value, list | tuple):
        of_kind = getattr(type(value), "_make", type(value))  # named tuples take their fields one by one
        items = [with_operators(one, make) for one in value]
        return of_kind(items) if any(new is not old for new, old in zip(items, value)) else value
    return value
