"""Operators cut into logical shards: one combinator that behaves by the placements of its input and result.

A logical shard is an ordinary operator on a part of the features, with parameters of its own. A rank holds some of the
shards, in order. Its work follows from the placements:

    from                      to            forward                  backward                 example
    Replicate(partial=True)   Shard(-1)     y = [f_j(x)]             dx = sum of dx_j         column linear
    Shard(-1)                 Shard(-1)     y = [f_j(x_j)]           dx = [dx_j]              attention, dropout
    Shard(-1)                 Partial()     y = sum of f_j(x_j)      dx = [dx_j]              row linear
    Replicate()               Partial()     y = sum of f_j(x)        none                     embedding

[ ] are parts side by side. Sums follow the binary tree over all shards. A rank holds a whole subtree: with as
many shards, sums and matrix products are the same for any number of ranks, and so are the bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import as_matrix
from parallel.nn.compose import Sequential, Wrapper
from parallel.nn.dropout import Dropout
from parallel.nn.operator import (
    ArraySpec,
    GradientSink,
    Member,
    Operator,
    OperatorOutline,
    Parameter,
    PassMode,
    sum_flops,
)
from parallel.nn.placement import Placement, Shard
from parallel.nn.rewrite import inherit
from parallel.sharding.tensor.exchange import tree_sum
from parallel.sharding.tensor.redistribute import CopyToShards
from quant.types import Array


class Shards(Operator):
    """This rank's logical shards of an operator.

    Parameters
    ----------
    axis : str
        Name of the mesh axis.
    operators : mapping of int to Operator
        By number of the shard, ascending: this rank's.
    takes, gives : Placement
        Along the axis. `Shard` has the units of all shards.
    """

    continues = True

    def __init__(self, axis: str, operators: Mapping[int, Operator], takes: Placement, gives: Placement):
        self.axis, self.takes, self.gives = axis, takes, gives
        self.numbers, self.operators = tuple(operators), tuple(operators.values())

    def members(self) -> Iterator[tuple[str, Member]]:
        """Yield each shard, in place of the operator that was cut."""
        yield from (("", operator) for operator in self.operators)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        parts = self._split(x, self.takes)
        pairs = [operator.forward(part, run) for operator, part in zip(self.operators, parts)]
        return self._joined([y for y, _ in pairs], self.gives), tuple(saved for _, saved in pairs)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        parts = self._split(dy, self.gives)
        found = [operator.backward(part, values, grads) for operator, part, values in zip(self.operators, parts, saved)]
        return None if found[0] is None else self._joined(found, self.takes)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        if axis == self.axis:
            if x != self.takes:
                raise self.refuse(axis, x, str(self.takes))
            return self.gives
        *_, y = [operator.place(axis, x, partial) for operator in self.operators]
        return y

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of all shards. With several, parts, results and sums of this rank are separate arrays."""
        outlines = [operator.outline(part) for operator, part in zip(self.operators, self._split_spec(x))]
        ys = [outline.y for outline in outlines]
        side_by_side = isinstance(self.gives, Shard)
        last = sum(y.shape[-1] for y in ys) if side_by_side else ys[0].shape[-1]
        y = ArraySpec((*ys[0].shape[:-1], last), ys[0].dtype if side_by_side else kernels.wide(ys[0].dtype))
        if len(outlines) == 1:
            return outlines[0]._replace(y=outlines[0].y if outlines[0].y == y else y)  # a spec stands for one array
        work = max(outline.work for outline in outlines) + 3 * sum(one.nbytes for one in ys) + 3 * x.nbytes
        saved = tuple(outline.saved for outline in outlines)
        return OperatorOutline(y, saved, work=work, **sum_flops(outlines))

    def _widths(self, length: int, units: Sequence[int]) -> list[int]:
        here = [units[number] for number in self.numbers]
        return [length // max(sum(here), 1) * count for count in here]

    def _split(self, x: Array, placement: Placement) -> list[Array]:
        """The part of each shard. x itself for each, if it is not sharded."""
        if not isinstance(placement, Shard) or len(self.operators) == 1:
            return [x] * len(self.operators)
        assert placement.units is not None
        bounds = list(accumulate(self._widths(x.shape[-1], placement.units), initial=0))
        return [x[..., start:stop].copy() for start, stop in pairwise(bounds)]  # an empty view would keep x

    def _split_spec(self, x: ArraySpec) -> list[ArraySpec]:
        if not isinstance(self.takes, Shard) or len(self.operators) == 1:
            return [x] * len(self.operators)
        assert self.takes.units is not None
        return [ArraySpec((*x.shape[:-1], width), x.dtype) for width in self._widths(x.shape[-1], self.takes.units)]

    @staticmethod
    def _joined(parts: Sequence[Array], placement: Placement) -> Array:
        """One array of the shards' results, or gradients: side by side if sharded, else their sum by the tree."""
        if not isinstance(placement, Shard):
            return tree_sum(parts)
        return parts[0] if len(parts) == 1 else kernels.array_namespace(parts[0]).concatenate(parts, axis=-1)


class CutOperator(Operator):
    """Operators that together replace one that was cut, under its name."""

    continues = True

    def __init__(self, items: Sequence[Operator]):
        self.inner = Sequential(items)

    def members(self) -> Iterator[tuple[str, Member]]:
        for item in self.inner.items:
            yield from item.members()

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return self.inner.forward(x, run)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        return self.inner.backward(dy, saved, grads)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        return self.inner.place(axis, x, partial)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        return self.inner.outline(x)


class SpreadShards(Wrapper):
    """f and the shards after it: dx is summed while the gradients of weights are computed (Shoeybi et al., 2019)."""

    def __init__(self, spread: CopyToShards, inner: Operator):
        super().__init__(inner)
        self.spread = spread

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return self.inner.forward(x, run)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        weights: list[tuple[Parameter, Callable[[Array], object]]] = []
        dx = self.inner.backward(dy, saved, lambda parameter, compute: weights.append((parameter, compute)))
        complete = self.spread.start_backward(dx)
        for parameter, compute in weights:
            grads(parameter, compute)
        return complete()

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        return self.inner.place(axis, self.spread.place(axis, x, partial), partial)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        inner = self.inner.outline(x)
        return inner._replace(work=max(inner.work, self.spread.outline(x).work))


class AddBias(Operator):
    """y = x + bias, for a bias that is added once, after the sum of a row linear layer."""

    mixes = (-1,)

    def __init__(self, bias: Parameter):
        self.bias = bias

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        return x + self.bias.data, ()

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        upper = as_matrix(dy)
        grads(self.bias, lambda out: kernels.sum_rows(upper, out=out))
        return dy

    def outline(self, x: ArraySpec) -> OperatorOutline:
        return OperatorOutline(ArraySpec(*x), ())


class DropoutShard(Dropout):
    """Dropout of the features from `start` to `stop` of `width`. Its mask is the same part of the whole mask."""

    def __init__(self, whole: Dropout, width: int, start: int, stop: int):
        inherit(self, whole)
        self.width, self.start, self.stop = width, start, stop
        self.part = start, stop

    def _mask(self, samples: Array, shape: tuple[int, ...], key: tuple[int, int], position: int = 0) -> Array:
        whole = super()._mask(samples, (*shape[:-1], self.width), key, position)
        part = whole.reshape(*shape[:-1], self.width)[..., self.start : self.stop]
        return part.copy().reshape(shape[0], math.prod(shape[1:]))
