"""Mixtures of experts against loops over tokens in float64; choices, capacity, loss terms, random numbers."""

import math

import ml_dtypes
import numpy as np
import pytest
from support.mixture_cases import EXPERTS, WIDTH, mixture, token_loop
from support.operator_cases import play

from parallel.nn import gradcheck, kernels
from parallel.nn.buffer import SelectionBias, StateBuffer
from parallel.nn.expert_choice import best_in_groups, capacity_of, within_capacity
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.operator import PassMode
from parallel.nn.router import Router, RouterSettings

SETTINGS = {
    "softmax, then the best": RouterSettings(normalize=False),
    "the best, then softmax": RouterSettings(),
    "one expert": RouterSettings(choices=1, normalize=False),
    "all experts": RouterSettings(choices=EXPERTS),
    "sigmoid": RouterSettings(choices=3, scores="sigmoid", scale=2.5),
    "groups": RouterSettings(choices=4, groups=4, chosen_groups=2, scores="sigmoid"),
    "capacity": RouterSettings(capacity=0.75),
    "capacity by score": RouterSettings(capacity=0.75, priority="score"),
    "small capacity": RouterSettings(choices=1, normalize=False, capacity=0.01),
    "losses": RouterSettings(balance_loss=0.3, z_loss=0.02),
    "losses of sigmoid": RouterSettings(scores="sigmoid", balance_loss=0.3, z_loss=0.02, capacity=1.0),
}


@pytest.mark.parametrize("shape", [(3, 9, WIDTH), (1, 1, WIDTH), (11, WIDTH), (0, 4, WIDTH), (2, 2, 3, WIDTH)])
@pytest.mark.parametrize("name", SETTINGS)
def test_loop_over_tokens(name, shape):
    """Results, gradients, choices and loss terms, without permutation or segments: one token and expert at a time."""
    operator = mixture(SETTINGS[name], shared=True)
    x = np.random.default_rng(0).standard_normal(shape)
    run = PassMode(samples=np.arange(shape[0]), scale=4.0)
    found = play(operator, x, run=run)
    expected = token_loop(operator, x, run.scale)
    np.testing.assert_allclose(found.y, expected.y, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.dx, expected.dx, rtol=0, atol=1e-12)
    for key, gradient in found.gradients.items():
        np.testing.assert_allclose(gradient, expected.gradients[key], rtol=0, atol=1e-12, err_msg=key)
    np.testing.assert_array_equal(run.records["router", "chosen"], expected.chosen)
    np.testing.assert_array_equal(run.records["router", "dropped"], expected.dropped)
    for key, values in run.terms.items():
        np.testing.assert_allclose(values, expected.terms[key[1]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5, WIDTH), (4, WIDTH), (1, WIDTH), (0, 5, WIDTH), (2, 0, WIDTH)])
@pytest.mark.parametrize(
    "settings",
    [
        RouterSettings(noise=True, jitter=0.1, balance_loss=0.1, z_loss=0.1),
        RouterSettings(4, "sigmoid", groups=4, chosen_groups=2, balance_loss=0.1, scale=2.0),
    ],
)
def test_gradients_of_routers(settings, shape):
    gradcheck.check(Router(WIDTH, EXPERTS, settings), np.random.default_rng(3).standard_normal(shape))


def test_equal_scores_take_the_first():
    scores = np.array([[1.0, 3.0, 3.0, 3.0]])
    np.testing.assert_array_equal(kernels.top_k(scores, 2), [[False, True, True, False]])


def test_groups_by_their_best_sums():
    """A group with one high score loses to one with two good ones where two count."""
    scores = np.array([[9.0, 0, 0, 5.0, 5.0, 0]])
    np.testing.assert_array_equal(best_in_groups(scores, 2, 2, 1).nonzero()[1], [3, 4])
    np.testing.assert_array_equal(best_in_groups(scores, 2, 2, 2).nonzero()[1], [0, 3])


@pytest.mark.parametrize("priority, kept", [("position", [0, 1]), ("score", [1, 3])])
def test_capacity(priority, kept):
    chosen, scores = np.ones((1, 4, 1), bool), np.array([0.1, 0.4, 0.2, 0.4]).reshape(1, 4, 1)
    np.testing.assert_array_equal(within_capacity(chosen, scores, 2, priority)[0, :, 0].nonzero()[0], kept)


def test_capacity_is_the_mean_load_rounded_up():
    assert [capacity_of(1.0, *sizes) for sizes in [(8, 2, 4), (7, 1, 4), (0, 2, 4)]] == [4, 2, 0]
    assert [capacity_of(factor, 100, 2, 4) for factor in (1.1, 1.12, 1.101, np.float32(1.1), 1)] == [55, 56, 56, 55, 50]


@pytest.mark.parametrize("settings", [SETTINGS["capacity"], SETTINGS["losses"], RouterSettings(noise=True, jitter=0.1)])
def test_same_bits_in_any_micro_batch(settings):
    """Sequences alone, or together in any order, have the same choices, weights and terms."""
    x = np.random.default_rng(1).standard_normal((5, 8, WIDTH)).astype(np.float32)
    operator, samples = Router(WIDTH, EXPERTS, settings), np.array([3, 9, 4, 0, 7])
    play(operator, x, np.float32, run=PassMode(samples=samples))
    run = PassMode(samples=samples)
    whole = operator.forward(x, run)[0]
    for at in (4, 0, 2):
        alone = PassMode(samples=samples[at : at + 1])
        np.testing.assert_array_equal(operator.forward(x[at : at + 1], alone)[0][0] != 0, whole[at] != 0)
        for key, terms in run.terms.items():
            np.testing.assert_allclose(alone.terms[key], terms[at : at + 1], rtol=1e-5)


def test_no_noise_in_evaluation():
    operator = Router(WIDTH, EXPERTS, RouterSettings(noise=True, jitter=0.2))
    x = np.random.default_rng(2).standard_normal((2, 4, WIDTH))
    play(operator, x)
    quiet = [operator.forward(x, PassMode(training=False, samples=np.arange(2), step=step))[0] for step in (0, 1)]
    noisy = [operator.forward(x, PassMode(samples=np.arange(2), step=step))[0] for step in (0, 1)]
    assert np.array_equal(*quiet) and not np.array_equal(*noisy)


def test_noise_is_normal():
    """Noise of a router without logits: weights of its softplus alone, log 2."""
    operator = Router(1, 64, RouterSettings(noise=True))
    operator.weight.data, operator.noise.data = np.zeros((1, 64)), np.zeros((1, 64))
    values = operator.forward(np.ones((4, 500, 1)), PassMode(samples=np.arange(4)))[1].logits / math.log(2)
    assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02 and abs((values**4).mean() - 3) < 0.1


def test_routing_is_not_in_half_precision():
    """Logits that are equal in bfloat16, but not in float32."""
    operator = Router(2, 2, RouterSettings(choices=1, normalize=False))
    operator.weight.data = np.array([[1, 1], [0, 2**-6]]).astype(ml_dtypes.bfloat16)
    weights = operator.forward(np.array([[256.0, 1.0]], ml_dtypes.bfloat16), PassMode(samples=np.arange(1)))[0]
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights != 0, [[False, True]])


def test_expert_that_returns_another_width():
    operator = mixture(RouterSettings())
    operator.experts.experts[2] = operator.experts.experts[2].items[0]
    with pytest.raises(ValueError, match=r"expected a result of shape \(\d, 6\), found shape \(\d, 5\)"):
        play(operator, np.ones((2, 3, WIDTH)))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"choices": 0}, "choices: expected an integer from 1 on, found 0"),
        ({"scores": "tanh"}, "scores to be softmax or sigmoid, found tanh"),
        ({"choices": 1}, r"choices to be at least 2, or weights unnormalized \(.*\), found 1"),
        ({"capacity": 0.0}, "capacity to be a finite number above 0, found 0.0"),
        ({"capacity": math.inf}, "capacity to be a finite number above 0, found inf"),
        ({"priority": "score"}, "priority to be position without a capacity, found score"),
        ({"scale": 0.0}, "scale to be a number above 0, found 0.0"),
        ({"scale": math.inf}, "scale to be a number above 0, found inf"),
        ({"groups": 0}, "groups: expected an integer from 1 on, found 0"),
        ({"groups": 2, "chosen_groups": 2}, "chosen_groups to be 1 to 1 of 2, found 2"),
        ({"jitter": 1.0}, "jitter"),
        ({"z_loss": -1.0}, "z_loss to be a number from 0"),
        ({"balance_loss": math.nan}, "balance_loss"),
        ({"groups": 2, "chosen_groups": 3}, "chosen_groups to be 1 to 1 of 2, found 3"),
        ({"groups": 4, "chosen_groups": 2, "choices": 3}, "a multiple of the 2 chosen groups"),
        ({"priority": "random"}, "position or score"),
    ],
)
def test_settings_without_meaning(wrong, message):
    with pytest.raises(ValueError, match=message):
        RouterSettings(**wrong)


def test_more_choices_than_experts():
    with pytest.raises(ValueError, match="choices to be at most 4 of 4 experts, found 5"):
        Router(WIDTH, 4, RouterSettings(choices=5))
    with pytest.raises(ValueError, match="groups to be a divisor of the 4 experts, found 3"):
        Router(WIDTH, 4, RouterSettings(groups=3))
    with pytest.raises(ValueError, match="expected 4 experts, as its router has, found 0"):
        MixtureOfExperts(Router(WIDTH, 4), [])


def test_bias_follows_the_load():
    """Experts below the mean number of choices gain, those above it lose; weights do not change."""
    bias = SelectionBias(3, 0.5)
    bias.update([2, 5, 2])
    np.testing.assert_array_equal(bias.values, [0.5, -0.5, 0.5])
    bias.update([1, 1, 1])
    np.testing.assert_array_equal(bias.values, [0.5, -0.5, 0.5])
    operator = Router(1, 3, RouterSettings(choices=1, normalize=False, scores="sigmoid", bias_rate=0.5))
    operator.weight.data = np.array([[0.0, 2.0, 1.0]])
    operator.bias.load(bias.values)
    weights = operator.forward(np.ones((1, 1)), PassMode(samples=np.arange(1)))[0]
    np.testing.assert_allclose(weights, [[0, 0, 1 / (1 + math.exp(-1))]])


@pytest.mark.parametrize("wrong", [[0.0], "abc", [[0.0, 1.0, 2.0]], None])
def test_buffer_of_another_shape(wrong):
    with pytest.raises(ValueError, match=r"expected an array of shape \(3,\)"):
        SelectionBias(3, 0.5).load(wrong)


def test_buffer_takes_the_mean_of_passes():
    """Floats and integers keep their types; one pass is taken exactly, and none changes nothing."""
    mean, count = StateBuffer(np.zeros(2, np.float32)), StateBuffer(np.int64(4))
    mean.end_step([], {})
    assert not mean.values.any()
    mean.end_step([np.float32([1, 2]), np.float32([3, 6])], {})
    count.end_step([np.int64(5), np.int64(5)], {})
    assert mean.values.tolist() == [2, 4] and count.values == 5
    assert (mean.values.dtype, count.values.dtype) == (np.float32, np.int64)
    exact = np.float32([1 / 3, 1e-30])
    mean.end_step([exact], {})
    assert (mean.values == exact).all()
