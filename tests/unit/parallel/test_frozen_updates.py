"""Layers that are frozen and released in a training: the updates of PyTorch's optimizers, in float64."""

import json

import numpy as np
import pytest
from conformance.thread_communicator import run_threads
from mpi4py import MPI

from parallel import LAMB, Adam, AdamW, Engine, nn
from parallel.nn.loss import MSE

WIDTHS = (5, 8, 6, 3)
FROZEN = 300


def batch(step):
    random = np.random.default_rng(step)
    return random.normal(size=(6, WIDTHS[0])), random.normal(size=(6, WIDTHS[-1]))


def engine(model, optimizer, comm=MPI.COMM_SELF, **settings):
    return Engine(model, MSE(), comm, optimizer, precision="fp64", batch=6, **{"micro_batch": 6, **settings})


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_pytorch_agrees(kind):
    """The first layer is frozen for 300 steps, trains for 20, is frozen for 5 and trains for 5."""
    torch = pytest.importorskip("torch")
    model = nn.mlp(list(WIDTHS))
    settings = {"lr": 0.01, "weight_decay": 0.1}
    phases = [(FROZEN, False), (20, True), (5, False), (5, True)]
    flags = [flag for steps, flag in phases for _ in range(steps)]
    with engine(model, kind(**settings)) as made:
        theirs = {name: torch.tensor(values, requires_grad=True) for name, values in made.state_dict().items()}
        weights = [value for name, value in theirs.items() if name.endswith("weight")]
        biases = [value for name, value in theirs.items() if name.endswith("bias")]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        optimizer = getattr(torch.optim, kind.__name__)(groups, **settings)
        for step, flag in enumerate(flags):
            model.items[0].requires_grad_(flag)
            for name, value in theirs.items():
                value.requires_grad_(flag or not name.startswith("0."))
            made.step(*batch(step))
            x, y = map(torch.tensor, batch(step))
            for weight, bias in zip(weights, biases):
                x = torch.nn.functional.linear(x, weight.T, bias)
                x = x if weight is weights[-1] else torch.relu(x)
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(x, y).backward()
            optimizer.step()
            if step == FROZEN - 1:
                before = made.state_dict()
            if step == FROZEN:
                moved = np.abs(made.state_dict()["0.1.bias"] - before["0.1.bias"]).max()
                assert 0.9 * settings["lr"] < moved <= settings["lr"]  # the first step of Adam
        for name, values in made.state_dict().items():
            np.testing.assert_allclose(values, theirs[name].detach().numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


def trained(comm, steps, folder=None, load=None, kind=Adam, **settings):
    """State after these steps; the first layer is frozen in the steps below 30, and from 40 to 44."""
    model = nn.mlp(list(WIDTHS))
    with engine(model, kind(lr=0.01), comm, **settings) as made:
        if load:
            made.load(load)
        for step in steps:
            model.items[0].requires_grad_(30 <= step < 40 or step >= 45)
            made.step(*batch(step))
        if folder:
            made.save(folder)
        return made.state_dict(), made.inner.state().get("missed")


LAYOUTS = {
    "dp": {"layout": "dp", "micro_batch": 3},
    "zero2": {"layout": "zero2", "micro_batch": 3},
    "zero3": {"layout": "zero3", "micro_batch": 3},
    "tp=2": {"mesh": "tp=2"},
    "tensor_shards=2": {"tensor_shards": 2},
    "pp": {"layout": "pp:1f1b", "micro_batch": 3},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_counts_alike(layout, tmp_path):
    """Also a training that goes on from a checkpoint of another layout."""
    pytest.importorskip("safetensors")
    missed = {"0.1.weight": 35, "0.1.bias": 35}
    ((expected, count),) = run_threads(1, lambda comm: trained(comm, range(50)))
    assert count == missed
    settings, ranks = LAYOUTS[layout], 1 if layout == "tensor_shards=2" else 2
    for _, count in run_threads(ranks, lambda comm: trained(comm, range(42), tmp_path, **settings)):
        assert count == dict.fromkeys(missed, 32)
    here = run_threads(ranks, lambda comm: trained(comm, range(42, 50), load=tmp_path, **settings))
    for found, count in [*here, *run_threads(1, lambda comm: trained(comm, range(42, 50), load=tmp_path))]:
        assert count == missed
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, err_msg=name)


def test_checkpoints_of_versions_that_did_not_count(tmp_path):
    """All updates of the engine count as those of the parameters, as they did then."""
    pytest.importorskip("safetensors")
    model = nn.mlp(list(WIDTHS))
    with engine(model, LAMB(lr=0.01)) as made:
        made.step(*batch(0))
        state = made.inner.state()
        assert "missed" not in state and json.loads(json.dumps(state)) == state
        model.items[0].requires_grad_(False)
        made.step(*batch(1))
        assert made.inner.state()["missed"] == {"0.1.weight": 1, "0.1.bias": 1}
        made.inner.load(state)
        assert "missed" not in made.inner.state()


class Unused(nn.Operator):
    """Identity with a parameter that it does not use."""

    def __init__(self):
        self.weight = nn.Parameter((4,), nn.constant(2.0))

    def forward(self, x, run):
        return x, ()

    def backward(self, dy, saved, grads):
        return dy


@pytest.mark.parametrize("trains", [True, False])
def test_parameters_without_a_gradient(trains):
    """The gradient that did not come counts as zero: AdamW decays the parameter, unless it is frozen."""
    model = nn.Sequential(Unused(), nn.Linear(5, 3))
    model.items[0].weight.requires_grad = trains
    with engine(model, AdamW(lr=0.5, weight_decay=0.1)) as made:
        for step in range(2):
            made.step(*batch(step))
        np.testing.assert_allclose(made.state_dict()["0.weight"], 2 * (1 - 0.05) ** 2 if trains else 2.0)
