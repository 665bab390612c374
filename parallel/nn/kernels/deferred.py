"""Numbers that a device computes and the host reads together, at the end of a step.

The host waits for the device whenever it reads a number. Within `deferred`, operators and losses leave numbers on the
device, and checks of values are made when the numbers are read: one wait for a step, however many micro-batches and
operators it has. Elsewhere, and for host arrays, numbers are read and checked at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from parallel.nn.kernels.storage import array_namespace
from quant.types import Array

Judge = Callable[[float], None]
"""Check of a number, which raises an exception."""


class DeferredNumbers:
    """Numbers of a step that are still on the device, with their checks."""

    def __init__(self) -> None:
        self._checks: list[tuple[Array, Judge]] = []

    def add(self, value: Array, judge: Judge) -> None:
        self._checks.append((value, judge))

    def read(self, numbers: Sequence[Any]) -> tuple[list[float], Exception | None]:
        """Values of `numbers`, floats or arrays of no dimension, and the first error of the checks or of the device."""
        waiting = [value for value, _ in self._checks] + [number for number in numbers if is_deferred(number)]
        try:
            found = iter(_to_host(waiting)) if waiting else iter(())
            for _, judge in self._checks:
                judge(next(found))
            return [next(found) if is_deferred(number) else float(number) for number in numbers], None
        except Exception as error:  # not raised: the ranks exchange losses and errors later
            return [0.0] * len(numbers), error


def _to_host(values: Sequence[Array]) -> list[float]:
    xp = array_namespace(values[0])
    together = xp.stack([value.astype(np.float64) for value in values])
    found: list[float] = together.get().tolist()
    return found


_active: ContextVar[DeferredNumbers | None] = ContextVar("deferred numbers", default=None)


@contextmanager
def deferred() -> Iterator[DeferredNumbers]:
    """Leave numbers of this thread on the device, until `DeferredNumbers.read`."""
    numbers = DeferredNumbers()
    token = _active.set(numbers)
    try:
        yield numbers
    finally:
        _active.reset(token)


def is_deferred(value: Any) -> bool:
    """True if a number is an array on a device."""
    return hasattr(value, "dtype") and not isinstance(value, np.ndarray | np.generic)


def number(value: Array) -> Any:
    """Float of an array of no dimension. Within `deferred` an array on a device remains one."""
    return value if _active.get() is not None and is_deferred(value) else float(value)


def check(value: Array, judge: Judge) -> None:
    """Call `judge` with a number: at once, or, within `deferred`, when the numbers on the device are read."""
    numbers = _active.get()
    if numbers is not None and is_deferred(value):
        numbers.add(value, judge)
    else:
        judge(float(value))
