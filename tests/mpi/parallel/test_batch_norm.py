"""Batch normalisation in float64 as that of PyTorch: results, gradients and running statistics, on any ranks."""

import tempfile

import numpy as np
import pytest

from parallel import SGD, Engine, nn
from parallel.runtime.consistency_check import StepFailed

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks(2, 3)

SHAPES = {"rows": (12, 6), "sequences": (12, 6, 3), "images": (12, 6, 2, 3)}
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def model(shape, sync):
    inner = int(np.prod(shape[2:], initial=1))
    head = nn.Sequential([nn.Flatten(), nn.Linear(6 * inner, 4)])
    return nn.Sequential([nn.BatchNorm(6, eps=1e-4, momentum=0.2, sync=sync), head])


def peer(shape, state):
    make = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    inner = int(np.prod(shape[2:], initial=1))
    made = torch.nn.Sequential(make(6, eps=1e-4, momentum=0.2), torch.nn.Flatten(), torch.nn.Linear(6 * inner, 4))
    made = made.double()
    with torch.no_grad():
        made[2].weight.copy_(torch.tensor(state["1.1.weight"].T))
        made[2].bias.copy_(torch.tensor(state["1.1.bias"]))
    return made


def data(shape, step=0):
    random = np.random.default_rng(step)
    return random.normal(1, 2, shape), random.integers(0, 4, len(shape) and shape[0])


def trained_in_torch(made, shape, parts, steps=3):
    """Train on micro-batches of `parts` samples; running statistics are the mean of those that they arrive at."""
    optimizer, norm = torch.optim.SGD(made.parameters(), lr=0.1), made[0]
    for step in range(steps):
        optimizer.zero_grad()
        before, arrived = (norm.running_mean.clone(), norm.running_var.clone()), []
        x, y = map(torch.tensor, data(shape, step))
        for start in range(0, len(x), parts):
            here = slice(start, start + parts)
            norm.running_mean.copy_(before[0])
            norm.running_var.copy_(before[1])
            loss = torch.nn.functional.cross_entropy(made(x[here]), y[here], reduction="sum") / len(x)
            loss.backward()
            arrived.append((norm.running_mean.clone(), norm.running_var.clone()))
        norm.running_mean.copy_(sum(one for one, _ in arrived) / len(arrived))
        norm.running_var.copy_(sum(one for _, one in arrived) / len(arrived))
        optimizer.step()


def compare(engine, made, shape):
    found, norm = engine.state_dict(), made[0]
    expected = {"0.gain": norm.weight, "0.bias": norm.bias, "1.1.weight": made[2].weight.T, "1.1.bias": made[2].bias}
    expected |= {"0.running_mean": norm.running_mean, "0.running_var": norm.running_var}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values.detach().numpy(), **EXACT, err_msg=name)
    x, y = data(shape, 9)
    made.eval()
    with torch.no_grad():
        scores = made(torch.tensor(x))
    made.train()
    np.testing.assert_allclose(engine.predict(x), scores.numpy(), **EXACT)
    loss = torch.nn.functional.cross_entropy(scores, torch.tensor(y)).item()
    assert engine.evaluate(x, y).loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_like_torch(comm, kind, sync):
    """Micro-batches of 4 samples, or one a rank with the statistics of all."""
    shape, ranks = SHAPES[kind], comm.Get_size()
    pipeline = ("pp",) if ranks <= 2 and not sync else ()  # the model has two units
    for layout in ("dp", "zero1", "zero3", *pipeline):
        options = {} if sync else {"micro_batch": 4}
        with Engine(model(shape, sync), nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), batch=12, layout=layout,
                    precision="fp64", **options) as engine:  # fmt: skip
            made = peer(shape, engine.state_dict())
            for step in range(3):
                engine.step(*data(shape, step))
            trained_in_torch(made, shape, 12 if sync else 4)
            compare(engine, made, shape)
    assert ranks


def test_uneven_replicas_of_one_batch(comm):
    """Ranks of unequal micro-batches count by their samples."""
    shape = (3 * comm.Get_size() - 1, 6)
    with Engine(model(shape, True), nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), micro_batch=3, precision="fp64",
                batch=12) as engine:  # fmt: skip
        made = peer(shape, engine.state_dict())
        for step in range(3):
            engine.step(*data(shape, step))
        trained_in_torch(made, shape, shape[0])
        compare(engine, made, shape)


def test_checkpoints_have_running_statistics(comm):
    shape = SHAPES["rows"]
    folder = comm.bcast(tempfile.mkdtemp() if comm.Get_rank() == 0 else None)
    made = [Engine(model(shape, False), nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), layout=layout, batch=12,
                   precision="fp64", micro_batch=4) for layout in ("dp", "zero3")]  # fmt: skip
    with made[0] as engine, made[1] as other:
        engine.step(*data(shape))
        engine.save(folder)
        other.load(folder)
        for one in (engine, other):
            one.step(*data(shape, 1))
        expected = engine.state_dict()
        for name, values in other.state_dict().items():
            np.testing.assert_allclose(values, expected[name], **EXACT, err_msg=name)
    alone = other.settings and expected["0.running_mean"]
    assert abs(alone).max() > 0.01


def test_refusals(comm):
    shape, ranks = SHAPES["rows"], comm.Get_size()

    def step(samples=12, **options):
        with Engine(model(shape, True), nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), batch=12, **options) as engine:
            engine.step(*data((samples, 6)))

    with pytest.raises(ValueError, match="reproducible: True is for BatchNorm without sync"):
        step(reproducible=True)
    with pytest.raises(ValueError, match="pool: True is for BatchNorm without sync"):
        step(pool=True)
    with pytest.raises(ValueError, match=r"layout: pp.* is for BatchNorm without sync"):
        step(layout="pp", stages=2 if ranks == 2 else 1)
    with (
        Engine(model(shape, False), nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), micro_batch=1) as engine,
        pytest.raises(StepFailed, match="expected several values of each feature"),
    ):
        engine.step(*data((3, 6)))
    if ranks > 1:
        with pytest.raises(ValueError, match="BatchNorm: sync needs as many micro-batches on all ranks; found "):
            step(4 * ranks + 1 if ranks == 2 else 13, micro_batch=4)


@pytest.mark.parametrize("sync", [False, True])
def test_an_error_on_one_rank(comm, sync):
    """In an operator before the exchange; the others do not wait, and nothing is updated."""

    class Faulty(nn.ReLU):
        def forward(self, x, run):
            if comm.Get_rank() == comm.Get_size() - 1 and run.training:
                raise ArithmeticError("broken")
            return super().forward(x, run)

    units = [Faulty(), nn.BatchNorm(6, sync=sync), nn.Linear(6, 4)]
    with Engine(nn.Sequential(units), nn.SoftmaxCrossEntropy(), comm, SGD(lr=0.1), batch=12) as engine:
        before = engine.state_dict()
        with pytest.raises(StepFailed, match=r"nothing was updated; rank .*broken"):
            engine.step(*data((12, 6)))
        for name, values in engine.state_dict().items():
            assert np.array_equal(values, before[name])
