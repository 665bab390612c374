"""A model with some of its operators replaced, or watched: a new tree that shares the parameters of the old one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

from parallel.nn.operator import Array, Operator, Outline, Parameter, Run, Sink, Spec


def rebuilt(model: Operator, change: Callable[[Operator], Operator]) -> Operator:
    """A copy of the tree, from its leaves up, in which every operator is what `change` makes of its copy.

    Parameters
    ----------
    model : Operator
        Stays as it is.
    change : callable operator -> operator
        Gets the copy, whose own operators were changed before it; it may write into it. What is held twice is changed
        once; what is `Around` another operator is changed as one with it.
    """
    made: dict[int, Operator] = {}

    def build(operator: Operator) -> Operator:
        if id(operator) not in made:
            new = copy(operator)
            for name, value in vars(operator).items() if not isinstance(operator, Around) else ():
                if isinstance(value, Operator):
                    setattr(new, name, build(value))
                elif isinstance(value, list | tuple):
                    setattr(new, name, type(value)(build(i) if isinstance(i, Operator) else i for i in value))
            made[id(operator)] = change(new)
        return made[id(operator)]

    return build(model)


class Around(Operator):
    """An operator in place of another one that it holds; parameters keep their names.

    Parameters
    ----------
    inner : Operator
    """

    def __init__(self, inner: Operator):
        self.inner, self.name = inner, inner.name

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        """Those of the inner operator."""
        yield from self.inner.members()

    def outline(self, x: Spec) -> Outline:
        """That of the inner operator."""
        return self.inner.outline(x)


class Watched(Around):
    """The inner operator, and somebody who sees what goes into it and what comes out.

    Parameters
    ----------
    inner : Operator
    see : callable (operator, x, y)
    """

    def __init__(self, inner: Operator, see: Callable[[Operator, Array, Array], object]):
        super().__init__(inner)
        self._see = see

    def forward(self, x: Array, run: Run) -> tuple[Array, Any]:
        """As the inner operator."""
        y, saved = self.inner.forward(x, run)
        self._see(self.inner, x, y)
        return y, saved

    def backward(self, dy: Array, saved: Any, grads: Sink) -> Array:
        """As the inner operator."""
        return self.inner.backward(dy, saved, grads)
