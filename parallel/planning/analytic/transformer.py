"""Decoder-only transformer as numbers: its matrix products and parameters, without arrays.

A layer is a list of `Product`s. Parameters, FLOPs and the share of each rank follow from that list, so an architecture
is described in one place (`attention_products`, `feed_forward_products`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parallel.planning.analytic.checked import expect_at_least

MOST_LAYERS = 10_000
"""Layers beyond which a number is taken for a slip."""


class Product(NamedTuple):
    """Product of every token's vector with a weight of `inputs` x `outputs` elements.

    Attributes
    ----------
    part : str
        Part of the model: projections, ffn, experts, router or vocabulary.
    most : int
        Ranks that can share the weight in tensor parallelism. 1: each has all of it. More ranks hold copies.
    by_rows : bool
        True if ranks share the inputs and sum the outputs. The bias is then whole on every rank.
    stored, active : int
        Number of weights of this shape in the layer, and number that a token uses.
    """

    part: str
    name: str
    inputs: int
    outputs: int
    most: int
    by_rows: bool = False
    stored: int = 1
    active: int = 1

    @property
    def flops(self) -> int:
        """Multiplications and additions for one token in a forward pass."""
        return 2 * self.inputs * self.outputs * self.active


@dataclass(frozen=True)
class RoutedExperts:
    """Mixture-of-experts FFN: `active` of `count` experts of hidden `width` per token, and `shared` ones for all.

    The first `dense_layers` layers have the plain FFN of the model. `balance_bias`: the router has a bias per expert.
    """

    count: int
    active: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    balance_bias: bool = False

    def __post_init__(self) -> None:
        expect_at_least(self, 1, "count", "active", "width")
        expect_at_least(self, 0, "shared", "dense_layers")
        if self.active > self.count:
            raise ValueError(f"active: expected at most the {self.count} experts that there are, found {self.active}")


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: ranks of the two low-rank projections, and widths of a head.

    A head's queries and keys have `plain` positions and `rotary` ones, its values `value` (DeepSeek-AI, "DeepSeek-V2",
    2024, section 2.1).
    """

    query_rank: int
    kv_rank: int
    plain: int
    rotary: int
    value: int

    def __post_init__(self) -> None:
        expect_at_least(self, 1, "query_rank", "kv_rank", "plain", "rotary", "value")


@dataclass(frozen=True)
class Transformer:
    """Decoder-only transformer.

    Attributes
    ----------
    layers, width, heads, vocabulary, context : int
        `vocabulary` 0 leaves out the embedding and the head, for formulas of a stack of layers.
    kv_heads, head_width, ffn : int
        0 for the usual ones: `heads`, `width` / `heads`, 4 `width`.
    gated : bool
        True if the FFN has a third matrix (SwiGLU).
    tied : bool
        True if the head uses the embedding's table.
    positions : int
        Learned position embeddings. 0 for none (rotary ones, for example).
    bias : bool
        True if linear layers and norms have biases.
    dropout : bool
        True if there is dropout after the embedding, the softmax, and both halves of a layer.
    norms : int
        Norms of a layer.
    experts, latent : optional
    source : str
        Publication that the numbers are from.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    kv_heads: int = 0
    head_width: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = False
    positions: int = 0
    bias: bool = False
    dropout: bool = False
    norms: int = 2
    experts: RoutedExperts | None = None
    latent: LatentAttention | None = None
    source: str = ""

    def __post_init__(self) -> None:
        expect_at_least(self, 1, "layers", "width", "heads", "context")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers: expected at most {MOST_LAYERS}, found {self.layers}")
        expect_at_least(self, 0, "vocabulary", "kv_heads", "head_width", "ffn", "positions", "norms")
        if not self.head_width and self.width % self.heads:
            raise ValueError(
                f"heads: expected a divisor of the width {self.width}, or a head_width; found {self.heads}"
            )
        # 0 means the usual number, filled in so that formulas need no cases
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_width", self.head_width or self.width // self.heads)
        object.__setattr__(self, "ffn", self.ffn or 4 * self.width)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of the {self.heads} heads, found {self.kv_heads}")
        if self.experts and self.experts.dense_layers > self.layers:
            raise ValueError(f"dense_layers: expected at most {self.layers} layers, found {self.experts.dense_layers}")

    def is_sparse(self, layer: int) -> bool:
        """True if a layer's FFN consists of experts."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def kinds(self, layers: range | None = None) -> list[tuple[int, int]]:
        """Kinds of layer among `layers`, by default all: (one layer of the kind, number of them)."""
        layers = range(self.layers) if layers is None else layers
        first = self.layers if self.experts is None else self.experts.dense_layers
        dense = range(layers.start, min(layers.stop, max(first, layers.start)))
        sparse = range(dense.stop, layers.stop)
        return [(some.start, len(some)) for some in (dense, sparse) if some]

    def products(self, layer: int) -> list[Product]:
        """Matrix products of a layer, in order."""
        return [*attention_products(self), *feed_forward_products(self, layer)]

    @property
    def head(self) -> Product:
        """Product with the vocabulary's table (the head's own, or the embedding's)."""
        return Product("vocabulary", "head", self.width, self.vocabulary, self.vocabulary or 1)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of the model's width."""
        return self.width * (1 + self.bias)

    def other_parameters(self, layer: int) -> int:
        """Parameters of a layer that belong to no product: norms, and the router's bias."""
        latent = 0 if self.latent is None else (self.latent.query_rank + self.latent.kv_rank) * (1 + self.bias)
        balance = self.experts.count if self.experts and self.experts.balance_bias and self.is_sparse(layer) else 0
        return self.norms * self.norm_parameters + latent + balance

    def layer_parameters(self, layer: int, *, active: bool = False) -> int:
        """Parameters of a layer. With `active`, parameters that one token uses."""
        weights = sum(
            (each.active if active else each.stored) * (each.inputs + self.bias) * each.outputs
            for each in self.products(layer)
        )
        return weights + self.other_parameters(layer)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters. A tied table counts once."""
        return self._parameters(active=False)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all, but for the experts that it does not."""
        return self._parameters(active=True)

    def _parameters(self, *, active: bool) -> int:
        tables = self.vocabulary * self.width * (1 if self.tied else 2) + self.positions * self.width
        final = self.norm_parameters if self.norms else 0
        return (
            tables + final + sum(count * self.layer_parameters(layer, active=active) for layer, count in self.kinds())
        )


def attention_products(model: Transformer) -> Iterator[Product]:
    """Projections of attention. Keys' and values' can be shared by at most as many ranks as kv heads."""
    part, width, heads = "projections", model.width, model.heads
    if model.latent is None:
        queries, keys = heads * model.head_width, model.kv_heads * model.head_width
        yield Product(part, "queries", width, queries, heads)
        yield Product(part, "keys, values", width, 2 * keys, model.kv_heads)
        yield Product(part, "output", queries, width, heads, by_rows=True)
        return
    latent = model.latent
    yield Product(part, "queries down", width, latent.query_rank, 1)
    yield Product(part, "queries up", latent.query_rank, heads * (latent.plain + latent.rotary), heads)
    yield Product(part, "keys, values down", width, latent.kv_rank + latent.rotary, 1)
    yield Product(part, "keys, values up", latent.kv_rank, heads * (latent.plain + latent.value), heads)
    yield Product(part, "output", heads * latent.value, width, heads, by_rows=True)


def feed_forward_products(model: Transformer, layer: int) -> Iterator[Product]:
    """Products of the FFN, or of the router and the experts."""
    inner = 2 if model.gated else 1  # matrices from the width to the hidden width, beside one back

    def pair(part: str, hidden: int, stored: int, active: int) -> Iterator[Product]:
        yield Product(part, "in", model.width, inner * hidden, hidden, stored=stored, active=active)
        yield Product(part, "out", hidden, model.width, hidden, by_rows=True, stored=stored, active=active)

    experts = model.experts
    if experts is None or not model.is_sparse(layer):
        yield from pair("ffn", model.ffn, 1, 1)
        return
    yield Product("router", "router", model.width, experts.count, 1)
    yield from pair("experts", experts.width, experts.count, experts.active)
    if experts.shared:
        yield from pair("ffn", experts.width * experts.shared, 1, 1)
