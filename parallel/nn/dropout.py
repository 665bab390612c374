"""Dropout with masks that depend only on seed, step, use of the layer and sample, not on ranks or batches."""

import math
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from quant.types import Array


class Dropout(Operator):
    """Dropout: in training, y is x / (1 - rate) with elements set to 0 with probability `rate`; otherwise y = x.

    Counter-based random numbers: the mask depends only on the run's seed and step, the use of the operator in the pass
    (`PassMode.use`), the sample's number and the element.
    """

    continues = True
    part: Any = None
    """Of a shard: its features."""

    def __init__(self, rate: float):
        self.rate = rate
        self._expect_rate()

    def _expect_rate(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(f"Dropout: expected a rate from 0 to below 1, found {self.rate}")

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Apply dropout to x; in training, saves the mask, of one byte per element."""
        if not run.training or not self.rate:
            return x, None
        self._expect_rate()  # which may have been assigned
        expected = f"a batch of {len(run.samples)}, as many as the run has numbers of samples"
        expect(len(x) == len(run.samples), self, expected, x)
        samples = kernels.array_namespace(x).asarray(run.samples)
        key = kernels.key_of(run.seed, run.step, run.use(self.name, self.part))
        keep = self._mask(samples, x.shape, key)
        return kernels.masked(x, keep.reshape(x.shape), 1 / (1 - self.rate)), keep

    def _mask(self, samples: Array, shape: tuple[int, ...], key: tuple[int, int], position: int = 0) -> Array:
        """Mask of the elements to keep, of shape (batch, elements); the samples' first axis begins at `position`."""
        first = position * math.prod(shape[2:])
        return kernels.keep(samples, math.prod(shape[1:]), self.rate, key, first)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return dy if saved is None else kernels.masked(dy, saved.reshape(dy.shape), 1 / (1 - self.rate))

    def outline(self, x: ArraySpec) -> OperatorOutline:
        if not self.rate:
            return OperatorOutline(x, None)
        keep = ArraySpec((x.shape[0], math.prod(x.shape[1:])), kernels.BOOL)
        return OperatorOutline(ArraySpec(x.shape, x.dtype), keep, 0, 40 * elements(x))
