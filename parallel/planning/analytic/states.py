"""Memory of weights, gradients and optimizer: bytes per parameter by recipe, divided by ZeRO, tp, pp and ep.

>>> [round(sum(RECIPES["mixed"].divided(64, stage)) * 7.5, 2) for stage in range(4)]  # GB for 7.5e9 parameters
[120.0, 31.41, 16.64, 1.88]
"""

from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from parallel.planning.analytic.layout import NO_COMPRESSION, ClusterLayout
from parallel.planning.analytic.transformer import Transformer


class StateRecipe(NamedTuple):
    """Bytes per parameter of the weights, the gradients, and all that ZeRO-1 divides (`optimizer`)."""

    weights: int
    gradients: int
    optimizer: int

    def divided(self, ranks: int, stage: int) -> tuple[Fraction, Fraction, Fraction]:
        """Bytes per parameter on one of `ranks` ranks that share states in ZeRO stage 0 to 3.

        Stage 1 divides the optimizer's, 2 also gradients, 3 also weights (Rajbhandari et al., "ZeRO", SC 2020,
        figure 1).
        """
        weights, gradients, optimizer = (
            Fraction(nbytes, ranks if stage >= least else 1) for nbytes, least in zip(self, DIVIDED_FROM)
        )
        return weights, gradients, optimizer


DIVIDED_FROM = (3, 2, 1)
"""Stage of ZeRO from which weights, gradients and optimizer are divided."""


RECIPES = {
    "mixed": StateRecipe(2, 2, 4 + 8),  # half gradients, float32 master weights, Adam's two moments
    "bf16": StateRecipe(2, 4, 4 + 8),  # float32 gradients only
    "fp16": StateRecipe(2, 2, 4 + 4 + 8),  # half gradients, and float32 copies of them for the update
    "fp32": StateRecipe(4, 4, 8),
}
"""Recipes by name, with Adam: 16, 18, 20 and 16 bytes per parameter. `chorus train` has bf16's, also for fp16."""


class WeightCount(NamedTuple):
    """Parameters of one rank: parameters that all replicas share, and parameters of routed experts."""

    dense: int
    experts: int


@lru_cache(maxsize=4096)
def layer_weights(model: Transformer, sparse: bool, tp: int, ep: int) -> WeightCount:
    """Parameters of a layer on one rank of tp and ep. Products that not all tp ranks can share are copied."""
    layer = model.experts.dense_layers if model.experts and sparse else 0
    count = {"dense": model.other_parameters(layer), "experts": 0}
    for each in model.products(layer):
        kind, stored = ("experts", each.stored // ep) if each.part == "experts" else ("dense", each.stored)
        shares = min(tp, each.most)
        weight = -(-each.inputs * each.outputs // shares)
        bias = model.bias * -(-each.outputs // (1 if each.by_rows else shares))
        count[kind] += (weight + bias) * stored
    return WeightCount(**count)


def part_weights(model: Transformer, layers: range, layout: ClusterLayout) -> WeightCount:
    """Parameters on one rank of a part of the model. The first has the embedding, the last norm and head.

    A tied table is on both if they are different stages.
    """
    return _part_weights(model, layers, layout.tp, layout.ep, layout.pp)


@lru_cache(maxsize=4096)
def _part_weights(model: Transformer, layers: range, tp: int, ep: int, pp: int) -> WeightCount:
    dense = experts = 0
    for layer, count in model.kinds(layers):
        weights = layer_weights(model, model.is_sparse(layer), tp, ep)
        dense, experts = dense + count * weights.dense, experts + count * weights.experts
    table = -(-model.vocabulary // tp) * model.width
    first, last = layers.start == 0, layers.stop == model.layers
    ends = first * (table + model.positions * model.width)
    ends += last * (model.norm_parameters if model.norms else 0)
    ends += last * (0 if model.tied and (first or pp == 1) else table)
    return WeightCount(dense + ends, experts)


class WeightCopies(NamedTuple):
    """Number of weights of a rank, the ranks with copies of these, and the distance of neighbours among them."""

    elements: int
    ranks: int
    stride: int


def weight_copies(weights: WeightCount, layout: ClusterLayout) -> tuple[WeightCopies, WeightCopies]:
    """Copies of dense weights, and of experts: `ep` neighbours among the replicas have different ones."""
    ranks, stride, ep = layout.replicas, layout.replica_stride, layout.ep
    return WeightCopies(weights.dense, ranks, stride), WeightCopies(weights.experts, ranks // ep, stride * ep)


def state_bytes(weights: WeightCount, recipe: StateRecipe, layout: ClusterLayout) -> Counter[str]:
    """Bytes of weights, gradients, optimizer, and residuals of compression of one rank. Each part is rounded up."""
    found: Counter[str] = Counter()
    for count, ranks, _ in weight_copies(weights, layout):
        for kind, nbytes, least in zip(STATE_KINDS, recipe, DIVIDED_FROM):
            found[kind] += -(-count * nbytes // (ranks if layout.zero >= least else 1))
    if layout.compress != NO_COMPRESSION:
        found[RESIDUAL] = RESIDUAL_BYTES * sum(weights)
    return found


STATE_KINDS = ("weights", "gradients", "optimizer")
RESIDUAL, RESIDUAL_BYTES = "residual", 2 * 4
"""Error feedback of compressed gradients: float32, of this step and of the one before."""
