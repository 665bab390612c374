"""Fake quantisation of operator inputs during training, with ranges that are moving averages over the steps.

In a training step an operator computes with inputs rounded to codes of the range known so far (before the first step's
end: with the inputs themselves), and notes their range in the pass (`PassMode.ranges`). After the step those of all
ranks are combined, so that all ranks have the same range for the next. Passes of no step, such as a measurement of
time, change nothing. (B. Jacob et al., "Quantization and training of neural networks for efficient
integer-arithmetic-only inference", CVPR 2018, section 3.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import is_single
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from parallel.nn.rewrite import operators_in
from parallel.nn.transforms.wrapper import WrappedOperator
from quant import PerTensor, QuantSpec, quantize
from quant.observers import Ema
from quant.observers.ranges import allgather, batch_range
from quant.types import Array

RATE = 0.05
"""Weight of the newest step in the moving average."""


class MovingRange:
    """Moving average of the range of an operator's inputs.

    Attributes
    ----------
    parameters : dict of arrays, or None
        Scale and zero point (arguments of `quantize`) of the averaged range; None before the end of the first step.
    """

    def __init__(self, spec: QuantSpec, rate: float = RATE):
        self.spec = spec
        self.parameters: dict[str, np.ndarray] | None = None
        self._observer = Ema(rate)

    def extend(self, low: float, high: float) -> None:
        """Average the range of a step with those before."""
        self._observer.observe(np.array([low, high], np.float32))
        self._set(self._observer)

    def state(self) -> list[float]:
        """Averaged range [low, high], or [] before the first step."""
        return [] if self.parameters is None else [float(bound[0]) for bound in self._observer.range()]

    def load(self, state: list[float]) -> None:
        observer = Ema(self._observer.a)
        if state:
            observer.observe(np.array(state, np.float32))
        self._set(observer)

    def _set(self, observer: Ema) -> None:
        self._observer = observer.folded()
        self.parameters = self._observer.parameters(self.spec) if len(self._observer.batches) else None


class FakeQuantizedInput(WrappedOperator):
    """Operator whose inputs are rounded to codes of a moving range; gradients pass where the inputs were in range.

    `spec` has linear codes and one scale for all. A forward pass in training notes the range of its inputs in the pass;
    ValueError for NaN or infinity.
    """

    def __init__(self, inner: Operator, spec: QuantSpec, rate: float = RATE):
        super().__init__(inner)
        if not spec.linear or spec.granularity != PerTensor() or spec.rounding == "stochastic":
            raise ValueError(f"spec: expected linear codes with one scale for all, as int8, found {spec}")
        self.range = MovingRange(spec, rate)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        if run.training and x.size:
            low, high = (float(bound[0]) for bound in batch_range(x, PerTensor()))
            least, largest = run.ranges.get(self.name, (low, high))  # of other uses in the pass
            run.ranges[self.name] = min(low, least), max(high, largest)
        values, inside = fake_quantized(x, self.range.spec, self.range.parameters)
        y, saved = self.inner.forward(values, run)
        return y, (saved, inside)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        inner_saved, inside = saved
        dx = self.inner.backward(dy, inner_saved, grads)
        return None if dx is None else dx * inside

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of the inner operator on rounded inputs; also saves a flag per input."""
        inner = self.inner.outline(ArraySpec(x.shape, x.dtype))
        inside = ArraySpec(x.shape, np.dtype(bool))
        elements = inside.nbytes
        return inner._replace(saved=(inner.saved, inside), work=inner.work + 13 * elements + x.nbytes)


def fake_quantized(x: Array, spec: QuantSpec, parameters: dict[str, np.ndarray] | None) -> tuple[Array, Array]:
    """(x rounded to codes with these scales and zero points, True where x is in their range); new arrays like x.

    Without parameters x is copied, and all of it is in range.
    """
    xp = kernels.array_namespace(x)
    if parameters is None:
        return x.copy(), xp.ones(x.shape, bool)
    scale, zero = float(parameters["scales"].item()), float(parameters.get("zeros", np.zeros(1)).item())
    inside = (x >= scale * (spec.q_min - zero)) & (x <= scale * (spec.q_max - zero))
    given = {name: xp.asarray(value) for name, value in parameters.items()}
    return kernels.narrow(quantize(x, spec, nonfinite="poison", **given).dequantize(), x.dtype), inside


class MovingRanges:
    """Moving ranges of the fake-quantised inputs at or below some operators, by operator name."""

    def __init__(self, units: Sequence[Operator]):
        operators = (one for unit in units for one in operators_in(unit))
        self._ranges = {one.name: one.range for one in operators if isinstance(one, FakeQuantizedInput)}

    def __len__(self) -> int:
        return len(self._ranges)

    def end_step(self, runs: Sequence[PassMode], comm: Any) -> None:
        """Average the ranges that passes of all ranks have noted with those of the steps before. Collective."""
        if not self._ranges:
            return
        bounds = np.full((len(self), 2), np.inf, np.float32)  # low and -high; infinite where there were no inputs
        for row, name in zip(bounds, self._ranges):
            for low, high in (run.ranges[name] for run in runs if name in run.ranges):
                np.minimum(row, [low, -high], out=row)
        lowest = allgather(comm, bounds.reshape(-1)).min(axis=0).reshape(bounds.shape)
        for (low, negative), moving in zip(lowest.tolist(), self._ranges.values()):
            if math.isfinite(low):
                moving.extend(low, -negative)

    def state(self) -> dict[str, list[float]]:
        return {name: moving.state() for name, moving in self._ranges.items()}

    def load(self, state: Mapping[str, list[float]]) -> None:
        """Restore ranges that were `checked_ranges`; those of unknown operators are ignored, missing ones are empty."""
        for name, moving in self._ranges.items():
            moving.load(state.get(name, []))


def checked_ranges(state: Any) -> dict[str, list[float]]:
    """Ranges from a checkpoint ({name: [low, high] or []}); ValueError if they are none."""
    if not isinstance(state, dict):
        raise ValueError(f"ranges: expected them by name, found {state!r}")
    for name, bounds in state.items():
        numbers = isinstance(bounds, list) and all(map(is_single, bounds))
        if not numbers or len(bounds) not in (0, 2) or bounds != sorted(bounds):
            raise ValueError(f"ranges: expected [low, high] or [] for {name}, found {bounds!r}")
    return state
