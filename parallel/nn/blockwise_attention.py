"""Multi-head attention in memory proportional to the length: grouped key/value heads, any mask."""

from typing import Any, NamedTuple

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, whole_number
from parallel.nn.attention_mask import CAUSAL, AttentionMask
from parallel.nn.attention_tiles import (
    KEYS,
    QUERIES,
    attention,
    attention_gradients,
    backward_tiles,
    tiles,
    visible_tiles,
)
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode
from parallel.nn.rotary import Rotary
from quant.types import Array


class Heads(NamedTuple):
    """Numbers of query heads and of key/value heads; each of the latter serves as many neighbouring query heads."""

    queries: int
    groups: int

    @classmethod
    def of(cls, heads: int, kv_heads: int | None) -> "Heads":
        """Checked numbers; by default as many key/value heads as query heads."""
        heads = whole_number("heads", heads, 1)
        kv_heads = heads if kv_heads is None else whole_number("kv_heads", kv_heads, 1)
        if heads % kv_heads:
            raise ValueError(f"attention: expected heads that the kv heads divide, found {heads} and {kv_heads}")
        return cls(heads, kv_heads)

    @property
    def packed(self) -> int:
        """Heads of queries, keys and values side by side."""
        return self.queries + 2 * self.groups

    def split(self, x: Array) -> tuple[Array, Array]:
        """Queries, and keys with values, in the shapes of `attention_tiles` (copies), from x (batch, n, packed * d)."""
        batch, length, width = x.shape
        xp, each = kernels.array_namespace(x), width // self.packed
        rows = x.reshape(batch, length, self.packed, each)
        q = rows[:, :, : self.queries].reshape(batch, length, self.groups, self.queries // self.groups, each)
        kv = rows[:, :, self.queries :].reshape(batch, length, 2, self.groups, each)
        return xp.ascontiguousarray(q.transpose(0, 2, 3, 1, 4)), xp.ascontiguousarray(kv.transpose(2, 0, 3, 1, 4))

    def queries_and_keys(self, x: Array) -> Array:
        """View of the queries and keys of x (batch, n, packed * d), of shape (batch, n, queries + groups, d)."""
        rows = x.reshape(*x.shape[:2], self.packed, x.shape[2] // self.packed)
        return rows[:, :, : self.queries + self.groups]

    def join(self, dq: Array, dkv: Array, dtype: Any) -> Array:
        """Packed array of `dtype`, the inverse of `split`."""
        batch, _, _, length, width = dq.shape
        xp = kernels.array_namespace(dq)
        x = xp.empty((batch, length, self.packed, width), dtype)
        q_rows = dq.transpose(0, 3, 1, 2, 4).reshape(batch, length, self.queries, width)
        kv_rows = dkv.transpose(1, 3, 0, 2, 4).reshape(batch, length, 2 * self.groups, width)
        kernels.narrow(q_rows, dtype, x[:, :, : self.queries])
        kernels.narrow(kv_rows, dtype, x[:, :, self.queries :])
        return x.reshape(batch, length, self.packed * width)

    def merge(self, out: Array) -> Array:
        """Results of all heads side by side, (batch, n, heads * d), from the shape of queries."""
        batch, groups, heads, length, width = out.shape
        return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, groups * heads * width)

    def separate(self, y: Array) -> Array:
        """View of `y`, or of its gradient, in the shape of queries: the inverse of `merge`."""
        (batch, length, width), heads = y.shape, self.queries // self.groups
        return y.reshape(batch, length, self.groups, heads, width // self.queries).transpose(0, 2, 3, 1, 4)


class BlockwiseAttention(Operator):
    """Multi-head attention from packed q, k, v, in memory proportional to the length; no parameters.

    The input, of shape (batch, length, (heads + 2 kv_heads) * d), has the query heads side by side, then the key heads,
    then the value heads; the result has shape (batch, length, heads * d).

    Parameters
    ----------
    heads, kv_heads : int
        `kv_heads` (default: `heads`) divides `heads`: grouped-query attention (Ainslie et al., arXiv:2305.13245).
    mask : AttentionMask
    rotary : Rotary, optional
        Rotation of queries and keys by their positions, for heads of even width.
    """

    fixed = ("heads",)

    def __init__(
        self,
        heads: int,
        kv_heads: int | None = None,
        mask: AttentionMask = CAUSAL,
        rotary: Rotary | None = None,
    ):
        self.heads, self.mask, self.rotary = Heads.of(heads, kv_heads), mask, rotary

    @property
    def continues(self) -> bool:
        """True of causal attention."""
        return self.mask.causal

    @property
    def context(self) -> int | None:
        """Number of positions that the rotation has. None: no limit."""
        return None if self.rotary is None else self.rotary.context

    def _expect(self, x: Any, before: int = 0) -> None:
        fits = len(x.shape) == 3 and x.shape[2] % self.heads.packed == 0
        expect(fits, self, f"an array of shape (batch, length, multiple of {self.heads.packed} heads)", x)
        if self.context is not None:
            fits = before + x.shape[1] <= self.context
            expect(fits, self, f"at most {self.context} positions, {before} before", x)
            expect(x.shape[2] // self.heads.packed % 2 == 0, self, "heads of even width", x)

    def _positions(self, x: Array, before: int) -> tuple[range, ...]:
        """Positions of the tokens of x, with `before` earlier ones."""
        return (range(before, before + x.shape[1]),)

    def _rotated(self, x: Array, before: int = 0) -> Array:
        """Packed q, k, v with queries and keys rotated: a copy, or x itself without rotation."""
        if self.rotary is None:
            return x
        y = x.copy()
        self.rotary.rotate(self.heads.queries_and_keys(y), self._positions(y, before))
        return y

    def _rotated_back(self, dx: Array) -> Array:
        """Gradient of x, in place, from the gradient of its rotated copy."""
        if self.rotary is not None:
            self.rotary.rotate(self.heads.queries_and_keys(dx), self._positions(dx, 0), -1)
        return dx

    def _rotation_work(self, x: ArraySpec) -> int:
        """Bytes of the temporary arrays of a rotation."""
        return 0 if self.rotary is None else 3 * elements(x) * kernels.wide(x.dtype).itemsize

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Attention; saves x, the result, and the log of the sum of exponentials of each query and head."""
        before = 0 if run.past is None else run.past.length
        self._expect(x, before)
        q, kv = self.heads.split(self._rotated(x, before))
        kv = kv if run.past is None else run.past.extended(kv, kernels.array_namespace(x))
        out, log_sum = self._attend(q, kv)
        y = self.heads.merge(out)
        return y, (x, y, log_sum)

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        x, y, log_sum = saved
        q, kv = self.heads.split(self._rotated(x))
        dq, dkv = self._attend_backward(q, kv, self.heads.separate(y), log_sum, self.heads.separate(dy))
        return self._rotated_back(self.heads.join(dq, dkv, x.dtype))

    def _attend(self, q: Array, kv: Array) -> tuple[Array, Array]:
        """Result, of the shape and dtype of q, the last positions of kv, and log of the sum of exponentials."""
        keys = range(kv.shape[3])
        return attention(q, kv, (keys[len(keys) - q.shape[3] :],), (keys,), self.mask)

    def _attend_backward(self, q: Array, kv: Array, out: Array, log_sum: Array, dout: Array) -> tuple[Array, Array]:
        """Gradients of q and kv, wide."""
        blocks = (range(q.shape[3]),)
        return attention_gradients(backward_tiles(q, out, log_sum, dout, blocks), q, kv, blocks, self.mask)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline; counts 4 * d flops per head and per pair of query and key that is computed (whole tiles).

        The backward pass computes the scores again, which is half of them.
        """
        self._expect(x)
        return self._outline(x, (range(x.shape[1]),), (range(x.shape[1]),))

    def _outline(self, x: ArraySpec, queries: tuple[range, ...], keys: tuple[range, ...]) -> OperatorOutline:
        """Outline for queries and keys at these blocks of positions."""
        batch, length, width = x.shape[0], x.shape[1], x.shape[2] // self.heads.packed
        key_tiles, pairs, largest = list(tiles(keys, KEYS)), 0, 0
        for tile in tiles(queries, QUERIES):
            for place, low, _ in visible_tiles(self.mask, tile, key_tiles):
                pairs += len(low) * (place.stop - place.start)
                largest = max(largest, len(low) * (place.stop - place.start))
        wide = kernels.wide(x.dtype)
        y = ArraySpec((batch, length, self.heads.queries * width), x.dtype)
        log_sum = ArraySpec((batch, self.heads.groups, self.heads.queries // self.heads.groups, length), wide)
        copies = (elements(x) + 3 * elements(y)) * x.dtype.itemsize + (elements(x) + 2 * elements(y)) * wide.itemsize
        work = copies + 3 * batch * self.heads.queries * largest * wide.itemsize + self._rotation_work(x)
        flops = 4 * batch * pairs * self.heads.queries * width
        return OperatorOutline(y, (x, y, log_sum), flops, work, recomputed=flops // 2)
