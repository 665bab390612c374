"""What is to become small: sums over a micro-batch, divided once, by a global count, when all are together."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, expect_range
from parallel.nn.operator import Array, Outline, Spec


class Loss(Protocol):
    """What a loss can do. A loss has no parameters and no name in the model."""

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        """The sum of the losses, and what backward needs."""
        ...

    def backward(self, scale: float, saved: Any) -> Array:
        """The gradient of `scale` times that sum by y."""
        ...

    def count(self, targets: Array) -> int:
        """How many losses the sum has."""
        ...

    def outline(self, y: Spec, targets: Spec) -> Outline:
        """What is saved, and temporaries; `y` is that of no array."""
        ...


_NOTHING = Spec((), np.dtype(np.float64))


class SoftmaxCrossEntropy:
    """-log softmax(scores)[target], of all targets that are not negative.

    Scores have shape (..., classes) and targets, integers, the same without the last axis.
    """

    name = ""

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        """Saves scores, targets, and the logarithm of each row's sum of exponentials."""
        expect(targets.dtype.kind in "iu", self, "targets that are integers", targets)
        expect(y.shape[:-1] == targets.shape, self, f"targets of shape {y.shape[:-1]}", targets)
        expect_range(self, targets, y.shape[-1], "target")
        loss, log_sum = kernels.softmax_cross_entropy(y.reshape(-1, y.shape[-1]), targets.reshape(-1))
        return loss, (y, targets, log_sum)

    def backward(self, scale: float, saved: Any) -> Array:
        """scale (softmax - 1 at the target)."""
        y, targets, log_sum = saved
        rows = y.reshape(-1, y.shape[-1])
        return kernels.softmax_cross_entropy_backward(scale, rows, targets.reshape(-1), log_sum).reshape(y.shape)

    def count(self, targets: Array) -> int:
        """Targets that are not negative."""
        return int((targets >= 0).sum())

    def correct(self, y: Array, targets: Array) -> int:
        """How many of the counted targets have the highest score."""
        return int(((y.argmax(axis=-1) == targets) & (targets >= 0)).sum())

    def outline(self, y: Spec, targets: Spec) -> Outline:
        """A number a row is saved beside scores and targets."""
        log_sum = Spec((elements(targets),), kernels.wide(y.dtype))
        return Outline(_NOTHING, (y, targets, log_sum), 0, 3 * elements(y) * log_sum.dtype.itemsize)


class MSE:
    """(y - target)^2, of every element."""

    name = ""

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        """Saves both."""
        expect(y.shape == targets.shape, self, f"targets of shape {y.shape}", targets)
        return kernels.squared_error(y, targets), (y, targets)

    def backward(self, scale: float, saved: Any) -> Array:
        """2 scale (y - target)."""
        return kernels.squared_error_backward(scale, *saved)

    def count(self, targets: Array) -> int:
        """Elements."""
        return int(targets.size)

    def outline(self, y: Spec, targets: Spec) -> Outline:
        """Nothing new is saved."""
        return Outline(_NOTHING, (y, targets), 0, 3 * elements(y) * kernels.wide(y.dtype).itemsize)
