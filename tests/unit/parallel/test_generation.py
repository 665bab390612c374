"""Models outside of an engine: results, keys and values of earlier positions, and generated tokens."""

import numpy as np
import pytest

from parallel import nn
from parallel.nn.depths import DepthLayers
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.flat_params import FlatParams
from parallel.nn.generation import next_token
from parallel.nn.operator import ParameterNotGathered, PassMode
from parallel.nn.pass_mode import Past
from parallel.nn.rewrite import operators_in
from parallel.nn.router import RouterSettings

TOKENS, CONTEXT, SHAPE = 13, 90, (2, 4, 8)
MIXTURES = ExpertLayers(4, RouterSettings(choices=2))
LIMITED = ExpertLayers(4, RouterSettings(choices=2, capacity=1.0))


def gpt(**options):
    return nn.transformer(TOKENS, CONTEXT, *SHAPE, **options)


CONTINUING = {
    "gpt": gpt,
    "dropout": lambda: gpt(dropout=0.5),
    "selective": lambda: gpt(recompute="selective"),
    "full": lambda: gpt(recompute="full"),
    "gated": lambda: nn.gated_transformer(TOKENS, CONTEXT, *SHAPE),
    "grouped heads": lambda: nn.gated_transformer(TOKENS, CONTEXT, *SHAPE, kv_heads=2),
    "rotary": lambda: nn.gated_transformer(TOKENS, CONTEXT, *SHAPE, kv_heads=2, llama=nn.LlamaOptions(tied=True)),
    "mixtures": lambda: gpt(experts=MIXTURES),
}
WHOLE = {
    "capacity": lambda: gpt(experts=LIMITED),
    "depths": lambda: DepthLayers(0.5, every=1).of(gpt(), 8),
}


def valued(model, dtype=np.float64):
    """The model with weights that are large enough for different scores."""
    flat = FlatParams(model)
    vector = np.zeros(flat.length, dtype)
    flat.initialise(vector, 1)
    vector *= 8
    flat.bind(vector)
    return model


@pytest.mark.parametrize("name", CONTINUING)
@pytest.mark.parametrize("cuts", [(1,) * CONTEXT, (70, 1, 19), (3, 66, 21)], ids=str)
def test_passes_that_continue_are_the_whole_pass(name, cuts):
    """Also over blocks of 64 queries."""
    model, x = valued(CONTINUING[name]()), np.random.default_rng(2).integers(0, TOKENS, (3, CONTEXT))
    past, found = Past(), []
    for count in cuts:
        run = PassMode(training=False, samples=np.arange(3), past=past)
        found.append(model.forward(x[:, past.length : past.length + count], run)[0])
        past.end_pass(count)
    np.testing.assert_allclose(np.concatenate(found, axis=1), model(x), rtol=0, atol=1e-12 * np.abs(model(x)).max())
    with pytest.raises(ValueError, match=f"at most {CONTEXT} positions, {CONTEXT} before"):
        model.forward(x[:, :1], PassMode(training=False, samples=np.arange(3), past=past))


@pytest.mark.parametrize("name", [*CONTINUING, *WHOLE])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 4, "seed": 3}, {"temperature": 0.5}], ids=str)
def test_generated_tokens_do_not_depend_on_the_cache(name, options):
    """Beyond the context too, where the model reads the last half of it again."""
    model = valued((CONTINUING | WHOLE)[name]())
    assert all(one.continues for one in operators_in(model)) == (name in CONTINUING)
    made = list(nn.generate(model, [1, 2, 3], CONTEXT + 60, **options))
    assert made == list(nn.generate(model, [1, 2, 3], CONTEXT + 60, cached=False, **options))
    assert len(made) == CONTEXT + 60 and len(set(made)) > 2


def test_greedy_tokens_are_the_best_ones():
    model, known = valued(gpt()), [5, 7]
    for token in nn.generate(model, [5, 7], 80, temperature=0):
        assert token == model(np.array([known]))[0, -1].argmax()
        known.append(token)


def test_a_long_prompt_is_read_from_its_end():
    model, prompt = valued(gpt()), list(np.random.default_rng(0).integers(0, TOKENS, 200))
    assert list(nn.generate(model, prompt, 5)) == list(nn.generate(model, prompt[-CONTEXT // 2 :], 5))


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3), (1.0, 1), (0.0, None)])
def test_draws_have_their_probabilities(temperature, top_k):
    scores, draws = np.array([0.5, 2.0, -1.0, 1.5, 0.0], np.float32), 20_000
    random = np.random.default_rng(0)
    counts = np.bincount([next_token(scores, temperature, top_k, random) for _ in range(draws)], minlength=5)
    if temperature == 0 or top_k == 1:
        assert counts[1] == draws
        return
    best = np.argsort(-scores)[:top_k]
    expected = np.zeros(5)
    expected[best] = np.exp(scores[best] / temperature)
    expected /= expected.sum()
    assert (np.abs(counts / draws - expected) <= 4 * np.sqrt(expected * (1 - expected) / draws)).all()


def test_a_seed_repeats_the_tokens():
    model = valued(gpt())
    first, again, other = (list(nn.generate(model, [1], 40, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (([], 3), {}, "prompt: expected at least one token"),
        (([1], 3), {"temperature": -1}, "temperature: expected a number from 0 on, found -1"),
        (([1], 3), {"top_k": 0}, "top_k: expected an integer from 1 on"),
        (([1], -1), {}, "length: expected an integer from 0 on"),
        (([-1], 3), {}, "prompt: expected an integer from 0 on"),
    ],
)
def test_wrong_options(arguments, options, text):
    with pytest.raises(ValueError, match=text):
        nn.generate(gpt(), *arguments, **options)


def test_scores_that_are_not_finite():
    with pytest.raises(ValueError, match="scores: expected finite numbers"):
        next_token(np.array([0.0, np.nan]), 1.0, None, np.random.default_rng(0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_call_is_an_evaluation(dtype):
    """Without dropout, of inputs in any dtype, and of lists."""
    model, x = valued(nn.mlp([6, 8, 4], dropout=0.5), dtype), np.random.default_rng(0).standard_normal((5, 6))
    y = model(x)
    assert y.dtype == dtype and (y == model(x.astype(dtype))).all() and (y == model(x.tolist())).all()
    assert (y == model.forward(x.astype(dtype), PassMode(training=False))[0]).all()


def test_a_call_without_values():
    model = nn.mlp([6, 4])
    with pytest.raises(ParameterNotGathered, match="no values"):
        model(np.zeros((1, 6)))
