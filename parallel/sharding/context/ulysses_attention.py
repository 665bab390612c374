"""Attention by an all-to-all of heads (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509).

Tokens of all ranks and some of the heads replace some of the tokens and all heads: a rank computes whole sequences for
its heads, so every division is balanced and every mask costs the same everywhere.

    before      rank 0          rank 1              after       rank 0          rank 1
    heads       0 1 2 3         0 1 2 3             heads       0 1             2 3
    tokens      0 .. s/2        s/2 .. s            tokens      0 .. s          0 .. s
"""

from typing import Any

from parallel.nn import kernels
from parallel.nn.attention_tiles import attention, attention_gradients, backward_tiles
from parallel.nn.blockwise_attention import BlockwiseAttention, Heads
from parallel.nn.operator import ArraySpec, GradientSink, OperatorOutline, PassMode
from parallel.sharding.context.context_attention import ContextAttention
from parallel.sharding.context.messages import alltoall
from quant.types import Array


def refusal(heads: int, kv_heads: int, ranks: int) -> str:
    """Reason why this number of ranks cannot divide these heads. Empty if it can."""
    if heads % ranks:
        fits = [count for count in range(1, heads + 1) if heads % count == 0]
        return f"expected a number of ranks that divides the {heads} heads ({', '.join(map(str, fits))}), found {ranks}"
    if kv_heads % ranks and ranks % kv_heads:
        return f"expected {kv_heads} kv heads that are divided by the ranks, or divide them; found {ranks} ranks"
    return ""


class UlyssesAttention(ContextAttention):
    """Attention with heads divided over the ranks. 4 (c-1)/c^2 b s h elements are sent per rank and pass.

    The ranks divide the heads, and either they divide the key/value heads or these divide them: then ranks that share a
    key/value head each get a copy of it, and their gradients of it are summed.
    """

    def __init__(self, axis: Any, *arguments: Any, **options: Any):
        super().__init__(axis, *arguments, **options)
        if reason := refusal(*self.heads, axis.size):
            raise ValueError(f"ulysses: {reason}")
        self.local = Heads(self.heads.queries // axis.size, max(self.heads.groups // axis.size, 1))
        self._blocks = tuple(block for rank in range(axis.size) for block in self.division.blocks(rank))

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Attention. Saves queries, keys, values and results of this rank's heads over the whole sequence."""
        self._expect(x)
        q, kv = self.heads.split(self._rotated(x))
        batch, _, _, length, width = q.shape
        q = self._to_heads(q.reshape(1, batch, self.heads.queries, length, width), self._q_slices())
        kv = self._to_heads(kv, self._kv_slices())
        q = q.reshape(batch, self.local.groups, self.local.queries // self.local.groups, *q.shape[3:])
        out, log_sum = attention(q, kv, self._blocks, self._blocks, self.mask)
        y = self._to_tokens(self._flat(out), self._q_slices())[0]
        return y.transpose(0, 2, 1, 3).reshape(batch, length, self.heads.queries * width), (q, kv, out, log_sum)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        q, kv, out, log_sum = saved
        upper = self.heads.separate(dy)
        batch, length, width = len(dy), dy.shape[1], q.shape[-1]
        upper = upper.reshape(1, batch, self.heads.queries, length, width)
        dout = self._to_heads(upper, self._q_slices()).reshape(q.shape)
        tiles = backward_tiles(q, out, log_sum, dout, self._blocks)
        dq, dkv = attention_gradients(tiles, q, kv, self._blocks, self.mask)
        dq, dkv = kernels.narrow(dq, q.dtype), kernels.narrow(dkv, q.dtype)
        dq = self._to_tokens(self._flat(dq), self._q_slices())
        shape = (batch, self.heads.groups, self.heads.queries // self.heads.groups, length, width)
        return self._rotated_back(self.heads.join(dq.reshape(shape), self._to_tokens(dkv, self._kv_slices()), dy.dtype))

    def _q_slices(self) -> list[slice]:
        """Query heads of each rank."""
        each = self.local.queries
        return [slice(rank * each, (rank + 1) * each) for rank in range(self.axis.size)]

    def _kv_slices(self) -> list[slice]:
        """Key/value heads of each rank. Neighbours may have the same."""
        firsts = [rank * self.heads.groups // self.axis.size for rank in range(self.axis.size)]
        return [slice(first, first + self.local.groups) for first in firsts]

    def _to_heads(self, x: Array, heads: list[slice]) -> Array:
        """From (lead, batch, all heads, own tokens, width) to (lead, batch, own heads, all tokens, width)."""
        own = heads[self.axis.rank]
        shape = (*x.shape[:2], own.stop - own.start)
        shapes = [(*shape, size, x.shape[-1]) for size in self.division.sizes]
        parts = alltoall(self.axis, [x[:, :, some] for some in heads], shapes)
        return kernels.array_namespace(x).concatenate(parts, axis=3)

    def _to_tokens(self, x: Array, heads: list[slice]) -> Array:
        """The inverse of `_to_heads`. A sum where several ranks have a head, wide."""
        xp, at, sent = kernels.array_namespace(x), 0, []
        for size in self.division.sizes:
            sent.append(x[:, :, :, at : at + size])
            at += size
        own = self.division.size(self.axis.rank)
        shapes = [(*x.shape[:2], some.stop - some.start, own, x.shape[-1]) for some in heads]
        parts, last = alltoall(self.axis, sent, shapes), heads[-1].stop
        if sum(some.stop - some.start for some in heads) == last:
            return xp.concatenate(parts, axis=2)
        whole = xp.zeros((*x.shape[:2], last, own, x.shape[-1]), kernels.wide(x.dtype))
        for some, part in zip(heads, parts):
            whole[:, :, some] += kernels.widen(part)
        return whole

    @staticmethod
    def _flat(x: Array) -> Array:
        """View of (batch, g, r, n, width) as (1, batch, heads, n, width)."""
        batch, groups, heads, length, width = x.shape
        return x.reshape(1, batch, groups * heads, length, width)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        self._expect(x)
        batch, length, width = x.shape[0], self.division.length, x.shape[2] // self.heads.packed
        whole = ArraySpec((batch, length, self.local.packed * width), x.dtype)
        inner = BlockwiseAttention(*self.local, self.mask)._outline(whole, self._blocks, self._blocks)
        (_, out, log_sum), each = inner.saved, self.local.queries // self.local.groups
        q = ArraySpec((batch, self.local.groups, each, length, width), x.dtype)
        kv = ArraySpec((2, batch, self.local.groups, length, width), x.dtype)
        y = ArraySpec((batch, x.shape[1], self.heads.queries * width), x.dtype)
        saved = q, kv, ArraySpec(q.shape, out.dtype), log_sum
        work = inner.work + 2 * x.nbytes + 2 * y.nbytes + self._rotation_work(x)
        return inner._replace(y=y, saved=saved, work=work)
