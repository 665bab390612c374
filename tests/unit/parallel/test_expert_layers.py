"""Mixtures of experts described by text, and the models that have them."""

import numpy as np
import pytest

from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.models import build, transformer
from parallel.nn.operator import ArraySpec
from parallel.nn.router import RouterSettings


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", ExpertLayers(8, RouterSettings(balance_loss=0.01))),
        ("4", ExpertLayers(4, RouterSettings(balance_loss=0.01))),
        (
            "k=1, noise, 16 ,z=0.001,unnormalized",
            ExpertLayers(16, RouterSettings(1, normalize=False, noise=True, balance_loss=0.01, z_loss=0.001)),
        ),
        ("8,bias=0.1,scores=sigmoid,shared", ExpertLayers(8, RouterSettings(scores="sigmoid", bias_rate=0.1), 1, True)),
        ("balance=0,every=2", ExpertLayers(8, RouterSettings(), 2)),
        (
            "8,k=4,groups=4,chosen-groups=2,scale=2.5,capacity=1.5,priority=score,jitter=0.1",
            ExpertLayers(8, RouterSettings(4, "softmax", True, 2.5, 4, 2, 1.5, "score", jitter=0.1, balance_loss=0.01)),
        ),
    ],
)
def test_text(text, expected):
    assert ExpertLayers.parse(text) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("8,9", "expected their number and some of k, scores, .*; found '9'"),
        ("8,kk=2", "found 'kk=2'"),
        ("8,k=two", "expected another value than in 'k=two'"),
        ("8,noise=1", "expected another value than in 'noise=1'"),
        ("2,k=3", "choices to be at most 2 of 2 experts, found 3"),
        ("8,k=1", "choices to be at least 2, or weights unnormalized"),
        ("8,priority=score", "priority to be position without a capacity, found score"),
        ("8,capacity=inf", "capacity to be a finite number above 0, found inf"),
        ("8,scale=0", "scale to be a number above 0"),
        ("8,k=4,groups=2,chosen-groups=2", "chosen_groups to be 1 to 1 of 2, found 2"),
        ("8,every=0", "every: expected an integer from 1 on, found 0"),
        ("0", "experts: expected an integer from 1 on, found 0"),
    ],
)
def test_malformed_text(text, message):
    with pytest.raises(ValueError, match=message):
        ExpertLayers.parse(text)


def test_only_models_with_experts_take_them():
    with pytest.raises(ValueError, match="experts: expected the model gpt-moe, found gpt:tiny"):
        build("gpt:tiny", (16,), 32, experts="8")


@pytest.mark.parametrize("every, blocks", [(1, [1, 2, 3]), (2, [2]), (3, [3])])
def test_blocks_with_a_mixture(every, blocks):
    model = transformer(32, 16, 3, 2, 8, experts=ExpertLayers(4, every=every))
    found = [
        number
        for number, unit in enumerate(model.items)
        if any(isinstance(value, MixtureOfExperts) for _, value in unit.walk())
    ]
    assert found == blocks


def test_too_few_blocks_for_a_mixture():
    with pytest.raises(ValueError, match="experts: expected a model of at least 3 blocks, found 2"):
        build("gpt-moe:tiny", (16,), 32, experts="8,k=2,every=3")


def test_a_token_costs_what_it_costs_in_a_dense_model():
    """But for the router."""
    x = ArraySpec((2, 16), np.dtype(np.int64))
    dense = build("gpt:tiny", (16,), 64).outline(x).flops
    router = 2 * 2 * (2 * 16) * 64 * 8  # layers, tokens, width, experts
    assert build("gpt-moe:tiny", (16,), 64, experts="8,k=2").outline(x).flops == dense + router
    assert build("gpt-moe:tiny", (16,), 64, experts="8,k=4").outline(x).flops == dense + router
