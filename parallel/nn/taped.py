"""Operators differentiated by another package: the record of the forward pass gives the gradients of the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from parallel.nn.array_checks import label
from parallel.nn.operator import GradientSink, Member, Operator, Parameter, PassMode, StateBuffer
from parallel.nn.pass_mode import PassPosition
from quant.types import Array


@dataclass
class Tape:
    """Record of a forward pass, and what is needed to repeat it. No tuple: its arrays are no activations."""

    record: Any  # of the package, which refers to the memory of the weights
    weights: Sequence[np.ndarray]  # values of the parameters, where they were
    run: PassMode
    began: PassPosition
    is_used: bool = False  # by a backward pass, which ends a record


class TapedOperator(Operator):
    """Base class of operators that another package differentiates, on NumPy arrays.

    A record refers to the weights' memory, which may have other contents in the backward pass: where weights are
    gathered for each pass. If they have another place then, the forward pass is repeated, as it is for a second
    backward pass.

    Parameters
    ----------
    subject : str
        Name of the module or function, for messages.
    weights, buffers : mapping
        By the names that they have within the operator.
    """

    def __init__(self, subject: str, weights: Mapping[str, Parameter], buffers: Mapping[str, StateBuffer]):
        self.subject, self.weights, self.buffers = subject, dict(weights), dict(buffers)

    def members(self) -> Iterator[tuple[str, Member]]:
        yield from self.weights.items()
        yield from self.buffers.items()

    def _recorded(self, x: Array, weights: Mapping[str, np.ndarray], run: PassMode) -> tuple[Array, Any]:
        """Result of the module or function, and in training the record of its computation."""
        raise NotImplementedError

    def _gradients(self, record: Any, dy: Array) -> tuple[Array, Mapping[str, np.ndarray | None]]:
        """Gradients of x and, by name, of the parameters that are trained (None: no influence)."""
        raise NotImplementedError

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        began = run.position()
        weights = {name: parameter.data for name, parameter in self.weights.items()}
        y, record = self._noted(self._recorded, x, weights, run)
        return y, (x, Tape(record, [*weights.values()], run, began) if run.training else None)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        x, tape = saved
        if tape is None:
            raise RuntimeError(f"{label(self)}: expected a forward pass in training before backward")
        if tape.is_used or not all(map(_is_same_memory, tape.weights, (one.data for one in self.weights.values()))):
            with tape.run.repeated(tape.began):
                tape = self.forward(x, tape.run)[1][1]
        tape.is_used = True
        dx, gradients = self._noted(self._gradients, tape.record, dy)
        for name, gradient in gradients.items():
            grads(self.weights[name], partial(_write, gradient))
        return dx

    def _noted(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Result of a function of the package. Errors have a note with the module or function."""
        try:
            return compute(*args)
        except Exception as error:
            error.add_note(f"in {self.subject}, which {label(self)} computes")
            raise


def _is_same_memory(one: np.ndarray, other: np.ndarray) -> bool:
    return one is other or one.__array_interface__["data"] == other.__array_interface__["data"]


def _write(gradient: np.ndarray | None, out: Array) -> None:
    out[...] = 0 if gradient is None else gradient
