"""Batch normalisation alone: gradients, PyTorch, evaluations, and what it refuses."""

import numpy as np
import pytest
from support.standin import cupy

from parallel import nn
from parallel.nn.flat_params import FlatParams
from parallel.nn.gradcheck import check

RANDOM = np.random.default_rng(0)


def made(features=3, dtype=np.float64, **options):
    norm = nn.BatchNorm(features, **options)
    flat = FlatParams(norm)
    weights = np.empty(flat.length, dtype)
    flat.initialise(weights, seed=0)
    flat.bind(weights)
    norm.gain.data[...], norm.bias.data[...] = RANDOM.normal(1, 1, (2, features))
    return norm


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 5), (2, 3, 4, 5), (0, 3)])
def test_gradients(shape):
    check(nn.BatchNorm(3), RANDOM.normal(1, 2, shape))


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 5), (2, 3, 4, 5)])
def test_like_torch(shape):
    torch = pytest.importorskip("torch")
    norm, x, dy = made(momentum=0.3, eps=1e-3), RANDOM.normal(1, 2, shape), RANDOM.normal(size=shape)
    gain, bias, leaf = (torch.tensor(one, requires_grad=True) for one in (norm.gain.data, norm.bias.data, x))
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    expected = torch.nn.functional.batch_norm(leaf, mean, variance, gain, bias, True, 0.3, 1e-3)
    expected.backward(torch.tensor(dy))
    run, gradients = nn.PassMode(), {}
    y, saved = norm.forward(x, run)

    def sink(parameter, compute):
        compute(gradients.setdefault(parameter.name, np.empty(parameter.shape)))

    dx = norm.backward(dy, saved, sink)
    arrived = {name: values for (_, name), values in run.buffers.items()}
    for found, wanted in (
        (y, expected.detach()),
        (dx, leaf.grad),
        (gradients["gain"], gain.grad),
        (gradients["bias"], bias.grad),
        (arrived["running_mean"], mean),
        (arrived["running_var"], variance),
    ):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12, atol=1e-13)
    assert not norm.running_mean.values.any()  # until the end of the step


def test_evaluations_take_running_statistics():
    norm = made(eps=1e-12)
    norm.running_mean.load([1, 2, 3])
    norm.running_var.load([4, 9, 16])
    norm.gain.data[...], norm.bias.data[...] = 2, 1
    np.testing.assert_allclose(norm(np.array([[3.0, 5, 7], [1, 2, 3]])), [[3, 3, 3], [1, 1, 1]], rtol=1e-11)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_narrow_types(dtype):
    """Statistics are computed wide: of values whose squares overflow a half type, too."""
    norm, x = made(2, dtype=dtype), RANDOM.normal(1000, 300, (64, 2)).astype(dtype)
    norm.gain.data[...], norm.bias.data[...] = 1, 0
    y, _ = norm.forward(x, nn.PassMode())
    assert y.dtype == dtype
    np.testing.assert_allclose(y.astype(float).mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(y.astype(float).std(axis=0), 1, rtol=1e-2)


def test_refusals():
    norm = made()
    for wrong in ((2, 5), (3,)):
        with pytest.raises(ValueError, match=r"BatchNorm: expected an array of shape \(batch, 3, ...\)"):
            norm.forward(np.ones(wrong), nn.PassMode())
    with pytest.raises(ValueError, match="expected several values of each feature in training, found one"):
        norm.forward(np.ones((1, 3)), nn.PassMode())
    with pytest.raises(TypeError, match=r"BatchNorm .*: expected arrays on the host, as of device='cpu'"):
        norm.forward(cupy.asarray(np.ones((4, 3))), nn.PassMode())
    with pytest.raises(ValueError, match="sync needs an engine in a layout dp or zero"):
        made(sync=True).forward(np.ones((4, 3)), nn.PassMode())
    for options in ({"eps": 0}, {"momentum": 2}, {"momentum": float("nan")}):
        with pytest.raises(ValueError, match="eps, momentum: expected above 0, and 0 to 1"):
            nn.BatchNorm(3, **options)


def test_state_dictionaries_of_torch():
    torch = pytest.importorskip("torch")
    from parallel.torch import from_torch_state, to_torch

    model = nn.Sequential([made()])
    theirs = torch.nn.Sequential(torch.nn.BatchNorm1d(3)).double()
    assert from_torch_state(model, theirs.state_dict()).keys() == {
        "0.gain",
        "0.bias",
        "0.running_mean",
        "0.running_var",
    }
    theirs.load_state_dict(to_torch(model))
    np.testing.assert_array_equal(theirs[0].weight.detach().numpy(), model.items[0].gain.data)
