"""Mixtures of experts cut along a mesh axis: experts, or parts of each, on different ranks that have the same tokens.

The experts form logical groups, and each expert is cut into `slices` of its hidden features. Logical shard g s + j has
slice j of the experts of group g, for s slices. Tokens, weights and the router are replicated along the axis::

    rank 0   router   experts 0, 1 of all tokens   --+
                                                     +--  sum of both on each rank
    rank 1   router   experts 2, 3 of all tokens   --+

So a token enters the exchange between replicas (`parallel.sharding.expert`) exactly once for each of its experts: on
the rank that has the expert's shard. Results are partial sums along the axis, and so are the gradients of tokens and
weights. They are summed inside, so that the router's gradient is whole on every rank, and needs no sum. Sums follow
the tree over all shards: with as many shards, any number of ranks has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from collectives.schedule.chunks import even
from parallel.nn import kernels
from parallel.nn.array_checks import label
from parallel.nn.compose import Sequential
from parallel.nn.expert_group import Assignments, ExpertGroup
from parallel.nn.linear import Linear
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode
from parallel.nn.placement import Features, PlacementError, unit_bounds
from parallel.nn.rewrite import copied
from parallel.sharding.tensor.exchange import allreduce, tree_sum
from quant.types import Array


class ExpertCut(NamedTuple):
    """Cut of experts along a mesh axis.

    Attributes
    ----------
    slices : int
        Logical parts of each expert's hidden features.
    spread : bool
        Ranks of the axis have different shards. Otherwise each has all.
    """

    slices: int = 1
    spread: bool = False


class GroupShards(Operator):
    """This rank's logical shards of the experts of a mixture, in the place of its `ExpertGroup`.

    Parameters
    ----------
    axis : MeshAxis
        Axis to sum results over. It has one rank if this rank has all shards.
    groups : mapping of int to ExpertGroup
        By number of the shard.
    experts : int
        Number of experts of the mixture.
    algorithm : str
        Of the sums.
    """

    continues = True

    def __init__(self, axis: Any, groups: Mapping[int, ExpertGroup], experts: int, algorithm: str):
        self.axis, self.numbers, self.groups = axis, tuple(groups), list(groups.values())
        self.algorithm, self._experts = algorithm, experts
        self._firsts = [group.first for group in self.groups]
        self.exchanges = axis.size > 1
        for group in self.groups:
            group.exchanges = self.exchanges  # so that errors are caught in single experts

    def __len__(self) -> int:
        """Number of experts of the mixture."""
        return self._experts

    def members(self) -> Iterator[tuple[str, Parameter | Operator]]:
        """Yield each shard, in place of the group of experts that was cut."""
        yield from (("", group) for group in self.groups)

    def send(self, tokens: Array, chosen: Assignments) -> Any:
        """As `ExpertGroup.send`, of each shard."""
        ranges = [(first, first + len(group)) for first, group in zip(self._firsts, self.groups)]
        bounds = [0, *accumulate(chosen.counts)]
        places = [slice(bounds[start], bounds[stop]) for start, stop in ranges]
        sent = [group.send(tokens, chosen.of_experts(*some)) for group, some in zip(self.groups, ranges)]
        return (places, bounds[-1]), sent

    def forward_sent(self, sent: Any, y: Array, run: PassMode) -> Any:
        """Add the weighted results of all ranks' shards to y, wide. Returns saved values."""
        about, parts = sent
        terms, saved = [], []
        for group, part in zip(self.groups, parts):
            terms.append(kernels.array_namespace(y).zeros(y.shape, y.dtype))
            saved.append(group.forward_sent(part, terms[-1], run))
        y += allreduce(self.axis, tree_sum(terms), self.algorithm)
        return about, tuple(saved)

    def send_gradients(self, upper: Array, saved: Any, dtype: np.dtype) -> Any:
        return [group.send_gradients(upper, own, dtype) for group, own in zip(self.groups, saved[1])]

    def backward_sent(self, sent: Any, saved: Any, dx: Array, grads: GradientSink) -> Array:
        """Add the gradients of the tokens to dx, wide. Returns the gradients of the weights.

        Both use one sum over the ranks.
        """
        (places, assigned), values = saved
        terms = []
        for group, place, part, own in zip(self.groups, places, sent, values):
            term = kernels.array_namespace(dx).zeros(dx.size + assigned, dx.dtype)
            term[dx.size :][place] = group.backward_sent(part, own, term[: dx.size].reshape(dx.shape), grads)
            terms.append(term)
        total = allreduce(self.axis, tree_sum(terms), self.algorithm)
        dx += total[: dx.size].reshape(dx.shape)
        return total[dx.size :]

    def outline_rows(self, x: ArraySpec) -> OperatorOutline:
        """Outline for rows like `x`, divided evenly over the experts."""
        outlines = [
            group.outline_rows(ArraySpec((x.shape[0] * len(group) // len(self), *x.shape[1:]), x.dtype))
            for group in self.groups
            if len(group)
        ]
        work = sum(one.work for one in outlines) + 2 * len(self.groups) * x.nbytes
        saved = tuple(one.saved for one in outlines)
        return OperatorOutline(ArraySpec(*x), saved, sum(one.flops for one in outlines), work)


def cut_experts(group: ExpertGroup, cutter: Any, how: ExpertCut) -> GroupShards:
    """Logical shards of a group of experts that a rank has, by a `parallel.sharding.tensor.cut_model.Cutter`.

    PlacementError if experts cannot be cut into slices.
    """
    numbers = cutter.numbers if how.spread else range(cutter.shards)
    counts = even(len(group), cutter.shards // how.slices)
    firsts = [0, *accumulate(counts)]
    shards = {}
    for number in numbers:
        place = number // how.slices
        experts = group.experts[firsts[place] : firsts[place + 1]]
        if how.slices > 1:
            slices = range(place * how.slices, (place + 1) * how.slices)
            experts = [_slice(expert, cutter, number, slices) for expert in experts]
        elif how.spread and cutter.axis.size > 1:
            experts = [_own(expert, cutter, number) for expert in experts]
        shards[number] = ExpertGroup(experts, firsts[place])
    axis = cutter.axis if how.spread else cutter.axis._replace(rank=0, size=1)
    return GroupShards(axis, shards, len(group), cutter.algorithm)


def _own(expert: Operator, cutter: Any, number: int) -> Operator:
    """Copy of an expert that one rank of the axis has: its parameters are whole parts of their tensors."""
    ours = copied(expert)
    for name, value in expert.__getstate__().items():
        setattr(ours, name, _owned(value, cutter, number))
    return ours


def _owned(value: Any, cutter: Any, number: int) -> Any:
    if isinstance(value, Parameter):
        return _whole_on(number, value, cutter)
    if isinstance(value, Operator):
        return _own(value, cutter, number)
    if isinstance(value, dict):
        return {key: _owned(one, cutter, number) for key, one in value.items()}
    return type(value)(_owned(one, cutter, number) for one in value) if type(value) in (list, tuple) else value


def _whole_on(number: int, parameter: Parameter, cutter: Any) -> Parameter:
    """Shard with all of a parameter. Only this logical shard has it."""
    length, here = parameter.shape[0], range(number, number + 1)
    shard: Parameter = cutter.part(parameter, number, 0, Features(length), (0, length), among=here)
    return shard


def _slice(expert: Operator, cutter: Any, number: int, slices: range) -> Operator:
    """Slice of an expert, one of the shards `slices`: some hidden features.

    The first slice adds the bias after them.
    """
    items = expert.items if isinstance(expert, Sequential) else []
    linear = [item for item in items if type(item) is Linear]
    inner = [item for item in items if type(item) is not Linear]
    if len(items) < 2 or items[0] not in linear or items[-1] not in linear or len(linear) != 2:
        raise PlacementError(f"etp: expected experts of two linear layers and what is between, found {label(expert)}")
    # features are cut between the layers: only elementwise operators work on some of them
    if any(item.mixes != () or item.parameters() for item in inner):
        raise PlacementError(f"etp: expected elementwise operators between an expert's layers, found {label(expert)}")
    first, last = (copied(one) for one in linear)
    units = unit_bounds(linear[0].outputs, len(slices))[number - slices[0]]
    hidden = linear[0].columns
    first.weight = cutter.part(first.weight, number, 1, hidden, units, among=slices)
    first.bias = None if first.bias is None else cutter.part(first.bias, number, 0, hidden, units, among=slices)
    last.weight = cutter.part(last.weight, number, 0, hidden, units, among=slices)
    first.outputs = last.inputs = units[1] - units[0]
    # results are summed over the slices, so one slice alone adds the bias
    if last.bias is not None:
        last.bias = _whole_on(number, last.bias, cutter) if number == slices[0] else None
    return Sequential([first, *inner, last])
