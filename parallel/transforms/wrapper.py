"""Copies of models in which operators are wrapped; parameters are shared and keep their names."""

from collections.abc import Callable, Iterator
from copy import copy

from parallel.nn.operator import Operator, Parameter
from parallel.nn.rewrite import with_operators


class WrappedOperator(Operator):
    """Base class of wrappers of an operator that keep its name and its parameters' names."""

    def __init__(self, inner: Operator):
        self.inner, self.name = inner, inner.name

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        yield from self.inner.members()


def rebuilt(model: Operator, change: Callable[[Operator], Operator]) -> Operator:
    """Copy of an operator tree, sharing its parameters, with each copied operator replaced by `change`, leaves first.

    `change` may modify its argument. Operators used twice are changed once; the inside of a `WrappedOperator` is not
    changed.
    """
    made: dict[int, Operator] = {}

    def build(operator: Operator) -> Operator:
        if id(operator) not in made:
            new = copy(operator)
            for name, value in vars(operator).items() if not isinstance(operator, WrappedOperator) else ():
                setattr(new, name, with_operators(value, build))
            made[id(operator)] = change(new)
        return made[id(operator)]

    return build(model)
