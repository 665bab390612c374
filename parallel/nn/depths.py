"""Mixture-of-Depths: a block computes for some tokens of each sequence, and the others pass by.

    y_t = x_t + r_t (block(chosen tokens)_t - x_t)   for the chosen tokens t, with r_t = x_t w
    y_t = x_t                                        for the others

In training a sequence's tokens with the highest r are chosen: that of a token depends on later ones, so when a model
is used, a predictor of the choice replaces it. (Raposo et al., arXiv:2404.02258, sections 3.4 and 3.5.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, whole_number
from parallel.nn.compose import Sequential
from parallel.nn.operator import (
    ArraySpec,
    GradientSink,
    Operator,
    OperatorOutline,
    Parameter,
    PassMode,
    constant,
    normal,
)
from parallel.nn.placement import Placement
from quant.types import Array


class DepthValues(NamedTuple):
    """Saved values: chosen positions (sequences, chosen), gates (sequences, chosen, 1), change by the block."""

    x: Array
    chosen: Array
    gates: Array
    change: Array
    of_block: Any
    scale: float


class MixtureOfDepths(Operator):
    """Block for the best `fraction` of the tokens of each sequence, of x (batch, length, width).

    Parameters
    ----------
    block : Operator
        From (batch, chosen, width) to the same shape, such as both halves of a transformer's block; positions keep
        their order, so causal attention stays causal.
    width : int
    fraction : float
        Of the tokens, above 0 up to 1; rounded up to whole tokens.
    predictor_loss : float
        Factor of the predictor's loss, the binary cross-entropy of the choice of every token (`PassMode.terms`); its
        gradient reaches the predictor only.
    """

    mixes: tuple[int, ...] | None = (1, -1)
    writes_records = True
    chooses_tokens = True

    def __init__(self, block: Operator, width: int, fraction: float, predictor_loss: float = 1.0):
        if not 0 < fraction <= 1:
            raise ValueError(f"MixtureOfDepths: expected a fraction above 0 up to 1, found {fraction}")
        self.block, self.width = block, whole_number("width", width)
        self.fraction, self.predictor_loss = fraction, predictor_loss
        self.weight = Parameter((width, 1), normal(1 / math.sqrt(max(width, 1))))
        self.predictor = Parameter((width + 1, 1), constant(0.0), decay=False)

    def _expect(self, x: Any) -> None:
        fits = len(x.shape) == 3 and x.shape[2] == self.width
        expect(fits, self, f"an array of shape (batch, length, {self.width})", x)

    def count(self, length: int) -> int:
        """Number of tokens chosen of a sequence in training: `fraction`, the decimal number, of them, rounded up."""
        return math.ceil(Fraction(str(self.fraction)) * length)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Apply the block to the chosen tokens; in evaluation, to those that the predictor chooses."""
        self._expect(x)
        if not run.training:
            return self._used(x, run), ()
        gates = kernels.widen(x) @ kernels.widen(self.weight.data)
        mask = kernels.top_k(gates[..., 0], self.count(x.shape[1]))
        self._note(x, mask, run)
        xp = kernels.array_namespace(x)
        chosen = xp.flatnonzero(mask).reshape(len(x), self.count(x.shape[1]))
        return self._changed(x, chosen, gates.reshape(-1)[chosen][..., None], run)

    def _changed(self, x: Array, chosen: Array, gates: Array, run: PassMode) -> tuple[Array, Any]:
        """Result with the block applied at `chosen` (numbers of tokens in the batch), and saved values."""
        xp, rows = kernels.array_namespace(x), x.reshape(-1, self.width)
        tokens = rows[chosen]
        result, of_block = self.block.forward(tokens, run)
        change = kernels.widen(result) - kernels.widen(tokens)
        y = xp.array(rows)
        y[chosen] = kernels.narrow(kernels.widen(tokens) + gates * change, x.dtype)
        return y.reshape(x.shape), DepthValues(x, chosen, gates, change, of_block, run.scale)

    def _used(self, x: Array, run: PassMode) -> Array:
        """Result with the predictor's choice, sequence by sequence, as their numbers of tokens differ."""
        xp, rows = kernels.array_namespace(x), []
        gates = kernels.widen(x) @ kernels.widen(self.weight.data)
        wanted = self._logits(x) > 0
        for one, alone in self._alone(x, run):
            chosen = xp.flatnonzero(wanted[one])[None]
            rows.append(self._changed(x[one], chosen, gates[one].reshape(-1)[chosen][..., None], alone)[0])
        return xp.concatenate([x[:0], *rows])

    def _alone(self, x: Array, run: PassMode) -> Iterator[tuple[slice, PassMode]]:
        """Yield each sequence of an evaluation and the mode of its pass; empty slices up to `PassMode.passes`."""
        for number in range(max(len(x), run.passes)):
            one = slice(number, number + 1)
            yield one, PassMode(False, run.seed, run.step, run.samples[one], passes=min(run.passes, 1))

    def _logits(self, x: Array) -> Array:
        weights = kernels.widen(self.predictor.data)
        return (kernels.widen(x) @ weights[:-1] + weights[-1])[..., 0]

    def _note(self, x: Array, mask: Array, run: PassMode) -> None:
        """Add the predictor's loss of each sequence, and the number of its right guesses, to the pass."""
        logits = self._logits(x)
        losses = kernels.softplus(logits) - logits * mask
        use = run.use(self.name)
        run.terms[use, "predictor"] = self.predictor_loss * losses.sum(axis=1)
        run.records[use, "predicted"] = ((logits > 0) == mask).sum().reshape(1)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        y = super().place(axis, x, partial)
        if (of_block := self.block.place(axis, y, partial)) != y:
            raise self.refuse(axis, of_block, f"a block with the result {y}")
        return y

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        xp, v = kernels.array_namespace(dy), saved
        rows, upper = kernels.widen(v.x.reshape(-1, self.width)), kernels.widen(dy.reshape(-1, self.width))
        of_chosen = upper[v.chosen]
        dgates = (of_chosen * v.change).sum(axis=-1, keepdims=True)
        dchange = v.gates * of_chosen
        dtokens = kernels.widen(self.block.backward(kernels.narrow(dchange, dy.dtype), v.of_block, grads))
        dx = xp.array(upper)
        dx[v.chosen] += dtokens - dchange + dgates * kernels.widen(self.weight.data).reshape(-1)
        tokens = rows[v.chosen].reshape(-1, self.width)
        grads(self.weight, lambda out: kernels.matmul(tokens.T, dgates.reshape(-1, 1), out=out))
        self._give_predictor_gradient(v.x, v.chosen.reshape(-1), v.scale, grads)
        return kernels.narrow(dx, dy.dtype).reshape(dy.shape)

    def _give_predictor_gradient(self, x: Array, chosen: Array, scale: float, grads: GradientSink) -> None:
        """Hand in the gradient of the loss of the choice of the tokens with the numbers `chosen`."""
        slopes = kernels.sigmoid(self._logits(x)).reshape(-1)
        slopes[chosen] -= 1
        slopes *= self.predictor_loss * scale

        def gradient(out: Array) -> None:
            kernels.matmul(kernels.widen(x.reshape(-1, self.width)).T, slopes[:, None], out=out[:-1])
            out[-1] = slopes.sum()

        grads(self.predictor, gradient)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of a pass in training."""
        self._expect(x)
        batch, length, width = x.shape
        tokens, wide = ArraySpec((batch, self.count(length), width), x.dtype), kernels.wide(x.dtype)
        block = self.block.outline(tokens)
        chosen, gates = ArraySpec(tokens.shape[:2], np.dtype(np.int64)), ArraySpec((*tokens.shape[:2], 1), wide)
        saved = x, chosen, gates, ArraySpec(tokens.shape, wide), block.saved
        work = block.work + (elements(tokens) * 4 + elements(x) * 2) * wide.itemsize
        return OperatorOutline(ArraySpec(*x), saved, block.flops + 4 * elements(x), work, block.recomputed)


@dataclass(frozen=True)
class DepthLayers:
    """Blocks of a transformer that compute for a part of the tokens only (`MixtureOfDepths`).

    Attributes
    ----------
    fraction : float
        Of the tokens of each sequence, above 0 up to 1.
    every : int
        Distance of these blocks: 2 for every second block, from the second on.
    """

    fraction: float = 0.125
    every: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"depths: expected a fraction above 0 up to 1, found {self.fraction:g}")
        whole_number("depths: every", self.every, 1)

    @classmethod
    def parse(cls, text: str) -> DepthLayers:
        """Parse a fraction and perhaps a distance, such as ``"0.5,every=1"``; ValueError for other text.

        >>> DepthLayers.parse("0.125"), DepthLayers.parse("0.5,every=1")
        (DepthLayers(fraction=0.125, every=2), DepthLayers(fraction=0.5, every=1))
        """
        fraction, comma, rest = text.partition(",")
        name, _, every = rest.partition("=")
        expected = f"depths: expected text such as 0.125 or 0.5,every=1, found {text!r}"
        if comma and name.strip() != "every":
            raise ValueError(expected)
        try:
            values = float(fraction), int(every) if comma else cls.every
        except ValueError as error:
            raise ValueError(expected) from error
        return cls(*values)

    def of(self, model: Sequential, width: int) -> Sequential:
        """Transformer of this width with `MixtureOfDepths` around some of its blocks; ValueError if there are none."""
        last = len(model.items) - 1
        numbers = range(self.every, last, self.every)
        if not numbers:
            raise ValueError(f"depths: expected a model of at least {self.every} blocks, found {last - 1}")
        items = [
            MixtureOfDepths(item, width, self.fraction) if number in numbers else item
            for number, item in enumerate(model.items)
        ]
        return Sequential(items, cuts={_within_block(pattern, numbers): style for pattern, style in model.cuts.items()})


def _within_block(pattern: str, numbers: range) -> str:
    """Pattern of operator names in a transformer whose blocks with these numbers are within a `MixtureOfDepths`.

    >>> [_within_block(pattern, range(2, 5, 2)) for pattern in ("0.0", "2.1.inner.1", "3.1.inner.1", "*.0.inner.1")]
    ['0.0', '2.block.1.inner.1', '3.1.inner.1', '*.0.inner.1']
    """
    number, _, rest = pattern.partition(".")
    return f"{number}.block.{rest}" if number.isdecimal() and int(number) in numbers else pattern
