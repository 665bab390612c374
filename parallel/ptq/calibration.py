"""Calibration: statistics of layer inputs over all ranks' samples (second moments, mean and largest sizes, ranges)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from parallel.data.sampler import Batch, Dataset
from parallel.nn.operator import Operator, PassMode
from parallel.nn.transforms.quantizable_layers import QuantizableLayer, kind_of
from parallel.nn.transforms.wrapper import WrappedOperator, rebuilt
from parallel.ptq.packed_weights import PackedWeight, inputs_of
from parallel.runtime.collective_errors import collective_call
from quant import PerChannel, QuantSpec
from quant.observers import OBSERVERS, MinMax
from quant.types import Array

UNFIT = "these samples do not go through the model"

OperatorCallback = Callable[[Operator, Array, Array], object]
"""Function of an operator, its input and its output."""


class InputMoments:
    """Accumulated statistics of the input rows X of a matrix product: X^T X, and mean and largest |x|.

    `moments` is X^T X: float64, shape (inputs, inputs).
    """

    def __init__(self, inputs: int):
        self.rows = 0
        self.moments = np.zeros((inputs, inputs))
        self._total = np.zeros(inputs)
        self._range = MinMax(PerChannel(1))

    def add(self, rows: Array) -> None:
        if len(rows):
            self.rows += len(rows)
            self.moments += rows.T.astype(np.float64) @ rows
            self._total += abs(rows).sum(axis=0, dtype=np.float64)
            self._range.observe(rows)

    def allreduce(self, comm: Any) -> InputMoments:
        """New statistics of the rows of all ranks, the same on all. Collective. `comm` has mpi4py's interface."""
        total = InputMoments(len(self._total))
        total._range = self._range.allreduce(comm)
        comm.Allreduce(self.moments, total.moments)
        comm.Allreduce(self._total, total._total)
        total.rows = sum(comm.allgather(self.rows))
        return total

    @property
    def live(self) -> int:
        """Number of input features that were not always 0."""
        return int(np.count_nonzero(np.diag(self.moments)))

    @property
    def sizes(self) -> np.ndarray:
        """Mean |x| of each input feature."""
        return self._total / max(self.rows, 1)

    @property
    def largest(self) -> np.ndarray:
        """Largest |x| of each input feature. 0 without rows."""
        if not self.rows:
            return np.zeros(len(self._total), np.float32)
        low, high = self._range.range()
        largest: np.ndarray = np.maximum(abs(low), abs(high))
        return largest


def dealt(data: Dataset, samples: int, micro_batch: int, rank: int, ranks: int) -> list[Batch]:
    """This rank's share of up to `samples` samples spaced evenly over a data set, in micro-batches of `micro_batch`.

    The micro-batches are the same for any number of ranks. Ranks take them in turns.
    """
    count = min(samples, len(data))
    numbers = np.arange(count, dtype=np.int64) * len(data) // max(count, 1)
    parts = [numbers[first : first + micro_batch] for first in range(0, count, micro_batch)]
    return [Batch(at, *data.take(parts[at]), parts[at]) for at in range(rank, len(parts), ranks)]


class ObservedOperator(WrappedOperator):
    """Wrapper of an operator that calls ``callback(operator, input, output)`` after each forward."""

    def __init__(self, inner: Operator, callback: OperatorCallback):
        super().__init__(inner)
        self._callback = callback

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        y, saved = self.inner.forward(x, run)
        self._callback(self.inner, x, y)
        return y, saved


def watch(model: Operator, names: set[str], callback: OperatorCallback) -> Operator:
    """Copy of the model, sharing its parameters, that calls `callback` after each forward of the operators named."""
    return rebuilt(model, lambda operator: ObservedOperator(operator, callback) if operator.name in names else operator)


def run_batches(model: Operator, batches: Iterable[Batch], comm: Any) -> None:
    """Run this rank's batches forward, for `watch`. No outputs. Collective. ValueError on all ranks if one fails."""
    collective_call(comm, lambda: [forward(model, batch) for batch in batches], UNFIT)


def forward(model: Operator, batch: Batch) -> Array:
    return model.forward(batch.x, PassMode(training=False, samples=batch.samples))[0]


def calibrate(
    model: Operator, layers: Sequence[QuantizableLayer], batches: Sequence[Batch], comm: Any
) -> dict[str, InputMoments]:
    """Input statistics of every layer with a matrix product, over all ranks' batches, by layer name. Collective.

    A rank may have no batches. ValueError on all ranks, if samples do not fit the model, or there are none. A warning
    on all ranks names the layers with fewer rows of samples than inputs that are not always 0.
    """
    own = {layer.name: InputMoments(layer.shape[1]) for layer in layers if layer.multiplied}
    names = {user.name for layer in layers for user in layer.users if _multiplies(user)}

    def add(operator: Any, x: Array, y: Array) -> None:
        own[operator.weight.name].add(inputs_of(operator, x))

    run_batches(watch(model, names, add), batches, comm)
    total = {name: moments.allreduce(comm) for name, moments in own.items()}
    if empty := [name for name, moments in total.items() if not moments.rows]:  # totals are equal: all raise
        raise ValueError(f"no sample has come to {', '.join(empty)}: there is nothing to calibrate with")
    if few := [f"{name} ({one.rows} for {one.live})" for name, one in total.items() if one.rows < one.live]:
        text = "calibration: expected at least as many rows of samples as inputs; rounding to nearest may be better for"
        warnings.warn(f"{text} {', '.join(few)}", stacklevel=2)
    return total


def observed(
    model: Operator, spec: QuantSpec, observer: str, batches: Sequence[Batch], comm: Any
) -> dict[str, dict[str, np.ndarray]]:
    """Scale and zero point (arguments of `quantize`) of the inputs of every product with a packed weight. Collective.

    By operator name, from the batches of all ranks. `spec` is the inputs' spec: linear codes, one scale for all. A
    batch's `number` is its index among the batches of all ranks. Raises ValueError like `calibrate`.
    """
    observers = {
        value.name: OBSERVERS[observer](spec)
        for _, value in model.walk()
        if isinstance(value, Operator)
        and isinstance(getattr(value, "weight", None), PackedWeight)
        and _multiplies(value)
    }

    def begun() -> Iterator[Batch]:
        for batch in batches:
            for one in observers.values():
                one.begin(batch.number)
            yield batch

    def observe(operator: Operator, x: Array, y: Array) -> None:
        observers[operator.name].observe(inputs_of(operator, x))

    run_batches(watch(model, set(observers), observe), begun(), comm)
    return {name: one.allreduce(comm).parameters(spec) for name, one in observers.items()}


def _multiplies(operator: Operator) -> bool:
    return getattr(kind_of(operator), "product", None) is not None
