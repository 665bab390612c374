"""Random operators of a user's own in every layout, against a loop in float64 without an engine."""

import re
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from support.tiers import default
from support.tiny_models import Squares

from parallel import SGD, Engine, nn
from parallel.nn.flat_params import FlatParams
from parallel.nn.gradcheck import check

WIDTH, BATCH, STEPS = 5, 12, 3
LAYOUTS = ("dp-naive", "dp-bucket", "dp", "zero1", "zero2", "zero3", "pp", "pp:gpipe", "pp:zb-h1", "ps")
CONTAINERS = (
    lambda parameters: dict(enumerate(parameters)),
    lambda parameters: {"deep": {f"p{number}": one for number, one in enumerate(parameters)}},
    list,
    tuple,
    lambda parameters: [parameters[:1], {"rest": tuple(parameters[1:])}],
)


class Terms(nn.Operator):
    """Sum of x and of terms of random parameters: matrices, their transposes and vectors, some used several times.

    `uses` are (parameter, kind); each use is one more reference, so that the engine knows how often a gradient comes.
    """

    def __init__(self, random, shared):
        own = [parameter(random) for _ in range(random.integers(1, 4))]
        borrowed = [shared[at] for at in random.integers(0, len(shared), random.integers(0, 2))]
        chosen = [(own + borrowed)[at] for at in random.integers(0, len(own + borrowed), random.integers(1, 5))]
        self.first = [one for one in chosen if one.shape == (WIDTH,)]
        self.others = CONTAINERS[random.integers(len(CONTAINERS))]([one for one in chosen if len(one.shape) == 2])
        self.uses = lambda: [(one, kind) for one, kind in zip(chosen, random_kinds)]
        random_kinds = random.integers(0, 2, len(chosen)).tolist()
        self.unused = {"never": parameter(random)} if random.integers(2) else {}
        self.hand_in = random.permutation(len(chosen)).tolist()

    def forward(self, x, run):
        y = x.copy()
        for one, kind in self.uses():
            if len(one.shape) == 1:
                y += x * one.data if kind else one.data
            else:
                y += np.tanh(x) @ (one.data.T if kind else one.data)
        return y, x

    def backward(self, dy, x, grads):
        uses, dx, slope = self.uses(), dy.copy(), 1 - np.tanh(x) ** 2
        for one, kind in uses:
            if len(one.shape) == 2:
                dx += slope * (dy @ (one.data if kind else one.data.T))
            elif kind:
                dx += dy * one.data
        for at in self.hand_in:
            grads(uses[at][0], lambda out, at=at: np.copyto(out, self.gradient(uses[at], dy, x)))
        return dx

    @staticmethod
    def gradient(use, dy, x):
        one, kind = use
        if len(one.shape) == 1:
            return (dy * x if kind else dy).sum(0)
        return dy.T @ np.tanh(x) if kind else np.tanh(x).T @ dy


def parameter(random):
    shape = (WIDTH,) if random.integers(2) else (WIDTH, WIDTH)
    return nn.Parameter(shape, nn.normal(0.2), decay=bool(random.integers(2)))


def model(seed):
    """Four units; some parameters belong to several of them, some are frozen."""
    random = np.random.default_rng(seed)
    shared = [parameter(random) for _ in range(2)]
    made = nn.Sequential([Terms(random, shared) for _ in range(4)])
    for one in made.parameters():
        one.requires_grad = random.random() > 0.1
    return made


def data(seed, step):
    random = np.random.default_rng([seed, step])
    return random.normal(size=(BATCH, WIDTH)), random.normal(size=(BATCH, WIDTH))


def reference(seed):
    """Weights by name after SGD with momentum and decay on whole batches."""
    made, loss = model(seed), Squares()
    flat = FlatParams(made)
    vector, velocity = np.empty(flat.length), {}
    flat.initialise(vector, 0)
    flat.bind(vector)
    for step in range(STEPS):
        x, y = data(seed, step)
        sums = {}

        def sink(one, compute, sums=sums):
            part = np.empty(one.shape)
            compute(part)
            sums[one.name] = sums.get(one.name, 0) + part

        scores, saved = made.forward(x, nn.PassMode())
        _, kept = loss.forward(scores, y)
        made.backward(loss.backward(1.0, kept), saved, sink)
        for one in made.parameters():
            if one.requires_grad:
                gradient = sums.get(one.name, 0) / BATCH + 0.1 * one.decay * one.data
                velocity[one.name] = 0.9 * velocity.get(one.name, 0) + gradient
                one.data -= 0.05 * velocity[one.name]
    return {one.name: one.data.copy() for one in made.parameters()}


@pytest.mark.parametrize("seed", default(range(100), 0, 1, 2))
def test_against_a_plain_loop(comm, seed):
    """Each seed takes all layouts in turn, with other ways to cut the batch."""
    expected = reference(seed)
    for layout in (LAYOUTS[(seed + at) % len(LAYOUTS)] for at in range(4 if seed < 3 else len(LAYOUTS))):
        if (layout == "ps" and comm.size < 2) or (layout.startswith("pp") and comm.size > 4):
            continue
        optimizer, made = SGD(lr=0.05, momentum=0.9, weight_decay=0.1), model(seed)
        options = {"precision": "fp64", "batch": BATCH, "micro_batch": 2 + seed % 3, "bucket_bytes": 2048 + seed}
        with Engine(made, Squares(), comm, optimizer, layout=layout, first_bytes=1, **options) as engine:
            for step in range(STEPS):
                engine.step(*data(seed, step))
            found = engine.state_dict()
            engine.inner.quiesce()
            if layout != "ps":
                assert engine.ledger.predicted == engine.ledger.allocated, layout
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-9, atol=1e-11, err_msg=f"{layout} {name}")


def test_the_operators_themselves():
    """Their gradients are right, and come as often as they are held: so the test above has a reference."""
    for seed in range(5):
        for unit in model(seed).requires_grad_(True).items:
            unit.unused = {}
            assert check(unit, np.random.default_rng(seed).normal(size=(3, WIDTH))) < 1e-6


@pytest.mark.parametrize("layout", default(("dp", "zero2", "zero3", "pp", "ps", "local"), "zero3", "ps"))
def test_the_program_of_the_documentation(comm, layout, monkeypatch):
    """At most 30 lines, with data and test; unchanged in six layouts."""
    if (layout == "ps" and comm.size < 2) or (layout == "pp" and comm.size > 2):
        pytest.skip("servers and workers; two units")
    page = Path(__file__).parents[3] / "docs/guide/from_pytorch.md"
    program = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert len(program.splitlines()) <= 30
    monkeypatch.setenv("LAYOUT", layout)
    if comm.size == MPI.COMM_WORLD.size:
        exec(compile(program, str(page), "exec"), {})


class Forked(nn.Operator):
    """Makes a tuple of an array, its double, and integers."""

    def forward(self, x, run):
        return (x, 2 * x, np.arange(x.size).reshape(x.shape)), None

    def backward(self, dy, saved, grads):
        assert dy[2] is None
        return dy[0] + 2 * dy[1]


class Squared(nn.Operator):
    """Squares the second array of three."""

    def forward(self, x, run):
        return (x[0], x[1] * x[1], x[2]), x[1]

    def backward(self, dy, saved, grads):
        return dy[0], 2 * saved * dy[1], None


class Centred(nn.Operator):
    """Adds two arrays, and subtracts their mean over the samples, in evaluation a running one."""

    def __init__(self, width):
        self.mean = nn.StateBuffer(np.zeros(width))

    def forward(self, x, run):
        assert x[2].dtype == np.int64
        y = x[0] + x[1]
        if not run.training:
            return y - self.mean.values, None
        run.buffers[run.use(self.name), self.mean.name] = 0.5 * self.mean.values + 0.5 * y.mean(0)
        return y - y.mean(0), None

    def backward(self, dy, saved, grads):
        dx = dy - dy.mean(0)
        return dx, dx, None


@pytest.mark.parametrize("layout", ["dp", "zero3", "pp:gpipe", "pp:1f1b", "pp:zb-h1"])
def test_tuples_and_buffers(comm, layout):
    """Losses and the running mean of one rank, whose value after a step is that of the mean of micro-batches."""
    x, y = np.random.default_rng(0).standard_normal((BATCH, WIDTH)), np.arange(BATCH) % WIDTH
    found = []
    for ranks, name in ((MPI.COMM_SELF, "dp"), (comm, layout)):
        cut = {"microbatches": 4} if name.startswith("pp") else {"micro_batch": 3}
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        model = nn.Sequential([first, Forked(), Squared(), Centred(WIDTH), last])
        options = {"layout": name, "precision": "fp64", "batch": BATCH, **cut}
        with Engine(model, nn.SoftmaxCrossEntropy(), ranks, SGD(lr=0.1), **options) as engine:
            weights = engine.state_dict()
            z = x @ weights["0.weight"]
            report = engine.step(x, y)
            np.testing.assert_allclose(engine.state_dict()["3.mean"], 0.5 * (z + 4 * z * z).mean(0), rtol=1e-12)
            found.append([report.loss, engine.step(x, y).loss, engine.evaluate(x, y).loss])
    np.testing.assert_allclose(*found, rtol=1e-12)
