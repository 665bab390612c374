"""Forward and backward pass of one micro-batch, unit by unit.

A rank without a micro-batch, or whose model has raised an exception, makes the same calls without computing, so that
collectives inside the passes match; errors are exchanged at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from parallel.nn.array_checks import expect_type, named, type_after
from parallel.nn.gradient_checks import checked
from parallel.nn.operator import GradientSink, Operator, Parameter, PassMode, nbytes_of
from quant.types import Array

QUIET: dict[str, Any] = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}
"""Suppressed NumPy warnings: non-finite losses and gradients are found when ranks synchronise."""


class MicrobatchPass:
    """A micro-batch, or none.

    Parameters
    ----------
    x, y : array or None
        Inputs and targets; on a pipeline stage, the outputs of the units before it.
    run : PassMode
    loss : loss operator

    Attributes
    ----------
    saved : list
        Values saved by the units' forward passes; each is released by its backward.
    total : float
        The sum of losses.
    problem : Exception or None
        The first error; after it nothing is computed.
    """

    def __init__(self, x: Array, y: Array, run: PassMode, loss: Any):
        self._x, self._y, self._run, self._loss = x, y, run, loss
        self._dy: Array = None
        self._of_loss: Any = None
        self.saved: list[Any] = []
        self.total = 0.0
        self.problem: Exception | None = None

    def forward(self, unit: Operator) -> None:
        """Go through a unit."""

        def go() -> None:
            y, kept = unit.forward(self._x, self._run)
            expect_type(unit, "result", y, type_after(unit, self._x))
            self._x = y
            self.saved.append(kept)

        self._try(go)

    def score(self) -> None:
        """The sum of losses."""

        def go() -> None:
            self.total, self._of_loss = self._loss.forward(self._x, self._y)

        self._try(go)

    def give(self) -> Array:
        """Output of the units, for the next stage."""
        y, self._x = self._x, None
        return y

    def take(self, dy: Array) -> None:
        """Set the gradient of the output, from the next stage."""
        self._dy = None if self.problem else dy

    def give_back(self) -> Array:
        """Gradient of the inputs, for the previous stage."""
        dx, self._dy = self._dy, None
        return dx

    def nbytes(self, made: Array = None) -> int:
        """Bytes alive between forward and backward, with the output `made` that was given away."""
        return nbytes_of((self._x, self._y, self.saved, self._of_loss, made))

    def turn(self, scale: float) -> None:
        """Backward of the loss, times `scale`."""

        def go() -> None:
            self._dy = self._loss.backward(scale, self._of_loss)
            expect_type(self._loss, "gradient", self._dy, self._x.dtype)
            self._x = self._of_loss = None

        self._try(go)

    def backward(self, unit: Operator, grads: GradientSink) -> None:
        """Go back through a unit."""

        def go() -> None:
            dx = unit.backward(self._dy, self.saved.pop(), checked(unit, grads))
            if dx is not None:
                expect_type(unit, "gradient", dx, self._dy.dtype)
            self._dy = dx

        self._try(go)

    def settle(self, later: Iterable[tuple[Parameter, Callable[[Array], object]]], grads: GradientSink) -> None:
        """Compute deferred gradients."""
        if self.problem is not None:
            return
        try:
            with np.errstate(**QUIET):
                for parameter, compute in later:
                    grads(parameter, compute)
        except Exception as error:
            self._fail(error)

    def measure(self, measure: Callable[[Array, Array], float]) -> float:
        """Value of a function of scores and targets; 0 without a micro-batch."""
        measured = 0.0

        def go() -> None:
            nonlocal measured
            measured = float(measure(self._x, self._y))

        self._try(go)
        return measured

    def _try(self, go: Callable[[], None]) -> None:
        if (self._x is None and self._dy is None) or self.problem is not None:
            return
        try:
            with np.errstate(**QUIET):
                go()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = named(error, self._loss)
        self.saved.clear()
        self._x = self._dy = self._of_loss = None


def nobody() -> MicrobatchPass:
    """Pass of a rank without a micro-batch."""
    return MicrobatchPass(None, None, PassMode(), None)
