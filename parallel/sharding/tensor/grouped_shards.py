"""Shards of which several share a part: columns of queries, with keys and values that are fewer than the shards.

    shard       0          1          2          3          of 4 query heads and 2 key/value heads
    queries     q_0        q_1        q_2        q_3        each shard its own
    keys        k_0        k_0        k_1        k_1        shards 0 and 1 share head 0's
    values      v_0        v_0        v_1        v_1

A rank with several sharers has one copy of a shared part and computes its result once. Ranks with others have copies:
their placement is `Copies`, and the gradient of its result is summed over these ranks, so that gradients of the copies
are equal (Ainslie et al., arXiv:2305.13245, heads are replicated where the partitions outnumber them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from parallel.nn import kernels
from parallel.nn.kernels.storage import narrow
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
from parallel.nn.placement import Copies, Placement, Replicate, Shard
from parallel.sharding.tensor.exchange import allreduce_among, tree_sum
from parallel.sharding.tensor.shards import Shards
from quant.types import Array


class SumCopies:
    """Exchange between copies of a value and the shards that use them. Like f, but of the ranks with each copy.

    Forward nothing, backward a sum over these ranks.
    """

    def __init__(self, axis: Any):
        self.axis = axis

    def place(self, x: Copies) -> Copies:
        """Placement of the copies as shards use them, each of which has a term of their gradient."""
        return replace(x, partial=True)

    def backward(self, terms: Sequence[Array], places: Sequence[Shard | Copies]) -> list[Array]:
        """Sums of the gradients of several values, from this rank's terms, wide (`allreduce_among`)."""
        own = range(self.axis.rank, self.axis.rank + 1)
        return allreduce_among(self.axis, terms, [one.ranks if isinstance(one, Copies) else own for one in places])


class GroupedShards(Shards):
    """This rank's logical shards, y_n = [f_n(x), s_k(x)]. Several shards share s_k.

    Parameters
    ----------
    axis : MeshAxis
    operators : mapping of int to Operator
        The f_n, by number n of the shard, ascending: this rank's. A shard without sharing may have an empty result.
    shared : mapping of int to Operator
        The s_k of these shards, by a number that no shard has.
    sharers : mapping of int to range
        Shards, on all ranks, that share each s_k.
    gives : Shard
    sums : SumCopies or None
        None: gradients of shared parameters remain partial. `check_placements` refuses that.
    """

    exchanges = True

    def __init__(
        self,
        axis: str,
        operators: Mapping[int, Operator],
        shared: Mapping[int, Operator],
        sharers: Mapping[int, range],
        gives: Shard,
        sums: SumCopies | None,
    ):
        super().__init__(axis, operators, Replicate(partial=True), gives)
        self.sums = sums
        self._sharers = [sharers[number] for number in shared]
        self.shared = tuple(shared.values())
        self._of = [next((k for k, some in enumerate(self._sharers) if n in some), None) for n in self.numbers]

    def members(self) -> Iterator[tuple[str, Member]]:
        """Yield each shard and each shared part, in place of the operator that was cut."""
        yield from super().members()
        yield from (("", operator) for operator in self.shared)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        own = [operator.forward(x, run) for operator in self.operators]
        common = [operator.forward(x, run) for operator in self.shared]  # once, however many shards use them
        parts = [y if k is None else _side_by_side(y, common[k][0]) for (y, _), k in zip(own, self._of)]
        widths = tuple(y.shape[-1] for y, _ in own)
        saved = tuple(values for _, values in own), tuple(values for _, values in common), widths
        return self._joined(parts, self.gives), saved

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        own, common, widths = saved
        parts, found = self._split(dy, self.gives), []
        terms: list[list[Array | None]] = [[None] * len(parts) for _ in self.shared]
        for at, (operator, part, values, width) in enumerate(zip(self.operators, parts, own, widths)):
            found.append(operator.backward(_columns(part, 0, width), values, grads))
            if (k := self._of[at]) is not None:
                terms[k][at] = _columns(part, width, part.shape[-1])
        sums = [tree_sum(some) for some in terms]
        if self.sums is not None:
            sums = self.sums.backward(sums, [placement_of(operator) for operator in self.shared])
        for operator, total, values, sharers in zip(self.shared, sums, common, self._sharers):
            dx = operator.backward(narrow(total, dy.dtype), values, grads)
            if sharers[0] in self.numbers and dx is not None:  # every holder has the same: it counts once
                at = self.numbers.index(sharers[0])
                found[at] = tree_sum([found[at], dx])
        return None if found[0] is None else self._joined(found, self.takes)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        for operator in self.shared:
            if axis != self.axis:
                operator.place(axis, x, partial)
            elif isinstance(y := placement_of(operator), Copies) and not (self.sums and self.sums.place(y).partial):
                partial.update(operator.parameters())
        return super().place(axis, x, partial)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline of all shards and shared parts, and of the exchange of gradients."""
        own = [operator.outline(x) for operator in self.operators]
        common = [operator.outline(x) for operator in self.shared]
        width = sum(one.y.shape[-1] for one in own)
        width += sum(common[k].y.shape[-1] for k in self._of if k is not None)
        y = ArraySpec((*x.shape[:-1], width), own[0].y.dtype)
        work = max(one.work for one in [*own, *common]) + 4 * y.nbytes + 3 * x.nbytes
        saved = tuple(one.saved for one in own), tuple(one.saved for one in common)
        return OperatorOutline(y, saved, work=work, **sum_flops([*own, *common]))


def placement_of(shared: Operator) -> Shard | Copies:
    """Placement of the parameters of a shared operator, and so of its result."""
    (placement,) = {replace(cast(Shard | Copies, one.placement), dim=-1) for one in shared.parameters()}
    return placement


def holders(sharers: range, each: int) -> range:
    """Ranks that have these shards, `each` per rank.

    >>> holders(range(3, 6), 2)
    range(1, 3)
    """
    return range(sharers[0] // each, sharers[-1] // each + 1)


def _side_by_side(left: Array, right: Array) -> Array:
    return kernels.array_namespace(left).concatenate([left, right], axis=-1)


def _columns(x: Array, start: int, stop: int) -> Array:
    return kernels.array_namespace(x).ascontiguousarray(x[..., start:stop])
