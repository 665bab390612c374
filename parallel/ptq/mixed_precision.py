"""Mixed precision: options per layer with their costs and losses, and the choice among them."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from parallel.data.sampler import Batch
from parallel.nn.operator import Operator, PassMode
from parallel.ptq.calibration import UNFIT, InputMoments, forward, watch
from parallel.ptq.packed_weights import FewBitWeight, RoundedInput, inputs_of, packed
from parallel.ptq.quantizable_layers import QuantizableLayer
from parallel.ptq.quantize_model import nbytes_of, rounded
from parallel.runtime.collective_errors import collective_call
from quant import PerGroup, QuantSpec
from quant.observers import MinMax
from quant.search import SEARCHES, Choice, SearchTable
from quant.types import Array

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
"""Code widths that a layer may have."""

TIMES = 5
"""Repetitions of a timing; the fastest counts."""


def options_of(spec: QuantSpec, widths: Sequence[int] = WIDTHS, groups: Sequence[int] | None = None) -> list[QuantSpec]:
    """Spec of linear codes in other widths and, if it has groups, other group sizes; else ValueError.

    By default, groups have half, once, twice and four times their size.

    >>> from quant import grouped
    >>> [(one.bits, one.granularity.size) for one in options_of(grouped(3, 32), [2, 4], [32, 64])]
    [(2, 32), (2, 64), (4, 32), (4, 64)]
    """
    if not spec.linear:
        raise ValueError(f"mixed: widths are those of linear codes, and codes {spec.code} have one")
    own = spec.granularity
    if not isinstance(own, PerGroup):
        if groups:
            raise ValueError("mixed: groups of several sizes are for specs that have groups")
        return [spec.replace(bits=bits) for bits in widths]
    sizes = groups or [size for size in (own.size // 2, own.size, 2 * own.size, 4 * own.size) if size]
    return [spec.replace(bits=bits, granularity=PerGroup(size, own.axis)) for bits in widths for size in sizes]


@dataclass(frozen=True)
class PrecisionMixture:
    """Layers, their options `specs`, and the search table.

    `weights` has every layer by every option, `nbytes` their bytes, `table` costs (bytes or seconds) and losses.
    """

    model: Operator
    layers: Sequence[QuantizableLayer]
    specs: Sequence[QuantSpec]
    weights: Sequence[Sequence[FewBitWeight]]
    nbytes: np.ndarray
    table: SearchTable

    def uniform(self, spec: QuantSpec) -> Choice:
        """Same option for all layers."""
        return (list(self.specs).index(spec),) * len(self.layers)

    def budget(self, spec: QuantSpec, bits: float) -> float:
        """Cost of all layers at a mean width, scales included; linear between the widths of the options."""
        widths = sorted({option.bits for option in self.specs})
        if not widths[0] <= bits <= widths[-1]:
            raise ValueError(f"mixed: expected {widths[0]} to {widths[-1]} bits on the average, found {bits:g}")
        costs = [self.table.cost(self.uniform(spec.replace(bits=width))) for width in widths]
        return float(np.interp(bits, widths, costs))

    def choose(self, search: str, budget: float, comm: Any) -> Choice:
        """Options found by a search of `SEARCHES` within a budget, the same on all ranks. Collective."""
        return collective_call(comm, lambda: SEARCHES[search](self.table, budget), search, root=0)

    def chosen(self, choice: Choice) -> Operator:
        """Model with these options."""
        chosen = zip(self.layers, self.weights, choice)
        return packed(self.model, {layer.name: options[at] for layer, options, at in chosen})

    def bits(self, choice: Choice) -> float:
        """Mean bits per weight, scales included."""
        total = sum(int(sizes[at]) for sizes, at in zip(self.nbytes, choice))
        return 8 * total / max(sum(math.prod(layer.shape) for layer in self.layers), 1)


class MixtureOptions(NamedTuple):
    """Options of `mixture`: a key of `METHODS`, a value of `SENSITIVITIES`, a key of `COSTS`.

    `activations`, the spec of the inputs if they are quantised too, affects costs only.
    """

    method: str
    sensitivity: Callable[..., np.ndarray]
    cost: str = "bytes"
    activations: QuantSpec | None = None


def mixture(
    model: Operator,
    loss: Any,
    layers: Sequence[QuantizableLayer],
    specs: Sequence[QuantSpec],
    moments: dict[str, InputMoments],
    batches: Sequence[Batch],
    comm: Any,
    options: MixtureOptions,
) -> PrecisionMixture:
    """Round every layer by every option and measure costs and losses. Collective.

    `specs` are the options, `layers` those of `layers_of(model)`, `moments` the result of `calibrate`; other
    parameters as in `parallel.ptq.evaluation.evaluate`.
    """
    method, sensitivity, cost, activations = options
    if cost not in COSTS:
        raise ValueError(f"cost: expected one of {', '.join(COSTS)}, found {cost!r}")
    flat = rounded([(layer, spec) for layer in layers for spec in specs], moments, method, comm)
    weights = [flat[first : first + len(specs)] for first in range(0, len(flat), len(specs))]
    sizes = np.array([[nbytes_of(layer, spec, method) for spec in specs] for layer in layers], np.int64)
    losses = sensitivity(model, loss, layers, weights, batches, comm)
    costs = sizes if cost == "bytes" else _latency(model, layers, weights, batches, comm, activations)
    return PrecisionMixture(model, layers, specs, weights, sizes, SearchTable(costs, losses))


def _latency(
    model: Operator,
    layers: Sequence[QuantizableLayer],
    weights: Sequence[Sequence[FewBitWeight]],
    batches: Sequence[Batch],
    comm: Any,
    activations: QuantSpec | None,
) -> np.ndarray:
    """Seconds of a layer's forward passes on rank 0's first batch, over all its users."""

    def measured() -> np.ndarray:
        if not batches:
            raise ValueError("rank 0 has no samples to time layers with")
        arriving: dict[str, Array] = {}
        names = {user.name for layer in layers for user in layer.users}
        forward(watch(model, names, lambda operator, x, y: arriving.setdefault(operator.name, x)), batches[0])
        return np.array(
            [
                [_seconds(packed(model, {layer.name: weight}), layer, arriving, activations) for weight in options]
                for layer, options in zip(layers, weights)
            ]
        )

    return collective_call(comm, measured, UNFIT, root=0)


def _seconds(
    model: Operator, layer: QuantizableLayer, arriving: dict[str, Array], activations: QuantSpec | None
) -> float:
    """Seconds of a layer's forward passes; `arriving` has the inputs of its users by name."""
    users = {user.name for user in layer.users}
    total = 0.0
    for _, operator in model.walk():
        if isinstance(operator, Operator) and operator.name in users:
            users.discard(operator.name)
            x = arriving[operator.name]
            if activations is not None and layer.multiplied and x.dtype.kind == "f":
                observer = MinMax()
                observer.observe(inputs_of(operator, x))
                operator = RoundedInput(operator, activations, observer.parameters(activations))
            forward_once = partial(operator.forward, x, PassMode(training=False))
            total += min(timeit.repeat(forward_once, number=1, repeat=TIMES))
    return total


COSTS = ("bytes", "latency")
"""Costs that a budget may limit."""
