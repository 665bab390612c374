"""Mixed precision: options per layer with their bytes and losses, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel.nn.operator import Operator
from parallel.ptq.calibration import InputMoments
from parallel.ptq.packed_weights import FewBitWeight, packed
from parallel.ptq.quantizable_layers import QuantizableLayer
from parallel.ptq.quantize_model import rounded
from parallel.runtime.collective_errors import collective_call
from quant import PerGroup, QuantSpec
from quant.search import SEARCHES, Choice, SearchTable

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
"""Code widths that a layer may have."""


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
    """Layers, their options `specs`, `weights` of every layer by every option, and the table of bytes and losses."""

    model: Operator
    layers: Sequence[QuantizableLayer]
    specs: Sequence[QuantSpec]
    weights: Sequence[Sequence[FewBitWeight]]
    table: SearchTable

    def uniform(self, spec: QuantSpec) -> Choice:
        """Same option for all layers."""
        return (list(self.specs).index(spec),) * len(self.layers)

    def budget(self, spec: QuantSpec, bits: float) -> float:
        """Bytes of all layers at a mean width, scales included; linear between the widths of the options."""
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
        return 8 * self.table.cost(choice) / max(sum(math.prod(layer.shape) for layer in self.layers), 1)


def mixture(
    model: Operator,
    layers: Sequence[QuantizableLayer],
    specs: Sequence[QuantSpec],
    moments: dict[str, InputMoments],
    method: str,
    sensitivity: Callable[[Sequence[Sequence[FewBitWeight]]], np.ndarray],
    comm: Any,
) -> PrecisionMixture:
    """Round every layer of `layers_of(model)` by every option of `specs`, and estimate losses. Collective.

    `moments` is the result of `calibrate`, `method` a key of `METHODS`; `sensitivity` maps the weights of every layer
    by every option to losses, as a function of `SENSITIVITIES` with its other arguments bound.
    """
    flat = rounded([(layer, spec) for layer in layers for spec in specs], moments, method, comm)
    weights = [flat[first : first + len(specs)] for first in range(0, len(flat), len(specs))]
    nbytes = [[weight.nbytes for weight in options] for options in weights]
    return PrecisionMixture(model, layers, specs, weights, SearchTable(np.array(nbytes), sensitivity(weights)))
