"""Base of attention over a sequence that is divided over the ranks of a mesh axis.

Each rank has the tokens of its blocks (`parallel.sharding.context.sequence_division`), and computes the results of its
queries. The algorithms differ in how keys and values reach them. `parallel.sharding.context.cost_formulas` has their
bytes and times.
"""

from typing import Any

from parallel.nn.array_checks import expect
from parallel.nn.attention_mask import CAUSAL, AttentionMask
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.operator import ArraySpec, OperatorOutline, Parameter
from parallel.nn.placement import Placement, Shard
from parallel.nn.rotary import Rotary
from parallel.sharding.context.sequence_division import Blocks, SequenceDivision
from quant.types import Array


class ContextAttention(BlockwiseAttention):
    """Attention of this rank's queries over the keys of all ranks. x and y hold this rank's tokens only.

    Parameters
    ----------
    axis : MeshAxis
        With `name`, `rank`, `size` and `comm`.
    division : SequenceDivision
        Over the ranks of the axis. Sequences have its length.
    heads, kv_heads, mask, rotary
        See `BlockwiseAttention`. Positions are positions in the whole sequence.
    """

    exchanges = True

    def __init__(
        self,
        axis: Any,
        division: SequenceDivision,
        heads: int,
        kv_heads: int | None = None,
        mask: AttentionMask = CAUSAL,
        rotary: Rotary | None = None,
    ):
        super().__init__(heads, kv_heads, mask, rotary)
        if self.context is not None and division.length > self.context:
            raise ValueError(f"length: expected at most {self.context} positions, found {division.length}")
        if division.ranks != axis.size:
            raise ValueError(f"division: expected one over {axis.size} ranks, found {division}")
        self.axis, self.division = axis, division

    @property
    def blocks(self) -> Blocks:
        """Positions of this rank's tokens."""
        return self.division.blocks(self.axis.rank)

    def _positions(self, x: Array, before: int) -> Blocks:
        return self.blocks

    def _expect(self, x: Any, before: int = 0) -> None:
        super()._expect(x, before)
        size = self.division.size(self.axis.rank)
        expected = f"{size} of {self.division.length} positions on rank {self.axis.rank} of {self.axis.size}"
        expect(x.shape[1] == size, self, expected, x)

    def place(self, axis: str, x: Placement, partial: set[Parameter]) -> Placement:
        """Along its own axis, the placement of divided sequences, `Shard(1)`. x must have it."""
        if axis != self.axis.name:
            return super().place(axis, x, partial)
        if x != Shard(1):
            raise self.refuse(axis, x, str(Shard(1)))
        return x

    def outline(self, x: ArraySpec) -> OperatorOutline:
        self._expect(x)
        keys = tuple(block for rank in range(self.axis.size) for block in self.division.blocks(rank))
        return self._outline(x, self.blocks, keys)
