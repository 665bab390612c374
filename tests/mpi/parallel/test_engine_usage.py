"""Uses of an engine that depend on what was given before, or on more than the engine: cuts, own arrays, reports."""

import numpy as np
import pytest
from mpi4py import MPI

from parallel import AdamW, Engine, nn
from parallel.data.datasets import ArrayDataset
from parallel.nn.expert_layers import ExpertLayers
from parallel.nn.models import transformer
from parallel.nn.router import RouterSettings
from parallel.runtime.consistency_check import StepFailed

X = np.random.default_rng(0).standard_normal((48, 6)).astype(np.float32)
Y = np.arange(48) % 4
LOSS = nn.SoftmaxCrossEntropy()


def mlp():
    return nn.mlp([6, 8, 8, 8, 4])


def engine(comm, model=None, optimizer=None, **options):
    return Engine(model or mlp(), LOSS, comm, optimizer or AdamW(lr=0.01), **options)


@pytest.fixture
def several(comm):
    if comm.Get_size() == 1:
        pytest.skip("one rank")


# ---------------------------------------------------------------------------------------------- cuts


@pytest.mark.parametrize("layout", ["dp", "zero3"])
def test_an_evaluation_is_cut_by_its_own_length(comm, layout, monkeypatch):
    """Not as the last step was: after a batch of one, each sample was a micro-batch."""
    with engine(comm, layout=layout) as made:
        cuts, evaluate = [], made.inner.evaluate

        def evaluated(batches, measure):
            cuts.append([len(batch.x) for batch in batches])
            return evaluate(batches, measure)

        monkeypatch.setattr(made.inner, "evaluate", evaluated)
        found = [made.evaluate(X, Y)]
        for count in (48, 1, 5):
            before = made.state_dict()
            made.step(X[:count], Y[:count])
            made.load_state_dict(before)
            found.append(made.evaluate(X, Y))
    assert len({str(cut) for cut in cuts}) == 1 and len(cuts[0]) <= 1
    assert len({(one.loss, one.count) for one in found}) == 1


@pytest.mark.parametrize("options", [{}, {"batch_tokens": 96}, {"layout": "pp:auto", "example": (X, Y)}])
def test_micro_batches_of_a_pipeline_are_those_of_the_given_batch(comm, options):
    """The default batch, of 64 samples, is not used, and need not divide."""
    if comm.Get_size() > 4:
        pytest.skip("four units")
    options = {"layout": "pp", "example": (X, Y), **options}
    with engine(comm, microbatches=6, **options) as made, engine(MPI.COMM_SELF) as alone:
        for count in (24, 48, 25, 7):
            loss = made.step(X[:count], Y[:count]).loss
            assert loss == pytest.approx(alone.step(X[:count], Y[:count]).loss, rel=1e-5)


def test_a_batch_that_does_not_divide_is_refused_where_it_is_given(comm):
    if comm.Get_size() > 4:
        pytest.skip("four units")
    message = "microbatches: a batch of 25 samples does not divide into 6 micro-batches"
    with pytest.raises(ValueError, match=message):
        engine(comm, layout="pp", microbatches=6, batch=25, example=(X, Y))
    with engine(comm, layout="pp", microbatches=6, example=(X, Y)) as made:
        with pytest.raises(ValueError, match=message):
            made.batches(ArrayDataset(X, Y), 25)
        assert sum(made.step(mine).count for mine in made.batches(ArrayDataset(X, Y), 24)) == 48


def test_pipelines_of_any_number(comm):
    """With the default batch too, whose micro-batches are perhaps not the same number for each."""
    with engine(comm, layout="pp", stages=1, example=(X, Y)) as made, engine(MPI.COMM_SELF) as alone:
        assert made.step(X, Y).loss == pytest.approx(alone.step(X, Y).loss, rel=1e-5)


def test_a_batch_beside_a_number_of_tokens(comm):
    with (
        engine(comm, batch_tokens=64) as made,
        pytest.raises(ValueError, match="batch: expected none beside batch_tokens=64, found 8"),
    ):
        made.batches(ArrayDataset(X, Y), 8)


# ---------------------------------------------------------------------------------------------- arrays of operators


class Centred(nn.Operator):
    """x less its mean over the batch, of which it keeps a running mean, as written by hand; or a constant only."""

    def __init__(self, width, running=True, lazy=False):
        self.running, self.mean, self.cached = running, None if lazy else np.zeros(width, np.float32), {}

    def forward(self, x, run):
        if self.cached.get("ones") is None:
            self.cached["ones"] = np.ones(x.shape[1], x.dtype)  # a constant, made in the first pass
        if self.running and run.training:
            mean = x.mean(axis=0)
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return x - x.mean(axis=0) * self.cached["ones"], len(x)

    def backward(self, dy, saved, grads):
        return dy - dy.mean(axis=0)

    def outline(self, x):
        return nn.OperatorOutline(x, ())


def centred(**options):
    units = mlp().items
    return nn.Sequential([*units[:2], Centred(8, **options), *units[2:]])


@pytest.mark.parametrize("layout", ["dp", "zero1", "zero3", "pp", "local", "ps"])
@pytest.mark.parametrize("lazy", [False, True])
def test_running_means_of_an_operator_are_refused(comm, layout, lazy):
    """They would differ by rank, and be in no checkpoint."""
    if comm.Get_size() == 1 and layout == "ps":
        pytest.skip("a server and a worker")
    options = {"example": (X, Y)} if layout == "pp" else {}
    with (
        pytest.raises(StepFailed, match="Centred 2: mean was changed by forward; expected forward to leave attributes"),
        engine(comm, centred(lazy=lazy), layout=layout, micro_batch=4, **options) as made,
    ):
        for _ in range(3):
            made.step(X, Y)
        made.inner.quiesce()


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp"])
def test_constants_of_an_operator_are_taken(comm, layout):
    options = {"example": (X, Y)} if layout == "pp" else {}
    with engine(comm, centred(running=False), layout=layout, micro_batch=4, **options) as made:
        losses = [made.step(X, Y).loss for _ in range(3)]
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------------------------------- reports


def experts():
    routers = RouterSettings(balance_loss=0.1, z_loss=0.01)
    return transformer(16, 8, 2, 2, 8, experts=ExpertLayers(2, routers))


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1"])
def test_terms_of_operators_with_servers(comm, several, consistency):
    """The first server has those of all workers, a worker those of its own micro-batches."""
    tokens = np.random.default_rng(1).integers(0, 16, (12, 9))
    options = {"micro_batch": 2, "optimizer": AdamW(lr=0.01)}
    with engine(MPI.COMM_SELF, experts(), **options) as alone:
        expected = alone.step(tokens[:, :-1], tokens[:, 1:])
    with engine(comm, experts(), layout="ps", consistency=consistency, **options) as made:
        report = made.step(tokens[:, :-1], tokens[:, 1:])
        made.inner.quiesce()
    counted = comm.allreduce(sum(map(sum, report.counts.values())) if comm.Get_rank() else 0)
    assert counted == sum(map(sum, expected.counts.values()))
    if comm.Get_rank() == 0 and consistency == "bsp":
        assert (report.terms, report.counts) == (expected.terms, expected.counts)
    if comm.Get_rank() == 0 or report.count:
        assert report.terms.keys() == expected.terms.keys() and min(report.terms.values()) > 0


def test_terms_of_operators_in_federated_rounds(comm):
    """Means over the local steps of a rank's clients."""
    tokens = np.random.default_rng(1).integers(0, 16, (12, 9))
    options = {"clients": 3, "client_fraction": 1.0, "local_epochs": 2, "batch": 4}
    with engine(comm, experts(), layout="federated", **options) as made:
        (round_, *_) = made.batches(ArrayDataset(tokens[:, :-1], tokens[:, 1:]))
        report = made.step(round_)
    counted = comm.allreduce(sum(map(sum, report.counts.values())))
    assert counted == 2 * 2 * 2 * 12 * 8  # passes, blocks, choices, samples, tokens
    assert all(value > 0 for value in report.terms.values()) and bool(report.terms) == bool(len(round_))
