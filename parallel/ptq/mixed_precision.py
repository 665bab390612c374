"""Mixed precision: choice of an option per layer, from the bytes and the (measured or estimated) losses of options."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel.data.sampler import Batch
from parallel.nn.array_checks import checked
from parallel.nn.operator import Operator, PassMode
from parallel.nn.transforms.quantizable_layers import QuantizableLayer, to_matrix
from parallel.ptq.calibration import InputMoments
from parallel.ptq.evaluation import evaluate
from parallel.ptq.packed_weights import FewBitWeight, packed
from parallel.ptq.quantize_model import attempted
from parallel.runtime.collective_errors import collective_call
from quant import PerGroup, QuantSpec
from quant.search import SEARCHES, Choice, SearchTable

WIDTHS = (2, 3, 4, 5, 6, 7, 8)
"""Code widths that a layer may have."""

LossEstimate = Callable[[QuantizableLayer, FewBitWeight], float]
"""Function of a layer and its quantised weight: expected increase of the loss."""


def options_of(spec: QuantSpec, widths: Sequence[int] = WIDTHS) -> list[QuantSpec]:
    """Variants of a spec of linear codes: each width, with groups of half, 1, 2 and 4 times the size if it has groups.

    >>> from quant import grouped
    >>> [(one.bits, one.granularity.size) for one in options_of(grouped(3, 1), [2, 4])]
    [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]
    """
    if not spec.linear:
        raise ValueError(f"mixed: widths are those of linear codes, and codes {spec.code} have one")
    own = spec.granularity
    if not isinstance(own, PerGroup):
        return [spec.replace(bits=bits) for bits in widths]
    sizes = [size for size in (own.size // 2, own.size, 2 * own.size, 4 * own.size) if size]
    return [spec.replace(bits=bits, granularity=PerGroup(size, own.axis)) for bits in widths for size in sizes]


@dataclass(frozen=True)
class PrecisionMixture:
    """Quantisation options of all layers: `specs`, `weights` by layer and option, table of bytes and losses.

    Options that a layer does not have, since its weights do not fit the spec, have infinite bytes in the table.
    """

    model: Operator
    layers: Sequence[QuantizableLayer]
    specs: Sequence[QuantSpec]
    weights: Sequence[Sequence[FewBitWeight]]
    table: SearchTable

    def uniform(self, spec: QuantSpec) -> Choice:
        """Choice of `spec` for all layers."""
        return (list(self.specs).index(spec),) * len(self.layers)

    def has(self, choice: Choice) -> bool:
        """True if all layers have these options."""
        return math.isfinite(self.table.cost(choice))

    def budget(self, spec: QuantSpec, bits: float) -> float:
        """Bytes of all layers, with scales, for `bits`-bit codes on average: interpolated between widths of `spec`."""
        widths = sorted({option.bits for option in self.specs})
        if not widths[0] <= bits <= widths[-1]:
            raise ValueError(f"mixed: expected {widths[0]} to {widths[-1]} bits on the average, found {bits:g}")
        options = [list(self.specs).index(spec.replace(bits=width)) for width in widths]
        costs = [sum(weights[option].nbytes for weights in self.weights) for option in options]
        return float(np.interp(bits, widths, costs))

    def choose(self, search: str, budget: float, comm: Any) -> Choice:
        """Find an option per layer: least loss within `budget` bytes. `search` is a key of `SEARCHES`. Collective."""
        return collective_call(comm, lambda: SEARCHES[search](self.table, budget), search, root=0)

    def chosen(self, choice: Choice) -> Operator:
        chosen = zip(self.layers, self.weights, choice)
        return packed(self.model, {layer.name: options[at] for layer, options, at in chosen})

    def bits(self, choice: Choice) -> float:
        """Mean bits per weight of a choice, scales included."""
        return 8 * self.table.cost(choice) / max(sum(math.prod(layer.shape) for layer in self.layers), 1)


def mixture(
    model: Operator,
    layers: Sequence[QuantizableLayer],
    specs: Sequence[QuantSpec],
    moments: dict[str, InputMoments],
    method: str,
    estimate: LossEstimate,
    comm: Any,
) -> PrecisionMixture:
    """Quantise each of `layers` by each of `specs`, and estimate the losses. Collective.

    A layer whose weights do not fit a spec does not have that option. ValueError on all ranks if it has none.

    `layers` are `layers_of(model)`, `moments` is the result of `calibrate`, `method` a key of `METHODS`, `estimate` a
    result of one of `SENSITIVITIES`.
    """
    flat, problems = attempted([(layer, spec) for layer in layers for spec in specs], moments, method, comm)
    costs, losses = np.zeros((2, len(layers), len(specs)))
    for at, weight in enumerate(flat):
        place = divmod(at, len(specs))
        layer, fits = layers[place[0]], at not in problems
        costs[place], losses[place] = (weight.nbytes, estimate(layer, weight)) if fits else (math.inf, 0)
    if (missing := np.isinf(costs).all(axis=1)).any():
        raise ValueError(f"a layer cannot be quantised: {problems[int(missing.argmax()) * len(specs)]}")
    weights = [flat[first : first + len(specs)] for first in range(0, len(flat), len(specs))]
    return PrecisionMixture(model, layers, specs, weights, SearchTable(costs, losses))


def by_loss(
    model: Operator, loss: Any, layers: Sequence[QuantizableLayer], batches: Sequence[Batch], comm: Any
) -> LossEstimate:
    """Function that measures the increase of the mean loss with one layer quantised. Collective, as are its calls."""
    base = evaluate(model, loss, batches, comm).loss
    return lambda layer, weight: evaluate(packed(model, {layer.name: weight}), loss, batches, comm).loss - base


def by_fisher(
    model: Operator, loss: Any, layers: Sequence[QuantizableLayer], batches: Sequence[Batch], comm: Any
) -> LossEstimate:
    """Function that estimates a loss increase: half the sum of squared weight errors times mean squared gradients.

    The mean is over samples: the empirical Fisher information, in place of the diagonal of the Hessian (Y. LeCun,
    J. Denker, S. Solla, "Optimal Brain Damage", 1990). Cost: a backward pass for every sample. Collective.
    """
    information = fisher(model, loss, layers, batches, comm)
    return lambda layer, weight: 0.5 * float((information[layer.name] * np.square(weight.matrix - layer.matrix)).sum())


def fisher(
    model: Operator, loss: Any, layers: Sequence[QuantizableLayer], batches: Sequence[Batch], comm: Any
) -> dict[str, np.ndarray]:
    """Mean squared gradient of each weight over all ranks' samples, by layer, as matrices. Collective."""
    sums = {layer.name: np.zeros(layer.shape) for layer in layers}

    def add() -> int:
        samples = 0
        for batch in batches:
            for x, y in zip(batch.x, batch.y):
                found = gradients(model, loss, x[None], y[None])
                for layer in layers:
                    sums[layer.name] += np.square(to_matrix(found[layer.name], layer.transposed), dtype=np.float64)
                samples += 1
        return samples

    samples = sum(comm.allgather(collective_call(comm, add, "these samples have no gradients")))
    means = {name: np.empty_like(own) for name, own in sums.items()}
    for name, mean in means.items():
        comm.Allreduce(sums[name], mean)
        mean /= max(samples, 1)
    return means


def gradients(model: Operator, loss: Any, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of a micro-batch's mean loss, by parameter name."""
    found: dict[str, np.ndarray] = {}

    def sink(parameter: Any, compute: Any) -> None:
        one = np.empty(parameter.shape, np.float32)
        compute(one)
        found[parameter.name] = found[parameter.name] + one if parameter.name in found else one

    scores, saved = model.forward(x, PassMode(training=False))
    _, of_loss = loss.forward(scores, y)
    model.backward(loss.backward(1 / (loss.count(y) or 1), of_loss), saved, checked(model, sink))
    return found


SENSITIVITIES = {"loss": by_loss, "fisher": by_fisher}
"""Sensitivities by name: functions (model, loss, layers, batches, comm) -> estimate."""
