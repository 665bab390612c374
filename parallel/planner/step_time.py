"""Estimated time of a training step: products, memory traffic, messages of every axis, and the pipeline's bubble.

Products take their FLOPs over the attainable peak, with an efficiency that grows with their size; other operators the
time to move the saved arrays. Messages are priced by the cost formulas of the algorithms in `collectives.algorithms`,
on the link of their mesh axis. Overlapped: gradients of replicas with the last micro-batch's backward pass.
Efficiencies are estimates and not fitted to measurements.
"""

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from collectives.algorithms import catalog
from parallel.pipeline.schedule.formulas import FORMULAS, evaluate
from parallel.pipeline.schedule.stage_placement import Number
from parallel.planner.activations import HALF, layer_bytes
from parallel.planner.flops import OperatorCost, operators
from parallel.planner.layout import ClusterLayout, accumulation
from parallel.planner.machines import Cluster, Device, Link
from parallel.planner.states import StateRecipe, WeightCount, state_bytes
from parallel.planner.transformer import Product, Transformer

EFFICIENCY = ((0.0, 1e9, 16e9, 128e9), (0.1, 0.6, 0.9, 0.99))
"""FLOPs of a product, and the share of the attainable peak that it reaches; linear between (Gao et al., vTrain)."""

TRAFFIC = 4
"""Times that saved bytes are moved: written and read in the forward pass, and again in the backward pass."""


class Setup(NamedTuple):
    """Cluster, its device, precision of products, and recipe of states."""

    cluster: Cluster
    device: Device
    precision: str
    recipe: StateRecipe


class StepTime(NamedTuple):
    """Seconds of a step by cause; `bubble` is idle time of the pipeline, `replicas` what is not overlapped of dp."""

    compute: float
    recompute: float
    memory: float
    tensor: float
    context: float
    experts: float
    stages: float
    bubble: float
    replicas: float
    update: float

    @property
    def total(self) -> float:
        return sum(self)


@lru_cache(maxsize=1 << 16)
def message_seconds(collective: str, algorithm: str, ranks: int, nbytes: float, link: Link) -> float:
    """Seconds of a collective among `ranks` over a link, by the algorithm's formula in the catalogue."""
    if ranks == 1:
        return 0.0
    alpha, beta = link.cost
    return float(catalog.find(collective, algorithm).seconds(ranks, int(nbytes), alpha, beta, 0.0))


def product_seconds(cost: OperatorCost, setup: Setup) -> float:
    """Seconds of a product: at least those to move its operands."""
    peak = setup.device.peak_of(setup.precision) * setup.device.attainable
    share = float(np.interp(cost.flops / cost.repeats, *EFFICIENCY))
    return max(cost.flops / (peak * share), cost.nbytes() / setup.device.bandwidth)


class ForwardSeconds(NamedTuple):
    """Seconds of products in a forward pass of one micro-batch on one rank, if it had all layers."""

    layers: float  # products with weights
    scores: float
    head: float


@lru_cache(maxsize=4096)
def forward_seconds(model: Transformer, setup: Setup, tp: int, cp: int, ep: int, micro_batch: int) -> ForwardSeconds:
    """Seconds of products on a rank of tp, cp and ep; along cp it has its queries, and all keys."""
    layers = scores = head = 0.0
    products = {(each.part, each.name): each for layer, _ in model.kinds() for each in model.products(layer)}
    for cost in operators(model, micro_batch, model.context // cp):
        if cost.part == "scores":
            scores += cp * product_seconds(cost._replace(repeats=-(-cost.repeats // tp)), setup)
        elif cost.part == "vocabulary":
            head += product_seconds(cost._replace(n=-(-cost.n // tp)), setup)
        else:
            layers += product_seconds(_of_rank(products[cost.part, cost.name], cost, tp, ep), setup)
    return ForwardSeconds(layers, scores, head)


def _of_rank(each: Product, cost: OperatorCost, tp: int, ep: int) -> OperatorCost:
    """Share of one rank of tp and ep in a product."""
    shares = min(tp, each.most)
    if each.part == "experts":  # fewer experts, each with the tokens of more ranks
        cost = cost._replace(m=cost.m * ep, repeats=-(-cost.repeats // ep))
    return cost._replace(k=-(-cost.k // shares)) if each.by_rows else cost._replace(n=-(-cost.n // shares))


def step_time(
    model: Transformer, layout: ClusterLayout, setup: Setup, sequences: int, weights: WeightCount
) -> StepTime:
    """Estimated seconds of a step of `sequences`; `weights` are those of the stage that has most."""
    rounds, stages = accumulation(layout, sequences), layout.pp
    layers, scores, head = forward_seconds(model, setup, layout.tp, layout.cp, layout.ep, layout.micro_batch)
    again = {"none": scores * (layout.cp > 1), "selective": scores, "full": layers + scores}[layout.recompute]
    saved = sum(count * layer_bytes(model, layer, layout, "selective") for layer, count in model.kinds())
    each = {"compute": 3 * (layers + scores + head), "recompute": again}
    each |= {"memory": TRAFFIC * saved / setup.device.bandwidth, **_layer_messages(model, layout, setup)}
    each = {name: seconds / stages for name, seconds in each.items()}
    each["stages"] = 2 * layout.virtual * _boundary_seconds(model, layout, setup)
    busy = sum(each.values())
    return StepTime(
        **{name: rounds * seconds for name, seconds in each.items()},
        bubble=_idle(layout, rounds, busy),
        replicas=_replica_seconds(layout, setup, weights, rounds, busy),
        update=_update_seconds(layout, setup, weights),
    )


def _vector_bytes(model: Transformer, layout: ClusterLayout) -> float:
    """Bytes of the activations between two layers, of a micro-batch on a rank of cp."""
    return HALF * layout.micro_batch * model.context * model.width / layout.cp


def _boundary_seconds(model: Transformer, layout: ClusterLayout, setup: Setup) -> float:
    """Seconds of a message between two stages."""
    if layout.pp == 1:
        return 0.0
    link = setup.cluster.link(layout.pp, layout.strides()["pp"])
    return float(link.cost(_vector_bytes(model, layout) / (layout.tp if layout.sequence else 1)))


def _layer_messages(model: Transformer, layout: ClusterLayout, setup: Setup) -> dict[str, float]:
    """Seconds of the messages of all layers for one micro-batch, forward and backward, by axis."""
    tp, cp, ep, strides = layout.tp, layout.cp, layout.ep, layout.strides()
    vector = _vector_bytes(model, layout)
    passes = 3 if layout.recompute == "full" else 2  # each of two allreduces a layer
    gather = message_seconds("allgather", "ring", tp, vector, setup.cluster.link(tp))
    # With sequence parallelism the two saved inputs of a layer are gathered once more for the gradients of weights.
    tensor = 2 * (2 * passes + layout.sequence) * gather
    keys = HALF * layout.micro_batch * model.context * 2 * -(-model.kv_heads // tp) * model.head_width
    context = 3 * message_seconds("allgather", "ring", cp, keys, setup.cluster.link(cp, strides["cp"]))
    sparse = sum(count for layer, count in model.kinds() if model.is_sparse(layer))
    sent = vector * (model.experts.active if model.experts else 0) / tp
    exchange = message_seconds("alltoall", "pairwise", ep, sent, setup.cluster.link(ep, strides["cp"]))
    return {
        "tensor": model.layers * tensor,
        "context": model.layers * context,
        "experts": sparse * 2 * passes * exchange,
    }


def _idle(layout: ClusterLayout, rounds: int, busy: float) -> float:
    """Idle seconds of a stage that is busy for `busy` seconds per micro-batch: a third of it forward."""
    if layout.pp == 1:
        return 0.0
    third = Fraction(busy / 3)
    letters: dict[str, Number] = {"p": layout.pp, "m": rounds, "v": layout.virtual, "F": third, "B": third, "W": third}
    return float(evaluate(FORMULAS[layout.schedule].idle, **letters))


def _replica_seconds(layout: ClusterLayout, setup: Setup, weights: WeightCount, rounds: int, busy: float) -> float:
    """Seconds of gradients and gathered weights of replicas that no backward pass hides."""
    ranks, backward = layout.replicas, busy * 2 / 3
    link = setup.cluster.link(ranks, layout.strides()["cp"])
    scatter, gather = (
        message_seconds(collective, "ring", ranks, sum(weights) * nbytes, link)
        for collective, nbytes in (("reduce_scatter", setup.recipe.gradients), ("allgather", setup.recipe.weights))
    )
    if layout.zero == 3:  # weights of every layer for both passes, beside the layer before
        return max(0.0, rounds * (2 * gather + scatter - busy))
    if layout.zero == 2:  # gradients of every micro-batch
        return max(0.0, rounds * (scatter - backward)) + gather
    return max(0.0, scatter + gather - backward)


def _update_seconds(layout: ClusterLayout, setup: Setup, weights: WeightCount) -> float:
    """Seconds to read and write the states of one rank."""
    nbytes = state_bytes(weights, setup.recipe, layout)
    return 2 * nbytes["optimizer"] / setup.device.bandwidth
