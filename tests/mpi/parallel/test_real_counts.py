"""Counts of losses that are no integers, such as sums of weights: the same mean in every layout."""

import numpy as np
import pytest
from mpi4py import MPI

from parallel import SGD, Engine, nn
from parallel.runtime.consistency_check import StepFailed

WEIGHTS = np.array([0.0625, 0.03125, 0.125, 0.25])
"""Of the classes; the sum of a micro-batch is below 1."""

LAYOUTS = {
    "dp": lambda ranks: {},
    "reproducible": lambda ranks: {"reproducible": True, "micro_batch": 2},
    "zero3": lambda ranks: {"layout": "zero3", "micro_batch": 1},
    "pool": lambda ranks: {"pool": True, "micro_batch": 2},
    "pp": lambda ranks: {"layout": "pp:1f1b", "stages": min(ranks, 4), "microbatches": 4},
    "ps": lambda ranks: {"layout": "ps"} if ranks > 1 else {},
}


class Weighted:
    """Cross entropy weighted by class; the mean is that over the weights."""

    def forward(self, y, targets):
        shifted = y - y.max(axis=-1, keepdims=True)
        scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        weights = WEIGHTS[targets]
        rows = np.arange(len(targets))
        return float(-(weights * scores[rows, targets]).sum()), (np.exp(scores), rows, targets, weights)

    def backward(self, scale, saved):
        gradient, rows, targets, weights = saved
        gradient[rows, targets] -= 1
        return (scale * weights[:, None] * gradient).astype(gradient.dtype)

    def count(self, targets):
        return WEIGHTS[targets].sum()

    def outline(self, y, targets):
        return nn.SoftmaxCrossEntropy().outline(y, targets)


COUNT = {"own": 1.0}


class Counts(Weighted):
    """A loss whose count is this rank's; what it has itself is the same on all ranks."""

    def count(self, targets):
        return COUNT["own"]


def batch():
    random = np.random.default_rng(0)
    return random.standard_normal((24, 6)), random.integers(0, 4, 24)


def trained(comm, loss=None, **options):
    units = [nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 4)]
    loss = loss or Weighted()
    with Engine(nn.Sequential(units), loss, comm, SGD(lr=0.5), batch=24, precision="fp64", **options) as engine:
        for _ in range(3):
            engine.step(*batch())
        return engine.evaluate(*batch(), lambda scores, targets: 0.5), engine.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mean_over_weights(comm, layout):
    alone, expected = trained(MPI.COMM_SELF)
    found, weights = trained(comm, **LAYOUTS[layout](comm.Get_size()))
    assert found.count == pytest.approx(WEIGHTS[batch()[1]].sum()) and found.loss == pytest.approx(
        alone.loss, rel=1e-12
    )
    assert expected.keys() == weights.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(weights[name], values, rtol=1e-10, atol=1e-13)


WRONG = {
    "negative": (-1.0, "count of Counts: expected a finite number from 0 on, found -1.0"),
    "NaN": (np.nan, "count of Counts: expected a finite number from 0 on, found nan"),
    "complex": (1 + 2j, r"count of Counts: expected a real number, found \(1\+2j\)"),
    "text": ("3", "count of Counts: expected a real number, found '3'"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrong", WRONG)
def test_counts_that_are_refused(comm, layout, wrong, monkeypatch):
    value, message = WRONG[wrong]
    monkeypatch.setitem(COUNT, "own", value if comm.Get_rank() == comm.Get_size() - 1 else 1.0)
    with pytest.raises(StepFailed, match=message):
        trained(comm, Counts(), **LAYOUTS[layout](comm.Get_size()))
