"""Evaluation of quantised models: mean loss, and errors per layer."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel.data.sampler import Batch
from parallel.nn.operator import Operator, PassMode
from parallel.nn.rewrite import operators_in
from parallel.nn.transforms.quantizable_layers import QuantizableLayer
from parallel.ptq.calibration import UNFIT, forward, watch
from parallel.ptq.packed_weights import weights_of
from parallel.runtime.collective_errors import collective_call
from parallel.runtime.step_report import Evaluation, in_units
from quant.types import Array


def evaluate(
    model: Operator,
    loss: Any,
    batches: Sequence[Batch],
    comm: Any,
    measure: Callable[[Array, Array], float] | None = None,
) -> Evaluation:
    """Loss and `measure` per target over all ranks' batches, independent of their distribution. Collective.

    `batches` are this rank's (may be empty). `measure` maps scores and targets to a number that is summed over all
    batches, for example the number of correct predictions. ValueError on all ranks if samples do not fit the model, or
    a loss is not finite.
    """

    def scored() -> list[tuple[float, int, float]]:
        rows = []
        for batch in batches:
            y = forward(model, batch)
            total, _ = loss.forward(y, batch.y)
            if not math.isfinite(total):
                raise ValueError(f"the loss of samples {batch.samples[0]} and on is {total}")
            rows.append((total, loss.count(batch.y), measure(y, batch.y) if measure else 0.0))
        return rows

    all_ranks = comm.allgather(collective_call(comm, scored, "these samples cannot be scored"))
    rows = [row for rank_rows in all_ranks for row in rank_rows]
    total, count, measured = [math.fsum(column) for column in zip(*rows)] or [0.0] * 3
    # Divided, not multiplied with 1 / count: the same rounding as an engine's evaluation.
    loss_mean, measured_mean = (total / count, measured / count) if count else (math.nan, math.nan)
    return Evaluation(loss_mean, measured_mean if measure else None, in_units(count))


class LayerErrorRow(NamedTuple):
    """Errors and size of a quantised layer. Errors are relative to the norms of the exact values.

    `weights` is the error of its matrix, `outputs` the error of its output with only this layer quantised, `arriving`
    with all layers quantised. NaN without a product or samples. `arriving` is also NaN in operators that choose
    tokens, as the quantised model may choose others. `nbytes` and `bits` per weight count scales and divisors.
    `before` counts the bytes as float32.
    """

    name: str
    shape: tuple[int, int]
    bits: float
    nbytes: int
    before: int
    weights: float
    outputs: float
    arriving: float


def compare(
    model: Operator, made: Operator, layers: Sequence[QuantizableLayer], batches: Sequence[Batch], comm: Any
) -> list[LayerErrorRow]:
    """Errors and sizes of quantised model `made`, per layer of the exact `model`, on all ranks' samples. Collective."""
    weights = weights_of(made)
    users = {user.name: layer.name for layer in layers for user in layer.users}
    rounded = {value.name: value for _, value in made.walk() if isinstance(value, Operator) and value.name in users}
    place = {layer.name: number for number, layer in enumerate(layers)}
    groups = (one for one in operators_in(model) if one.chooses_tokens)
    routed = {one.name for group in groups for one in operators_in(group)} & set(users)
    sums, exact = np.zeros((len(layers), 3)), {}

    def before(operator: Operator, x: Array, y: Array) -> None:
        exact[operator.name] = y
        alone, _ = rounded[operator.name].forward(x, PassMode(training=False))
        sums[place[users[operator.name]], :2] += _square(y), _square(alone - y)

    def after(operator: Operator, x: Array, y: Array) -> None:
        sums[place[users[operator.name]], 2] += _square(y - exact[operator.name])

    # A quantised router may choose other tokens: the rows of `routed` do not correspond.
    first, second = watch(model, set(users), before), watch(made, set(users) - routed, after)
    collective_call(comm, lambda: [(forward(first, batch), forward(second, batch)) for batch in batches], UNFIT)
    sums[[place[users[name]] for name in routed], 2] = math.nan
    total = np.empty_like(sums)
    comm.Allreduce(sums, total)
    rows = []
    for layer, (size, alone, all_) in zip(layers, total):
        packed, w = weights[layer.name].quantized, layer.matrix
        errors = (_ratio(_square(packed.matrix - w), _square(w)), _ratio(alone, size), _ratio(all_, size))
        bits = 8 * packed.nbytes / max(w.size, 1)
        rows.append(LayerErrorRow(layer.name, layer.shape, bits, packed.nbytes, w.nbytes, *errors))
    return rows


def _square(x: Array) -> float:
    return float(np.square(x, dtype=np.float64).sum())


def _ratio(off: float, size: float) -> float:
    return math.sqrt(off / size) if size else math.nan
