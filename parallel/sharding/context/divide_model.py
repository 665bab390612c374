"""Models whose sequences are divided over the ranks of a mesh axis: a copy in which some operators are replaced.

Attention exchanges (`ALGORITHMS`). Operators that depend on positions get this rank's positions (`REPLACEMENTS`). All
others work on single tokens: `Operator.place` refuses an operator that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from parallel.nn.attention import CausalAttention
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.depths import MixtureOfDepths
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import PositionEmbedding
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.operator import Operator, set_names
from parallel.nn.placement import PlacementError, Shard
from parallel.nn.rewrite import copied, linked, replaced
from parallel.sharding.context.allgather_attention import AllgatherAttention
from parallel.sharding.context.context_attention import ContextAttention
from parallel.sharding.context.divided_depths import DividedDepths
from parallel.sharding.context.divided_router import DividedRouter
from parallel.sharding.context.positions import DividedDropout, DividedPositionEmbedding, PartOfTokens
from parallel.sharding.context.ring_attention import RingAttention
from parallel.sharding.context.sequence_division import SequenceDivision
from parallel.sharding.context.sequence_parts import SequenceParts, TiedTerms, works_by_part
from parallel.sharding.context.ulysses_attention import UlyssesAttention

ALGORITHMS: dict[str, type[ContextAttention]] = {
    "ring": RingAttention,
    "allgather": AllgatherAttention,
    "ulysses": UlyssesAttention,
}
"""Attention over a divided sequence, by name."""


class ModelDivision(NamedTuple):
    """Axis, division of its sequences, class of attention, and gradients by part of tied tables."""

    axis: Any
    division: SequenceDivision
    attention: type[ContextAttention]
    tied: TiedTerms

    def divided(self, model: Operator) -> Operator:
        """Copy of a model in which operators that need other positions, or work part by part, are replaced."""
        places = self.division.part_slices(self.axis.rank)

        def replacement(operator: Operator) -> Operator | None:
            for kind, make in REPLACEMENTS:
                if isinstance(operator, kind):
                    return make(operator, self)
            if not self.division.parts or not works_by_part(operator):
                return None
            return SequenceParts(operator, places, self.tied)

        return replaced(model, replacement)


class NoHeads(CausalAttention):
    """Attention of a shard without heads. It exchanges nothing."""

    mixes = ()

    def __init__(self) -> None:
        super().__init__(0)


def _causal(operator: CausalAttention, how: ModelDivision) -> Operator:
    if not operator.heads:
        return linked(NoHeads(), operator)
    return linked(how.attention(how.axis, how.division, operator.heads), operator)


def _blockwise(operator: BlockwiseAttention, how: ModelDivision) -> Operator:
    return linked(how.attention(how.axis, how.division, *operator.heads, operator.mask, operator.rotary), operator)


def _part(operator: PartOfTokens, how: ModelDivision) -> Operator:
    return operator.divided(how.division, how.axis.rank)


def _positions(operator: PositionEmbedding, how: ModelDivision) -> Operator:
    return DividedPositionEmbedding(operator, how.division, how.axis.rank)


def _dropout(operator: Dropout, how: ModelDivision) -> Operator:
    return DividedDropout(operator, how.division.blocks(how.axis.rank))


def _mixture(operator: MixtureOfExperts, how: ModelDivision) -> Operator:
    """Mixture with a router of divided sequences. Its experts compute on all tokens of a rank at once."""
    if how.division.parts_per_rank > 1:
        each = how.division.parts_per_rank
        raise PlacementError(f"sequence_parts: mixtures of experts take one part on each rank, found {each}")
    ours = copied(operator)
    ours.router = DividedRouter(operator.router, how.axis, how.division)
    return ours


def _depths(operator: MixtureOfDepths, how: ModelDivision) -> Operator:
    """Mixture-of-Depths that divides its chosen tokens again."""
    if how.division.parts_per_rank > 1:
        each = how.division.parts_per_rank
        raise PlacementError(f"sequence_parts: Mixture-of-Depths takes one part on each rank, found {each}")

    def block_of(count: int) -> Operator:
        return how._replace(division=replace(how.division, length=count)).divided(operator.block)

    return DividedDepths(operator, how.axis, how.division, block_of)


REPLACEMENTS: tuple[tuple[type[Operator], Callable[[Any, ModelDivision], Operator]], ...] = (
    (CausalAttention, _causal),
    (BlockwiseAttention, _blockwise),
    (PartOfTokens, _part),
    (PositionEmbedding, _positions),
    (Dropout, _dropout),
    (MixtureOfExperts, _mixture),
    (MixtureOfDepths, _depths),
)
"""Operators that need other positions than their own token's, and what replaces them."""


def divide(model: Operator, axis: Any, division: SequenceDivision, algorithm: str = "ring") -> Operator:
    """Model for this rank's tokens of every sequence. Shares parameters with `model` and leaves it unchanged.

    Parameters
    ----------
    model : Operator
        Of inputs (batch, positions): whole, or already cut by `parallel.sharding.tensor`.
    axis : MeshAxis
    division : SequenceDivision
        Over the ranks of the axis. With `parts`, and "allgather", every number of ranks that leaves a power of two of
        parts per rank has the same bits (`parallel.sharding.context.sequence_parts`). Batches and sums over ranks must
        be reproducible too.
    algorithm : str
        Key of `ALGORITHMS`.

    Raises
    ------
    PlacementError, ValueError
        If an operator needs whole sequences, or the algorithm does not suit the heads.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"context attention: expected one of {', '.join(ALGORITHMS)}; found {algorithm!r}")
    set_names(model)
    ours = ModelDivision(axis, division, ALGORITHMS[algorithm], TiedTerms()).divided(model)
    set_names(ours)
    ours.place(axis.name, Shard(1), set())
    return ours
