"""Operators and whole models against PyTorch, where it is installed: results, gradients and their norms."""

import numpy as np
import pytest
from support.operator_cases import CASES, inputs, play

from parallel.nn.flat_params import FlatParams
from parallel.nn.loss import MSE, SoftmaxCrossEntropy
from parallel.nn.operator import PassMode

torch = pytest.importorskip("torch")

TOLERANCES = {"float64": {"rtol": 1e-10, "atol": 1e-12}, "float32": {"rtol": 1e-5, "atol": 4e-5}}
NORMS = {"float64": 1e-12, "float32": 1e-5}
PEERS = [name for name, case in CASES.items() if case.peer]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", PEERS)
def test_like_torch(name, dtype):
    """Both motions with the same numbers; every gradient of a parameter, that by x, and all their norms."""
    case = CASES[name]
    operator, x = case.make(), inputs(case)
    found = play(operator, x, dtype)
    parameters = {p.name: torch.tensor(p.data, requires_grad=True) for p in operator.parameters()}
    leaf = torch.tensor(x) if case.tokens else torch.tensor(x.astype(dtype), requires_grad=True)
    y = case.peer(torch, leaf, parameters)
    dy = np.random.default_rng(2)
    dy.standard_normal(FlatParams(operator).length)  # as play draws
    y.backward(torch.tensor(dy.standard_normal(found.y.shape).astype(dtype)))
    compare(found.y, y.detach(), dtype)
    if found.dx is not None:
        compare(found.dx, leaf.grad, dtype)
    assert found.gradients.keys() == parameters.keys()
    for key, parameter in parameters.items():
        compare(found.gradients[key], parameter.grad, dtype)


def compare(ours, theirs, dtype):
    theirs = theirs.numpy()
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, **TOLERANCES[dtype])
    np.testing.assert_allclose(np.linalg.norm(ours), np.linalg.norm(theirs), rtol=NORMS[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_cross_entropy(dtype):
    random = np.random.default_rng(0)
    scores, targets = random.normal(0, 5, (3, 6, 11)).astype(dtype), random.integers(-2, 11, (3, 6))
    loss = SoftmaxCrossEntropy()
    sum_, saved = loss.forward(scores, targets)
    leaf = torch.tensor(scores, requires_grad=True)
    flat = torch.tensor(np.maximum(targets, -1).reshape(-1))
    theirs = torch.nn.functional.cross_entropy(leaf.reshape(-1, 11), flat, ignore_index=-1, reduction="sum")
    (0.25 * theirs).backward()
    np.testing.assert_allclose(sum_, theirs.item(), rtol=1e-12 if dtype == "float64" else 1e-6)
    compare(loss.backward(0.25, saved), leaf.grad, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_squared_error(dtype):
    y, targets = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(dtype)
    sum_, saved = MSE().forward(y, targets)
    leaf = torch.tensor(y, requires_grad=True)
    theirs = torch.nn.functional.mse_loss(leaf, torch.tensor(targets), reduction="sum")
    (0.25 * theirs).backward()
    np.testing.assert_allclose(sum_, theirs.item(), rtol=1e-12 if dtype == "float64" else 1e-6)
    compare(MSE().backward(0.25, saved), leaf.grad, dtype)


@pytest.mark.parametrize("name", ["mlp", "convnet", "transformer"])
def test_a_few_steps_of_descent(name):
    """Whole models with plain SGD in float64: the same parameters after three steps, to the last digits."""
    case = CASES[name]
    operator, x = case.make(), inputs(case)
    flat, loss = FlatParams(operator), SoftmaxCrossEntropy()
    vector = np.zeros(flat.length)
    flat.initialise(vector, 0)
    flat.bind(vector)
    theirs = {p.name: torch.tensor(p.data, requires_grad=True) for p in operator.parameters()}
    for _ in range(3):
        gradient = np.zeros(flat.length)

        def sink(parameter, compute, gradient=gradient):
            out = np.empty(parameter.shape)
            compute(out)
            place = flat.by_name[parameter.name]
            flat.view(gradient, parameter, place.span.start)[...] += out

        y, saved = operator.forward(x, PassMode(samples=np.arange(len(x))))
        targets = np.arange(y[..., 0].size).reshape(y.shape[:-1]) % 4
        operator.backward(loss.backward(1 / targets.size, loss.forward(y, targets)[1]), saved, sink)
        vector -= 0.5 * gradient
        scores = case.peer(torch, torch.tensor(x), theirs)
        torch.nn.functional.cross_entropy(
            scores.reshape(-1, scores.shape[-1]), torch.tensor(targets.reshape(-1))
        ).backward()
        with torch.no_grad():
            for parameter in theirs.values():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    for parameter in operator.parameters():
        np.testing.assert_allclose(parameter.data, theirs[parameter.name].detach().numpy(), rtol=1e-9, atol=1e-13)
