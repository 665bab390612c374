"""One micro-batch on its way through units, forward and backward, on a rank that has one, has none, or has failed.

A rank without a micro-batch, and one whose model has raised an exception, keep walking with the others, so that nobody
waits for them in vain; what went wrong is told when all have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from parallel.nn.operator import Array, Operator, Parameter, Run, Sink, nbytes_of


class Motion:
    """A micro-batch, or none.

    Parameters
    ----------
    x, y : array or None
        Inputs and targets. Who has only some of the model's units, has as inputs what the units before them made.
    run : Run
    loss : loss operator

    Attributes
    ----------
    saved : list
        What the units' forwards saved, from the first one on; each is gone when its backward is over.
    total : float
        The sum of losses.
    problem : Exception or None
        What went wrong; from then on nothing is computed.
    """

    def __init__(self, x: Array, y: Array, run: Run, loss: Any):
        self._x, self._y, self._run, self._loss = x, y, run, loss
        self._dy: Array = None
        self._of_loss: Any = None
        self.saved: list[Any] = []
        self.total = 0.0
        self.problem: Exception | None = None

    def forward(self, unit: Operator) -> None:
        """Go through a unit."""

        def go() -> None:
            self._x, kept = unit.forward(self._x, self._run)
            self.saved.append(kept)

        self._try(go)

    def score(self) -> None:
        """The sum of losses."""

        def go() -> None:
            self.total, self._of_loss = self._loss.forward(self._x, self._y)

        self._try(go)

    def give(self) -> Array:
        """What the units have made, for whoever has the next ones."""
        y, self._x = self._x, None
        return y

    def take(self, dy: Array) -> None:
        """The gradient of what the units have made, from whoever has the next ones."""
        self._dy = None if self.problem else dy

    def give_back(self) -> Array:
        """The gradient of the inputs, for whoever has made them."""
        dx, self._dy = self._dy, None
        return dx

    def nbytes(self, made: Array = None) -> int:
        """Bytes of what is alive between forward and backward; with what was `made` and given away."""
        return nbytes_of((self._x, self._y, self.saved, self._of_loss, made))

    def turn(self, scale: float) -> None:
        """From the loss, times `scale`, to the gradient of the last unit's result."""

        def go() -> None:
            self._dy = self._loss.backward(scale, self._of_loss)
            self._x = self._of_loss = None

        self._try(go)

    def backward(self, unit: Operator, grads: Sink) -> None:
        """Go back through a unit."""

        def go() -> None:
            self._dy = unit.backward(self._dy, self.saved.pop(), grads)

        self._try(go)

    def settle(self, later: Iterable[tuple[Parameter, Callable[[Array], object]]], grads: Sink) -> None:
        """Hand in gradients that were put off."""
        if self.problem is not None:
            return
        try:
            for parameter, compute in later:
                grads(parameter, compute)
        except Exception as error:
            self._fail(error)

    def measure(self, measure: Callable[[Array, Array], float]) -> float:
        """What a function of scores and targets says; 0 where there are none."""
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
            go()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.problem = error
        self.saved.clear()
        self._x = self._dy = self._of_loss = None


def nobody() -> Motion:
    """The motion of a rank that has no micro-batch."""
    return Motion(None, None, Run(), None)
