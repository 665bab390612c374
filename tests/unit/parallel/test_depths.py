"""Mixture-of-Depths against a loop over tokens, differences, and what a token may depend on."""

import numpy as np
import pytest
from support.operator_cases import play

from parallel.nn import gradcheck
from parallel.nn.attention import self_attention
from parallel.nn.compose import Residual, Sequential
from parallel.nn.depths import MixtureOfDepths
from parallel.nn.linear import Linear
from parallel.nn.norm import LayerNorm
from parallel.nn.operator import PassMode

WIDTH = 6


def block():
    return Sequential(
        [Residual(self_attention(WIDTH, 2)), Residual(Sequential([LayerNorm(WIDTH), Linear(WIDTH, WIDTH)]))]
    )


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal((*shape, WIDTH))


@pytest.mark.parametrize("fraction", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(2, 7), (1, 1), (0, 5), (3, 0)])
def test_gradients(shape, fraction):
    gradcheck.check(MixtureOfDepths(block(), WIDTH, fraction, predictor_loss=0.0), tokens(*shape))


def test_number_of_tokens():
    """Fractions are decimal numbers: 0.07 of 100 tokens are 7."""
    found = [
        MixtureOfDepths(block(), WIDTH, fraction).count(100) for fraction in (0.07, 0.55, 0.071, np.float32(0.07), 1)
    ]
    assert found == [7, 55, 8, 7, 100]


def test_loop_over_sequences():
    """The tokens with the highest gates, in their order, through the block; the others unchanged."""
    operator, x = MixtureOfDepths(block(), WIDTH, 0.4), tokens(3, 9)
    found = play(operator, x)
    for n, rows in enumerate(x):
        gates = rows @ operator.weight.data[:, 0]
        chosen = sorted(sorted(range(9), key=lambda t: (-gates[t], t))[:4])
        expected = rows.copy()
        result = operator.block.forward(rows[None, chosen], PassMode(samples=np.zeros(1, int)))[0][0]
        expected[chosen] += gates[chosen][:, None] * (result - rows[chosen])
        np.testing.assert_allclose(found.y[n], expected, rtol=0, atol=1e-12)


def test_gradient_of_the_predictor():
    """By differences of its loss, with the loss scale; x gets nothing of it."""
    operator, x = MixtureOfDepths(block(), WIDTH, 0.5, predictor_loss=0.3), tokens(2, 6)
    run = PassMode(samples=np.arange(2), scale=8.0)
    found = play(operator, x, run=run)
    without = MixtureOfDepths(block(), WIDTH, 0.5, predictor_loss=0.0)
    np.testing.assert_array_equal(found.dx, play(without, x).dx)
    for at in range(WIDTH + 1):
        losses = []
        for step in (1e-5, -1e-5):
            operator.predictor.data[at] += step
            again = PassMode(samples=np.arange(2))
            operator.forward(x, again)
            losses.append(again.terms["", "predictor"].sum())
            operator.predictor.data[at] -= step
        assert abs(8 * (losses[0] - losses[1]) / 2e-5 - found.gradients["predictor"][at, 0]) < 1e-6


def test_causal_in_use():
    """With the predictor, a token's result depends on no later one; in training it does, by the choice."""
    operator, x = MixtureOfDepths(block(), WIDTH, 0.5), tokens(2, 8)
    play(operator, x)
    operator.predictor.data = np.array([[1.0], [0], [0], [0], [0], [0], [0.1]])
    use = PassMode(training=False, samples=np.arange(2))
    y = operator.forward(x, use)[0]
    wanted = x[..., 0] > -0.1
    assert wanted.any() and not wanted.all()
    np.testing.assert_array_equal((y != x).any(axis=-1), wanted)
    for length in range(9):
        np.testing.assert_allclose(operator.forward(x[:, :length], use)[0], y[:, :length], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 3, 5), (3, WIDTH)])
def test_wrong_shapes(shape):
    with pytest.raises(ValueError, match="expected an array of shape"):
        play(MixtureOfDepths(block(), WIDTH, 0.5), np.zeros(shape))


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, float("nan")])
def test_wrong_fraction(fraction):
    with pytest.raises(ValueError, match="expected a fraction above 0 up to 1"):
        MixtureOfDepths(block(), WIDTH, fraction)
