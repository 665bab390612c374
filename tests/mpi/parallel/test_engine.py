"""The engine for every strategy: whole batches in, the same training out; state, freezing, averages, errors."""

import math

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models

pytest.importorskip("safetensors")

from parallel import SGD, AdamW, Engine, Settings, nn
from parallel.checkpoint.checkpoint_files import CheckpointError
from parallel.data.datasets import ArrayDataset
from parallel.nn.operator import name_all
from parallel.nn.transforms.pruning import Pruning
from parallel.runtime.consistency_check import RankMismatch, StepFailed

SYNCHRONOUS = {
    "dp-naive": {},
    "dp": {"accumulate": 3},
    "zero1": {"micro_batch": 3},
    "zero2": {"pool": False},
    "zero3": {"reproducible": True},
    "pp": {},
    "pp:zb-h1": {"micro_batch": 5},
    "ps": {},
}
EVERY = {**SYNCHRONOUS, "local": {"tau": 2}, "sgp": {}}
STEPS = 5

synchronous = pytest.mark.parametrize("layout", SYNCHRONOUS)
every = pytest.mark.parametrize("layout", EVERY)


def batch(step=0, size=24):
    random = np.random.default_rng(step)
    x = random.normal(size=(size, 7))
    return x, np.tanh(x[:, ::-1])


def engine(comm, layout, model=None, optimizer=None, loss=None, **options):
    if layout == "ps" and comm.size < 2:
        pytest.skip("servers and workers")
    if layout.startswith("pp") and comm.size > 4:
        pytest.skip("five units")
    optimizer = optimizer or AdamW(lr=0.01, weight_decay=0.1)
    options = {"precision": "fp64", "batch": 24, "bucket_bytes": 3000, "first_bytes": 1} | EVERY[layout] | options
    model = model or tiny_models.model(tied=layout in SYNCHRONOUS)
    return Engine(model, loss or tiny_models.Squares(), comm, optimizer, layout=layout, **options)


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-10, atol=1e-12, err_msg=name)


def trained(made, steps=range(STEPS)):
    return [made.step(*batch(step)).loss for step in steps]


@pytest.fixture(scope="module")
def alone():
    """Losses, evaluation and weights of one rank."""
    with engine(MPI.COMM_SELF, "dp-naive") as made:
        return trained(made), made.evaluate(*batch(9, 10)), made.state_dict()


@pytest.mark.ranks(1, 2, 3)
@synchronous
def test_the_same_training_in_every_layout(comm, layout, alone):
    losses, tested, weights = alone
    with engine(comm, layout) as made:
        found = trained(made)
        assert made.steps == STEPS
        assert made.is_reporter == (comm.rank == 0)
        if layout != "ps" or comm.rank == 0:  # workers report their own parts
            np.testing.assert_allclose(found, losses, rtol=1e-11)
        other = made.evaluate(*batch(9, 10))
        assert other.count == tested.count == 10
        assert math.isclose(other.loss, tested.loss, rel_tol=1e-11)
        close(made.state_dict(), weights)
        assert made.updates == STEPS


@synchronous
def test_loaded_shares_of_a_data_set(comm, layout):
    data = ArrayDataset(*batch(0, 50))
    with engine(MPI.COMM_SELF, "dp-naive") as made:
        for epoch in range(2):
            for some in made.batches(data, 24, epoch=epoch):
                made.step(some)
        expected = made.state_dict()
    with engine(comm, layout) as made:
        for epoch in range(2):
            for some in made.batches(data, epoch=epoch):
                made.step(some)
        assert made.steps == 6
        close(made.state_dict(), expected)


@pytest.mark.parametrize("layout", ["dp", "zero1"])
def test_drawn_micro_batches(comm, layout, alone):
    with engine(comm, layout, accumulate=None, micro_batch=2, pool=True) as made:
        trained(made)
        close(made.state_dict(), alone[2])


@pytest.mark.ranks(2, 3)
@every
@pytest.mark.parametrize("other", ["zero2", "dp-naive"])
def test_a_checkpoint_goes_to_any_layout(comm, layout, other, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("checkpoints")))
    with engine(comm, layout) as made:
        trained(made, range(2))
        made.save(folder, epoch=3)
        expected = made.state_dict()
    with engine(comm, other, tiny_models.model(tied=layout in SYNCHRONOUS)) as made:
        assert made.load(folder) == {"epoch": 3}
        assert made.steps == 2
        close(made.state_dict(), expected)
        again = trained(made, range(2, 4))
    with engine(comm, layout) as made:
        made.load(folder)
        found = trained(made, range(2, 4))
        if layout in SYNCHRONOUS and layout != "ps":
            np.testing.assert_allclose(found, again, rtol=1e-10)


def test_checkpoints_that_cannot_be_loaded(comm, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("checkpoints")))
    with engine(comm, "dp") as made:
        with pytest.raises(CheckpointError, match="has no checkpoints"):
            made.load(folder)
        path = made.save(folder)
    other = AdamW(lr=0.1, ema=0.5)
    with engine(comm, "dp", optimizer=other) as made, pytest.raises(CheckpointError, match="of another optimiser"):
        made.load(path)


@every
def test_weights_as_a_dictionary(comm, layout, alone):
    """All or some of them; what does not fit changes nothing."""
    with engine(comm, layout) as made:
        trained(made, range(2))
        before = made.state_dict()
        new = {name: values + 1 for name, values in before.items()}
        for wrong, text in (
            ({**new, "0.bias": np.zeros(3)}, r"0\.bias: expected an array of shape \(20,\), found \(3,\)"),
            ({"0.bias": new["0.bias"]}, "missing are .*unknown are"),
            ({**new, "head": 1.0}, r"unknown are \['head'\]"),
        ):
            with pytest.raises(ValueError, match=text):
                made.load_state_dict(wrong)
        close(made.state_dict(), before)
        made.load_state_dict({"0.bias": new["0.bias"], "head": 1.0}, strict=False)
        close(made.state_dict(), {**before, "0.bias": new["0.bias"]})
        made.load_state_dict(new)
        close(made.state_dict(), new)
        made.step(*batch(7))
        moved = made.state_dict()
        assert all(0 < np.abs(moved[name] - new[name]).max() < 0.5 for name in new)


@every
def test_frozen_units_groups_and_hooks(comm, layout):
    """Frozen parameters keep their bits, groups have their rates, and hooks see every gradient."""
    model, seen = tiny_models.model(tied=False), []
    model.items[1].requires_grad_(False)
    hooked = model.items[-1].bias

    def hook(gradient):
        seen.append(gradient.shape)
        gradient[1:] = 0
        return -gradient

    handle = hooked.register_hook(hook)
    still = {"params": model.items[2].parameters(), "lr": 0.0}
    with engine(comm, layout, model, AdamW(lr=0.01, weight_decay=0.0, groups=[still])) as made:
        before = made.state_dict()
        trained(made, range(3))
        after = made.state_dict()
        for name in before:
            unit = int(name.partition(".")[0])
            same = np.array_equal(before[name], after[name])
            assert same == (unit in (1, 2)), name
        assert (after[hooked.name][1:] == before[hooked.name][1:]).all()
        assert comm.allreduce(len(seen)) > 0 and set(seen) <= {(7,)}
        model.items[1].requires_grad_(True)
        trained(made, range(3, 5))
        assert not np.array_equal(before["1.inner.0.weight"], made.state_dict()["1.inner.0.weight"])
        handle.remove()
        count = len(seen)
        trained(made, range(5, 7))
        assert len(seen) == count and not np.array_equal(before[hooked.name][1:], made.state_dict()[hooked.name][1:])


METHODS = {
    "step": lambda made, data: made.step(data.x, data.y),
    "evaluate": lambda made, data: made.evaluate(data.x, data.y),
    "batches": lambda made, data: made.batches(data),
    "state_dict": lambda made, data: made.state_dict(),
    "load_state_dict": lambda made, data: made.load_state_dict({}),
    "save": lambda made, data: made.save("/dev/null/a"),
    "load": lambda made, data: made.load("/dev/null/a"),
    "with": lambda made, data: made.__enter__(),
}


@every
def test_a_closed_engine(comm, layout):
    """Its methods are refused by name, whoever closed it; another `close` does nothing."""
    data = ArrayDataset(*batch())
    with engine(comm, layout) as made:
        made.step(data.x, data.y)
        made.close()
    made.close()
    for name, call in METHODS.items():
        with pytest.raises(RuntimeError, match=f"^{name}: expected an open engine, found one that is closed$"):
            call(made, data)
    assert made.steps == 1


@pytest.mark.parametrize(
    ("epoch", "error"),
    [(-1, ValueError), (1.5, TypeError), (float("nan"), TypeError), ("1", TypeError), (None, TypeError)],
)
def test_epochs_that_are_none(comm, epoch, error):
    data = ArrayDataset(*batch())
    with engine(comm, "dp-naive") as made:
        with pytest.raises(error, match=f"^epoch: expected an integer from 0 on, found {epoch!r}$"):
            made.batches(data, epoch=epoch)
        assert len(list(made.batches(data, epoch=np.int64(3)))) == 1


@every
def test_moving_average(comm, layout):
    """Evaluated and read in place of the weights, which come back."""
    with engine(comm, layout, optimizer=AdamW(lr=0.01, ema=0.75)) as made:
        average = made.state_dict()
        for step in range(4):
            made.step(*batch(step))
            weights = made.state_dict()  # the mean of replicas, from which decentralised styles go on
            average = {name: 0.75 * average[name] + 0.25 * weights[name] if step else weights[name] for name in weights}
        close(made.state_dict(ema=True), average)
        own, of_average = made.evaluate(*batch(9)), made.evaluate(*batch(9), ema=True)
        close(made.state_dict(), weights)
        made.load_state_dict(average)
        assert math.isclose(made.evaluate(*batch(9)).loss, of_average.loss, rel_tol=1e-10)
        assert not math.isclose(own.loss, of_average.loss, rel_tol=1e-6)
    with engine(comm, layout) as made, pytest.raises(ValueError, match="ema: expected an optimizer with a moving"):
        made.state_dict(ema=True)


@every
def test_a_batch_of_each_rank_is_refused(comm, layout):
    """As a program for DistributedDataParallel has."""
    if comm.size == 1:
        pytest.skip("one rank")
    with engine(comm, layout) as made:
        with pytest.raises(
            RankMismatch,
            match=r"rank 0 has x: float\d\d of shape \(24.*, hash .*; rank 1 has x: float\d\d of shape \(24",
        ):
            made.step(*batch(comm.rank))
        made.step(*batch(0))
        with pytest.raises(RankMismatch, match=r"rank 0 has x: float\d\d of shape \(10, 7\)"):
            made.evaluate(*batch(comm.rank, 10))


class Broken(tiny_models.Dense):
    """Operator that fails in its second forward pass in training."""

    calls = 0

    def forward(self, x, run):
        self.calls += run.training
        if self.calls > 1:
            raise LookupError("no such thing")
        return super().forward(x, run)


@every
def test_errors_name_the_operator_and_keep_the_cause(comm, layout):
    """On every rank the text has the operator; on the rank of the error its traceback is there."""
    model = tiny_models.model(tied=False)
    model.items[0] = Broken(7, 20)
    failed = pytest.raises(StepFailed, match=r"no such thing.*in the forward of Broken 0")
    several = {} if "accumulate" in EVERY[layout] else {"micro_batch": 3}
    with failed as caught, engine(comm, layout, model, **several) as made:
        for step in range(8):
            made.step(*batch(step))
        made.evaluate(*batch(0))
    error, frames = caught.value, []
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_qualname)
            trace = trace.tb_next
        error = error.__cause__
    assert comm.allreduce("Broken.forward" in frames) > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": 0.1}, "lr: expected an option of engines; the optimizer has it"),
        ({"epochs": 3}, "epochs: expected an option of engines; the training program has it"),
        ({"settings": Settings(dropout=0.1)}, "dropout: expected an option of engines; the model has it"),
        ({"settings": Settings(rate=0.1)}, "rate: expected an option of engines; the optimizer has it"),
        ({"prune": 0.5}, "steps: pruning reaches 0.5 after half of them; expected a number, found None"),
        ({"products": "fp9"}, "products: expected one of stored, fp8, mxfp8; found 'fp9'"),
        ({"micro_batches": 3}, "micro_batches: expected an option of engines; perhaps microbatches"),
        ({"layout": "dq"}, "layout: expected one of"),
        ({"layout": "dp", "servers": 3}, "servers: it belongs to ps"),
        ({"layout": "pp:auto"}, "example: pp:auto measures the model"),
    ],
)
def test_options_that_are_refused(comm, options, text):
    with pytest.raises(ValueError, match=text):
        Engine(tiny_models.model(), tiny_models.Squares(), comm, AdamW(lr=0.1), **options)
    with pytest.raises(TypeError, match="settings: expected Settings"):
        Engine(tiny_models.model(), tiny_models.Squares(), comm, AdamW(lr=0.1), {"layout": "dp"})


@pytest.mark.parametrize("layout", ["dp", "zero3", "ps", "local"])
def test_transforms_of_the_settings(comm, layout):
    """Tests compute with pruned weights, whatever the layout; the state has all of them."""
    loss, optimizer = nn.SoftmaxCrossEntropy(), AdamW(lr=0.01)
    x, y = np.random.default_rng(0).normal(size=(24, 7)).astype("f4"), np.arange(24) % 5
    with engine(comm, layout, nn.mlp([7, 16, 5]), optimizer, loss, precision="fp32", prune=0.5, steps=2) as made:
        for _ in range(4):
            made.step(x, y)
        weights, tested = made.state_dict(), made.evaluate(x, y)
    model = nn.mlp([7, 16, 5])
    for parameter in name_all(model):
        values = weights[parameter.name]
        assert np.count_nonzero(values) > 0.9 * values.size or values.ndim == 1
        parameter.data = Pruning(0.5).values(values.T, 4).T if values.ndim == 2 else values
    scores, _ = model.forward(x, nn.PassMode(training=False))
    assert math.isclose(loss.forward(scores, y)[0] / 24, tested.loss, rel_tol=1e-5)


def test_the_settings_name_the_optimizer(comm):
    with engine(comm, "dp", optimizer=SGD(lr=0.1)) as made:
        assert made.settings.optimizer == "sgd"


def test_lengths_that_differ(comm):
    with engine(comm, "dp") as made, pytest.raises(StepFailed, match="24 inputs, 25 targets, 24 sample numbers"):
        made.step(batch()[0], batch(0, 25)[1])


def test_cuts_measured_on_an_example(comm):
    if comm.size > 4:
        pytest.skip("five units")
    settings = Settings(layout="pp:auto", batch=24, precision="fp64")
    with Engine(
        tiny_models.model(tied=False), tiny_models.Squares(), comm, AdamW(lr=0.01), settings, example=batch()
    ) as made:
        assert made.settings.cuts is not None and made.settings.layout != "pp:auto"
        assert math.isfinite(made.step(*batch()).loss)
