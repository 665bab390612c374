"""Causal multi-head self-attention."""

import math
from typing import Any

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, whole_number
from parallel.nn.compose import Sequential
from parallel.nn.kernels import causal_attention
from parallel.nn.linear import Linear
from parallel.nn.operator import ArraySpec, GradientSink, Init, Operator, OperatorOutline, PassMode
from parallel.nn.placement import Features
from quant.types import Array


class CausalAttention(Operator):
    """Causal multi-head attention from packed q, k, v: softmax(q k^T / sqrt(head width)) v, each head; no parameters.

    The input has queries, keys and values side by side, and in each the `heads` side by side (Vaswani et al.,
    "Attention Is All You Need", 2017).
    """

    fixed = ("heads",)
    continues = True

    def __init__(self, heads: int):
        self.heads = whole_number("heads", heads)

    def _expect(self, x: Any) -> None:
        fits = len(x.shape) == 3 and x.shape[2] % (3 * self.heads) == 0
        expect(fits, self, f"an array of shape (batch, length, multiple of 3 times {self.heads} heads)", x)

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        """Attention, one block of queries after the other; saves the heads of x and the attention probabilities.

        Keys to the right of a block are neither computed nor stored.
        """
        self._expect(x)
        xp, heads = kernels.array_namespace(x), causal_attention.split_heads(x, 3, self.heads)
        q, k, v = heads
        if run.past is not None:
            k, v = run.past.extended(heads[1:], xp)
        before = k.shape[2] - q.shape[2]
        result, scale, probabilities = causal_attention.empty_heads(q, 1, x.dtype), _scale(q), []
        for first, last in causal_attention.blocks(x.shape[1], x):
            seen = before + last
            scores = xp.empty((*q.shape[:2], last - first, seen), kernels.wide(x.dtype))
            kernels.matmul(q[:, :, first:last], k[:, :, :seen].swapaxes(2, 3), out=scores)
            p = causal_attention.causal_probabilities(scores, scale, before + first, x.dtype)
            kernels.matmul(p, v[:, :, :seen], out=result[0, :, :, first:last])
            probabilities.append(p)
        return causal_attention.merge_heads(result, x.dtype), (heads, tuple(probabilities))

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        """Gradient of x, by blocks of queries from the last, which attends to all keys, to the first."""
        (q, k, v), probabilities = saved
        xp, length, scale, dtype = kernels.array_namespace(dy), dy.shape[1], _scale(q), kernels.wide(dy.dtype)
        upper = causal_attention.split_heads(dy, 1, self.heads)[0]
        rounded = xp is not np and len(probabilities) == 1  # no block is added to another
        gradient = causal_attention.empty_heads(q, 3, dy.dtype if rounded else dtype)
        dq, dk, dv = gradient
        for (first, last), p in reversed(list(zip(causal_attention.blocks(length, dy), probabilities))):
            dp = xp.empty(p.shape, dtype)
            kernels.matmul(upper[:, :, first:last], v[:, :, :last].swapaxes(2, 3), out=dp)
            ds = causal_attention.causal_gradient(dp, p, scale, first)
            kernels.matmul(ds, k[:, :, :last], out=dq[:, :, first:last])
            for left, right, into in ((ds, q, dk), (p, upper, dv)):
                left, right, into = left.swapaxes(2, 3), right[:, :, first:last], into[:, :, :last]
                if last == length:
                    kernels.matmul(left, right, out=into)
                else:
                    part = xp.empty(into.shape, dtype)
                    into += kernels.matmul(left, right, out=part)
        return causal_attention.merge_heads(gradient, dy.dtype)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        """Outline; counts 4 * width flops per pair of query and key that is computed (whole blocks of queries).

        Blocks are longer on a GPU: see `causal_attention.outlines_on`.
        """
        self._expect(x)
        batch, length, width = x.shape[0], x.shape[1], x.shape[2] // 3
        blocks = causal_attention.blocks(length)
        kept = tuple(ArraySpec((batch, self.heads, last - first, last), x.dtype) for first, last in blocks)
        pairs = sum((last - first) * last for first, last in blocks)
        block = max((elements(p) for p in kept), default=0) * kernels.wide(x.dtype).itemsize
        half = x.dtype.itemsize == 2
        work = 2 * block + block * half + (elements(x) // 3) * kernels.wide(x.dtype).itemsize * (1 + 3 * half)
        work += 16 * causal_attention.block_length() * length  # of the mask, and of sums of rows
        return OperatorOutline(ArraySpec((batch, length, width), x.dtype), (x, kept), 4 * batch * pairs * width, work)


def _scale(q: Array) -> float:
    return 1 / math.sqrt(max(q.shape[-1], 1))


def self_attention(width: int, heads: int, *, init: Init | None = None, init_out: Init | None = None) -> Sequential:
    """Self-attention layer: projection to q, k, v, causal attention, output projection; `heads` divides `width`.

    Maps shape (batch, length, width) to the same shape. `init` and `init_out` are the initial weights of the
    projections.
    """
    if whole_number("heads", heads) < 1 or whole_number("width", width) % heads:
        raise ValueError(f"self_attention: expected a width that is a multiple of the heads, found {width} and {heads}")
    inner, outer = Linear(width, 3 * width, init=init), Linear(width, width, init=init_out)
    inner.columns, outer.rows = Features(heads, (width // heads,) * 3), Features(heads, (width // heads,))
    return Sequential([inner, CausalAttention(heads), outer])
