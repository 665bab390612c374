"""Outlines of operators and losses without one of their own, found by a forward pass on zeros."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from parallel.nn.array_checks import label
from parallel.nn.operator import (
    ArraySpec,
    Operator,
    OperatorOutline,
    Parameter,
    PassMode,
    arrays_of,
    forward_of,
    parts_of,
)


def trial_outline(operator: Operator, x: ArraySpec) -> OperatorOutline:
    """Outline of an operator by its forward pass on zeros of the shape and dtype of `x`, with parameters of zeros.

    Flops and temporaries are unknown and count as 0. Takes the time and memory of that pass, on the host.
    """
    parts = tuple(np.zeros(one.shape, one.dtype) for one in parts_of(x))
    given, first = parts if type(x) is tuple else parts[0], parts[0].shape
    run = PassMode(samples=np.arange(first[0] if first else 0))
    with _zeros(operator.parameters()), np.errstate(all="ignore"):  # 0 / 0 is no mistake here
        try:
            y, saved = forward_of(operator, given, run)
        except Exception as error:
            error.add_note(f"in a forward pass of {label(operator)} on zeros, since it has no outline")
            raise
    specs = dict(zip(map(id, parts), parts_of(x)))
    values = tuple(_spec(array, specs) for array in arrays_of(saved).values())
    result: Any = tuple(_spec(one, specs) for one in parts_of(y))
    return OperatorOutline(result if type(y) is tuple else result[0], values)


def loss_outline(loss: Any, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
    """Outline of a loss: its own or, if it has none, that of a forward pass on zeros."""
    if hasattr(loss, "outline"):
        return loss.outline(y, targets)  # type: ignore[no-any-return]
    scores, classes = np.zeros(y.shape, y.dtype), np.zeros(targets.shape, targets.dtype)
    with np.errstate(all="ignore"):
        saved = loss.forward(scores, classes)[1]
    specs = {id(scores): y, id(classes): targets}
    values = tuple(_spec(array, specs) for array in arrays_of(saved).values())
    return OperatorOutline(ArraySpec((), np.dtype(np.float64)), values)


def _spec(array: Any, specs: dict[int, ArraySpec]) -> ArraySpec:
    """Spec of an array, the same object for the same array."""
    return specs.setdefault(id(array), ArraySpec(array.shape, array.dtype))


@contextmanager
def _zeros(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Context in which parameters have the value 0 on the host; their own values are restored after it."""
    before = [(one, one._data, one.dtype) for one in parameters]
    try:
        for one in parameters:
            one._data = np.zeros(one.shape, one.dtype)
        yield
    finally:
        for one, data, dtype in before:
            one._data, one.dtype = data, dtype
