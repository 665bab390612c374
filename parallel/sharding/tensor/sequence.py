"""Sequence parallelism: between cut operators, every rank has an equal part of the tokens (Korthikanti et al., 2022).

Norms, dropout, biases and residual sums work on these parts. `GatherSequence` and `ScatterSequence` exchange them.
Rank r of t has tokens from r s/t on. If another axis divides the sequence, s is its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import expect, label
from parallel.nn.compose import Wrapper
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import PositionEmbedding
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from parallel.nn.placement import Placement, Replicate, Shard
from parallel.nn.rewrite import copied, inherit
from parallel.sharding.context.positions import DividedDropout, DividedPositionEmbedding, PartOfTokens
from parallel.sharding.context.sequence_division import SequenceDivision
from parallel.sharding.context.sequence_parts import SequenceParts
from parallel.sharding.tensor.exchange import allgather
from parallel.sharding.tensor.redistribute import GatherSequence
from quant.types import Array


class GatheredInput(Wrapper):
    """An operator on the whole sequence, gathered from parts. Only this rank's part is saved.

    The backward pass gathers the sequence once more, for the gradients of weights.
    """

    def __init__(self, gather: GatherSequence, inner: Operator):
        super().__init__(inner)
        self.gather = gather

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        whole, _ = self.gather.forward(x, run)
        y, saved = self.inner.forward(whole, run)
        return y, (x, run, exchanged(saved, whole, WHOLE))

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        x, run, inner = saved
        whole, _ = self.gather.forward(x, run)
        return self.gather.backward(self.inner.backward(dy, exchanged(inner, WHOLE, whole), grads), (), grads)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        return self.inner.place(axis, self.gather.place(axis, x, partial), partial)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        gather = self.gather.outline(x)
        inner = self.inner.outline(gather.y)
        saved = (x, exchanged(inner.saved, gather.y, WHOLE))
        return inner._replace(saved=saved, work=inner.work + gather.work)


class OnWholeSequence(Wrapper):
    """An operator that every rank applies to the whole sequence. Input and result are this rank's parts.

    All ranks compute the same, so gradients of parameters are whole.
    """

    exchanges = True

    def __init__(self, inner: Operator, axis: Any):
        super().__init__(inner)
        self.axis = axis

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        y, saved = self.inner.forward(self._whole(x), run)
        return self._part(y), saved

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return self._part(self.inner.backward(self._whole(dy), saved, grads))

    def _whole(self, x: Array) -> Array:
        return allgather(self.axis, x, 1, [x.shape[1]] * self.axis.size)

    def _part(self, x: Array) -> Array:
        length = x.shape[1] // self.axis.size
        return x[:, self.axis.rank * length : (self.axis.rank + 1) * length].copy()

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        if axis != self.axis.name:
            return self.inner.place(axis, x, partial)
        if x != Shard(1):
            raise self.refuse(axis, x, str(Shard(1)))
        self.inner.place(axis, Replicate(), partial)
        return x

    def outline(self, x: ArraySpec) -> OperatorOutline:
        inner = self.inner.outline(ArraySpec((x.shape[0], x.shape[1] * self.axis.size, *x.shape[2:]), x.dtype))
        y = ArraySpec((inner.y.shape[0], x.shape[1], *inner.y.shape[2:]), inner.y.dtype)
        return inner._replace(y=y, work=inner.work + 2 * inner.y.nbytes)


WHOLE = object()
"""Placeholder of the gathered sequence in saved values."""


def exchanged(saved: Any, one: Any, other: Any) -> Any:
    """Nested tuples with `other` in place of the object `one`."""
    if saved is one:
        return other
    if type(saved) is tuple:
        return tuple(exchanged(item, one, other) for item in saved)
    return saved


class EqualParts(SequenceParts, PartOfTokens):
    """An operator applied to `each` equal parts of a rank's tokens, for sums that do not depend on the ranks.

    If another axis divides the sequence, to `each` equal slices of every part of it.
    """

    def __init__(self, inner: Operator, each: int):
        super().__init__(inner, (), None)
        self.each = each

    def divided(self, division: SequenceDivision, rank: int) -> EqualParts:
        ours = copied(self)
        ours.places = tuple(division.part_slices(rank))
        return ours

    def slices(self, length: int) -> Sequence[slice]:
        parts = len(self.places) or 1
        if length % (self.each * parts):
            expected = f"a multiple of {self.each * parts} tokens on every rank"
            raise ValueError(f"{label(self.inner)}: expected {expected}, found {length}")
        step = length // (self.each * parts)
        return [slice(at * step, (at + 1) * step) for at in range(self.each * parts)]


class PositionsOfPart(DividedPositionEmbedding, PartOfTokens):
    """Learned position embedding of this rank's part of the tokens: of any length, unless sequences are divided.

    `every` has the positions of all ranks of the axis. None: these have whole sequences.
    """

    def __init__(self, whole: PositionEmbedding, axis: Any):
        inherit(self, whole)
        self.axis = axis
        self.every: Array | None = None

    def divided(self, division: SequenceDivision, rank: int) -> PositionsOfPart:
        ours = copied(self)
        ours.every = DividedPositionEmbedding(self, division, rank).positions
        return ours

    def _expect(self, x: Any) -> None:
        most = (self.context if self.every is None else len(self.every)) // self.axis.size
        fits = len(x.shape) == 3 and x.shape[1] <= most and x.shape[2] == self.width
        expect(fits, self, f"an array of shape (batch, at most {most}, {self.width})", x)

    def _indices(self, x: Array) -> Any:
        part = slice(self.axis.rank * x.shape[1], (self.axis.rank + 1) * x.shape[1])
        return part if self.every is None else kernels.array_namespace(x).asarray(self.every[part])


class DropoutOfPart(Dropout, PartOfTokens):
    """Dropout of this rank's tokens: its mask is their part of the whole sequence's mask.

    `whole` makes the mask of the tokens of all ranks of the axis, if these are of a divided sequence.
    """

    mixes = ()

    def __init__(self, dropout: Dropout, axis: Any):
        inherit(self, dropout)
        self.axis = axis
        self.whole: DividedDropout | None = None

    def members(self) -> Any:
        """No members: `whole` only makes masks."""
        return iter(())

    def divided(self, division: SequenceDivision, rank: int) -> DropoutOfPart:
        ours = copied(self)
        ours.whole = DividedDropout(inherit(object.__new__(Dropout), self), division.blocks(rank))
        return ours

    def _mask(self, samples: Array, shape: tuple[int, ...], key: tuple[int, int], position: int = 0) -> Array:
        start, length = self.axis.rank * shape[1], shape[1]
        if self.whole is None:
            return super()._mask(samples, shape, key, position + start)
        every = (shape[0], length * self.axis.size, *shape[2:])
        mask = self.whole._mask(samples, every, key).reshape(every)[:, start : start + length]
        return mask.copy().reshape(shape[0], mask[:1].size)  # a view would keep the whole mask
