"""Mixture-of-Depths whose blocks have experts on other ranks: trainings and evaluations. Ranks are threads."""

import numpy as np
import pytest
from conformance.thread_communicator import run_threads

from parallel import SGD, Engine, nn
from parallel.nn.depths import DepthLayers, MixtureOfDepths
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.models import transformer
from parallel.nn.router import RouterSettings
from parallel.sharding.mesh import Mesh

TOKENS, LENGTH, WIDTH = 32, 8, 8


def unbiased(random, shape):
    """Predictor that chooses about half of the tokens."""
    values = random.normal(size=shape)
    values[-1] = 0
    return values


def model():
    """Two blocks with experts for some of the tokens."""
    layers = ExpertLayers(4, RouterSettings(capacity=1.0, priority="score"))
    made = transformer(TOKENS, LENGTH, 2, 2, WIDTH, experts=layers)
    made.items[1] = MixtureOfDepths(made.items[1], WIDTH, 0.75)  # one in another
    made = DepthLayers(0.5, every=1).of(made, WIDTH)
    for one in (*made.items[1:3], made.items[1].block):
        one.predictor.init = unbiased
    return made


def batch(step, samples):
    tokens = np.random.default_rng(step).integers(0, TOKENS, (samples, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def scores(comm, samples, model=model, **options):
    """Losses of two steps, then losses and shares of correct predictions of evaluations."""
    loss = nn.SoftmaxCrossEntropy()
    with Engine(model(), loss, comm, SGD(lr=0.1), precision="fp64", batch=8, micro_batch=2, **options) as engine:
        trained = [engine.step(*batch(step, samples)).loss for step in range(2)]
        found = [engine.evaluate(*batch(9, number), loss.correct) for number in (samples, 1, 5)]
        return [*trained, *(value for one in found for value in (one.loss, one.measure))]


def every_second():
    """Four blocks, of which every second one has experts, for some of the tokens."""
    layers = ExpertLayers(4, RouterSettings(), every=2)
    return DepthLayers(0.5).of(transformer(TOKENS, LENGTH, 4, 2, WIDTH, experts=layers), WIDTH)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,ep=2", "cp=2", "pp=2,tp=2"])
def test_experts_in_every_second_block(mesh):
    expected = run_threads(1, lambda comm: scores(comm, 4, every_second))[0]
    options = {"mesh": mesh, "layout": "pp:1f1b" if "pp" in mesh else "dp"}
    for found in run_threads(Mesh.parse(mesh).size, lambda comm: scores(comm, 4, every_second, **options)):
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize(
    "mesh", ["dp=2,ep=2", "dp=3,ep=3", "dp=2,cp=2,ep=4", "dp=3,cp=2,ep=3", "dp=2,tp=2,ep=4", "pp=2,dp=2,ep=2"]
)
def test_as_on_one_rank(mesh, samples):
    """Some replicas have fewer sequences than others, or none."""
    expected = run_threads(1, lambda comm: scores(comm, samples))[0]
    options = {"mesh": mesh, "layout": "pp:1f1b" if "pp" in mesh else "dp"}
    for found in run_threads(Mesh.parse(mesh).size, lambda comm: scores(comm, samples, **options)):
        assert found == pytest.approx(expected, rel=1e-12)
