"""Copies of models in which operators are wrapped; parameters are shared and keep their names."""

from collections.abc import Callable

from parallel.nn.compose import Wrapper
from parallel.nn.operator import Operator
from parallel.nn.rewrite import copied, with_operators


class WrappedOperator(Wrapper):
    """Base class of wrappers whose inner operator `rebuilt` leaves as it is."""


def rebuilt(model: Operator, change: Callable[[Operator], Operator]) -> Operator:
    """Copy of an operator tree, sharing its parameters, with each copied operator replaced by `change`, leaves first.

    `change` may modify its argument. Operators used twice are changed once, the inner one of a `WrappedOperator` never.
    """
    made: dict[int, Operator] = {}

    def build(operator: Operator) -> Operator:
        if id(operator) not in made:
            new = copied(operator)
            for name, value in operator.__getstate__().items() if not isinstance(operator, WrappedOperator) else ():
                setattr(new, name, with_operators(value, build))
            made[id(operator)] = change(new)
        return made[id(operator)]

    return build(model)
