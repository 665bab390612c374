"""NumPy functions as operators, by the package `autograd`."""

import numpy as np
import pytest

anp = pytest.importorskip("autograd.numpy", reason="autograd is not installed: pip install 'chorus-mpi[autograd]'")
from mpi4py import MPI  # noqa: E402

from parallel import SGD, Engine, nn  # noqa: E402
from parallel.nn.gradcheck import check  # noqa: E402
from parallel.nn.pass_mode import PassMode  # noqa: E402


def layer(x, weight, bias):
    return anp.tanh(anp.dot(x, weight) + bias)


def made(inputs, outputs):
    return nn.from_autograd(
        layer, weight=nn.Parameter((inputs, outputs), nn.normal(0.5)), bias=nn.Parameter((outputs,), nn.constant(0.1))
    )


def test_gradients():
    check(made(3, 4), np.random.default_rng(0).standard_normal((5, 3)))


def written(by_hand):
    """Operator like `layer` with a backward pass of its own."""

    class Layer(nn.Operator):
        def __init__(self):
            self.weight, self.bias = by_hand.weights.values()

        def forward(self, x, run):
            y = np.tanh(x @ self.weight.data + self.bias.data)
            return y, (x, y)

        def backward(self, dy, saved, grads):
            x, y = saved
            dz = dy * (1 - y * y)
            grads(self.weight, lambda out: np.matmul(x.T, dz, out=out))
            grads(self.bias, lambda out: dz.sum(axis=0, out=out))
            return dz @ self.weight.data.T

    return Layer()


@pytest.mark.parametrize("layout", ["dp", "zero3"])
def test_losses_like_a_backward_pass_by_hand(layout):
    x, y = np.random.default_rng(0).standard_normal((12, 3)), np.arange(12) % 4
    found = []
    for kind in (lambda one: one, written):
        model = nn.Sequential([kind(made(3, 4)), kind(made(4, 4))])
        options = {"layout": layout, "precision": "fp64", "batch": 12, "micro_batch": 4}
        with Engine(model, nn.SoftmaxCrossEntropy(), MPI.COMM_SELF, SGD(lr=0.1), **options) as engine:
            found.append([engine.step(x, y).loss for _ in range(10)])
    np.testing.assert_allclose(*found, rtol=1e-12)


def test_tuples():
    """Integers among the inputs have the gradient None, as have frozen weights none."""
    scale = nn.Parameter((1,), nn.constant(1.0))
    scale.data = np.array([2.0])
    operator = nn.from_autograd(lambda x, at, scale: (x * scale, x[at] + 1), scale=scale)
    (y, z), saved = operator.forward((np.ones(3), np.array([2, 0])), PassMode())
    assert y.tolist() == [2, 2, 2] and z.tolist() == [2, 2]
    gradients = []
    dx = operator.backward((np.ones(3), np.ones(2)), saved, lambda parameter, compute: gradients.append(compute))
    assert dx[0].tolist() == [3, 2, 3] and dx[1] is None and len(gradients) == 1
    scale.requires_grad = False
    saved = operator.forward((np.ones(3), np.array([2, 0])), PassMode())[1]
    operator.backward((np.ones(3), np.ones(2)), saved, lambda *_: pytest.fail("a frozen weight"))


def test_refusals():
    with pytest.raises(TypeError, match="function: expected a function of arrays, found int"):
        nn.from_autograd(3)
    with pytest.raises(TypeError, match=r"weight: expected an nn\.Parameter, found list"):
        nn.from_autograd(layer, weight=[1.0])
    wrong = made(3, 4)
    for parameter in wrong.parameters():
        parameter.data = np.ones(parameter.shape)
    with pytest.raises(ValueError, match="shapes") as caught:
        wrong.forward(np.ones((2, 5)), PassMode())
    assert "layer" in str(caught.value.__notes__)
