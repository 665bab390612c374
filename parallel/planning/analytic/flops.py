"""FLOPs of a transformer by operator and by the conventions in use; roofline, time and cost of training.

Published figures count differently. `CONVENTIONS` has them by name:

    exact       matrix products of the model: attention of every query with every key; experts that a token uses
    causal      as exact, with the half of the scores that a causal mask leaves
    6n          6 FLOPs per active parameter and token (Kaplan et al. 2020), the embedding's table included
    palm        6n, and 12 layers x heads x head width x length for attention (Chowdhery et al. 2022, appendix B)

`exact` is what Korthikanti et al. (2022, appendix A) count: 72 B s L h^2 (1 + s/(6h) + V/(12 h L)) for a step of B
sequences of a plain model. A backward pass counts as two forward passes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from parallel.planning.analytic.machines import Device
from parallel.planning.analytic.transformer import Transformer


class OperatorCost(NamedTuple):
    """One matrix product for a number of tokens: FLOPs, and bytes read and written if each element moves once.

    `repeats` is the number of layers, or of weights, with a product of this shape m x k x n.
    """

    part: str
    name: str
    m: int
    k: int
    n: int
    repeats: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n * self.repeats

    def nbytes(self, itemsize: int = 2) -> int:
        return (self.m * self.k + self.k * self.n + self.m * self.n) * itemsize * self.repeats

    def intensity(self, itemsize: int = 2) -> float:
        """FLOPs per byte."""
        return self.flops / self.nbytes(itemsize)

    def seconds(self, device: Device, precision: str, itemsize: int = 2) -> float:
        """Least time on a device: the longer of computing and moving the data (Williams et al., "Roofline", 2009)."""
        return max(self.flops / device.peak_of(precision), self.nbytes(itemsize) / device.bandwidth)


def attention_widths(model: Transformer) -> tuple[int, int]:
    """Widths of a head's queries and keys, and of its values."""
    if model.latent is None:
        return model.head_width, model.head_width
    return model.latent.plain + model.latent.rotary, model.latent.value


def operators(model: Transformer, sequences: int = 1, length: int | None = None) -> Iterator[OperatorCost]:
    """Matrix products of a forward pass over `sequences` of `length` positions (default: the model's context).

    Tokens of experts are spread evenly.
    """
    length = length or model.context
    tokens, (width, value) = sequences * length, attention_widths(model)
    found: Counter[OperatorCost] = Counter()
    for layer, layers in model.kinds():
        for each in model.products(layer):
            rows = -(-tokens * each.active // each.stored)
            found[OperatorCost(each.part, each.name, rows, each.inputs, each.outputs, each.stored)] += layers
    found[OperatorCost("scores", "scores", length, width, length, sequences * model.heads)] = model.layers
    found[OperatorCost("scores", "weighted values", length, length, value, sequences * model.heads)] = model.layers
    if model.vocabulary:
        found[OperatorCost("vocabulary", "head", tokens, model.width, model.vocabulary, 1)] += 1
    for cost, count in found.items():
        yield cost._replace(repeats=cost.repeats * count)


def forward_flops(model: Transformer, length: int | None = None) -> Counter[str]:
    """FLOPs of a forward pass for one token of a sequence of `length`, by part of the model."""
    length = length or model.context
    found: Counter[str] = Counter()
    for layer, layers in model.kinds():
        for each in model.products(layer):
            found[each.part] += layers * each.flops
    found["scores"] = 2 * length * model.heads * sum(attention_widths(model)) * model.layers
    if model.vocabulary:
        found["vocabulary"] += model.head.flops
    return found


def _exact(model: Transformer, length: int) -> int:
    return 3 * forward_flops(model, length).total()


def _palm(model: Transformer, length: int) -> int:
    return 6 * model.active_parameters + 6 * model.layers * model.heads * sum(attention_widths(model)) * length


CONVENTIONS: dict[str, Callable[[Transformer, int], int]] = {
    "exact": _exact,
    "causal": lambda model, length: _exact(model, length) - 3 * forward_flops(model, length)["scores"] // 2,
    "6n": lambda model, length: 6 * model.active_parameters,
    "palm": _palm,
}
"""FLOPs per token of training (forward and backward) by convention, of (model, length)."""


def recomputed_flops(model: Transformer, recompute: str) -> int:
    """FLOPs per token that the backward pass computes again: none, the scores (selective), or all layers (full)."""
    forward = forward_flops(model, None)
    if recompute == "full":
        return forward.total() - forward["vocabulary"]
    return forward["scores"] if recompute == "selective" else 0


YEAR = 365 * 24 * 3600


class TrainingCost(NamedTuple):
    """Training on a number of tokens: FLOPs, seconds, device-hours, and their price (None without one)."""

    flops: float
    seconds: float
    device_hours: float
    price: float | None

    @property
    def years(self) -> float:
        return self.seconds / YEAR


def training_cost(flops: float, peak: float, devices: int, share: float, price: float | None = None) -> TrainingCost:
    """Time and cost of `flops` on devices of `peak` FLOP/s each that reach a `share` of it. `price` per device-hour.

    >>> round(training_cost(2e25, 2250e12, devices=1, share=1.0).years)  # GPT-4, by estimate, on one B200
    282
    """
    if not (peak > 0 and devices > 0 and 0 < share <= 1):
        raise ValueError(f"expected a peak and devices above 0 and a share up to 1, found {peak}, {devices}, {share}")
    seconds = flops / (peak * devices * share)
    hours = seconds * devices / 3600
    return TrainingCost(flops, seconds, hours, None if price is None else price * hours)
