"""Trainings with weights, soft targets and other losses, in every layout: as one process of PyTorch in float64."""

import numpy as np
import pytest

from parallel import SGD, Engine, nn

torch = pytest.importorskip("torch")
F = torch.nn.functional

pytestmark = pytest.mark.ranks(3)

LAYOUTS = {
    "dp": lambda ranks: {"micro_batch": 3},
    "reproducible": lambda ranks: {"reproducible": True, "micro_batch": 3},
    "zero1": lambda ranks: {"layout": "zero1"},
    "zero2": lambda ranks: {"layout": "zero2", "micro_batch": 2},
    "zero3": lambda ranks: {"layout": "zero3", "micro_batch": 2},
    "pp": lambda ranks: {"layout": "pp", "stages": ranks, "micro_batch": 3},
    "ps": lambda ranks: {"layout": "ps"} if ranks > 1 else {},
}
SIZES = (11, 4, 1)
"""Samples of the steps: with short last micro-batches, and ranks without any."""

OF_CLASSES = [0.5, 2.0, 0.25, 1.0]


def data(kind, samples):
    random = np.random.default_rng([samples, len(kind)])
    x, weights = random.standard_normal((samples, 6)), random.uniform(0.1, 2, samples)
    y = {"classes": random.integers(0, 4, samples), "shares": random.random((samples, 4))}.get(kind)
    return x, random.dirichlet(np.ones(4), samples) if y is None else y, weights


def mean(losses, weights):
    weights = torch.tensor(weights).reshape(-1, *[1] * (losses.ndim - 1)).expand(losses.shape)
    return (losses * weights).sum() / weights.sum()


LOSSES = {
    "class weights": (
        "classes",
        lambda: nn.SoftmaxCrossEntropy(class_weights=OF_CLASSES),
        lambda y, t, w: F.cross_entropy(y, t, weight=torch.tensor(OF_CLASSES, dtype=y.dtype)),
    ),
    "sample weights": (
        "classes",
        lambda: nn.SoftmaxCrossEntropy(weighted=True),
        lambda y, t, w: mean(F.cross_entropy(y, t, reduction="none"), w),
    ),
    "soft": ("soft", nn.SoftmaxCrossEntropy, lambda y, t, w: F.cross_entropy(y, t)),
    "bce": ("shares", nn.BCEWithLogits, lambda y, t, w: F.binary_cross_entropy_with_logits(y, t)),
    "l1": ("shares", nn.L1, lambda y, t, w: F.l1_loss(y, t)),
    "huber": (
        "shares",
        lambda: nn.Huber(0.5, weighted=True),
        lambda y, t, w: mean(F.huber_loss(y, t, reduction="none", delta=0.5), w),
    ),
}


def in_torch(name, state):
    """Losses of the steps and weights after them."""
    kind, _, peer = LOSSES[name]
    values = {key: torch.tensor(one, requires_grad=True) for key, one in state.items()}
    losses = []
    for samples in SIZES:
        x, y, weights = data(kind, samples)
        h = F.relu(torch.tensor(x) @ values["0.weight"] + values["0.bias"])
        loss = peer(h @ values["2.weight"] + values["2.bias"], torch.tensor(y), weights)
        losses.append(loss.item())
        for one, gradient in zip(values.values(), torch.autograd.grad(loss, [*values.values()])):
            one.data -= 0.1 * gradient
    return losses, {key: one.detach().numpy() for key, one in values.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_every_layout(comm, name):
    kind, loss, _ = LOSSES[name]
    for layout, options in LAYOUTS.items():
        model, made = nn.Sequential([nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)]), loss()
        chosen = {"batch": 11, "precision": "fp64"} | options(comm.Get_size())
        with Engine(model, made, comm, SGD(lr=0.1), **chosen) as engine:
            losses, expected = in_torch(name, engine.state_dict())
            for samples, wanted in zip(SIZES, losses):
                x, y, weights = data(kind, samples)
                y = nn.with_weights(y, weights) if made.weighted else y
                assert engine.evaluate(x, y).loss == pytest.approx(wanted, rel=1e-12), layout
                engine.step(x, y)
            found = engine.state_dict()
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-12, atol=1e-13, err_msg=f"{layout} {key}")
