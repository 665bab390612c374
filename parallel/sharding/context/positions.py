"""Operators that depend on a token's position, for tokens of a divided sequence: position embedding, dropout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import expect
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import PositionEmbedding
from parallel.nn.operator import GradientSink, Operator, PassMode
from parallel.nn.rewrite import inherit
from parallel.sharding.context.sequence_division import Blocks, SequenceDivision
from quant.types import Array


class PartOfTokens(Operator, ABC):
    """Operator that depends on positions, for a part of the tokens along another axis."""

    @abstractmethod
    def divided(self, division: SequenceDivision, rank: int) -> Operator:
        """This operator for the same part of the tokens that `rank` has of a divided sequence."""


class DividedPositionEmbedding(PositionEmbedding):
    """Learned position embedding of a rank's tokens. The gradient of other positions is 0 on this rank.

    Shares the table of `whole`. The sequence must not exceed the context of `whole`.
    """

    mixes = ()

    def __init__(self, whole: PositionEmbedding, division: SequenceDivision, rank: int):
        inherit(self, whole)
        if division.length > self.context:
            raise ValueError(f"length: expected at most {self.context} positions, found {division.length}")
        self.positions = division.positions(rank)

    def _expect(self, x: Any) -> None:
        fits = len(x.shape) == 3 and x.shape[1] == len(self.positions) and x.shape[2] == self.width
        expect(fits, self, f"an array of shape (batch, {len(self.positions)}, {self.width})", x)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        self._expect(x)
        return x + self.weight.data[self._indices(x)], ()

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        def gradient(out: Array) -> None:
            out[...] = 0
            out[self._indices(dy)] += kernels.sum_rows(dy)  # 0 + x has no negative zeros: as a sum over ranks

        grads(self.weight, gradient)
        return dy

    def _indices(self, x: Array) -> Any:
        """Index of the rows of the table for the tokens of x."""
        return kernels.array_namespace(x).asarray(self.positions)


class DividedDropout(Dropout):
    """Dropout of a rank's tokens: its mask is the part of the whole sequence's mask at these blocks of positions."""

    mixes = ()

    def __init__(self, whole: Dropout, blocks: Blocks):
        inherit(self, whole)
        self.whole, self.blocks = whole, blocks

    def members(self) -> Any:
        """No members: `whole` only makes masks."""
        return iter(())

    def _mask(self, samples: Array, shape: tuple[int, ...], key: tuple[int, int], position: int = 0) -> Array:
        xp, parts = kernels.array_namespace(samples), []
        for block in self.blocks:
            span = (len(samples), block[-1] + 1 - block.start if block else 0, *shape[2:])
            mask = self.whole._mask(samples, span, key, block.start).reshape(span)
            parts.append(mask[:, :: block.step])
        whole = xp.concatenate(parts, axis=1)
        expect(whole.shape == shape, self, f"an array of shape {whole.shape}", whole)
        return whole.reshape(len(samples), whole[:1].size)
