"""Losses: sums over a micro-batch, divided once by the global count."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, expect_range
from parallel.nn.operator import ArraySpec, OperatorOutline
from quant.types import Array


class Loss(Protocol):
    """Interface of losses. A loss has no parameters and no name in the model."""

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        """(sum of losses, saved)."""

    def backward(self, scale: float, saved: Any) -> Array:
        """Gradient of `scale` times the sum with respect to y."""

    def count(self, targets: Array) -> int:
        """Number of terms of the sum."""

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        """Saved arrays and temporaries; the outline's `y` is not an array."""


_NOTHING = ArraySpec((), np.dtype(np.float64))


class SoftmaxCrossEntropy:
    """-log softmax(scores)[target], over all non-negative targets.

    Scores have shape (..., classes) and targets, integers, the same without the last axis.
    """

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        expect(targets.dtype.kind in "iu", self, "targets that are integers", targets)
        expect(y.shape[:-1] == targets.shape, self, f"targets of shape {y.shape[:-1]}", targets)
        expect_range(self, targets, y.shape[-1], "target")
        loss, log_sum = kernels.softmax_cross_entropy(y.reshape(-1, y.shape[-1]), targets.reshape(-1))
        return loss, (y, targets, log_sum)

    def backward(self, scale: float, saved: Any) -> Array:
        y, targets, log_sum = saved
        rows = y.reshape(-1, y.shape[-1])
        return kernels.softmax_cross_entropy_backward(scale, rows, targets.reshape(-1), log_sum).reshape(y.shape)

    def count(self, targets: Array) -> int:
        return int((targets >= 0).sum())

    def correct(self, y: Array, targets: Array) -> int:
        """Number of counted targets with the highest score."""
        return int(((y.argmax(axis=-1) == targets) & (targets >= 0)).sum())

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        log_sum = ArraySpec((elements(targets),), kernels.wide(y.dtype))
        return OperatorOutline(_NOTHING, (y, targets, log_sum), 0, 3 * elements(y) * log_sum.dtype.itemsize)


class MSE:
    """Squared error (y - target)^2, summed over all elements."""

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        expect(y.shape == targets.shape, self, f"targets of shape {y.shape}", targets)
        return kernels.squared_error(y, targets), (y, targets)

    def backward(self, scale: float, saved: Any) -> Array:
        return kernels.squared_error_backward(scale, *saved)

    def count(self, targets: Array) -> int:
        return int(targets.size)

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        return OperatorOutline(_NOTHING, (y, targets), 0, 3 * elements(y) * kernels.wide(y.dtype).itemsize)
