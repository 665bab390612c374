"""Transformers with Mixture-of-Depths blocks: text, blocks, FLOPs, refusals."""

from fnmatch import fnmatchcase

import numpy as np
import pytest

from parallel.nn.depths import DepthLayers, MixtureOfDepths
from parallel.nn.models import build
from parallel.nn.operator import ArraySpec, Operator, name_all

X = ArraySpec((2, 16), np.dtype(np.int64))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected text such as 0.125"),
        ("half", "expected text such as 0.125"),
        ("0.5,each=1", "expected text such as 0.125"),
        ("0.5,every=", "expected text such as 0.125"),
        ("0.5,", "expected text such as 0.125"),
        ("0", "expected a fraction above 0 up to 1, found 0"),
        ("1.5", "expected a fraction above 0 up to 1, found 1.5"),
        ("0.5,every=0", "every: expected an integer from 1 on, found 0"),
    ],
)
def test_malformed_text(text, message):
    with pytest.raises(ValueError, match=f"^depths: {message}"):
        DepthLayers.parse(text)


@pytest.mark.parametrize("model", ["mlp:tiny", "convnet:tiny"])
def test_only_models_of_tokens_take_them(model):
    with pytest.raises(ValueError, match=f"depths: expected a model of tokens, found {model}"):
        build(model, (1, 8, 8), 10, depths="0.5")


def test_too_few_blocks():
    with pytest.raises(ValueError, match="depths: expected a model of at least 3 blocks, found 2"):
        build("gpt:tiny", (16,), 32, depths="0.5,every=3")


@pytest.mark.parametrize("model", ["gpt:mini", "gpt-moe:mini"])
@pytest.mark.parametrize("text, blocks", [("0.5", [2, 4]), ("0.5,every=1", [1, 2, 3, 4]), ("0.5,every=3", [3])])
def test_blocks(model, text, blocks):
    found = build(model, (16,), 32, depths=text)
    assert [number for number, unit in enumerate(found.items) if isinstance(unit, MixtureOfDepths)] == blocks


@pytest.mark.parametrize("experts", ["4", "4,every=2", "4,every=3"])
@pytest.mark.parametrize("text", ["0.5", "0.5,every=1", "0.5,every=3"])
def test_every_pattern_of_cuts_names_operators(text, experts):
    found, dense = (build("gpt-moe:mini", (16,), 32, depths=some, experts=experts) for some in (text, None))
    styles = styles_of(found)
    assert {name.replace(".block", ""): style for name, style in styles.items()} == styles_of(dense)
    assert all(any(fnmatchcase(name, pattern) for name in styles) for pattern in found.cuts)


def styles_of(model):
    """Styles of the operators of a model in its table, by name."""
    name_all(model)
    names = [one.name for _, one in model.walk() if isinstance(one, Operator)]
    return {name: style for name in names for pattern, style in model.cuts.items() if fnmatchcase(name, pattern)}


def test_flops():
    """Half of the tokens: half of the FLOPs of the linear maps, a quarter of those of the attention's products."""
    dense, half, none = (
        build("gpt:mini", (16,), 32, depths=text).outline(X).flops for text in (None, "0.5,every=1", "1e-9,every=1")
    )
    tokens, width, layers = 32, 128, 4
    products = layers * 2 * 2 * tokens * 16 * width
    linear = layers * tokens * 2 * 12 * width**2
    head = 2 * tokens * 32 * width
    choice = layers * tokens * 4 * width
    assert dense == head + linear + products
    assert half == head + linear // 2 + products // 4 + choice
    assert none == head + linear // 16 + products // 256 + choice
