"""Plan of a training as text and as a dict."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from collectives.units import format_time, short
from parallel.cli.reports.training_output import format_share
from parallel.planning.analytic.flops import CONVENTIONS, OperatorCost, forward_flops, operators, training_cost
from parallel.planning.analytic.layout import accumulation
from parallel.planning.analytic.memory import MEMORY_KINDS
from parallel.planning.analytic.search import PlanChoice, Rejection, SearchResult
from parallel.planning.analytic.step_time import Setup
from parallel.planning.analytic.transformer import Transformer

BYTES_PER_TOKEN = 5
"""Bytes of text of one token, about: 12T tokens are 60 TB."""


class PlanQuestion(NamedTuple):
    """Model, cluster, number of devices and sequences of a step that a plan is for."""

    model_name: str
    model: Transformer
    cluster_name: str
    setup: Setup
    devices: int
    sequences: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.model.context

    @property
    def step_flops(self) -> int:
        return CONVENTIONS["exact"](self.model, self.model.context) * self.tokens

    def mfu(self, seconds: float) -> float:
        """Model FLOPs utilisation of all devices at `seconds` seconds per step."""
        return self.step_flops / (seconds * self.devices * self.setup.device.peak_of(self.setup.precision))


def report(
    question: PlanQuestion, found: SearchResult, top: int, tokens: float | None = None, price: float | None = None
) -> str:
    """Whole plan as text: `top` layouts, memory of the best one, rejections. With `tokens` time and cost."""
    lines = [*_headline(question), *_flops_lines(question), "", *_choice_lines(question, found, top)]
    if found.choices:
        best = found.choices[0]
        lines += ["", *_batch_lines(question, best), "", *_memory_lines(question, best)]
        if tokens is not None:
            lines += ["", *_training_lines(question, best, tokens, price)]
    if found.rejected:
        lines += ["", *_rejection_lines(found)]
    return "\n".join(lines)


def _headline(question: PlanQuestion) -> Iterator[str]:
    model, setup = question.model, question.setup
    active = f", {short(model.active_parameters)} per token" if model.experts else ""
    source = f" ({model.source})" if model.source else ""
    yield f"{question.model_name}: {short(model.parameters)} parameters{active}, context {model.context}{source}"
    peak = f"{setup.device.peak_of(setup.precision) / 1e12:g} TFLOP/s in {setup.precision}, dense"
    nodes = -(-question.devices // setup.cluster.per_node)
    where = f"{question.devices} x {setup.cluster.device} on {nodes} node{'s' * (nodes > 1)}"
    yield f"{where}: {peak}, {setup.device.memory / 1e9:g} GB each"


def _flops_lines(question: PlanQuestion) -> Iterator[str]:
    forward = forward_flops(question.model)
    shares = ", ".join(f"{part} {format_share(count / forward.total())}" for part, count in forward.most_common())
    yield f"a step: {question.step_flops:.3g} FLOPs in matrix products, without causal mask: {shares}"
    simple = CONVENTIONS["6n"](question.model, question.model.context) * question.tokens
    yield f"        {simple:.3g} FLOPs as 6 x parameters x tokens"


def operator_lines(question: PlanQuestion) -> Iterator[str]:
    """Table of the matrix products of one sequence's forward pass: FLOPs, intensity, and least time on one device."""
    device, precision, costs = question.setup.device, question.setup.precision, [*operators(question.model)]
    total, ridge = sum(cost.flops for cost in costs), device.peak_of(precision) / device.bandwidth
    where = f"memory limits {question.setup.cluster.device}"
    yield f"products of one sequence's forward pass; below {ridge:.0f} FLOPs a byte {where}"
    yield f"{'':30}{'m x k x n':>24}{'times':>9}{'share':>8}{'FLOP/byte':>11}{'least':>11}  limit"
    for cost in costs:
        limit = "memory" if cost.intensity() < ridge else "products"
        shape, name = f"{cost.m} x {cost.k} x {cost.n}", f"{cost.part}: {cost.name}"
        least = format_time(cost.seconds(device, precision))
        share = format_share(cost.flops / total)
        yield f"{name:30}{shape:>24}{cost.repeats:>9}{share:>8}{cost.intensity():>11.4g}{least:>11}  {limit}"


def _batch_lines(question: PlanQuestion, choice: PlanChoice) -> Iterator[str]:
    layout, sequences = choice.layout, question.sequences
    each = f"{short(question.tokens)} tokens / {question.model.context} a sequence"
    yield f"global batch: {each} = {sequences} sequences: dp is at most that"
    rounds, workers = accumulation(layout, sequences), layout.workers
    yield f"  {sequences} sequences = dp {workers} x {rounds} micro-batches x {layout.micro_batch} sequences in each"
    yield f"  each of {workers} replicas is {layout.ranks // workers} devices; the gradient is of all sequences"


def _choice_lines(question: PlanQuestion, found: SearchResult, top: int) -> Iterator[str]:
    count = len(found.choices) + len(found.rejected)
    yield f"{count} layouts of {question.devices} devices, of which {len(found.choices)} fit"
    if not found.choices:
        return
    fields = found.choices[0].time._fields
    yield f"{'GB':>6}{'step':>9}{'tokens/s':>10}{'MFU':>6}  layout; parts of the step, by estimate"
    for choice in found.choices[:top]:
        seconds = choice.time.total
        parts = {name: share for name in fields if (share := getattr(choice.time, name) / seconds) >= 0.005}
        shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(parts.items(), key=lambda item: -item[1]))
        speed = f"{format_time(seconds):>9}{short(question.tokens / seconds):>10}{question.mfu(seconds):>6.0%}"
        yield f"{choice.nbytes / 1e9:>6.1f}{speed}  {choice.layout}"
        yield f"{'':33}{shares}"


def _memory_lines(question: PlanQuestion, choice: PlanChoice) -> Iterator[str]:
    yield f"memory of the first layout, GB a device of {question.setup.device.memory / 1e9:g}:"
    yield f"{'stage':7}" + "".join(f"{kind:>13}" for kind in (*MEMORY_KINDS, "total"))
    for stage, memory in enumerate(choice.memory):
        values = [*(memory[kind] for kind in MEMORY_KINDS), memory.total()]
        yield f"{stage:<7}" + "".join(f"{value / 1e9:13.2f}" for value in values)


def _training_lines(question: PlanQuestion, choice: PlanChoice, tokens: float, price: float | None) -> Iterator[str]:
    flops = CONVENTIONS["exact"](question.model, question.model.context) * tokens
    peak, mfu = question.setup.device.peak_of(question.setup.precision), question.mfu(choice.time.total)
    cost = training_cost(flops, peak, question.devices, min(1.0, mfu), price)
    paid = "" if cost.price is None else f", at {price:g} an hour {short(cost.price)}"
    yield f"{short(tokens)} tokens ({short(tokens * BYTES_PER_TOKEN)}B of text): {flops:.3g} FLOPs"
    yield f"  {format_time(cost.seconds)}, {short(cost.device_hours)} device-hours{paid}"
    alone = training_cost(flops, peak, 1, 1.0)
    yield f"  on one device at its peak: {format_time(alone.seconds)}"


def _rejection_lines(found: SearchResult) -> Iterator[str]:
    """Number of rejections of each kind, and the first one."""
    kinds = Counter(each.kind for each in found.rejected)
    for kind, count in kinds.most_common():
        first = next(each for each in found.rejected if each.kind == kind)
        yield f"{count} rejected: {kind}, as {first.layout}: {first.reason}"


def as_dict(question: PlanQuestion, found: SearchResult, top: int) -> dict[str, Any]:
    """Plan for programs: bytes, seconds and FLOPs. All rejections with their reasons."""
    return {
        "model": question.model_name,
        "parameters": question.model.parameters,
        "active_parameters": question.model.active_parameters,
        "cluster": question.cluster_name,
        "devices": question.devices,
        "sequences": question.sequences,
        "tokens": question.tokens,
        "step_flops": question.step_flops,
        "flops_convention": "exact",
        "fitting": len(found.choices),
        "operators": [_operator_dict(question, each) for each in operators(question.model)],
        "choices": [_choice_dict(question, each) for each in found.choices[:top]],
        "slower": [_slower_dict(each, found.choices[0]) for each in found.choices[top:]],
        "rejected": [_rejection_dict(each) for each in found.rejected],
    }


def _operator_dict(question: PlanQuestion, cost: OperatorCost) -> dict[str, Any]:
    """Product of one sequence's forward pass, with its least seconds on one device (roofline)."""
    least = cost.seconds(question.setup.device, question.setup.precision)
    return cost._asdict() | {"flops": cost.flops, "intensity": cost.intensity(), "least_seconds": least}


def _choice_dict(question: PlanQuestion, choice: PlanChoice) -> dict[str, Any]:
    seconds = choice.time.total
    return {
        "layout": choice.layout.as_dict(),
        "accumulation": accumulation(choice.layout, question.sequences),
        "peak_bytes": choice.nbytes,
        "stages": [dict(memory) for memory in choice.memory],
        "seconds": seconds,
        "parts": choice.time._asdict(),
        "tokens_per_s": question.tokens / seconds,
        "mfu": question.mfu(seconds),
    }


def _slower_dict(choice: PlanChoice, best: PlanChoice) -> dict[str, Any]:
    """Layout that fits and is not among the first: its seconds, and by what share it is slower than the best one."""
    seconds = choice.time.total
    return {"layout": choice.layout.as_dict(), "seconds": seconds, "slower": seconds / best.time.total - 1}


def _rejection_dict(rejection: Rejection) -> dict[str, Any]:
    return {"layout": rejection.layout.as_dict(), "kind": rejection.kind, "reason": rejection.reason}
