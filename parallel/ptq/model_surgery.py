"""Copies of a model with replaced or observed operators that share its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

from parallel.nn.operator import Operator, Parameter, PassMode
from quant.types import Array

OperatorCallback = Callable[[Operator, Array, Array], object]
"""Function of an operator, its input and its output."""


def rebuilt(model: Operator, change: Callable[[Operator], Operator]) -> Operator:
    """Copy of an operator tree in which `change` maps each copied operator, leaves first.

    `change` may modify the copy. Shared operators are changed once; the inside of a `WrappedOperator` is not changed.
    """
    made: dict[int, Operator] = {}

    def build(operator: Operator) -> Operator:
        if id(operator) not in made:
            new = copy(operator)
            for name, value in vars(operator).items() if not isinstance(operator, WrappedOperator) else ():
                if isinstance(value, Operator):
                    setattr(new, name, build(value))
                elif isinstance(value, list | tuple):
                    setattr(new, name, type(value)(build(i) if isinstance(i, Operator) else i for i in value))
            made[id(operator)] = change(new)
        return made[id(operator)]

    return build(model)


class WrappedOperator(Operator):
    """Wrapper of an operator that keeps parameters' names."""

    def __init__(self, inner: Operator):
        self.inner, self.name = inner, inner.name

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        yield from self.inner.members()


class ObservedOperator(WrappedOperator):
    """Wrapper that passes the operator, its inputs and outputs to a callback."""

    def __init__(self, inner: Operator, callback: OperatorCallback):
        super().__init__(inner)
        self._callback = callback

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        y, saved = self.inner.forward(x, run)
        self._callback(self.inner, x, y)
        return y, saved
