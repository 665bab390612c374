"""Checks of the gradients of a backward pass, the same for every sink."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Number
from typing import Any

from parallel.nn.array_checks import label
from parallel.nn.operator import GradientSink, Operator, Parameter
from quant.types import Array


class GradientNotWritten(TypeError):
    """A gradient was returned instead of written into the given array."""


def checked(operator: Operator, sink: GradientSink) -> GradientSink:
    """Sink that raises `GradientNotWritten` if ``compute(out)`` returns numbers outside of `out`.

    The error names the operator at or below `operator` that holds the parameter.
    """

    def take(parameter: Parameter, compute: Callable[[Array], object]) -> None:
        def write(out: Array) -> None:
            returned = compute(out)
            if returned is not None and returned is not out and _strays(returned, out):
                raise GradientNotWritten(
                    f"{holders_of(operator, parameter)}: the gradient of {parameter.name} was returned; expected it in "
                    "the array that is given, as by grads(p, lambda out: np.multiply(a, b, out=out))"
                )

        sink(parameter, write)

    return take


def holders_of(operator: Operator, parameter: Parameter) -> str:
    """Class and name of the operators that hold a parameter; of the root if none does."""
    operators = [operator, *(value for _, value in operator.walk() if isinstance(value, Operator))]
    held = [one for one in operators if any(value is parameter for _, value in one.members())]
    return " or ".join(dict.fromkeys(label(one) for one in held or [operator]))


def _strays(returned: Any, out: Array) -> bool:
    """True if a function's result holds numbers outside of `out`."""
    if isinstance(returned, list | tuple):
        return any(_strays(item, out) for item in returned)
    if isinstance(returned, type(out)):
        xp = sys.modules[type(out).__module__.partition(".")[0]]
        return bool(returned.size) and not xp.may_share_memory(returned, out)
    return hasattr(returned, "dtype") or isinstance(returned, Number)
