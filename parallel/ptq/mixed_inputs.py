"""A width for the inputs of each layer: choice by bytes of the inputs and measured losses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel.data.sampler import Batch
from parallel.nn.operator import Operator
from parallel.ptq.calibration import observed, run_batches, watch
from parallel.ptq.evaluation import evaluate
from parallel.ptq.packed_weights import inputs_of, rounding
from parallel.runtime.collective_errors import collective_call
from quant import QuantSpec
from quant.search import SEARCHES, Choice, SearchTable

Ranges = dict[str, dict[str, np.ndarray]]
"""Scale and zero point of the inputs of operators, by name."""


@dataclass(frozen=True)
class InputMixture:
    """Options for the inputs of all layers of a quantised model: specs, ranges by spec, table of bytes and losses.

    Bytes count the rows of a sample that a layer multiplies. Losses are measured with the inputs of one layer
    rounded.
    """

    model: Operator
    names: Sequence[str]
    specs: Sequence[QuantSpec]
    ranges: Sequence[Ranges]
    table: SearchTable

    def budget(self, bits: float) -> float:
        """Bytes of all inputs with `bits` bits on average. ValueError if no mixture of the widths has this average."""
        widths = [spec.bits for spec in self.specs]
        if not min(widths) <= bits <= max(widths):
            raise ValueError(f"mixed-inputs: expected {min(widths)} to {max(widths)} bits, found {bits:g}")
        return float(self.table.costs[:, 0].sum()) / widths[0] * bits

    def choose(self, search: str, bits: float, comm: Any) -> Choice:
        """Find an option per layer: least loss with `bits` bits on average. Collective."""
        return collective_call(comm, lambda: SEARCHES[search](self.table, self.budget(bits)), search, root=0)

    def chosen(self, choice: Choice) -> Operator:
        """Model that rounds the inputs of each layer by its option."""
        made = self.model
        for at, (spec, ranges) in enumerate(zip(self.specs, self.ranges)):
            made = rounding(made, spec, {name: ranges[name] for name, one in zip(self.names, choice) if one == at})
        return made


def input_mixture(
    model: Operator,
    loss: Any,
    spec: QuantSpec,
    widths: Sequence[int],
    observer: str,
    batches: Sequence[Batch],
    comm: Any,
) -> InputMixture:
    """Ranges and losses of each of the `widths` of the inputs of a model with quantised weights. Collective.

    `spec` is the inputs' spec except for its width. `quantise` describes `observer`. Runs a forward pass of all
    samples for each layer and width.
    """
    specs = [spec.replace(bits=bits) for bits in widths]
    ranges = [observed(model, one, observer, batches, comm) for one in specs]
    names, base = list(ranges[0]), evaluate(model, loss, batches, comm).loss
    elements = _elements(model, names, batches, comm)
    losses = np.zeros((len(names), len(specs)))
    for at, (one, found) in enumerate(zip(specs, ranges)):
        for row, name in enumerate(names):
            rounded = rounding(model, one, {name: found[name]})
            losses[row, at] = evaluate(rounded, loss, batches, comm).loss - base
    costs = np.outer(elements, [one.bits / 8 for one in specs])
    return InputMixture(model, names, specs, ranges, SearchTable(costs, losses))


def _elements(model: Operator, names: Sequence[str], batches: Sequence[Batch], comm: Any) -> np.ndarray:
    """Elements of the rows per sample that each operator multiplies, float64."""
    sums = dict.fromkeys(names, 0)

    def add(operator: Operator, x: Any, y: Any) -> None:
        sums[operator.name] += inputs_of(operator, x).size

    run_batches(watch(model, set(names), add), batches, comm)
    total = np.array(comm.allgather([*sums.values(), sum(len(batch.samples) for batch in batches)]), float).sum(axis=0)
    found: np.ndarray = total[:-1] / total[-1]
    return found
