"""Models cut along a mesh axis: operators named in a table of placements are replaced by their shards.

The table is the model's attribute `cuts`: names of operators, or patterns of names, and the style in which each is cut
(`STYLES`). Another style is a function and a line of `STYLES`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from parallel.nn.array_checks import label
from parallel.nn.attention import CausalAttention
from parallel.nn.blockwise_attention import BlockwiseAttention, Heads
from parallel.nn.compose import Recompute, Sequential
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.gated import SwiGLU
from parallel.nn.linear import Linear
from parallel.nn.loss import SoftmaxCrossEntropy
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.operator import Operator, Parameter, name_all
from parallel.nn.parameter import ParameterShard
from parallel.nn.placement import (
    Features,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    TensorCut,
)
from parallel.nn.rewrite import copied, linked, replaced
from parallel.sharding.context.sequence_parts import works_by_part
from parallel.sharding.tensor.gradient_sums import with_gradient_sums
from parallel.sharding.tensor.grouped_shards import GroupedShards, SumCopies, holders
from parallel.sharding.tensor.mixture_shards import ExpertCut, cut_experts
from parallel.sharding.tensor.redistribute import CopyToShards, GatherSequence, ScatterSequence, SumShards
from parallel.sharding.tensor.sequence import DropoutOfPart, EqualParts, GatheredInput, OnWholeSequence, PositionsOfPart
from parallel.sharding.tensor.shards import AddBias, CutOperator, DropoutShard, Shards, SpreadShards
from parallel.sharding.tensor.vocabulary import EmbeddingShard, VocabularyCrossEntropy

COPIES, WHOLE_EXPERTS = Replicate(partial=True), ExpertCut()


def cut(
    model: Operator,
    loss: Any,
    axis: Any,
    shards: int | None = None,
    algorithm: str = "auto",
    sequence: bool = False,
    experts: ExpertCut = WHOLE_EXPERTS,
) -> tuple[Operator, Any]:
    """Model and loss with their operators cut into logical shards. This rank of the axis has its part of the shards.

    Operators and parameters that the table does not name are shared with `model`. `model` is not changed.

    Parameters
    ----------
    model : Operator
        With a table `cuts`.
    loss
        Replaced by `VocabularyCrossEntropy` if the model's result is sharded.
    axis : MeshAxis
    shards : int
        Logical shards of every operator, by default one per rank. A multiple of the ranks. With as many shards, and
        sums by "tree", every number of ranks has the same bits, if each has a power of two of shards, or all.
    algorithm : str
        Of the sums over ranks.
    sequence : bool
        True if the ranks have parts of the sequence between cut operators (`parallel.sharding.tensor.sequence`). Its
        length must be a multiple of the shards.
    experts : ExpertCut
        Cut of the experts of mixtures.

    Raises
    ------
    PlacementError
        If the model has no table, or cannot be cut like this.
    """
    shards = axis.size if shards is None else shards
    if shards % axis.size:
        raise PlacementError(f"shards: expected a multiple of the {axis.size} ranks along {axis.name}, found {shards}")
    if shards == 1:
        return model, loss
    table = getattr(model, "cuts", None)
    if not table:
        raise PlacementError(f"{axis.name}: expected a model with a table `cuts` of the operators to cut, found none")
    name_all(model)
    cutter = Cutter(axis, shards, algorithm, sequence, experts)
    styles = dict(table)
    ours = replaced(model, lambda operator: cutter.replacement(operator, styles))
    if table := [pattern for pattern in table if pattern not in cutter.used]:
        raise PlacementError(f"cuts: expected names of operators of the model, found {', '.join(table)}")
    name_all(ours)
    for parameter in ours.parameters():  # both would get gradients of two shapes
        if id(parameter) in cutter.whole:
            raise PlacementError(f"cuts: {parameter.name} is cut in one operator and whole in another")
    ours = with_gradient_sums(ours, axis, algorithm)
    y = ours.place(axis.name, Replicate(), set())
    if isinstance(y, Shard) and type(loss) is SoftmaxCrossEntropy:
        assert y.units is not None
        loss = VocabularyCrossEntropy(axis, y.units, algorithm, loss)
    return ours, loss


class Cutter:
    """Cuts operators along one axis into logical shards. Tensors that several operators hold are cut once.

    With `sequence`, ranks have parts of the sequence between cut operators. `used` are the patterns of the table that
    named an operator, `whole` the parameters that were cut, by id.
    """

    def __init__(
        self, axis: Any, shards: int, algorithm: str, sequence: bool = False, experts: ExpertCut = WHOLE_EXPERTS
    ):
        self.axis, self.shards, self.algorithm, self.sequence = axis, shards, algorithm, sequence
        self.experts = experts
        self.each = shards // axis.size
        self.numbers = range(axis.rank * self.each, (axis.rank + 1) * self.each)
        self.used: set[str] = set()
        self.whole: dict[int, Parameter] = {}
        self._parts: dict[tuple[int, int], ParameterShard] = {}

    def replacement(self, operator: Operator, table: Mapping[str, str]) -> Operator | None:
        """Shards of an operator that the table names.

        For another operator its form on a part of the sequence, or None: itself.
        """
        for pattern, style in table.items():
            if operator.name and fnmatchcase(operator.name, pattern):
                self.used.add(pattern)
                return self._cut(operator, style)
        if self.sequence and operator.chooses_tokens and 1 in (operator.mixes or ()):  # tokens of whole sequences
            return OnWholeSequence(self._of_whole_sequences(operator, table), self.axis)
        return self.on_part(operator) if self.sequence else None

    def _of_whole_sequences(self, operator: Operator, table: Mapping[str, str]) -> Operator:
        """The operator with those in it cut, where ranks have whole sequences."""
        here = copy.copy(self)  # with the same parts of tensors
        here.sequence = False
        return replaced(operator, lambda one: here.replacement(one, table))

    def on_part(self, operator: Operator) -> Operator | None:
        """Form of an operator between those that are cut, if this rank has a part of the sequence. None: itself."""
        if isinstance(operator, PositionEmbedding):
            return PositionsOfPart(operator, self.axis)
        if isinstance(operator, Dropout):
            return DropoutOfPart(operator, self.axis)
        has_parameters = any(isinstance(value, Parameter) for _, value in operator.members())
        divides = self.each > 1 and has_parameters and works_by_part(operator)
        return EqualParts(operator, self.each) if divides else None

    def _cut(self, operator: Operator, style: str) -> Operator:
        if isinstance(operator, Recompute):
            return Recompute(self._cut(operator.inner, style))
        name, _, argument = style.partition(":")
        styles = {of: function for (text, of), function in STYLES.items() if text == name}
        function = next((function for of, function in styles.items() if type(operator) is of), None)
        if function is None:
            fits = " or ".join(of.__name__ for of in styles) or f"one of {sorted({text for text, _ in STYLES})}"
            raise PlacementError(f"cuts: {style!r} is for {fits}, found {label(operator)}")
        return CutOperator(function(operator, self, *([int(argument)] if argument else [])))

    def bounds(self, features: Features) -> tuple[dict[int, tuple[int, int]], Shard]:
        """Bounds of the units, perhaps none, of each shard of this rank. Placement of features that are cut so."""
        division = features.divided(self.shards)
        return {n: division.bounds[n] for n in self.numbers}, division.placement

    def part(
        self,
        parameter: Parameter,
        number: int,
        dim: int,
        features: Features,
        units: tuple[int, int],
        sharers: range | None = None,
        among: range | None = None,
    ) -> ParameterShard:
        """Logical shard of a parameter: these units of the features along one dimension.

        `sharers` are shards that share the part, by default this one alone. The tensor is cut `among` these, by
        default all.
        """
        key = id(parameter), number
        if key not in self._parts:
            ranks = holders(sharers or range(number, number + 1), self.each)
            part = TensorCut(parameter.shape, dim, features.ranges(*units), features.before(units[0]), ranks)
            everyone = holders(among or range(self.shards), self.each)
            self._parts[key] = ParameterShard(parameter, part, self.axis, everyone)
            self.whole[id(parameter)] = parameter
        return self._parts[key]

    def spread(self, shards: Mapping[int, Any], inner: Operator) -> list[Operator]:
        """f, and `inner` after it, of shards that have a weight."""
        like = shards[self.numbers[0]].weight
        if self.sequence:
            return [GatheredInput(GatherSequence(self.axis, like, self.algorithm), inner)]
        return [SpreadShards(CopyToShards(self.axis, like, self.algorithm), inner)]

    def sum(self, shards: Mapping[int, Any], takes: Placement, bias: Parameter | None = None) -> list[Operator]:
        """Shards that have a weight, g, and a bias that is added once."""
        g = ScatterSequence if self.sequence else SumShards
        inner = Shards(self.axis.name, shards, takes, Partial())
        operators: list[Operator] = [inner, g(self.axis, shards[self.numbers[0]].weight, self.algorithm)]
        if bias is None:
            return operators
        add = AddBias(bias)
        return [*operators, (self.on_part(add) or add) if self.sequence else add]


def _column(linear: Linear, cutter: Cutter) -> list[Operator]:
    """Linear layer cut by outputs: x whole, y sharded. The bias is cut too."""
    division = linear.columns.divided(cutter.shards)

    def shard(number: int, features: Features, units: tuple[int, int], sharers: range | None = None) -> Linear:
        made = copied(linear)
        made.weight = cutter.part(linear.weight, number, 1, features, units, sharers)
        made.outputs = made.weight.shape[1]
        made.bias = None if linear.bias is None else cutter.part(linear.bias, number, 0, features, units, sharers)
        return made

    shards = {number: shard(number, division.own, division.bounds[number]) for number in cutter.numbers}
    if division.shared is None:
        return cutter.spread(shards, Shards(cutter.axis.name, shards, COPIES, division.placement))
    sharers = {
        cutter.shards + unit: some
        for unit, some in enumerate(division.sharers)
        if some[0] < cutter.numbers.stop and some[-1] >= cutter.numbers.start
    }
    shared = {
        number: shard(number, division.shared, (number - cutter.shards, number - cutter.shards + 1), some)
        for number, some in sharers.items()
    }
    sums = SumCopies(cutter.axis)
    grouped = GroupedShards(cutter.axis.name, shards, shared, sharers, division.placement, sums)
    return cutter.spread(shards, grouped)


def _row(linear: Linear, cutter: Cutter) -> list[Operator]:
    """Linear layer cut by inputs: x sharded, y a sum over the ranks. The bias is added once, to the sum."""
    division, shards = linear.rows.divided(cutter.shards), {}
    for number in cutter.numbers:
        shards[number] = shard = copied(linear)
        shard.weight = cutter.part(linear.weight, number, 0, division.own, division.bounds[number])
        shard.inputs, shard.bias = shard.weight.shape[0], None
    return cutter.sum(shards, division.placement, linear.bias)


def _heads(attention: CausalAttention, cutter: Cutter) -> list[Operator]:
    """Attention cut by heads. A shard without heads passes its empty array on."""
    bounds, features = cutter.bounds(Features(attention.heads))
    shards: dict[int, Operator] = {}
    for number, (start, stop) in bounds.items():
        shards[number] = shard = copied(attention)
        shard.heads = stop - start
    return [Shards(cutter.axis.name, _unless_empty(shards, bounds), features, features)]


def _grouped_heads(attention: BlockwiseAttention, cutter: Cutter) -> list[Operator]:
    """Attention cut by key/value heads, each with its query heads, or some of these. Then shards share a head."""
    queries, groups = attention.heads
    each = queries // groups
    bounds, takes = cutter.bounds(Features(groups, (each, 1, 1), each))
    _, gives = cutter.bounds(Features(groups, (each,), each))
    whole = groups >= cutter.shards or each == 1
    shards: dict[int, Operator] = {}
    for number, (start, stop) in bounds.items():
        shards[number] = shard = copied(attention)
        shard.heads = Heads((stop - start) * each, stop - start) if whole else Heads(stop - start, 1)
    return [Shards(cutter.axis.name, _unless_empty(shards, bounds), takes, gives)]


def _unless_empty(shards: Mapping[int, Operator], bounds: Mapping[int, tuple[int, int]]) -> dict[int, Operator]:
    """The shards. The identity in place of those without units."""
    return {at: shard if bounds[at][0] < bounds[at][1] else Sequential([]) for at, shard in shards.items()}


def _gate(gate: SwiGLU, cutter: Cutter) -> list[Operator]:
    """Gated activation cut by features: gates with their values."""
    bounds, features = cutter.bounds(Features(gate.features))
    shards = {number: linked(SwiGLU(stop - start), gate) for number, (start, stop) in bounds.items()}
    return [Shards(cutter.axis.name, shards, features, features)]


def _mixture(mixture: MixtureOfExperts, cutter: Cutter) -> list[Operator]:
    """Mixture whose experts are cut. The router and a shared expert are on every rank, for whole sequences."""
    ours = copied(mixture)
    ours.experts = cut_experts(mixture.experts, cutter, cutter.experts)  # type: ignore[assignment]
    return [OnWholeSequence(ours, cutter.axis) if cutter.sequence else ours]


def _dropout(dropout: Dropout, cutter: Cutter, width: int) -> list[Operator]:
    """Dropout of sharded features, of `width` altogether. Masks are parts of the whole mask."""
    bounds, features = cutter.bounds(Features(width))
    shards = {number: DropoutShard(dropout, width, *units) for number, units in bounds.items()}
    return [Shards(cutter.axis.name, shards, features, features)]


def _embedding(embedding: Embedding, cutter: Cutter) -> list[Operator]:
    """Token embedding cut by tokens: a sum in which all terms but one are zero."""
    bounds, _ = cutter.bounds(Features(embedding.vocabulary))
    shards = {
        number: EmbeddingShard(
            embedding, cutter.part(embedding.weight, number, 0, Features(embedding.vocabulary), units), *units
        )
        for number, units in bounds.items()
    }
    return cutter.sum(shards, Replicate())


def _unembedding(output: Unembedding, cutter: Cutter) -> list[Operator]:
    """Output projection cut by tokens: scores are sharded, and the loss becomes `VocabularyCrossEntropy`."""
    vocabulary = Features(output.weight.shape[0])
    bounds, features = cutter.bounds(vocabulary)
    shards: dict[int, Operator] = {}
    for number, units in bounds.items():
        shards[number] = shard = copied(output)
        shard.weight = cutter.part(output.weight, number, 0, vocabulary, units)
    return cutter.spread(shards, Shards(cutter.axis.name, shards, COPIES, features))


STYLES: dict[tuple[str, type[Operator]], Callable[..., list[Operator]]] = {
    ("column", Linear): _column,
    ("row", Linear): _row,
    ("heads", CausalAttention): _heads,
    ("heads", BlockwiseAttention): _grouped_heads,
    ("gate", SwiGLU): _gate,
    ("features", Dropout): _dropout,
    ("experts", MixtureOfExperts): _mixture,
    ("vocabulary", Embedding): _embedding,
    ("vocabulary", Unembedding): _unembedding,
}
"""Operators that replace one of a type, by style. ``features:256`` gives the style an argument."""
