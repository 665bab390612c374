"""Predicted time of a training step: products, memory traffic, messages of every axis, and the pipeline's bubble.

Products take their FLOPs over the attainable peak, with an efficiency that grows with their size. Operators that are
bound by memory take the time to move the saved arrays. Messages are priced by the cost formulas of the algorithms
in `collectives.algorithms`, on the links of their mesh axis. The bubble follows the schedule's formula (equal to the
simulator's). `Stack` has the shares that the software reaches and hides. One of its numbers is calibrated.
"""

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from collectives.algorithms import catalog
from parallel.nn.flat_params import BLOCK
from parallel.pipeline.schedule.formulas import FORMULAS, evaluate
from parallel.pipeline.schedule.stage_placement import Number
from parallel.planning.analytic.activations import HALF, layer_bytes
from parallel.planning.analytic.flops import OperatorCost, operators
from parallel.planning.analytic.layout import COMPRESSED_BITS, NO_COMPRESSION, ClusterLayout, accumulation, layer_ranges
from parallel.planning.analytic.machines import Cluster, Device, Link, Stack
from parallel.planning.analytic.states import StateRecipe, WeightCount, state_bytes, weight_copies
from parallel.planning.analytic.transformer import Product, Transformer

FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 2.5, 4.0
"""Times that the saved bytes of operators between products are moved.

Each array is written, and read by the next operator, with its gradient. Of the scores of 5 a s bytes a token
(Korthikanti et al.), 13 a s forward and 19 a s backward. Chosen among several values as the best fit to published
steps.
"""

LOGIT_TRAFFIC = 6
"""Times that float32 logits are moved: written, read for maximum, sum and loss, and their gradient twice."""


FEEDBACK_TRAFFIC = 6 * 4
"""Bytes moved for an element of a compressed sum, in float32: gradient and residual read, residual written, the sum of
received parts read and written, and the result written."""


class Setup(NamedTuple):
    """Cluster, its device, precision of products, recipe of states, and software."""

    cluster: Cluster
    device: Device
    precision: str
    recipe: StateRecipe
    stack: Stack = Stack()


class StepTime(NamedTuple):
    """Seconds of a step by cause.

    `bubble` is idle time of the pipeline, `replicas` the time of dp that is not overlapped.
    """

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


class BatchTime(NamedTuple):
    """Seconds of a micro-batch by cause (see `StepTime`), on a rank that has some layers, and perhaps the head."""

    compute: float
    recompute: float
    memory: float
    tensor: float
    context: float
    experts: float
    stages: float
    head: float

    @property
    def busy(self) -> float:
        return sum(self)

    def part(self, layers: float, head: bool) -> "BatchTime":
        """Seconds of a stage with this share of the layers, with or without the head."""
        times = BatchTime(*(layers * seconds for seconds in self))
        return times._replace(stages=self.stages, head=self.head * head)


@lru_cache(maxsize=1 << 16)
def message_seconds(collective: str, algorithm: str, ranks: int, nbytes: float, link: Link) -> float:
    """Seconds of a collective among `ranks` over a link, by the algorithm's formula in the catalogue."""
    if ranks == 1:
        return 0.0
    alpha, beta = link.cost
    return float(catalog.find(collective, algorithm).seconds(ranks, int(nbytes), alpha, beta, 0.0))


def ring_seconds(collective: str, ranks: int, stride: int, nbytes: float, setup: Setup) -> float:
    """Seconds of a ring allgather or reduce-scatter along an axis of `ranks`, `stride` devices apart.

    Over nodes it has two levels: among the ranks of a node, and for each of these, with its part, between nodes.
    """
    cluster, stack = setup.cluster, setup.stack
    near = cluster.ranks_inside(ranks, stride)
    inside = _reached(cluster.link(near, stride), stack.inside)
    seconds = message_seconds(collective, "ring", near, nbytes, inside)
    between = _reached(cluster.between, stack.between)
    return seconds + message_seconds(collective, "ring", -(-ranks // near), nbytes / near, between)


@lru_cache(maxsize=256)
def _reached(link: Link, share: float) -> Link:
    return Link(link.alpha, link.rate * share)


def product_seconds(cost: OperatorCost, setup: Setup) -> float:
    """Seconds of a product: at least those to move its operands."""
    peak = setup.device.peak_of(setup.precision) * setup.device.attainable * setup.stack.products
    share = setup.device.efficiency_of(cost.flops / cost.repeats)
    return max(cost.flops / (peak * share), cost.nbytes() / setup.device.bandwidth)


class ForwardSeconds(NamedTuple):
    """Seconds of products in a forward pass of one micro-batch on one rank, if it had all layers."""

    layers: float  # products with weights
    scores: float
    head: float


@lru_cache(maxsize=4096)
def forward_seconds(model: Transformer, setup: Setup, tp: int, cp: int, ep: int, micro_batch: int) -> ForwardSeconds:
    """Seconds of products on a rank of tp, cp and ep. Along cp it has its queries, and all keys."""
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
    """Predicted seconds of a step of `sequences`. `weights`: weights of the stage that has most."""
    rounds, stages = accumulation(layout, sequences), stage_times(model, layout, setup)
    slowest = max(stages, key=lambda stage: stage.busy)
    others = (sum(stage.busy for stage in stages) - slowest.busy) / max(1, layout.pp - 1)
    parts = {name: rounds * seconds for name, seconds in slowest._asdict().items()}
    parts["compute"] += parts.pop("head")
    return StepTime(
        **parts,
        bubble=_idle(layout, rounds, others),
        replicas=_replica_seconds(layout, setup, weights, rounds, slowest.busy),
        update=_update_seconds(layout, setup, weights),
    )


def stage_times(model: Transformer, layout: ClusterLayout, setup: Setup) -> list[BatchTime]:
    """Predicted seconds of a micro-batch on every stage, forward and backward. All layers take equal time."""
    whole, ranges = batch_time(model, layout, setup), layer_ranges(model, layout)
    shares = [sum(len(ranges[part]) for part in layout.parts_of(stage)) / model.layers for stage in range(layout.pp)]
    return [whole.part(share, stage == layout.pp - 1) for stage, share in enumerate(shares)]


def batch_time(model: Transformer, layout: ClusterLayout, setup: Setup) -> BatchTime:
    """Predicted seconds of a micro-batch, forward and backward, on a rank that has all layers and the head."""
    layers, scores, head = forward_seconds(model, setup, layout.tp, layout.cp, layout.ep, layout.micro_batch)
    again = {"none": scores * (layout.cp > 1), "selective": scores, "full": layers + scores}[layout.recompute]
    logits = 4 * layout.micro_batch * model.context / layout.cp * model.vocabulary / layout.tp
    return BatchTime(
        compute=3 * (layers + scores),
        recompute=again,
        memory=_traffic(model, layout, setup) / setup.device.bandwidth,
        **_layer_messages(model, layout, setup),
        stages=2 * layout.virtual * _boundary_seconds(model, layout, setup),
        head=3 * head + LOGIT_TRAFFIC * logits / setup.device.bandwidth,
    )


def balanced_layers(model: Transformer, layout: ClusterLayout, setup: Setup) -> tuple[int, ...]:
    """Layers of each part with fewer in the last one (it has the head). Empty if that is no faster than `layout`."""
    alike = replace(layout, dp=1, zero=0, compress=NO_COMPRESSION, layers=())
    return _balanced_layers(model, alike, setup)


@lru_cache(maxsize=1 << 14)
def _balanced_layers(model: Transformer, layout: ClusterLayout, setup: Setup) -> tuple[int, ...]:
    whole, parts = batch_time(model, layout, setup), layout.parts
    each = (whole.busy - whole.head - whole.stages) / model.layers

    def slowest(layers: tuple[int, ...]) -> float:
        """Seconds of the slowest stage, without messages between stages."""
        counts = [sum(layers[part] for part in layout.parts_of(stage)) for stage in range(layout.pp)]
        return max(max(counts) * each, counts[-1] * each + whole.head)

    even = tuple(map(len, layer_ranges(model, layout)))
    before, divisions = parts - 1, [even]
    for last in range(even[-1] - 1, 0, -1):
        rest = model.layers - last
        divisions.append((*((part + 1) * rest // before - part * rest // before for part in range(before)), last))
    best = min(divisions, key=slowest)  # the first of equal ones
    return () if best == even else best


def _traffic(model: Transformer, layout: ClusterLayout, setup: Setup) -> float:
    """Bytes that operators between products move for a micro-batch, in all layers."""
    saved = sum(count * layer_bytes(model, layer, layout, "selective") for layer, count in model.kinds())
    scores = 0
    if not setup.stack.fused_attention:
        whole = sum(count * layer_bytes(model, layer, layout, "none") for layer, count in model.kinds())
        scores = whole - saved
    again = {"none": 0, "selective": scores, "full": saved + scores}[layout.recompute]
    return (FORWARD_TRAFFIC + BACKWARD_TRAFFIC) * (saved + scores) + FORWARD_TRAFFIC * again


def _vector_bytes(model: Transformer, layout: ClusterLayout) -> float:
    """Bytes of the activations between two layers, of a micro-batch on a rank of cp."""
    return HALF * layout.micro_batch * model.context * model.width / layout.cp


def _boundary_seconds(model: Transformer, layout: ClusterLayout, setup: Setup) -> float:
    """Seconds of a message between two stages."""
    if layout.pp == 1:
        return 0.0
    inside = layout.ranks <= setup.cluster.per_node
    share = setup.stack.inside if inside else setup.stack.between
    link = _reached(setup.cluster.link(layout.pp, layout.strides()["pp"]), share)
    return float(link.cost(_vector_bytes(model, layout) / (layout.tp if layout.sequence else 1)))


def _layer_messages(model: Transformer, layout: ClusterLayout, setup: Setup) -> dict[str, float]:
    """Seconds of the messages of all layers for one micro-batch, forward and backward, by axis."""
    tp, cp, ep, strides = layout.tp, layout.cp, layout.ep, layout.strides()
    vector = _vector_bytes(model, layout)
    passes = 3 if layout.recompute == "full" else 2  # each of two allreduces a layer
    gather = ring_seconds("allgather", tp, 1, vector, setup) * (1 - setup.stack.hidden_tensor)
    # With sequence parallelism the two saved inputs of a layer are gathered once more for the gradients of weights.
    tensor = 2 * (2 * passes + layout.sequence) * gather
    keys = HALF * layout.micro_batch * model.context * 2 * -(-model.kv_heads // tp) * model.head_width
    context = 3 * ring_seconds("allgather", cp, strides["cp"], keys, setup)
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
    """Seconds of gradients and gathered weights of replicas that no computation hides. `busy` in a micro-batch."""
    copies, gradients, coding = weight_copies(weights, layout), float(setup.recipe.gradients), 0.0
    if layout.compress != NO_COMPRESSION:
        gradients = (COMPRESSED_BITS[layout.compress] + 32 / BLOCK) / 8
        summed = sum(each.elements for each in copies if each.ranks > 1)
        coding = FEEDBACK_TRAFFIC * summed / setup.device.bandwidth
    sent = setup.recipe.weights if layout.zero else gradients
    scatter, gather = (
        sum(ring_seconds(collective, each.ranks, each.stride, each.elements * nbytes, setup) for each in copies)
        for collective, nbytes in (("reduce_scatter", gradients), ("allgather", sent))
    )
    forward, backward = (busy / 3, busy * 2 / 3) if setup.stack.hides_replicas else (0.0, 0.0)
    if layout.zero == 3:  # weights of every layer for both passes, beside the layer before
        return max(0.0, rounds * (2 * gather + scatter - forward - backward))
    scatters = rounds if layout.zero == 2 else 1  # gradients of every micro-batch, or of the last one
    return coding + scatters * max(0.0, scatter - backward) + max(0.0, gather - forward)


def _update_seconds(layout: ClusterLayout, setup: Setup, weights: WeightCount) -> float:
    """Seconds to read and write the states of one rank."""
    nbytes = state_bytes(weights, setup.recipe, layout)
    return 2 * nbytes["optimizer"] / setup.device.bandwidth
