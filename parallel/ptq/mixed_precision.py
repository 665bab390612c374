"""Mixed precision: options per layer with their costs and losses, and the choice among them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Spec in other widths, and for groups in other group sizes.

    Parameters
    ----------
    spec : QuantSpec
        Spec of linear codes.
    widths : sequence of int
    groups : sequence of int, optional
        By default half of the spec's size, the same, twice and four times as many; none but its own where it has none.

    Raises
    ------
    ValueError
        If codes are not linear, a width is no width, or there are groups for a spec that has none.

    Examples
    --------
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
    """Layers, their options, and the search table.

    Attributes
    ----------
    model : Operator
    layers : sequence of Layer
    specs : sequence of QuantSpec
        The options.
    few : list of list of Few
        Every layer by every option.
    nbytes : array of int64, shape (layers, options)
    table : Table
        Costs (bytes or seconds) and losses of the options.
    """

    model: Operator
    layers: Sequence[QuantizableLayer]
    specs: Sequence[QuantSpec]
    few: Sequence[Sequence[FewBitWeight]]
    nbytes: np.ndarray
    table: SearchTable

    def uniform(self, spec: QuantSpec) -> Choice:
        """Same option for all layers."""
        return (list(self.specs).index(spec),) * len(self.layers)

    def budget(self, spec: QuantSpec, bits: float) -> float:
        """Cost of all layers at so many bits, scales included; linear between widths.

        Raises
        ------
        ValueError
            For bits below or above all widths.
        """
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
        return packed(self.model, {layer.name: few[at] for layer, few, at in zip(self.layers, self.few, choice)})

    def bits(self, choice: Choice) -> float:
        """Mean bits per weight, scales included."""
        taken = sum(int(line[at]) for line, at in zip(self.nbytes, choice))
        return 8 * taken / max(sum(math.prod(layer.shape) for layer in self.layers), 1)


class MixtureOptions(NamedTuple):
    """Options of `mixture`.

    Attributes
    ----------
    method : str
        A key of `METHODS`.
    sensitivity : callable
        A value of `SENSITIVITIES`.
    cost : str
        A key of `COSTS`.
    activations : QuantSpec, optional
        Spec of the inputs if they are quantised too; affects costs only.
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
    flat = rounded([(layer, spec) for layer in layers for spec in specs], moments, method, comm)
    few = [flat[first : first + len(specs)] for first in range(0, len(flat), len(specs))]
    sizes = np.array([[nbytes_of(layer, spec, method) for spec in specs] for layer in layers], np.int64)
    losses = sensitivity(model, loss, layers, few, batches, comm)
    costs = COSTS[cost](model, layers, few, sizes, batches, comm, activations)
    return PrecisionMixture(model, layers, specs, few, sizes, SearchTable(costs, losses))


def _bytes(model: Operator, layers: Any, few: Any, sizes: np.ndarray, *_: Any) -> np.ndarray:
    return sizes.astype(np.float64)


def _latency(
    model: Operator,
    layers: Sequence[QuantizableLayer],
    few: Sequence[Sequence[FewBitWeight]],
    sizes: np.ndarray,
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
        see = watch(model, names, lambda operator, x, y: arriving.setdefault(operator.name, x))
        forward(see, batches[0])
        return np.array(
            [[_seconds(model, layer, one, arriving, activations) for one in some] for layer, some in zip(layers, few)]
        )

    return collective_call(comm, measured, UNFIT, root=0)


def _seconds(
    model: Operator,
    layer: QuantizableLayer,
    few: FewBitWeight,
    arriving: dict[str, Array],
    activations: QuantSpec | None,
) -> float:
    made = packed(model, {layer.name: few})
    users = {user.name for user in layer.users}
    total = 0.0
    for _, operator in made.walk():
        if isinstance(operator, Operator) and operator.name in users:
            users.discard(operator.name)
            x = arriving[operator.name]
            if activations is not None and layer.multiplied and x.dtype.kind == "f":
                seen = MinMax()
                seen.observe(inputs_of(operator, x))
                operator = RoundedInput(operator, activations, seen.parameters(activations))
            total += min(_once(operator, x) for _ in range(TIMES))
    return total


def _once(operator: Operator, x: Array) -> float:
    began = time.perf_counter()
    operator.forward(x, PassMode(training=False))
    return time.perf_counter() - began


COSTS: dict[str, Callable[..., np.ndarray]] = {"bytes": _bytes, "latency": _latency}
"""Costs by name: functions to an array of shape (layers, options)."""
