"""Lessons of docs/lessons: each runs, and has the numbers of the product for the same model and data."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from parallel import SGD, Adam, Engine
from parallel.nn import MSE, Linear, PassMode, ReLU, Sequential
from parallel.nn.mixture import MixtureOfExperts
from parallel.nn.router import Router, RouterSettings
from parallel.pipeline.schedule.pipeline_plan import build
from parallel.sharding.context.ring_attention import RingAttention
from parallel.sharding.context.sequence_division import SequenceDivision
from parallel.sharding.device_mesh import MeshAxis
from quant import PerChannel, QuantSpec
from quant.ptq.gptq import gptq as product_gptq

LESSONS = sorted(path.stem for path in Path(__file__).parents[3].glob("docs/lessons/*.py"))
RATE = 0.1


def lesson(name, comm):
    """The lesson's module; skips where it needs more ranks."""
    if name == "ssp_server" and comm.Get_size() == 1:
        pytest.skip("a server and a worker")
    return importlib.import_module(name)


def units(weights):
    """Layers relu(x W), each one unit of the engine."""
    return [Sequential([Linear(*w.shape, bias=False), ReLU()]) for w in weights]


def trained(model, weights, comm, x, target, steps=1, optimizer=None, **options):
    """Losses of the steps, and weights after them, of an engine that starts with `weights`."""
    with Engine(model, MSE(), comm, optimizer or SGD(lr=RATE), precision="fp64", **options) as engine:
        names = engine.state_dict()
        engine.load_state_dict(dict(zip(names, weights, strict=True)))
        losses = [engine.step(x, target).loss for _ in range(steps)]
        return losses, list(engine.state_dict().values())


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LESSONS)
def test_runs(comm, capsys, name):
    """The checks in its `main` hold, and only rank 0 prints."""
    lesson(name, comm).main(comm)
    assert bool(capsys.readouterr().out) == (comm.Get_rank() == 0)


def test_server_needs_a_worker():
    with pytest.raises(ValueError, match="at least 2 ranks"):
        importlib.import_module("ssp_server").main(MPI.COMM_SELF)


@pytest.fixture
def regression():
    """Weights of three layers, inputs and targets."""
    random = np.random.default_rng(1)
    weights = [random.normal(0, 0.5, shape) for shape in ((6, 11), (11, 11), (11, 3))]
    return weights, random.normal(size=(12, 6)), random.random((12, 3))


def test_ring_allreduce(comm):
    """The same bits as the algorithm "ring", for equal chunks (the product cuts at cache lines)."""
    ring = lesson("ring_allreduce", comm)
    for n in (0, 1, 1024 * comm.Get_size()):
        x = np.random.default_rng(comm.Get_rank()).normal(size=n)
        expected = np.empty_like(x)
        comm.Allreduce(x, expected, algorithm="ring")
        ring.allreduce(comm, x)
        np.testing.assert_array_equal(x, expected)


def test_bucketed_ddp(comm, regression):
    ddp = lesson("bucketed_ddp", comm)
    weights, x, target = regression
    losses, expected = trained(Sequential(units(weights)), weights, comm, x, target, steps=3, layout="dp", batch=12)
    gradients = ddp.BucketedGradients(weights, comm, bucket_size=100)
    own = slice(comm.Get_rank(), None, comm.Get_size())
    for loss in losses:
        close(comm.allreduce(ddp.step(weights, x[own], target[own], target.size, gradients, RATE)), loss)
    for found, one in zip(weights, expected):
        close(found, one)


def test_zero3(comm, regression):
    zero3 = lesson("zero3", comm)
    weights, x, target = regression
    model, adam = Sequential(units(weights)), Adam(lr=0.01)
    losses, expected = trained(model, weights, comm, x, target, 3, adam, layout="zero3", batch=12)
    layers = [zero3.Layer(w, comm) for w in weights]
    own = slice(comm.Get_rank(), None, comm.Get_size())
    for t, loss in enumerate(losses, 1):
        close(comm.allreduce(zero3.step(layers, x[own], target[own], target.size, t)), loss)
    for layer, one in zip(layers, expected):
        close(layer.gather(), one)


@pytest.mark.parametrize("send", ["Isend", "Issend"])
def test_one_f_one_b(comm, monkeypatch, send):
    """Actions of the schedule "1f1b", and gradients of the engine that runs it; also if MPI buffers no message."""
    pipeline, ranks, microbatches = lesson("one_f_one_b", comm), comm.Get_size(), 5
    for stages in range(1, 6):
        for count in range(1, 8):
            for stage, actions in enumerate(build("1f1b", stages, count).actions):
                found = pipeline.schedule(stage, stages, count)
                assert found == [(action.kind.removesuffix("W"), action.microbatch) for action in actions]
    random = np.random.default_rng(0)
    weights, x = random.normal(0, 0.5, (ranks, 4, 4)), random.normal(size=(microbatches, 2, 4))
    target = random.random(x.shape)
    (expected,), after = trained(
        Sequential(units(weights)), weights, comm, x.reshape(-1, 4), target.reshape(-1, 4),
        layout="pp:1f1b", mesh=f"pp={ranks}", microbatches=microbatches, batch=10,
    )  # fmt: skip
    monkeypatch.setattr(type(comm), "Isend", getattr(type(comm), send))
    stage = pipeline.Stage(weights[comm.Get_rank()])
    loss, most = pipeline.step(comm, stage, x, target)
    close(loss, expected)
    close(weights[comm.Get_rank()] - RATE * stage.grad, after[comm.Get_rank()])
    assert most == min(ranks - comm.Get_rank(), microbatches)


def test_tensor_parallel_mlp(comm):
    lesson_mlp, ranks = lesson("tensor_parallel_mlp", comm), comm.Get_size()
    random = np.random.default_rng(0)
    a, b, (x, target) = random.normal(size=(5, 12)), random.normal(size=(12, 5)), random.normal(size=(2, 8, 5))
    layers = [Sequential([Linear(5, 12, bias=False), ReLU()]), Linear(12, 5, bias=False)]
    model = Sequential(layers, cuts={"0.0": "column", "1": "row"})
    (expected,), after = trained(model, [a, b], comm, x, target, mesh=f"tp={ranks}", batch=8)
    layer = lesson_mlp.ParallelMLP(a, b, comm)
    z, saved = layer.forward(x)
    close(np.mean((z - target) ** 2), expected)
    _, da, db = layer.backward(2 * (z - target) / z.size, saved)
    close(np.concatenate(comm.allgather(layer.a - RATE * da), axis=1), after[0])
    close(np.concatenate(comm.allgather(layer.b - RATE * db)), after[1])


def test_ring_attention(comm):
    ring, rank, size, n, d = lesson("ring_attention", comm), comm.Get_rank(), comm.Get_size(), 4, 3
    x, dy = np.random.default_rng(0).normal(size=(4, n * size, d))[:3], np.ones((n, d))
    q, k, v = x[:, n * rank : n * (rank + 1)]
    o, log_sum = ring.forward(comm, q, k, v)
    gradients = ring.backward(comm, q, k, v, o, log_sum, dy)
    axis = MeshAxis("cp", rank, size, comm)
    product = RingAttention(axis, SequenceDivision("contiguous", n * size, size), heads=1)
    y, saved = product.forward(np.concatenate([q, k, v], axis=1)[None], PassMode())
    close(o, y[0])
    close(np.concatenate(gradients, axis=1), product.backward(dy[None], saved, lambda *_: None)[0])


def test_expert_dispatch(comm):
    """Output and gradients of a mixture in the engine, whose experts are divided over the ranks."""
    dispatch, rank, size = lesson("expert_dispatch", comm), comm.Get_rank(), comm.Get_size()
    random, number = np.random.default_rng(0), 2 * size
    router, experts = random.normal(size=(4, number)), random.normal(size=(number, 4, 4))
    x, target = random.normal(size=(2, 2 * size, 3, 4))  # sequences of 3 tokens
    mixture = MixtureOfExperts(Router(4, number, RouterSettings(choices=1, normalize=False)), units(experts))
    (expected,), after = trained(
        Sequential([mixture]), [router, *experts], comm, x, target, mesh=f"dp={size},ep={size}", batch=2 * size
    )
    ours = dispatch.Mixture(comm, router, experts)
    own = slice(2 * rank, 2 * rank + 2)
    y, saved = ours.forward(x[own].reshape(-1, 4))
    off = y - target[own].reshape(-1, 4)
    close(comm.allreduce(np.sum(off**2)) / x.size, expected)
    dx, dw, drouter = ours.backward(2 * off / x.size, saved)
    close(router - RATE * comm.allreduce(drouter), after[0])
    close(np.concatenate(comm.allgather(ours.own - RATE * dw)), after[1:])
    for parameter, values in zip(mixture.parameters(), [router, *experts], strict=True):
        parameter.bind(values)
    y, saved = mixture.forward(x, PassMode())
    close(dx, mixture.backward(2 * (y - target) / x.size, saved, lambda *_: None)[own].reshape(-1, 4))


def test_ssp_server(comm):
    """With staleness 0, the weights of the engine's parameter server."""
    server, ranks = lesson("ssp_server", comm), comm.Get_size()
    random = np.random.default_rng(0)
    x, target = random.normal(size=(12, 5)), random.normal(size=12)
    _, (expected,) = trained(
        Linear(5, 1, bias=False), [np.zeros((5, 1))], comm, x, target[:, None], steps=4,
        layout="ps", consistency="bsp", batch=12, micro_batch=12 // (ranks - 1),
    )  # fmt: skip
    w, leads = server.train(comm, np.zeros(5), x, target, steps=4, staleness=0, rate=RATE)
    close(w, expected[:, 0])
    assert leads == [0] * 4 * (ranks - 1)


def test_gptq(comm):
    """The same weights as of the product, for a symmetric grid of 4 bits."""
    ours, size = lesson("gptq", comm), comm.Get_size()
    random = np.random.default_rng(0)
    w = random.normal(size=(4 * size, 10)).astype(np.float32)
    x = random.normal(size=(40, 3)) @ random.normal(size=(3, 10)) + 0.3 * random.normal(size=(40, 10))
    found = ours.quantize(comm, w.astype(np.float64), x[comm.Get_rank() :: size])
    expected = product_gptq(w, x.T @ x, QuantSpec(4, granularity=PerChannel(0))).dequantize()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_refused_sizes(comm):
    """Errors on all ranks, where experts or rows do not divide."""
    size = comm.Get_size()
    if size == 1:
        pytest.skip("one rank divides everything")
    with pytest.raises(ValueError, match=f"experts: expected a multiple of {size} ranks"):
        lesson("expert_dispatch", comm).Mixture(comm, np.ones((4, size + 1)), np.ones((size + 1, 4, 4)))
    with pytest.raises(ValueError, match=f"a multiple of {size} ranks"):
        lesson("gptq", comm).quantize(comm, np.ones((size + 1, 4)), np.eye(4))
