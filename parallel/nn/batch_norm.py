"""Batch normalisation: over the samples of a micro-batch in training, by running statistics in evaluations."""

from typing import Any

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, expect_floats, is_single, whole_number
from parallel.nn.buffer import StateBuffer
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode, constant
from quant.types import Array


class BatchNorm(Operator):
    """Batch normalisation of each feature: (x - mean) / sqrt(variance + eps) gain + bias.

    Ioffe and Szegedy, "Batch normalization", ICML 2015. Inputs have shape (batch, features, ...), as those of
    `torch.nn.BatchNorm1d` and `BatchNorm2d`. In training, mean and variance are those of the micro-batch. Passes in
    evaluation have the running ones, which a step moves by `momentum` towards the mean of its micro-batches. On the
    host only.

    Parameters
    ----------
    features : int
    eps : float
        Above 0.
    momentum : float
        From 0 to 1.
    sync : bool
        True for the statistics of all replicas' micro-batches of a turn, in the layouts dp and zero. All replicas must
        have equally many micro-batches in a step. Two small allreduces forward, one backward.

    Attributes
    ----------
    running_mean, running_var : StateBuffer of float64, of shape (features,)
        The variance is the unbiased one.
    """

    fixed = ("sync",)

    def __init__(self, features: int, eps: float = 1e-5, momentum: float = 0.1, *, sync: bool = False):
        self.features, self.eps, self.momentum, self.sync = whole_number("features", features), eps, momentum, sync
        if not is_single(eps) or eps <= 0 or not is_single(momentum) or not 0 <= momentum <= 1:
            raise ValueError(f"eps, momentum: expected above 0, and 0 to 1; found {eps!r} and {momentum!r}")
        self.gain = Parameter((features,), constant(1.0), decay=False)
        self.bias = Parameter((features,), constant(0.0), decay=False)
        self.running_mean, self.running_var = StateBuffer(np.zeros(features)), StateBuffer(np.ones(features))

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Normalise x; saves x, and in the compute dtype the mean and rstd (1 / standard deviation) of each feature."""
        self._expect(x)
        if not isinstance(x, np.ndarray):
            raise TypeError(f"BatchNorm {self.name}: expected arrays on the host, as of device='cpu'")
        wide, count = kernels.widen(x), 0.0
        if run.training:
            count, mean, variance = self._moments(wide)
            use = run.use(self.name)
            for buffer, arrived in (
                (self.running_mean, mean),
                (self.running_var, variance * (count / max(count - 1, 1))),
            ):
                if count:
                    run.buffers[use, buffer.name] = buffer.values + self.momentum * (arrived - buffer.values)
        else:
            mean, variance = self.running_mean.values, self.running_var.values
        rstd = kernels.narrow(1 / np.sqrt(variance + self.eps), wide.dtype)
        mean = kernels.narrow(mean, wide.dtype)
        y = self._normalised(wide, mean, rstd)
        y *= _along(kernels.widen(self.gain.data), x)
        y += _along(kernels.widen(self.bias.data), x)
        return kernels.narrow(y, x.dtype), (x, mean, rstd, count)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        x, mean, rstd, count = saved
        upper, axes = kernels.widen(dy), (0, *range(2, x.ndim))
        normal = self._normalised(kernels.widen(x), mean, rstd)
        dbias, dgain = (one.sum(axis=axes, dtype=np.float64) for one in (upper, upper * normal))
        grads(self.gain, lambda out: kernels.narrow(dgain, out.dtype, out))
        grads(self.bias, lambda out: kernels.narrow(dbias, out.dtype, out))
        sums = self._total(np.concatenate([dbias, dgain])) / max(count, 1)
        first, second = (_along(kernels.narrow(one, upper.dtype), x) for one in sums.reshape(2, -1))
        normal *= -second
        normal += upper
        normal -= first
        normal *= _along(kernels.widen(self.gain.data) * rstd, x)
        return kernels.narrow(normal, dy.dtype)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline; the temporaries are those of the backward pass."""
        self._expect(x)
        wide = kernels.wide(x.dtype)
        mean, rstd = (ArraySpec((self.features,), wide) for _ in range(2))
        work = 4 * elements(x) * wide.itemsize + 16 * 8 * self.features
        return OperatorOutline(ArraySpec(x.shape, x.dtype), (x, mean, rstd, 0.0), 0, work)

    def _expect(self, x: Any) -> None:
        fits = len(x.shape) >= 2 and x.shape[1] == self.features
        expect(fits, self, f"an array of shape (batch, {self.features}, ...)", x)
        expect_floats(self, x)

    def _moments(self, wide: Array) -> tuple[float, Array, Array]:
        """Number of values of each feature, their mean and their biased variance, in float64."""
        axes = (0, *range(2, wide.ndim))
        own = [wide.size / max(1, self.features)]
        total = self._total(np.concatenate([own, wide.sum(axis=axes, dtype=np.float64)]))
        count = float(total[0])
        if count == 1:
            raise ValueError(f"BatchNorm {self.name}: expected several values of each feature in training, found one")
        mean = total[1:] / max(count, 1)
        deviations = wide - _along(kernels.narrow(mean, wide.dtype), wide)
        deviations *= deviations
        return count, mean, self._total(deviations.sum(axis=axes, dtype=np.float64)) / max(count, 1)

    def _normalised(self, wide: Array, mean: Array, rstd: Array) -> Array:
        normal = wide - _along(mean, wide)
        normal *= _along(rstd, wide)
        return normal

    def _total(self, values: Array) -> Array:
        """Sums over all replicas of the sums of a micro-batch."""
        if self.sync:
            raise ValueError(f"BatchNorm {self.name}: sync needs an engine in a layout dp or zero")
        return values


def _along(values: Array, x: Array) -> Array:
    """View of values of the features that broadcasts along x."""
    return values.reshape(-1, *[1] * (x.ndim - 2))
