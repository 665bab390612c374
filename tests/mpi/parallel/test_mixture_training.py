"""Mixtures of experts, and of depths, in training: the same bits, loss terms and counts in every layout."""

import numpy as np
import pytest
from mpi4py import MPI

from parallel import LAMB, AdamW, Engine, nn
from parallel.nn.depths import MixtureOfDepths
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.models import transformer
from parallel.nn.router import Router, RouterSettings
from parallel.runtime.consistency_check import StepFailed

pytestmark = pytest.mark.ranks(3)

TOKENS, LENGTH, WIDTH = 32, 16, 16
ROUTERS = {
    "loss": RouterSettings(balance_loss=0.1, z_loss=0.01, noise=True),
    "bias": RouterSettings(scores="sigmoid", bias_rate=0.1, capacity=1.0, priority="score"),
}
STEPS = 3


def experts(router):
    return transformer(
        TOKENS, LENGTH, 3, 2, WIDTH, dropout=0.1, experts=ExpertLayers(4, ROUTERS[router], every=2, shared=True)
    )


def depths(wrapper=lambda inner: inner):
    """A transformer whose second block computes for half of the tokens."""
    model = transformer(TOKENS, LENGTH, 3, 2, WIDTH)
    model.items[2] = wrapper(MixtureOfDepths(model.items[2], WIDTH, 0.5))
    return nn.Sequential([model.items[0], wrapper(nn.Dropout(0.1)), *model.items[1:]])


def twice():
    """A transformer whose block with experts, with noise of its router and dropout, is at two depths."""
    model = experts("loss")
    model.items.insert(4, model.items[2])
    return nn.Sequential(model.items)


MODELS = {
    "twice": twice,
    "loss": lambda: experts("loss"),
    "bias": lambda: experts("bias"),
    "depths": depths,
    "recomputed": lambda: depths(nn.Recompute),
}


def batch(step, samples=12):
    tokens = np.random.default_rng(step).integers(0, TOKENS, (samples, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def trained(comm, model, save=None, load=None, steps=range(STEPS), rate=0.01, samples=12, **options):
    """Reports and weights after some steps."""
    options = {"reproducible": True, "clip": 1.0, "batch": 12, "micro_batch": 2, **options}
    with Engine(MODELS[model](), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=rate), **options) as engine:
        if load:
            engine.load(load)
        reports = [engine.step(*batch(step, samples)) for step in steps]
        if save:
            engine.save(save)
        return reports, engine.state_dict()


def expect_same(found, expected):
    (reports, weights), (other_reports, other_weights) = found, expected
    for one, other in zip(reports, other_reports, strict=True):
        assert (one.loss, one.norm, one.terms, one.counts) == (other.loss, other.norm, other.terms, other.counts)
    assert weights.keys() == other_weights.keys()
    assert not [
        name for name in weights if np.asarray(weights[name]).tobytes() != np.asarray(other_weights[name]).tobytes()
    ]


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:1f1b"])
@pytest.mark.parametrize("model", MODELS)
def test_same_bits_as_one_rank(comm, model, layout):
    expected = trained(MPI.COMM_SELF, {"recomputed": "depths"}.get(model, model))
    options = {"micro_batch": None, "microbatches": 6} if layout.startswith("pp") else {}
    expect_same(trained(comm, model, layout=layout, **options), expected)
    terms = {
        "twice": ["balance", "z"],
        "loss": ["balance", "z"],
        "bias": [],
        "depths": ["predictor"],
        "recomputed": ["predictor"],
    }[model]
    last = expected[0][-1]
    assert [name.rpartition(" ")[2] for name in last.terms] == terms
    assert all(value > 0 for value in last.terms.values())


@pytest.mark.parametrize("layout", ["dp", "zero3"])
def test_experts_on_different_ranks(comm, layout):
    size = comm.Get_size()
    expect_same(trained(comm, "bias", mesh=f"dp={size},ep={size}", layout=layout), trained(MPI.COMM_SELF, "bias"))


@pytest.mark.parametrize("router", ROUTERS)
def test_experts_over_divided_sequences(comm, router):
    """Bits of the mesh without `ep`; terms and counts of whole sequences."""
    parts = 2 - comm.Get_size() % 2
    mesh = f"dp={comm.Get_size() // parts},cp={parts}"
    found = trained(comm, router, mesh=f"{mesh},ep={comm.Get_size()}")
    expect_same(found, trained(comm, router, mesh=mesh))
    whole = trained(MPI.COMM_SELF, router)[0][0]
    assert found[0][0].counts == whole.counts and found[0][0].terms == pytest.approx(whole.terms, rel=1e-5)


@pytest.mark.parametrize("folds", ["ep", "etp"])
def test_experts_over_shards(comm, folds):
    """Experts, or parts of them, on the ranks along tp."""
    size = comm.Get_size()
    shards = {"tensor_shards": size, "expert_shards": size if folds == "etp" else 1}
    found = trained(comm, "bias", mesh=f"tp={size},{folds}={size}", **shards)
    expect_same(found, trained(MPI.COMM_SELF, "bias", **shards))


def test_evaluation_of_experts_in_depths(comm):
    """Of fewer sequences on some ranks, and none: that of one rank."""
    size = comm.Get_size()

    def evaluated(comm, **options):
        model, loss = experts("bias"), nn.SoftmaxCrossEntropy()
        model.items[2] = MixtureOfDepths(model.items[2], WIDTH, 0.75)
        with Engine(model, loss, comm, AdamW(lr=0.1), batch=12, micro_batch=2, **options) as engine:
            engine.step(*batch(0))
            return [engine.evaluate(*batch(1, samples)).loss for samples in (1, 3, 2 * size + 1)]

    assert evaluated(comm, mesh=f"dp={size},ep={size}") == pytest.approx(evaluated(MPI.COMM_SELF), rel=1e-4)


@pytest.mark.parametrize("optimizer", [AdamW, LAMB])
def test_fewer_experts_than_ranks(comm, optimizer):
    """The last parameters are those of experts, which some ranks lack."""

    def norms(comm, **options):
        router = Router(WIDTH, 1, RouterSettings(choices=1, normalize=False))
        model = nn.Sequential([nn.Linear(WIDTH, WIDTH), MixtureOfExperts(router, [nn.Linear(WIDTH, WIDTH)])])
        with Engine(model, nn.MSE(), comm, optimizer(lr=0.1), batch=12, **options) as engine:
            x = np.random.default_rng(0).standard_normal((2, 12, WIDTH))
            return [engine.step(x[0], x[1]).norm for _ in range(2)]

    size = comm.Get_size()
    assert norms(comm, mesh=f"dp={size},ep={size}") == pytest.approx(norms(MPI.COMM_SELF), rel=1e-4)


def test_loss_scale_of_fp16(comm):
    """Gradients of loss terms carry the loss scale: norms are near those of fp32, with the same weights."""
    whole, half = (
        trained(comm, "loss", rate=0.0, steps=range(9), precision=precision)[0] for precision in ("fp32", "fp16")
    )
    half = next(one for one in half if not one.skipped)
    whole = whole[half.step]
    assert half.scale > 1 and abs(half.norm - whole.norm) < 0.02 * whole.norm
    assert half.terms == pytest.approx(whole.terms, rel=0.02)


def test_failed_step_leaves_no_records(comm):
    (x, y), wrong = batch(0), batch(0)[0].copy()
    wrong[-1, -1] = TOKENS
    expected = trained(MPI.COMM_SELF, "bias", steps=range(1))[0][0]
    with Engine(experts("bias"), nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), batch=12, micro_batch=2) as engine:
        with pytest.raises(StepFailed, match="not below"):
            engine.step(wrong, y)
        assert engine.step(x, y).counts == expected.counts


@pytest.mark.parametrize("layout", ["ps", "local", "sgp"])
def test_biases_are_refused_where_they_are_not_updated(comm, layout):
    if layout == "ps" and comm.Get_size() == 1:
        pytest.skip("servers need workers beside them")
    model = nn.Recompute(experts("bias"))
    with pytest.raises(ValueError, match=f"layout {layout}: expected operators without buffers"):
        Engine(model, nn.SoftmaxCrossEntropy(), comm, AdamW(lr=0.01), layout=layout, batch=12)


def test_biases_are_saved(comm, tmp_path_factory):
    """Two steps, a checkpoint, and a third by another engine: as three in one."""
    folder = comm.bcast(str(tmp_path_factory.mktemp("biases")))
    expected = trained(comm, "bias")
    trained(comm, "bias", save=folder, steps=range(2))
    found = trained(comm, "bias", load=folder, steps=range(2, 3), layout="zero1")
    expect_same((found[0], found[1]), (expected[0][2:], expected[1]))
