"""Models to cut, small and of uneven sizes, with one micro-batch for each; a pass of one, and its gradients."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from parallel.nn.flat_params import FlatParams
from parallel.nn.gated import LlamaOptions, gated_transformer
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.models import mlp, transformer
from parallel.nn.operator import ArraySpec, PassMode, nbytes_of

TOKENS, CONTEXT, HEADS = 37, 7, 9


class ModelCase(NamedTuple):
    """A model, its loss, and functions of a random generator for inputs and targets."""

    make: Callable
    loss: Callable
    x: Callable
    y: Callable


def tokens(random):
    return random.integers(0, TOKENS, (3, CONTEXT))


def few_tokens(random):
    return random.integers(0, 3, (3, CONTEXT))


def ignored(random):
    """Targets of which some do not count."""
    return random.integers(-5, TOKENS, (3, CONTEXT))


def classes(random):
    return random.integers(0, 5, 6)


CASES = {
    "gpt": ModelCase(lambda: transformer(TOKENS, CONTEXT, 1, HEADS, 27), SoftmaxCrossEntropy, tokens, ignored),
    "gpt dropout recompute": ModelCase(
        lambda: transformer(TOKENS, CONTEXT, 2, HEADS, 18, dropout=0.2, recompute=True),
        SoftmaxCrossEntropy,
        tokens,
        tokens,
    ),
    "gpt without blocks": ModelCase(lambda: transformer(TOKENS, CONTEXT, 0, 1, 3), SoftmaxCrossEntropy, tokens, tokens),
    "gpt of two heads": ModelCase(
        lambda: transformer(3, CONTEXT, 1, 2, 4), SoftmaxCrossEntropy, few_tokens, few_tokens
    ),
    "gated": ModelCase(
        lambda: gated_transformer(TOKENS, CONTEXT, 2, 6, 18, kv_heads=3, dropout=0.2, recompute="selective,none"),
        SoftmaxCrossEntropy,
        tokens,
        ignored,
    ),
    "gated, one kv head": ModelCase(
        lambda: gated_transformer(TOKENS, CONTEXT, 1, 8, 16, kv_heads=1), SoftmaxCrossEntropy, tokens, ignored
    ),
    "gated, two kv heads": ModelCase(
        lambda: gated_transformer(TOKENS, CONTEXT, 1, 8, 16, kv_heads=2), SoftmaxCrossEntropy, tokens, tokens
    ),
    "llama": ModelCase(
        lambda: gated_transformer(
            TOKENS, CONTEXT, 2, 6, 24, kv_heads=3, dropout=0.2, recompute="selective,none", llama=LlamaOptions(50.0)
        ),
        SoftmaxCrossEntropy,
        tokens,
        ignored,
    ),
    "mlp": ModelCase(lambda: mlp([12, 11, 5]), SoftmaxCrossEntropy, lambda r: r.normal(size=(6, 3, 4)), classes),
    "mlp dropout": ModelCase(
        lambda: mlp([12, 11, 13, 10, 5], dropout=0.3),
        MSE,
        lambda random: random.normal(size=(6, 12)),
        lambda random: random.normal(size=(6, 5)),
    ),
}


class PassResult(NamedTuple):
    """Loss, gradients by label of the parameter, scores."""

    loss: float
    gradients: dict
    scores: np.ndarray


def one_pass(case, model, loss, dtype="f8"):
    """Forward and backward of the case's micro-batch, with initial values of seed 0; checks the outlines' sizes."""
    random = np.random.default_rng(0)
    x, targets = case.x(random), case.y(random)
    x = x.astype(dtype) if x.dtype.kind == "f" else x
    flat = FlatParams(model)
    vector = np.zeros(flat.length, dtype)
    flat.initialise(vector, 0)
    flat.bind(vector)
    gradients = {}

    def sink(parameter, compute):
        out = np.full(parameter.shape, np.nan, dtype)
        compute(out)
        key = parameter.label
        gradients[key] = gradients[key] + out if key in gradients else out

    scores, saved = model.forward(x, PassMode(samples=np.arange(len(x))))
    outline = model.outline(ArraySpec(x.shape, x.dtype))
    assert (scores.shape, scores.dtype) == tuple(outline.y)
    assert nbytes_of(saved) == nbytes_of(outline.saved)
    total, saved_loss = loss.forward(scores, targets)
    assert model.backward(loss.backward(0.5, saved_loss), saved, sink) is None
    return PassResult(total, gradients, scores)


def expect_close(found, model, whole, tolerance):
    """Compare gradients of a cut model with those of the whole, relative to the largest element of each tensor."""
    assert found.loss == pytest.approx(whole.loss, rel=tolerance)
    names = set()
    for parameter in model.parameters():
        expected = whole.gradients[parameter.name]
        expected = expected if parameter.cut is None else parameter.cut.take(expected)
        error = np.abs(found.gradients[parameter.label] - expected).max(initial=0)
        assert error <= tolerance * max(1.0, np.abs(expected).max(initial=0)), (parameter.name, error)
        names.add(parameter.name)
    assert names == set(whole.gradients)
