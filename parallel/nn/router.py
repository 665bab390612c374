"""Routers: choice of experts for each token of a mixture of experts, and the weights of their results.

Scores, choices and gradients are computed in float32 (float64 for float64 inputs). Choices and loss terms are made per
sequence, so that they do not depend on micro-batches, accumulation or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parallel.nn import kernels
from parallel.nn.array_checks import elements, expect, expect_last, whole_number
from parallel.nn.buffer import SelectionBias
from parallel.nn.expert_choice import best_in_groups, capacity_of, within_capacity
from parallel.nn.operator import ArraySpec, GradientSink, Operator, OperatorOutline, Parameter, PassMode, normal
from quant.types import Array

TINY = 1e-20
"""Added to the sum by which weights are divided."""


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a router; ValueError for values without meaning.

    Attributes
    ----------
    choices : int
        Experts per token, k.
    scores : str
        ``"softmax"`` over the experts, or ``"sigmoid"`` of each.
    normalize : bool
        Divide the weights of a token's experts by their sum. With softmax, the same as a softmax of the chosen logits
        only. Not of one choice: its weight would always be 1, and the router without a gradient.
    scale : float
        Factor of all weights, above 0.
    groups, chosen_groups : int
        Experts form `groups` groups, and those of a token come from `chosen_groups` of them, if several not from all.
    capacity : float or None
        Most tokens of a sequence per expert, as a multiple of the mean k tokens / experts; None: no limit. A token
        that an expert does not take gets nothing from it.
    priority : str
        Tokens that an expert takes at its limit: the first (``"position"``), or those with the highest scores
        (``"score"``, with a capacity only).
    noise : bool
        In training, add normal noise of a learned deviation to the logits (Shazeer et al., arXiv:1701.06538, eq. 4).
    jitter : float
        In training, multiply inputs by uniform numbers from 1 - jitter to 1 + jitter (Fedus et al., "Switch
        Transformers", arXiv:2101.03961, section 2.4).
    balance_loss : float
        Factor of the loss E / (k T) sum_e n_e sum_t p_te of each sequence, with T tokens, n_e choices of expert e and
        normalised scores p (Switch Transformers, eq. 4, times T: engines divide by the number of targets).
    bias_rate : float
        Step of the biases that balance the choices without a loss (`SelectionBias`); 0: none.
    z_loss : float
        Factor of the loss sum_t logsumexp(logits_t)^2 (Zoph et al., "ST-MoE", arXiv:2202.08906, eq. 5).
    """

    choices: int = 2
    scores: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    capacity: float | None = None
    priority: str = "position"
    noise: bool = False
    jitter: float = 0.0
    balance_loss: float = 0.0
    bias_rate: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("choices", "groups", "chosen_groups"):
            whole_number(f"router: {name}", getattr(self, name), 1)
        weighted = "at least 2, or weights unnormalized (divided by itself, one is always 1)"
        _expect(self.choices > 1 or not self.normalize, "choices", weighted, self.choices)
        _expect(self.scores in ("softmax", "sigmoid"), "scores", "softmax or sigmoid", self.scores)
        _expect(self.priority in ("position", "score"), "priority", "position or score", self.priority)
        most = self.groups - (self.groups > 1)
        _expect(1 <= self.chosen_groups <= most, "chosen_groups", f"1 to {most} of {self.groups}", self.chosen_groups)
        even = self.choices % self.chosen_groups == 0
        _expect(even, "choices", f"a multiple of the {self.chosen_groups} chosen groups", self.choices)
        finite = self.capacity is None or 0 < self.capacity < math.inf
        _expect(finite, "capacity", "a finite number above 0", self.capacity)
        limited = self.priority == "position" or self.capacity is not None
        _expect(limited, "priority", "position without a capacity", self.priority)
        _expect(0 <= self.jitter < 1, "jitter", "0 to below 1", self.jitter)
        _expect(0 < self.scale < math.inf, "scale", "a number above 0", self.scale)
        for name in ("balance_loss", "bias_rate", "z_loss"):
            value = getattr(self, name)
            _expect(math.isfinite(value) and value >= 0, name, "a number from 0", value)

    def expect_experts(self, experts: int) -> None:
        """Raise ValueError unless so many experts can be chosen from."""
        _expect(experts % self.groups == 0, "groups", f"a divisor of the {experts} experts", self.groups)
        most = experts // self.groups * self.chosen_groups
        _expect(self.choices <= most, "choices", f"at most {most} of {experts} experts", self.choices)


def _expect(holds: bool, name: str, expected: str, found: Any) -> None:
    if not holds:
        raise ValueError(f"router: expected {name} to be {expected}, found {found}")


def _sequences(x: Any) -> tuple[int, int]:
    """Number of sequences, and of tokens in each."""
    return (1, x.shape[0]) if len(x.shape) == 2 else (x.shape[0], math.prod(x.shape[1:-1]))


class RouterValues(NamedTuple):
    """Saved values of a router's forward pass: arrays of shape (sequences, tokens, ...)."""

    x: Array
    jitter: Array | None
    noise: Array | None
    logits: Array
    scores: Array
    chosen: Array
    kept: Array
    counts: Array
    scale: float
    """Loss scale. `counts`, of shape (sequences, 1, experts), are choices in whole sequences; None: no balance loss."""


class Router(Operator):
    """Linear router: maps (batch, ..., width) to weights (batch, ..., experts), 0 for experts that are not chosen.

    The first axis has the sequences; a matrix (tokens, width) is one sequence. In training, adds its loss terms to
    `PassMode.terms`, and their gradients to its own.

    Parameters
    ----------
    width, experts : int
    settings : RouterSettings
    """

    mixes: tuple[int, ...] | None = (1, -1)
    writes_records = True
    fixed: Sequence[str] = ("width", "experts")

    def __init__(self, width: int, experts: int, settings: RouterSettings | None = None):
        self.width, self.experts = whole_number("width", width), whole_number("experts", experts, 1)
        self.settings = settings or RouterSettings()
        self.settings.expect_experts(experts)
        self.weight = Parameter((width, experts), normal(1 / math.sqrt(max(width, 1))))
        self.noise = Parameter((width, experts), normal(0.0)) if self.settings.noise else None
        self.bias = SelectionBias(experts, self.settings.bias_rate) if self.settings.bias_rate else None

    @property
    def continues(self) -> bool:
        """True without a capacity, for which the tokens of a whole sequence compete."""
        return self.settings.capacity is None

    def __setattr__(self, name: str, value: Any) -> None:
        """As of any operator; ValueError for settings of a router with other parameters or biases."""
        if name == "settings" and "bias" in vars(self):
            value.expect_experts(self.experts)
            _expect(value.noise == (self.noise is not None), "noise", "as at first", value.noise)
            _expect(bool(value.bias_rate) == (self.bias is not None), "bias_rate", "0, or not, as at first", value)
        super().__setattr__(name, value)
        if name == "settings" and (bias := vars(self).get("bias")) is not None:
            bias.rate = value.bias_rate

    def forward(self, x: Array, run: PassMode) -> tuple[Array, Any]:
        expect_last(self, x, self.width)
        tokens, use = kernels.widen(x).reshape(*_sequences(x), self.width), run.use(self.name)
        jitter = self._jitter(x, run, use)
        tokens = tokens if jitter is None else tokens * jitter
        logits = tokens @ kernels.widen(self.weight.data)
        noise = self._noise(x, logits, run, use)
        if self.noise is not None:
            logits += noise * kernels.softplus(tokens @ kernels.widen(self.noise.data))
        scores = kernels.softmax(logits) if self.settings.scores == "softmax" else kernels.sigmoid(logits)
        s, biased = self.settings, scores
        if self.bias is not None:  # for the choice alone: weights are of the unbiased scores
            biased = scores + kernels.array_namespace(x).asarray(self.bias.values)
        chosen = best_in_groups(biased, s.choices, s.groups, s.chosen_groups)
        kept = self._kept(chosen, scores)
        counts = self._counts(chosen) if run.training and s.balance_loss else None
        values = RouterValues(x, jitter, noise, logits, scores, chosen, kept, counts, run.scale)
        if run.training:
            self._note(values, run, use)
        weights = kernels.array_namespace(x).where(kept, self._weights(scores, chosen), 0)
        return weights.reshape(*x.shape[:-1], self.experts), values

    def _kept(self, chosen: Array, scores: Array) -> Array:
        """Choices that experts have capacity for."""
        s = self.settings
        if s.capacity is None:
            return chosen
        return self._within(capacity_of(s.capacity, self._length(chosen), s.choices, self.experts), chosen, scores)

    def _within(self, capacity: int, chosen: Array, scores: Array) -> Array:
        """Choices among the `capacity` that an expert takes of a sequence."""
        return within_capacity(chosen, scores, capacity, self.settings.priority)

    def _length(self, tokens: Array) -> int:
        """Number of tokens of a whole sequence."""
        return int(tokens.shape[1])

    def _weights(self, scores: Array, chosen: Array) -> Array:
        """Weights of all experts, of which those of the chosen ones are meant."""
        if not self.settings.normalize:
            return self.settings.scale * scores
        return self.settings.scale * scores / self._chosen_sum(scores, chosen)

    @staticmethod
    def _chosen_sum(scores: Array, chosen: Array) -> Array:
        return (scores * chosen).sum(axis=-1, keepdims=True) + TINY

    def _jitter(self, x: Array, run: PassMode, use: str) -> Array | None:
        """Factors of the inputs, of shape (sequences, tokens, width); None: 1."""
        if not (self.settings.jitter and run.training):
            return None
        factors = 1 + self.settings.jitter * (2 * self._uniform(x, self.width, run, f"{use} jitter") - 1)
        return self._of_tokens(factors, x, self.width)

    def _noise(self, x: Array, logits: Array, run: PassMode, use: str) -> Array | None:
        """Normal random numbers like the logits, in evaluation 0; None if the router has no noise."""
        if self.noise is None:
            return None
        if not run.training:
            return kernels.array_namespace(x).zeros_like(logits)
        normal = kernels.normal_from(self._uniform(x, 2 * self.experts, run, f"{use} noise"))
        return self._of_tokens(normal, x, self.experts)

    def _uniform(self, x: Array, each: int, run: PassMode, purpose: str) -> Array:
        """Uniform random numbers of every sample, `each` for each token of it."""
        expected = f"a batch of {len(run.samples)}, as many as the run has numbers of samples"
        expect(len(x) == len(run.samples), self, expected, x)
        samples = kernels.array_namespace(x).asarray(run.samples)
        key = kernels.key_of(run.seed, run.step, purpose)
        return kernels.uniform(samples, self._tokens(x) * each, key)

    def _tokens(self, x: Array) -> int:
        """Number of tokens of a whole sample."""
        return math.prod(x.shape[1:-1])

    def _of_tokens(self, numbers: Array, x: Array, each: int) -> Array:
        """Numbers of the tokens of x, wide, of shape (sequences, tokens, each), from those of whole samples."""
        return numbers.astype(kernels.wide(x.dtype)).reshape(*_sequences(x), each)

    # ------------------------------------------------------------------------------------------ loss terms

    def _note(self, values: RouterValues, run: PassMode, use: str) -> None:
        """Add the loss terms of every sequence, and the choices of every expert, to the records of the pass."""
        s = self.settings
        run.records[use, "chosen"] = values.chosen.sum(axis=(0, 1))
        run.records[use, "dropped"] = (values.chosen > values.kept).sum(axis=(0, 1))
        if s.balance_loss:
            shares = (self._balance_slope(values) * self._normalized(values.scores)).sum(axis=-1)
            run.terms[use, "balance"] = shares.sum(axis=-1)
        if s.z_loss:
            run.terms[use, "z"] = s.z_loss * (kernels.log_sum_exp(values.logits)[..., 0] ** 2).sum(axis=-1)

    def _counts(self, chosen: Array) -> Array:
        """Choices of every expert in each whole sequence: (sequences, 1, experts)."""
        return chosen.sum(axis=1, keepdims=True)

    def _balance_slope(self, values: RouterValues) -> Array:
        """Derivative of the balance loss by the normalised scores of a token: (sequences, 1, experts)."""
        tokens = self.settings.choices * max(self._length(values.chosen), 1)
        return self.settings.balance_loss * self.experts / tokens * values.counts

    def _normalized(self, scores: Array) -> Array:
        """Scores whose sum over the experts is 1."""
        return scores if self.settings.scores == "softmax" else scores / (scores.sum(axis=-1, keepdims=True) + TINY)

    # ------------------------------------------------------------------------------------------ backward

    def backward(self, dy: Array, saved: Any, grads: GradientSink) -> Array:
        values: RouterValues = saved
        dlogits = self._logit_gradient(kernels.widen(dy).reshape(values.scores.shape), values)
        tokens = kernels.widen(values.x).reshape(*values.scores.shape[:2], self.width)
        tokens = tokens if values.jitter is None else tokens * values.jitter
        rows, upper = tokens.reshape(-1, self.width), dlogits.reshape(-1, self.experts)
        dx = dlogits @ kernels.widen(self.weight.data).T
        grads(self.weight, lambda out: kernels.matmul(rows.T, upper, out=out))
        if self.noise is not None:
            raw = tokens @ kernels.widen(self.noise.data)
            draw = dlogits * values.noise * kernels.sigmoid(raw)
            dx += draw @ kernels.widen(self.noise.data).T
            noise_upper = draw.reshape(-1, self.experts)
            grads(self.noise, lambda out: kernels.matmul(rows.T, noise_upper, out=out))
        dx = dx if values.jitter is None else dx * values.jitter
        return kernels.narrow(dx, values.x.dtype).reshape(values.x.shape)

    def _logit_gradient(self, dweights: Array, values: RouterValues) -> Array:
        """Gradient by the logits, of the weights and of the loss terms."""
        s, scores = self.settings, values.scores
        dscores = s.scale * dweights * values.kept
        if s.normalize:
            total = self._chosen_sum(scores, values.chosen)
            common = (dscores * scores).sum(axis=-1, keepdims=True) / total
            dscores = (dscores - common) * values.chosen / total
        if s.balance_loss:
            dscores = dscores + values.scale * self._balance_gradient(values)
        if s.scores == "softmax":
            dlogits = kernels.softmax_backward(dscores, scores, 1.0)
        else:
            dlogits = dscores * scores * (1 - scores)
        if s.z_loss:
            factor = 2 * s.z_loss * values.scale
            dlogits = dlogits + factor * kernels.log_sum_exp(values.logits) * kernels.softmax(values.logits)
        return dlogits

    def _balance_gradient(self, values: RouterValues) -> Array:
        """Gradient of the balance loss by the scores."""
        slope = self._balance_slope(values).astype(values.scores.dtype)
        if self.settings.scores == "softmax":
            return slope
        share, total = self._normalized(values.scores), values.scores.sum(axis=-1, keepdims=True) + TINY
        return (slope - (slope * share).sum(axis=-1, keepdims=True)) / total

    def outline(self, x: ArraySpec) -> OperatorOutline:
        expect_last(self, x, self.width)
        wide, shape = kernels.wide(x.dtype), (*x.shape[:-1], self.experts)
        logits, scores = ArraySpec(shape, wide), ArraySpec(shape, wide)
        chosen = ArraySpec(shape, kernels.BOOL)
        kept = chosen if self.settings.capacity is None else ArraySpec(shape, kernels.BOOL)
        sequences = ArraySpec((_sequences(x)[0], 1, self.experts), np.dtype(np.int64))
        counts = sequences if self.settings.balance_loss else None
        jitter = ArraySpec(x.shape, wide) if self.settings.jitter else None
        noise = ArraySpec(shape, wide) if self.settings.noise else None
        flops = 2 * elements(x) * self.experts * (2 if self.settings.noise else 1)
        work = elements(x) * wide.itemsize + 8 * elements(logits) * 8
        saved = x, jitter, noise, logits, scores, chosen, kept, counts
        return OperatorOutline(ArraySpec(shape, wide), saved, flops, work)
