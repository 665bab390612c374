"""Copies of models in which some operators are replaced."""

import copy
from collections.abc import Callable
from typing import Any

from parallel.nn.operator import Operator


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
            ours = copy.copy(operator)
            for name, value in vars(operator).items():
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
    """Attribute with ``make(operator)`` for every operator that it is, or holds in lists, tuples and dicts."""
    if isinstance(value, Operator):
        return make(value)
    if isinstance(value, dict):
        return {key: with_operators(one, make) for key, one in value.items()}
    if isinstance(value, list | tuple):
        of_kind = getattr(type(value), "_make", type(value))  # named tuples take their fields one by one
        return of_kind([with_operators(one, make) for one in value])
    return value
