"""Operators of a user's own in every engine: how their gradients may come, and what is said of their mistakes."""

import numpy as np
import pytest
from mpi4py import MPI
from support import tiny_models
from support.training_states import differing, whole

from collectives import Communicator
from parallel.asynchronous.decentralized.replica_engine import ReplicaEngine
from parallel.asynchronous.server.server_engine import ParameterServer
from parallel.engine.data_parallel.layouts import LAYOUTS
from parallel.engine.data_parallel_engine import DataParallelEngine
from parallel.engine.settings import Settings
from parallel.nn.compose import Sequential
from parallel.optim.optimizers import SGD
from parallel.pipeline.pipeline_engine import Pipeline
from parallel.runtime.consistency_check import StepFailed

STEPS = (7, 1, 4, 3)

layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Rows(tiny_models.Dense):
    """Hands in the gradients of a batch's halves one after another, the first one's weight twice before any bias."""

    def backward(self, dy, saved, grads):
        for half in (slice(2), slice(2, None)):
            super().backward(dy[half], tuple(array[half] for array in saved), grads)
        return super().backward(dy, saved, lambda parameter, compute: None)


class Returns(tiny_models.Dense):
    """A gradient that is returned and not written."""

    def backward(self, dy, saved, grads):
        grads(self.weight, lambda out: saved[0].T @ dy)
        return super().backward(dy, saved, lambda parameter, compute: None)


class Stray(tiny_models.Dense):
    """Hands in the gradient of a parameter that it does not hold."""

    def __init__(self, inputs, outputs, parameter):
        super().__init__(inputs, outputs)
        self.other = lambda: parameter

    def backward(self, dy, saved, grads):
        grads(self.other(), lambda out: out.fill(1.0))
        return super().backward(dy, saved, grads)


def model(dense):
    """The matrix of the last unit is the first one's; the units in between are not tied."""
    first = dense(7, 20)
    return Sequential([first, dense(20, 20), dense(20, 20), dense(20, 7), dense(7, 20), tiny_models.Dense(20, 7)])


def tied(dense):
    first = dense(7, 20)
    return Sequential([first, dense(20, 20), dense(20, 20), dense(20, 7, first.weight, transposed=True)])


def data_parallel(comm, layout, model, **settings):
    settings = {"first_bytes": 1, "bucket_bytes": 3000, **settings}
    return DataParallelEngine(
        model, tiny_models.Squares(), comm, SGD(rate=0.05, momentum=0.9), Settings(layout=layout, **settings)
    )


def trained(comm, made):
    with made:
        for step, count in enumerate(STEPS):
            made.step(tiny_models.batches(made.share(count), step))
        return whole(comm, made)


@pytest.fixture(scope="module")
def alone():
    with Communicator(MPI.COMM_SELF) as comm:
        yield comm


def close(state, expected):
    assert state.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(state[name], values, rtol=1e-11, atol=1e-12, err_msg=name)


@layouts
@pytest.mark.parametrize("kind", [model, tied])
def test_several_hand_ins_add_up(comm, layout, kind, alone):
    expected = trained(alone, data_parallel(alone, "dp-naive", kind(tiny_models.Dense), precision="fp64"))
    close(trained(comm, data_parallel(comm, layout, kind(Rows), precision="fp64")), expected)


@layouts
@pytest.mark.parametrize("kind", [model, tied])
def test_and_have_the_same_bits_where_that_is_asked_for(comm, layout, kind, alone):
    expected = trained(alone, data_parallel(alone, "dp-naive", kind(Rows), reproducible=True))
    assert differing(trained(comm, data_parallel(comm, layout, kind(Rows), reproducible=True)), expected) == []


def pipeline(comm, model, schedule="1f1b", **settings):
    mesh = f"pp={comm.size}"
    settings = {"bucket_bytes": 3000, "first_bytes": 1, "microbatches": 7, **settings}
    return Pipeline(
        model,
        tiny_models.Squares(),
        comm,
        SGD(rate=0.05, momentum=0.9),
        Settings(layout=f"pp:{schedule}", mesh=mesh, **settings),
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", [model, tied])
def test_they_do_in_pipelines(comm, schedule, kind, alone):
    if comm.size > 4:
        pytest.skip("four units at most")
    expected = trained(alone, data_parallel(alone, "dp-naive", kind(tiny_models.Dense), precision="fp64"))
    close(trained(comm, pipeline(comm, kind(Rows), schedule, precision="fp64")), expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_they_have_the_same_bits_in_pipelines(comm, schedule, alone):
    if comm.size > 6:
        pytest.skip("six units")
    expected = trained(alone, data_parallel(alone, "dp-naive", model(Rows), reproducible=True))
    assert differing(trained(comm, pipeline(comm, model(Rows), schedule, reproducible=True)), expected) == []


def test_an_order_that_would_show_is_refused(comm):
    if not 1 < comm.size <= 4:
        pytest.skip("the first and the last unit are in one part")
    told = r"0\.weight belongs to several parts .* came 2 times in one backward"
    with pipeline(comm, tied(Rows), reproducible=True) as made, pytest.raises(StepFailed, match=told):
        made.step(tiny_models.batches(made.share(4)))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("kind", [model, tied])
def test_they_do_with_servers(comm, kind, reproducible, alone):
    if comm.size < 2:
        pytest.skip("a server and a worker")
    settings = {"precision": "fp64", "reproducible": reproducible}
    expected = trained(alone, data_parallel(alone, "dp-naive", kind(tiny_models.Dense), **settings))
    with ParameterServer(
        kind(Rows),
        tiny_models.Squares(),
        comm,
        SGD(rate=0.05, momentum=0.9),
        Settings(layout="ps", bucket_bytes=3000, first_bytes=1, **settings),
    ) as made:
        for step, count in enumerate(STEPS):
            made.step(tiny_models.batches(range(count), step))
        made.quiesce()
        close(whole(comm, made), expected)


# ------------------------------------------------------------------------------------------ what is refused


def broken(comm, engine, wrong):
    """A model whose second unit is wrong."""
    made = model(tiny_models.Dense)
    made.items[1] = wrong(made)
    if engine in LAYOUTS:
        return data_parallel(comm, engine, made)
    if engine == "ps":
        return ParameterServer(made, tiny_models.Squares(), comm, SGD(rate=0.1))
    if engine == "local":
        return ReplicaEngine(made, tiny_models.Squares(), comm, SGD(rate=0.1), Settings(layout="local"))
    return pipeline(comm, made, engine)


engines = pytest.mark.parametrize("engine", [*LAYOUTS, "1f1b", "zb-h1", "ps", "local"])


def refused(comm, engine, wrong, told, batches=tiny_models.batches):
    if comm.size > 6 or (engine == "ps" and comm.size < 2):
        pytest.skip("six units; a server and a worker")
    made = broken(comm, engine, wrong)
    try:
        with pytest.raises(StepFailed, match=told):
            share = range(6) if engine == "ps" else made.share(6)
            for step in range(20):  # styles tell some steps later
                made.step(batches(share, step))
            made.evaluate([])
    finally:
        made.close()


@engines
def test_a_gradient_that_is_returned(comm, engine):
    told = r"Returns 1: the gradient of 1\.weight was returned; expected it in the array that is given"
    refused(comm, engine, lambda made: Returns(20, 20), told)


@engines
def test_a_gradient_of_a_parameter_that_nobody_holds(comm, engine):
    other = tiny_models.Dense(3, 4).bias
    told = r"the gradient of a parameter of shape \(4,\): expected a parameter that the operator holds"
    refused(comm, engine, lambda made: Stray(20, 20, other), told)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "dp-naive"])
def test_a_gradient_that_comes_too_late(comm, layout):
    """The bucket of another unit's parameter was exchanged by then, or its memory used again."""
    told = r"the gradient of 5\.bias came after the backward had left the units that hold it"
    refused(comm, layout, lambda made: Stray(20, 20, made.items[5].bias), told)


class Numpys(tiny_models.Dense):
    """An error of NumPy's, in the operator's own code."""

    def forward(self, x, run):
        return super().forward(x + np.ones(3), run)


class Backwards(tiny_models.Dense):
    def backward(self, dy, saved, grads):
        return super().backward(dy, (saved[0][:, :3], saved[1][:2]), grads)


class Wide(tiny_models.Dense):
    def forward(self, x, run):
        y, saved = super().forward(x, run)
        return y.astype("f8"), saved


class WideBack(tiny_models.Dense):
    def backward(self, dy, saved, grads):
        return super().backward(dy, saved, grads).astype("f8")


MISTAKES = {
    "NumPy's error": (Numpys, r"operands could not be broadcast .* \(in the forward of Numpys 1\)"),
    "in the backward": (
        Backwards,
        r"operands could not be broadcast .* \(in the backward of Backwards 1\)",
    ),
    "float64": (Wide, "Wide 1: expected a result of float32, found one of float64"),
    "float64, back": (WideBack, "WideBack 1: expected a gradient of float32, found one of float64"),
}


@engines
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_operator(comm, engine, mistake):
    kind, told = MISTAKES[mistake]
    refused(comm, engine, lambda made: kind(20, 20), told)


def wrongly(change):
    def made(numbers, step):
        return [change(*batch) for batch in tiny_models.batches(numbers, step)]

    return made


BATCHES = {
    "three items": (
        lambda n, x, y, s: (n, x, y),
        r"expected \(number, inputs, targets, sample numbers\), found a tuple of 3",
    ),
    "an array": (lambda n, x, y, s: x, "expected .number, inputs, targets, sample numbers., found ndarray"),
    "None": (
        lambda n, x, y, s: (n, x, None, s),
        "expected targets as an array with an axis of samples, found NoneType",
    ),
    "0-d": (lambda n, x, y, s: (n, x[0, 0], y, s), r"expected inputs as an array .* found float64 of shape \(\)"),
    "ragged": (lambda n, x, y, s: (n, [[1.0], [1.0, 2.0]], y, s), "inputs and targets make no arrays: .*inhomogeneous"),
}


@pytest.mark.parametrize("engine", ["dp", "zero3", "1f1b", "ps", "local"])
@pytest.mark.parametrize("form", BATCHES)
def test_a_batch_of_the_wrong_form(comm, engine, form):
    change, told = BATCHES[form]
    refused(comm, engine, lambda made: tiny_models.Dense(20, 20), told, wrongly(change))


@pytest.mark.parametrize("engine", ["dp", "zero3", "1f1b", "ps", "local"])
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_too_large_are_told_once(comm, engine):
    """Without a warning of NumPy's before."""

    def large(numbers, step):
        return [
            (number, x.astype("f4"), np.full_like(y, 1e38), samples)
            for number, x, y, samples in tiny_models.batches(numbers)
        ]

    refused(comm, engine, lambda made: Huge(20, 20), "not finite|not a finite number", large)


class Huge(tiny_models.Dense):
    def forward(self, x, run):
        y, saved = super().forward(x, run)
        return y * np.float32(1e38) * np.float32(1e38), saved
