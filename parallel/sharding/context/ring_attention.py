"""Ring attention: keys and values travel round the ranks. A rank computes with one rank's while the next are in flight.

In step i rank r has the keys and values of rank r - i:

    step       rank 0    rank 1    rank 2
      0         kv 0      kv 1      kv 2      -> each to the next rank
      1         kv 2      kv 0      kv 1      -> each to the next rank
      2         kv 1      kv 2      kv 0

Results of the steps are merged by their sums of exponentials. In the backward pass they travel once more. Gradients of
keys and values follow a step behind, in float32, from the first rank that is not their own until they reach their own
rank. With zigzag division every step is the same work on every rank (Liu, Zaharia and Abbeel, "Ring Attention with
Blockwise Transformers", arXiv:2310.01889). The order of the sums depends on the rank: other numbers of ranks round
differently.
"""

from parallel.nn import kernels
from parallel.nn.attention_tiles import (
    attend,
    attend_backward,
    backward_tiles,
    collected,
    collected_gradient,
    forward_tiles,
)
from parallel.sharding.context.context_attention import ContextAttention
from parallel.sharding.context.messages import RingShift
from quant.types import Array

KV_TAG, GRADIENT_TAG = 1, 2


class RingAttention(ContextAttention):
    """Attention by messages in a ring. 2 (c-1)/c b s g d elements are sent per rank forward, in c-1 messages.

    Memory beyond this rank's tokens: keys and values of one other rank, in the backward pass three gradients of them.
    """

    def _attend(self, q: Array, kv: Array) -> tuple[Array, Array]:
        queries, shift = forward_tiles(q, self.blocks), RingShift(self.axis, KV_TAG)
        for step in range(self.axis.size):
            last = step == self.axis.size - 1
            if not last:
                shift.start(kv, self._like(kv, self._source(step + 1), kv.dtype))
            attend(queries, kv, self.division.blocks(self._source(step)), self.mask, shift.progress)
            if not last:
                kv = shift.wait()
        return collected(queries, q)

    def _attend_backward(self, q: Array, kv: Array, out: Array, log_sum: Array, dout: Array) -> tuple[Array, Array]:
        queries, size = backward_tiles(q, out, log_sum, dout, self.blocks), self.axis.size
        xp, wide = kernels.array_namespace(q), kernels.wide(q.dtype)
        shift, home = RingShift(self.axis, KV_TAG), RingShift(self.axis, GRADIENT_TAG)
        own = xp.zeros(kv.shape, wide)
        for step in range(size):
            source, last = self._source(step), step == size - 1
            if not last:
                shift.start(kv, self._like(kv, self._source(step + 1), kv.dtype))
            dkv = xp.zeros(kv.shape, wide) if step else own
            attend_backward(queries, kv, dkv, self.division.blocks(source), self.mask, shift.progress)
            if step > 1:
                dkv += home.wait()  # gradients of the same keys, by the ranks before
            if step:
                home.start(dkv, self._like(kv, self._source(step + 1), wide))
            if not last:
                kv = shift.wait()
        if size > 1:
            own += home.wait()
        return collected_gradient(queries, q), own

    def _source(self, step: int) -> int:
        """Rank whose keys and values this rank has in a step."""
        source: int = (self.axis.rank - step) % self.axis.size
        return source

    def _like(self, kv: Array, rank: int, dtype: object) -> Array:
        """New array for keys and values, or their gradients, of a rank."""
        return kernels.array_namespace(kv).empty((*kv.shape[:3], self.division.size(rank), kv.shape[-1]), dtype)
