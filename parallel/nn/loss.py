"""Losses: each returns the sum over a micro-batch; engines divide by the number of targets of all ranks."""

from typing import Any, Protocol

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, expect_range
from parallel.nn.operator import ArraySpec, OperatorOutline
from quant.types import Array


class Loss(Protocol):
    """Interface of losses: sum of losses over a micro-batch, its gradient, number of targets. No parameters.

    A loss may have a method ``outline(y, targets)``, the outline for arrays like these (`ArraySpec`): saved arrays and
    bytes of temporaries, with a scalar `y`. Without it, a forward pass on zeros finds the saved arrays.
    """

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        """Return (sum of losses over the micro-batch, values that `backward` needs)."""

    def backward(self, scale: float, saved: Any) -> Array:
        """Gradient with respect to y of `scale` times the sum of losses."""

    def count(self, targets: Array) -> float:
        """Number of targets that count, by which the sum of losses is divided to get the mean.

        Any real number from 0 on, such as a sum of weights; in a step without targets nothing is updated.
        """


NO_RESULT = ArraySpec((), np.dtype(np.float64))


class SoftmaxCrossEntropy:
    """Cross-entropy loss: sum of -log softmax(scores)[target] over all targets that are not negative.

    Scores have shape (..., classes) and targets, integers, the same without the last axis.

    Parameters
    ----------
    smoothing : float
        From 0 to below 1: probability that is taken from the target and spread over all classes alike (Szegedy et al.,
        "Rethinking the Inception architecture for computer vision", CVPR 2016, section 7).
    """

    def __init__(self, smoothing: float = 0.0):
        if not 0 <= smoothing < 1:
            raise ValueError(f"smoothing: expected 0 to below 1, found {smoothing}")
        self.smoothing = smoothing

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        expect(targets.dtype.kind in "iu", self, "targets that are integers", targets)
        expect(y.shape[:-1] == targets.shape, self, f"targets of shape {y.shape[:-1]}", targets)
        expect_range(self, targets, y.shape[-1], "target")
        rows, flat = y.reshape(-1, y.shape[-1]), targets.reshape(-1)
        loss, log_sum = kernels.softmax_cross_entropy(rows, flat)
        if self.smoothing:
            xp = kernels.array_namespace(y)
            (here,) = xp.nonzero(flat >= 0)
            wide = kernels.widen(rows[here])
            above = wide[xp.arange(len(here)), flat[here]] - wide.mean(axis=-1)
            loss = loss + self.smoothing * kernels.number(above.sum(dtype=np.float64))
        return loss, (y, targets, log_sum)

    def backward(self, scale: float, saved: Any) -> Array:
        y, targets, log_sum = saved
        rows, flat = y.reshape(-1, y.shape[-1]), targets.reshape(-1)
        if not self.smoothing:
            return kernels.softmax_cross_entropy_backward(scale, rows, flat, log_sum).reshape(y.shape)
        gradient = kernels.softmax_cross_entropy_backward(scale, kernels.widen(rows), flat, log_sum)
        (here,) = kernels.array_namespace(y).nonzero(flat >= 0)
        gradient[here] -= self.smoothing * scale / y.shape[-1]
        gradient[here, flat[here]] += self.smoothing * scale
        return kernels.narrow(gradient, y.dtype).reshape(y.shape)

    def count(self, targets: Array) -> int:
        return int((targets >= 0).sum())

    def correct(self, y: Array, targets: Array) -> int:
        """Number of correct predictions: non-negative targets that have the highest score."""
        return int(((y.argmax(axis=-1) == targets) & (targets >= 0)).sum())

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        log_sum = ArraySpec((elements(targets),), kernels.wide(y.dtype))
        work = (5 if self.smoothing else 3) * elements(y) * log_sum.dtype.itemsize
        return OperatorOutline(NO_RESULT, (y, targets, log_sum), 0, work)


class MSE:
    """Squared-error loss: sum of (y - target)^2 over all elements (engines divide by their number)."""

    def forward(self, y: Array, targets: Array) -> tuple[float, Any]:
        expect(y.shape == targets.shape, self, f"targets of shape {y.shape}", targets)
        return kernels.squared_error(y, targets), (y, targets)

    def backward(self, scale: float, saved: Any) -> Array:
        return kernels.squared_error_backward(scale, *saved)

    def count(self, targets: Array) -> int:
        return int(targets.size)

    def outline(self, y: ArraySpec, targets: ArraySpec) -> OperatorOutline:
        return OperatorOutline(NO_RESULT, (y, targets), 0, 3 * elements(y) * kernels.wide(y.dtype).itemsize)
