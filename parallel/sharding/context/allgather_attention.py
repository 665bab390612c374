"""Attention by an allgather of keys and values (Llama 3, arXiv:2407.21783, section 3.3.2).

Each rank gets all keys and values, once more in the backward pass, and computes the result of its queries. Gradients
of all keys and values by these queries are summed over the ranks, each of which gets its own (a reduce-scatter, made
of an all-to-all and a sum of this rank's parts, with the same bytes).

Queries and keys are computed with part by part (`SequenceDivision.parts`), and the sum over the parts follows a binary
tree. So the bits are the same for every number of ranks that divides the parts with a power of two as the quotient.
"""

import math
from collections.abc import Sequence

from parallel.nn import kernels
from parallel.nn.attention_tiles import (
    BackwardTile,
    attend,
    attend_backward,
    backward_tiles,
    collected,
    collected_gradient,
    forward_tiles,
)
from parallel.runtime.tree_sum import TreeNode, TreeSum, VectorPool
from parallel.sharding.context.context_attention import ContextAttention
from parallel.sharding.context.messages import allgather, alltoall, views
from quant.types import Array


class AllgatherAttention(ContextAttention):
    """Attention with all keys and values on every rank. 2 (c-1)/c b s g d elements are sent per rank forward.

    Memory beyond this rank's tokens, during a pass of this operator only: all keys and values, in the backward pass
    also their gradients, in float32, once for each level of the tree of this rank's parts and one more.
    """

    def _attend(self, q: Array, kv: Array) -> tuple[Array, Array]:
        queries = forward_tiles(q, self.blocks)
        for source, other in enumerate(self._gathered(kv)):
            attend(queries, other, self.division.blocks(source), self.mask)
        return collected(queries, q)

    def _attend_backward(self, q: Array, kv: Array, out: Array, log_sum: Array, dout: Array) -> tuple[Array, Array]:
        xp, wide, every = kernels.array_namespace(q), kernels.wide(q.dtype), self._gathered(kv)
        shapes = [other.shape for other in every]
        tree = TreeSum(VectorPool(lambda: xp.empty(sum(map(math.prod, shapes)), wide)))
        queries = backward_tiles(q, out, log_sum, dout, self.blocks)
        for number, part in enumerate(self._parts(queries)):
            gradients = tree.pool.take()
            gradients[...] = 0
            for source, (other, dkv) in enumerate(zip(every, views(gradients, shapes))):
                attend_backward(part, other, dkv, self.division.blocks(source), self.mask)
            tree.push(TreeNode(0, number), gradients, ours=True)
        return collected_gradient(queries, q), self._scattered(tree.total(), shapes)

    def _gathered(self, kv: Array) -> list[Array]:
        """Keys and values of every rank."""
        return allgather(self.axis, kv, [(*kv.shape[:3], size, kv.shape[-1]) for size in self.division.sizes])

    def _parts(self, queries: Sequence[BackwardTile]) -> list[list[BackwardTile]]:
        """Tiles of queries, by the part that they belong to."""
        places = self.division.part_slices(self.axis.rank)
        return [[one for one in queries if place.start <= one.tile.place.start < place.stop] for place in places]

    def _scattered(self, gradients: Array, shapes: Sequence[tuple[int, ...]]) -> Array:
        """This rank's part of the sum of all ranks' gradients, in the order of the tree."""
        terms = alltoall(self.axis, views(gradients, shapes), [shapes[self.axis.rank]] * self.axis.size)
        tree = TreeSum(VectorPool(list))  # in place: nothing is taken from the pool
        for rank, term in enumerate(terms):
            tree.push(TreeNode(0, rank), term, ours=True)
        return tree.total()
