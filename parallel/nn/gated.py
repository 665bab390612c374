"""Decoder-only transformer with a gated feed-forward layer and grouped key/value heads."""

import math
from dataclasses import dataclass
from typing import Any

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect_last, whole_number
from parallel.nn.blockwise_attention import BlockwiseAttention
from parallel.nn.compose import Recompute, Residual, Sequential
from parallel.nn.dropout import Dropout
from parallel.nn.embedding import Embedding, PositionEmbedding, Unembedding
from parallel.nn.linear import Linear
from parallel.nn.norm import RMSNorm
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, PassMode, normal
from parallel.nn.placement import Features
from parallel.nn.recompute import recompute_kinds, unit_of
from parallel.nn.rotary import Rotary
from quant.types import Array


class SwiGLU(Operator):
    """Gated activation, y = silu(g) u, of gates g and values u side by side in x (Shazeer, arXiv:2002.05202).

    Maps shape (batch, ..., 2 n) to (batch, ..., n) for n = `features`; no parameters.
    """

    mixes = (-1,)
    fixed = ("features",)

    def __init__(self, features: int):
        self.features = whole_number("features", features)

    def _halves(self, x: Array) -> tuple[Array, Array]:
        xp = kernels.array_namespace(x)
        return xp.ascontiguousarray(x[..., : self.features]), kernels.widen(x[..., self.features :])

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        expect_last(self, x, 2 * self.features)
        gate, value = self._halves(x)
        return kernels.narrow(kernels.widen(kernels.silu(gate)) * value, x.dtype), x

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        gate, value = self._halves(saved)
        upper, half = kernels.widen(dy), self.features
        dx = kernels.array_namespace(saved).empty(saved.shape, upper.dtype)
        dx[..., :half] = kernels.silu_backward(upper * value, kernels.widen(gate))
        dx[..., half:] = upper * kernels.widen(kernels.silu(gate))
        return kernels.narrow(dx, saved.dtype)

    def outline(self, x: ArraySpec) -> OperatorOutline:
        expect_last(self, x, 2 * self.features)
        work = 4 * elements(x) * kernels.wide(x.dtype).itemsize
        return OperatorOutline(ArraySpec((*x.shape[:-1], self.features), x.dtype), x, 0, work)


@dataclass(frozen=True)
class LlamaOptions:
    """Options of `gated_transformer` with which it is LlamaForCausalLM of Hugging Face, whose names are in brackets.

    Attributes
    ----------
    base : float
        Of the angles of rotary positions (``rope_theta``). Scaled angles (``rope_scaling``) are not supported.
    hidden : int, optional
        Features of the feed-forward layer (``intermediate_size``). By default 8/3 of the width, rounded up.
    tied : bool
        True if the output has the weights of the embedding (``tie_word_embeddings``).
    eps : float
        Added to the mean square in norms (``rms_norm_eps``).
    """

    base: float = 1e4
    hidden: int | None = None
    tied: bool = False
    eps: float = 1e-5


def gated_transformer(
    vocabulary: int,
    context: int,
    layers: int,
    heads: int,
    width: int,
    *,
    kv_heads: int | None = None,
    dropout: float = 0.0,
    recompute: bool | str = False,
    llama: LlamaOptions | None = None,
) -> Sequential:
    """Decoder-only transformer with RMSNorm, grouped key/value heads, SwiGLU and no biases, like Llama.

    Touvron et al., arXiv:2302.13971; positions are learned and the output tied, as in
    `parallel.nn.models.transformer`, whose arguments it takes.
    `kv_heads`, by default `heads`, divides `heads`. The feed-forward layer has 8/3 `width` hidden features, rounded up.
    With `llama`, positions are rotary, in each attention, and the other options are those of Llama. Without it, they
    are the default ones with a tied output.
    """
    if whole_number("heads", heads) < 1 or whole_number("width", width) % heads:
        raise ValueError(f"heads: expected a divisor of the width {width}, found {heads}")
    options, rotary = llama or LlamaOptions(tied=True), None if llama is None else Rotary(context, llama.base)
    groups = BlockwiseAttention(heads, kv_heads).heads.groups
    hidden = -(-8 * width // 3) if options.hidden is None else whole_number("hidden", options.hidden, 1)
    init, init_out = normal(0.02), normal(0.02 / math.sqrt(2 * max(whole_number("layers", layers), 1)))

    def linear(inputs: int, outputs: int, rows: Features, columns: Features) -> Linear:
        # Results that are added to the residual stream start smaller, as in `transformer`.
        made = Linear(inputs, outputs, bias=False, init=init_out if columns == residual else init)
        made.rows, made.columns = rows, columns
        return made

    each, residual = width // heads, Features(width)
    packed = Features(groups, (heads // groups * each, each, each), heads // groups)
    embedding = Embedding(vocabulary, width, init=init)
    drop: list[Operator] = [Dropout(dropout)] if dropout else []
    learned = [PositionEmbedding(context, width, init=init)] if rotary is None else []
    units: list[Operator] = [Sequential([embedding, *learned, *drop])]
    for kind in recompute_kinds(recompute, layers):
        attention = BlockwiseAttention(heads, groups, rotary=rotary)
        halves: list[list[Operator]] = [
            [
                RMSNorm(width, options.eps),
                linear(width, (heads + 2 * groups) * each, residual, packed),
                Recompute(attention) if kind == "selective" else attention,
                linear(width, width, Features(groups, packed.widths[:1], packed.pieces), residual),
            ],
            [
                RMSNorm(width, options.eps),
                linear(width, 2 * hidden, residual, Features(hidden, (1, 1))),
                SwiGLU(hidden),
                linear(hidden, width, Features(hidden), residual),
            ],
        ]
        units.append(unit_of([Residual(Sequential([*half, *drop])) for half in halves], kind == "full"))
    output = Unembedding(embedding if options.tied else Embedding(vocabulary, width, init=init))
    units.append(Sequential([RMSNorm(width, options.eps), output]))
    cuts = {"0.0": "vocabulary", f"{layers + 1}.1": "vocabulary", **(CUTS if layers else {})}
    return Sequential(units, cuts=cuts)


CUTS = {
    "*.0.inner.1": "column",
    "*.0.inner.2": "heads",
    "*.0.inner.3": "row",
    "*.1.inner.1": "column",
    "*.1.inner.2": "gate",
    "*.1.inner.3": "row",
}
"""Placements within a block of `gated_transformer`: key/value heads with their queries, gates with their values."""
